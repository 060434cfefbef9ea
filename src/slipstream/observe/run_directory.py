"""The directory a run leaves behind: enough to understand it, to resume it and to reproduce it.

    config.yaml         the fully resolved configuration     rollouts/       sampled trajectories, readable
    environment.json    versions, machine, command line      checkpoints/    to resume from
    metrics.jsonl       numbers, one line a step             export/         the policy in Hugging Face format
    evaluations.jsonl   accuracy on held-out prompts         tensorboard/    event files
    answers.jsonl       what `generate` was answered         summary.json    the result; written last
    timeline.json       Chrome trace, a lane per engine
    ledger.jsonl        what became of every prompt          report.html     all of it to look at

This module owns the directory itself: that it is not another run's, and that one process at a time works in it. The
files are written by the other modules of `observe`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from slipstream.errors import RunDirectoryError
from slipstream.observe.environment import describe_environment
from slipstream.observe.files import storage_errors, write_json_atomically, write_text_atomically
from slipstream.observe.lock import LOCK_NAME, DirectoryLock, is_locked

SHOWN_DIFFERENCES = 8
# The place itself may be spelled differently (relative, moved) without being another configuration.
IGNORED_KEYS = ("output_dir",)


class RunDirectory:
    """A run directory, opened to be read or, with the lock held, to be written by this process alone."""

    def __init__(self, path: Path, lock: DirectoryLock | None) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, path: str | Path, config_text: str, workflow: str) -> Self:
        """Start a new run in `path`, which may not exist yet or be empty, and lock it.

        `config_text` is the resolved configuration as YAML, `workflow` the verb that runs it ("rl", "sft", ...).
        A run that failed before it had done anything is replaced: its configuration was probably what had to be mended.
        Raises RunDirectoryError, changing nothing, if the directory holds a run already (saying whether its
        configuration is another one, it is unfinished, or finished), something else, or is in use by another process.
        """
        path = Path(path).absolute()
        require_run_or_empty(path)
        with storage_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            lock = DirectoryLock(path)
        try:
            if (path / "config.yaml").exists() and cls(path, None).has_begun:
                raise RunDirectoryError(_why_taken(path, config_text))
            write_json_atomically(path / "environment.json", {"workflow": workflow, "starts": [describe_environment()]})
            # Written last: from here on the directory is a run.
            write_text_atomically(path / "config.yaml", config_text)
        except BaseException:
            lock.release()
            raise
        return cls(path, lock)

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open an existing run to read it (a report). Raises RunDirectoryError if `path` is not one."""
        path = Path(path).absolute()
        if not path.is_dir():
            raise RunDirectoryError(f"run directory {path} does not exist")
        if not (path / "config.yaml").exists():
            raise RunDirectoryError(f"{path} is not a run directory: it has no config.yaml")
        return cls(path, None)

    @classmethod
    def resume(cls, path: str | Path) -> Self:
        """Open an unfinished run to go on with it: locks it and notes this start in environment.json.

        Raises RunDirectoryError if `path` is not a run directory, is in use by another process, or is finished.
        """
        run = cls.open(path)
        run._lock = DirectoryLock(run.path)
        try:
            if run.finished:
                raise RunDirectoryError(f"the run in {run.path} is finished (it has summary.json): nothing to resume")
            environment = run.environment
            environment["starts"].append(describe_environment())
            write_json_atomically(run.path / "environment.json", environment)
        except BaseException:
            run.close()
            raise
        return run

    @property
    def config_text(self) -> str:
        """The configuration, as YAML."""
        return (self.path / "config.yaml").read_text(encoding="utf-8")

    @property
    def config_path(self) -> Path:
        """Where the configuration is."""
        return self.path / "config.yaml"

    def write_config(self, config_text: str) -> None:
        """Put another configuration, as YAML, in the place of the one that is there. The lock must be held."""
        write_text_atomically(self.config_path, config_text)

    @property
    def environment(self) -> dict[str, Any]:
        """`workflow`, and `starts`: one description of the environment for each time the run was started."""
        return _read_json(self.path / "environment.json")

    @property
    def workflow(self) -> str:
        """The verb that the run was started with."""
        return str(self.environment["workflow"])

    @property
    def summary(self) -> dict[str, Any] | None:
        """The result of a finished run, or None."""
        return _read_json(self.summary_path) if self.finished else None

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return self.summary_path.exists()

    @property
    def has_begun(self) -> bool:
        """Whether there is anything to lose: a step, an evaluation, a checkpoint, a stage of a pipeline, a result."""
        records = (self.metrics_path, self.evaluations_path, self.answers_path)
        stages = [self.path / name for name in ("policy", "sft", "rl")]
        return (
            self.finished
            or any(path.exists() and path.stat().st_size > 0 for path in records)
            or any(folder.exists() for folder in stages)
            or (self.checkpoints_folder.is_dir() and any(self.checkpoints_folder.iterdir()))
        )

    @property
    def in_use(self) -> bool:
        """Whether a process holds the lock: the run is going on."""
        return is_locked(self.path)

    @property
    def summary_path(self) -> Path:
        """The result of the run."""
        return self.path / "summary.json"

    @property
    def report_path(self) -> Path:
        """For `write_report`."""
        return self.path / "report.html"

    @property
    def metrics_path(self) -> Path:
        """For `MetricsWriter`."""
        return self.path / "metrics.jsonl"

    @property
    def evaluations_path(self) -> Path:
        """For `EvaluationWriter`."""
        return self.path / "evaluations.jsonl"

    @property
    def answers_path(self) -> Path:
        """For the answers of `generate`."""
        return self.path / "answers.jsonl"

    @property
    def scores_path(self) -> Path:
        """For `write_scores`: what a reward model made of the rows it was measured on."""
        return self.path / "scores.jsonl"

    @property
    def timeline_path(self) -> Path:
        """For `Timeline`."""
        return self.path / "timeline.json"

    @property
    def ledger_path(self) -> Path:
        """For `Ledger`."""
        return self.path / "ledger.jsonl"

    @property
    def rollouts_folder(self) -> Path:
        """For `write_rollouts`."""
        return self.path / "rollouts"

    @property
    def checkpoints_folder(self) -> Path:
        """For `CheckpointStore`."""
        return self.path / "checkpoints"

    @property
    def export_folder(self) -> Path:
        """Where the trained policy goes in Hugging Face format."""
        return self.path / "export"

    @property
    def best_path(self) -> Path:
        """For `BestPolicy`: which policy is the best so far."""
        return self.path / "best.json"

    @property
    def best_export_folder(self) -> Path:
        """For `BestPolicy`: the best policy so far in Hugging Face format."""
        return self.path / "export-best"

    def write_summary(self, summary: Mapping[str, Any]) -> Path:
        """Declare the run finished with this result. Raises TrainingError if the disk is full."""
        write_json_atomically(self.summary_path, dict(summary))
        return self.summary_path

    def close(self) -> None:
        """Release the lock; closing twice is harmless."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def parse_config(text: str) -> dict[str, Any]:
    """The mapping in a config.yaml. Raises RunDirectoryError if it is not YAML or not a mapping."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        config = YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        raise RunDirectoryError(f"config.yaml is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict):
        raise RunDirectoryError(f"config.yaml must hold a mapping of keys, found {type(config).__name__}")
    return config


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """The keys in which two configurations differ, dotted and sorted, each with both values: 'seed: 1 there, 2 here'.

    A key that only one of them has is 'unset' in the other.
    """
    one, other = _flatten(there), _flatten(here)
    names = sorted((one.keys() | other.keys()) - set(IGNORED_KEYS))
    unset = object()
    pairs = [(name, one.get(name, unset), other.get(name, unset)) for name in names]
    return [
        f"{name}: {'unset' if first is unset else first} there, {'unset' if second is unset else second} here"
        for name, first, second in pairs
        if first != second
    ]


