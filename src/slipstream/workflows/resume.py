"""Going on with an interrupted run, whatever workflow it was, from its last complete checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

from slipstream.config.generate import GenerateConfig
from slipstream.config.loader import validate_config
from slipstream.config.preference import PreferenceConfig
from slipstream.config.reward_model import RewardModelConfig
from slipstream.config.schema import RLConfig, SFTConfig
from slipstream.errors import RunDirectoryError
from slipstream.observe.checkpoints import CheckpointStore
from slipstream.observe.logs import get_logger
from slipstream.observe.report import write_report
from slipstream.observe.run_directory import RunDirectory, parse_config

logger = get_logger("resume")


def resume(run_dir: str | Path, *, reward: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Go on with the run in `run_dir`, with the configuration it was started with; returns its summary.

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
        return _resume(run.path, run.workflow, reward=reward)


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


def _resume(run_dir: Path, workflow: str, *, reward: Callable[..., Any] | None) -> dict[str, Any]:
    if workflow == "pipeline":
        from slipstream.workflows.pipeline import resume_pipeline

        return resume_pipeline(run_dir)
    with RunDirectory.resume(run_dir) as directory:
        settings = parse_config(directory.config_text)
        if directory.workflow == "rl":
            from slipstream.workflows.rl import require_reward, resume_rl

            rl_config = validate_config(RLConfig, settings)
            if rl_config.needs_reward or reward is not None:
                require_reward(rl_config.reward, reward)
            checkpoint = _latest_checkpoint(directory, rl_config.checkpoint.keep)
            return resume_rl(rl_config, directory, checkpoint, reward=reward)
        if directory.workflow == "sft":
            from slipstream.workflows.sft import resume_sft

            sft_config = validate_config(SFTConfig, settings)
            return resume_sft(sft_config, directory, _latest_checkpoint(directory, sft_config.checkpoint.keep))
        if directory.workflow == "reward-model":
            from slipstream.workflows.reward_model import resume_reward_model

            config = validate_config(RewardModelConfig, settings)
            return resume_reward_model(config, directory, _latest_checkpoint(directory, config.checkpoint.keep))
        if directory.workflow == "preference":
            from slipstream.workflows.preference import resume_preference

            preference_config = validate_config(PreferenceConfig, settings)
            checkpoint = _latest_checkpoint(directory, preference_config.checkpoint.keep)
            return resume_preference(preference_config, directory, checkpoint)
        if directory.workflow == "generate":
            from slipstream.workflows.generate import resume_generate

            return resume_generate(validate_config(GenerateConfig, settings), directory, reward=reward)
        raise RunDirectoryError(
            f"{directory.path} is a run of `slipstream {directory.workflow}`, which has nothing to resume: "
            "start it again with another output_dir"
        )


def _latest_checkpoint(directory: RunDirectory, keep: int) -> Path | None:
    store = CheckpointStore(directory.checkpoints_folder, keep)
    checkpoint = store.latest()
    for warning in store.warnings:
        logger.warning(warning)
    if checkpoint is None:
        logger.warning("no complete checkpoint: starting from the beginning", run_dir=str(directory.path))
    return checkpoint
