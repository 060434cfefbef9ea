"""What a person means by MODEL: a model folder, a hub name, a run, a pipeline, or one checkpoint of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import ModelError, RunDirectoryError
from slipstream.observe.checkpoints import checkpoint_step, find_damage
from slipstream.observe.run_directory import RunDirectory
from slipstream.workflows.model_facts import looks_like_path

LEARNER = "learner"
DESCRIPTION_FILE = "learner.json"
PIPELINE_FOLDERS = ("rl", "preference", "sft")
"""The runs inside of a pipeline, the last one first."""


@dataclass(frozen=True)
class ModelFolder:
    """A Hugging Face folder or hub name, or the learner's checkpoint `learner` that was begun from it.

    `path` is None where only the checkpoint knows it.
    """

    path: str | None
    learner: Path | None = None

    @property
    def shown(self) -> str:
        """The place of the weights, for people."""
        return str(self.learner or self.path)


def find_model(name: str) -> ModelFolder:
    """Where the newest weights of `name` are.

    Of a run: `export/`, else the best policy so far, else the newest complete checkpoint. Raises ModelError for what is
    no model, RunDirectoryError for a run that has none yet.
    """
    folder = Path(name).expanduser()
    if not folder.exists():
        if looks_like_path(name):
            raise ModelError(
                f"no folder {name!r}; expected a model folder, a hub name, a run directory or a checkpoint"
            )
        return ModelFolder(name)
    if (folder / "config.json").is_file():
        return ModelFolder(str(folder))
    if (folder / "config.yaml").is_file():
        return _of_run(RunDirectory.open(folder))
    for learner in (folder / LEARNER, folder):
        if (learner / DESCRIPTION_FILE).is_file():
            return ModelFolder(None, learner)
    if (folder / "adapter_config.json").is_file():
        raise ModelError(f"{name!r} is an adapter: make a model of it and its base with `slipstream merge-lora` first")
    found = "a file" if folder.is_file() else ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
    raise ModelError(
        f"{name!r} is no model (found {found}); expected a Hugging Face folder with config.json, a run directory, or a "
        "checkpoint of one"
    )


def started_in(learner: Path) -> Path | None:
    """The folder in which the run of a learner's checkpoint was started; None if the checkpoint lies in no run."""
    for folder in learner.absolute().parents:
        if (folder / "config.yaml").is_file() and (folder / "environment.json").is_file():
            return Path(RunDirectory.open(folder).environment["starts"][0]["working_folder"])
    return None


def _of_run(run: RunDirectory) -> ModelFolder:
    if run.workflow == "pipeline":
        for stage in PIPELINE_FOLDERS:
            if (run.path / stage / "config.yaml").is_file():
                return _of_run(RunDirectory.open(run.path / stage))
    for export in (run.export_folder, run.best_export_folder):
        if (export / "config.json").is_file():
            return ModelFolder(str(export))
    # Not by a CheckpointStore: the run may be going on, and opening one tidies up.
    checkpoints = sorted(run.checkpoints_folder.glob("step-*[0-9]"), key=checkpoint_step, reverse=True)
    for checkpoint in checkpoints:
        if find_damage(checkpoint) is None:
            return ModelFolder(None, checkpoint / LEARNER)
    raise RunDirectoryError(
        f"the run of `slipstream {run.workflow}` in {run.path} has no model: neither export/ nor a complete "
        "checkpoint; wait for one (checkpoint.every_steps says when), or name another run"
    )