def differences_text(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """The first of the differences in one line, for an error message; empty if there is none."""
    all_of_them = differences(there, here)
    more = len(all_of_them) - SHOWN_DIFFERENCES
    return "; ".join(all_of_them[:SHOWN_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def require_run_or_empty(path: Path) -> None:
    """Raise RunDirectoryError for a file, and for a folder with something in it that no run put there."""
    if path.exists() and not path.is_dir():
        raise RunDirectoryError(f"output_dir {path} is a file: choose another output_dir")
    if not path.exists() or (path / "config.yaml").exists():
        return
    # What a start that was killed before it wrote its configuration leaves behind is no obstacle.
    foreign = sorted(
        entry.name
        for entry in path.iterdir()
        if entry.name not in (LOCK_NAME, "environment.json") and not entry.name.endswith(".partial")
    )
    if foreign:
        raise RunDirectoryError(
            f"output_dir {path} is neither empty nor a run directory (it holds {', '.join(foreign[:3])}"
            f"{', ...' if len(foreign) > 3 else ''}): choose another output_dir"
        )


def _why_taken(path: Path, config_text: str) -> str:
    differing = differences_text(
        parse_config((path / "config.yaml").read_text(encoding="utf-8")), parse_config(config_text)
    )
    if differing:
        return f"{path} holds a run with another configuration ({differing}): choose another output_dir or remove it"
    if (path / "summary.json").exists():
        return f"the run in {path} is finished already: choose another output_dir or remove it to run again"
    return f"{path} holds an unfinished run with this configuration: go on with `slipstream resume {path}`"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RunDirectoryError(f"{path.parent} lacks {path.name}: it is not a complete run directory") from error
    except ValueError as error:
        raise RunDirectoryError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(record, dict):
        raise RunDirectoryError(f"{path} must hold a JSON object, found {type(record).__name__}")
    return record
