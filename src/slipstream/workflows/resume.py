"""Going on with an interrupted run, whatever workflow it was, from its last complete checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

from slipstream.config.generate import GenerateConfig
from slipstream.config.loader import dump_config, load_config, parse_overrides, validate_config
from slipstream.config.preference import PreferenceConfig
from slipstream.config.reward_model import RewardModelConfig, SupervisedConfig
from slipstream.config.schema import RLConfig, SFTConfig
from slipstream.errors import ConfigError, RunDirectoryError
from slipstream.observe.checkpoints import CheckpointStore
from slipstream.observe.logs import get_logger
from slipstream.observe.report import write_report
from slipstream.observe.run_directory import RunDirectory, differences, parse_config

logger = get_logger("resume")


# What decides how the work is divided, and not what is computed: a run may go on with other values.
CHANGEABLE_KEYS = (
    "training.data_parallel",
    "training.sequence_parallel",
    "training.zero_stage",
    "training.offload_optimizer",
    "training.offload_parameters",
    "training.tokens_per_micro_batch",
    "training.threads",
)
TRAINING_CONFIGS: dict[str, type[RLConfig | SupervisedConfig]] = {
    "rl": RLConfig,
    "sft": SFTConfig,
    "reward-model": RewardModelConfig,
    "preference": PreferenceConfig,
}


def resume(
    run_dir: str | Path, overrides: Sequence[str] = (), *, reward: Callable[..., Any] | None = None
) -> dict[str, Any]:
    """Go on with the run in `run_dir`, with the configuration it was started with; returns its summary.

    `overrides`, as on the command line (`--section.key value`), change CHANGEABLE_KEYS from here on: the run directory
    has the changed configuration then. Raises ConfigError for another key, or a value that the run cannot go on with.
    A damaged checkpoint is passed over with a warning for the one before it. Without any checkpoint the run starts
    from the beginning. Of a run that came to its end there is nothing left to do but perhaps its report. `reward` is
    needed if the run was started with a function object.
    Raises RunDirectoryError if there is no run, or another process works on it.
    """
    run = RunDirectory.open(run_dir)
    if run.finished and not run.in_use:
        logger.info(f"the run in {run.path} is complete (it has {run.summary_path.name}): nothing to resume")
        return conclude(run)
    with _folder_it_was_started_in(run):
        return _resume(run.path, run.workflow, overrides=overrides, reward=reward)


def conclude(run: RunDirectory) -> dict[str, Any]:
    """The summary of a run that has one; writes the report where a kill came between the two."""
    report = run.report_path
    if not report.exists() or report.stat().st_mtime_ns < run.summary_path.stat().st_mtime_ns:
        write_report(run.path)
    summary = run.summary
    assert summary is not None
    return summary


@contextmanager
def _folder_it_was_started_in(run: RunDirectory) -> Iterator[None]:
    """Relative paths of a configuration mean what they meant when the run was started, wherever it is resumed."""
    folder = Path(run.environment["starts"][0]["working_folder"])
    if folder == Path.cwd():
        yield
        return
    if not folder.is_dir():
        logger.warning(
            f"the folder the run was started in, {folder}, is gone: relative paths of its configuration are taken "
            f"from {Path.cwd()}"
        )
        yield
        return
    # The folder also has the user's own modules, as it had then.
    sys.path.append(str(folder))
    with chdir(folder):
        yield


def _change(directory: RunDirectory, overrides: Sequence[str]) -> None:
    """Put a run's configuration with `overrides` in the place of the one it has. Raises ConfigError."""
    kind = TRAINING_CONFIGS[directory.workflow]
    for override in parse_overrides(kind, overrides):
        if override.path not in CHANGEABLE_KEYS:
            raise ConfigError(
                f"--{override.path} cannot be changed when a run goes on; what can is the division of the work: "
                f"{', '.join(CHANGEABLE_KEYS)}"
            )
    before = validate_config(kind, parse_config(directory.config_text))
    after = load_config(kind, directory.config_path, overrides)
    stages = (before.training.zero_stage, after.training.zero_stage)
    if 0 in stages and stages[0] != stages[1] and directory.has_begun:
        raise ConfigError(
            f"--training.zero_stage: the run in {directory.path} has ZeRO stage {stages[0]}, whose checkpoints cannot "
            f"be loaded at stage {stages[1]}; stages 1, 2 and 3 can go over into each other, and 0 into none"
        )
    changes = differences(before.model_dump(), after.model_dump())
    if changes:
        directory.write_config(dump_config(after))
        logger.warning(f"from here on the run has another layout ({'; '.join(changes)})")


def _resume(
    run_dir: Path, workflow: str, *, overrides: Sequence[str], reward: Callable[..., Any] | None
) -> dict[str, Any]:
    if overrides and workflow not in TRAINING_CONFIGS:
        parts = "; resume the run of one of its stages instead, a folder in it" if workflow == "pipeline" else ""
        raise ConfigError(f"a run of `slipstream {workflow}` goes on as it is, without {overrides[0]}{parts}")
    if workflow == "pipeline":
        from slipstream.workflows.pipeline import resume_pipeline

        return resume_pipeline(run_dir)
    with RunDirectory.resume(run_dir) as directory:
        if overrides:
            _change(directory, overrides)
        settings = parse_config(directory.config_text)
        if directory.workflow in TRAINING_CONFIGS:
            config = validate_config(TRAINING_CONFIGS[directory.workflow], settings)
            return _resume_training(config, directory, reward=reward)
        if directory.workflow == "generate":
            from slipstream.workflows.generate import resume_generate

            return resume_generate(validate_config(GenerateConfig, settings), directory, reward=reward)
        raise RunDirectoryError(
            f"{directory.path} is a run of `slipstream {directory.workflow}`, which has nothing to resume: "
            "start it again with another output_dir"
        )


def _resume_training(
    config: RLConfig | SupervisedConfig, directory: RunDirectory, *, reward: Callable[..., Any] | None
) -> dict[str, Any]:
    if isinstance(config, RLConfig):
        from slipstream.workflows.rl import require_reward, resume_rl

        if config.needs_reward or reward is not None:
            require_reward(config.reward, reward)
        return resume_rl(config, directory, _latest_checkpoint(directory, config.checkpoint.keep), reward=reward)
    checkpoint = _latest_checkpoint(directory, config.checkpoint.keep)
    if isinstance(config, SFTConfig):
        from slipstream.workflows.sft import resume_sft

        return resume_sft(config, directory, checkpoint)
    if isinstance(config, RewardModelConfig):
        from slipstream.workflows.reward_model import resume_reward_model

        return resume_reward_model(config, directory, checkpoint)
    from slipstream.workflows.preference import resume_preference

    return resume_preference(config, directory, checkpoint)


def _latest_checkpoint(directory: RunDirectory, keep: int) -> Path | None:
    store = CheckpointStore(directory.checkpoints_folder, keep)
    checkpoint = store.latest()
    for warning in store.warnings:
        logger.warning(warning)
    if checkpoint is None:
        logger.warning("no complete checkpoint: starting from the beginning", run_dir=str(directory.path))
    return checkpoint
