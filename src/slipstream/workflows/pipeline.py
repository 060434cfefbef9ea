"""The whole pipeline: a small policy made from scratch, taught by SFT, improved by RL.

Each stage is an ordinary run in a directory of its own inside the pipeline's, and feeds the next: `policy/` is a
model with random weights and a tokenizer made from the task's own text, `sft/` and `rl/` are run directories. A
pipeline that was interrupted goes on where it stopped; finished stages are not repeated.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from slipstream.config.loader import dump_config, pipeline_stages, validate_config
from slipstream.config.schema import PipelineConfig, RLConfig, SFTConfig
from slipstream.data.source import load_rows
from slipstream.data.tokenizer import train_tokenizer
from slipstream.models.scratch import create_policy
from slipstream.observe.console import RunConsole
from slipstream.observe.report import write_report
from slipstream.observe.run_directory import RunDirectory, parse_config
from slipstream.workflows.checks import check_config
from slipstream.workflows.resume import resume
from slipstream.workflows.rl import train_rl
from slipstream.workflows.sft import train_sft

Stage = TypeVar("Stage", SFTConfig, RLConfig)


def run_pipeline(config: PipelineConfig) -> dict[str, Any]:
    """Run all stages; returns the summary that is also written to `summary.json` of the pipeline's directory."""
    check_config(config)
    with RunDirectory.create(config.output_dir, dump_config(config), "pipeline") as directory:
        return _run_stages(config, directory)


def resume_pipeline(run_dir: Path) -> dict[str, Any]:
    """Go on with an interrupted pipeline. Raises RunDirectoryError if it is finished."""
    with RunDirectory.resume(run_dir) as directory:
        settings = parse_config(directory.config_text)
        # The directory may have been moved since.
        return _run_stages(validate_config(PipelineConfig, settings | {"output_dir": str(run_dir)}), directory)


def _run_stages(config: PipelineConfig, directory: RunDirectory) -> dict[str, Any]:
    started = time.monotonic()
    sft_config, rl_config = pipeline_stages(config)
    console = RunConsole()
    with console.phase("making a policy from scratch"):
        _make_policy(config, sft_config)
    console.line("stage 1 of 2: supervised fine-tuning")
    _finish_stage(sft_config, train_sft)
    console.line("stage 2 of 2: reinforcement learning")
    rl_summary = _finish_stage(rl_config, train_rl)
    summary = {
        "workflow": "pipeline",
        **{name: value for name, value in rl_summary.items() if "accuracy" in name or name.startswith("best_")},
        "seconds": round(time.monotonic() - started, 1),
        "steps": rl_summary["steps"],
        "run_dir": str(directory.path),
    }
    directory.write_summary(summary)
    console.line(f"report of the whole pipeline: {write_report(directory.path)}")
    return summary


def _make_policy(config: PipelineConfig, sft_config: SFTConfig) -> None:
    folder = Path(sft_config.model.path)
    if folder.exists():
        return
    data = sft_config.data
    assert data.response_key is not None
    texts = [f"{row[data.prompt_key]}{row[data.response_key]}" for row in load_rows(data)]
    tokenizer = train_tokenizer(texts, config.policy.vocabulary_size)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    create_policy(config.policy, tokenizer, seed=config.seed, folder=partial)
    # Complete or absent: a pipeline that was killed here makes it again.
    partial.rename(folder)


def _finish_stage(config: Stage, train: Callable[[Stage], dict[str, Any]]) -> dict[str, Any]:
    """The summary of a stage that is finished, goes on, or is started, as its directory says."""
    path = Path(config.output_dir)
    if not (path / "config.yaml").exists():
        return train(config)
    summary = RunDirectory.open(path).summary
    return summary if summary is not None else resume(path)
