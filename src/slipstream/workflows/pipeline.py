"""The whole pipeline: a small policy made from scratch, taught by SFT, improved by RL, by preferences, or both.

Each stage is an ordinary run in a directory of its own inside the pipeline's, and feeds later ones: `policy/` is a
model with random weights and a tokenizer made from the task's own text, `sft/`, `reward_model/`, `rl/` and
`preference/` are run directories, and so are those of the policies that are compared, in `comparison/`. A pipeline that
was interrupted goes on where it stopped; finished stages are not repeated.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slipstream.config.generate import GenerateConfig
from slipstream.config.loader import dump_config, pipeline_stages, validate_config
from slipstream.config.pipeline import PipelineConfig
from slipstream.config.preference import PreferenceConfig
from slipstream.config.reward_model import RewardModelConfig
from slipstream.config.schema import RLConfig, SFTConfig
from slipstream.data.columns import Layout, cell, load_table
from slipstream.data.tokenizer import train_tokenizer
from slipstream.models.scratch import create_policy
from slipstream.observe.console import RunConsole
from slipstream.observe.report import write_report
from slipstream.observe.run_directory import RunDirectory, parse_config
from slipstream.workflows.checks import check_config
from slipstream.workflows.comparison import compare
from slipstream.workflows.generate import generate
from slipstream.workflows.preference import train_preference
from slipstream.workflows.resume import resume
from slipstream.workflows.reward_model import train_reward_model
from slipstream.workflows.rl import train_rl
from slipstream.workflows.sft import train_sft

COMPARISON = "comparison"

TRAINERS: dict[type, Callable[[Any], dict[str, Any]]] = {
    SFTConfig: train_sft,
    RewardModelConfig: train_reward_model,
    RLConfig: train_rl,
    PreferenceConfig: train_preference,
    GenerateConfig: generate,
}
"""What runs a stage."""

STAGE_TITLES = {
    "sft": "supervised fine-tuning",
    "reward_model": "reward model",
    "rl": "reinforcement learning",
    "preference": "preference training",
}


def run_pipeline(config: PipelineConfig) -> dict[str, Any]:
    """Run all stages; returns the summary that is also written to `summary.json` of the pipeline's directory."""
    check_config(config)
    with RunDirectory.create(config.output_dir, dump_config(config), "pipeline") as directory:
        return _run_stages(config, directory)


def resume_pipeline(run_dir: Path) -> dict[str, Any]:
    """Go on with an interrupted pipeline. Raises RunDirectoryError if another process works on it."""
    with RunDirectory.resume(run_dir) as directory:
        settings = parse_config(directory.config_text)
        # The directory may have been moved since.
        return _run_stages(validate_config(PipelineConfig, settings | {"output_dir": str(run_dir)}), directory)


def _run_stages(config: PipelineConfig, directory: RunDirectory) -> dict[str, Any]:
    started = time.monotonic()
    stages = pipeline_stages(config)
    console = RunConsole()
    with console.phase("making a policy from scratch"):
        _make_policy(config, stages["sft"])
    summaries = {}
    for number, (name, stage) in enumerate(stages.items(), start=1):
        console.line(f"stage {number} of {len(stages)}: {_title(name)}")
        summaries[name] = _finish_stage(stage)
    summary = {
        "workflow": "pipeline",
        **_results(summaries),
        "seconds": round(time.monotonic() - started, 1),
        "steps": sum(stage["steps"] for name, stage in summaries.items() if "steps" in stage and name != "sft"),
        "run_dir": str(directory.path),
    }
    if config.compared:
        summary[COMPARISON] = compare(
            {name: RunDirectory.open(directory.path / COMPARISON / name).answers_path for name in config.compared}
        )
    directory.write_summary(summary)
    console.line(f"report of the whole pipeline: {write_report(directory.path)}")
    return summary


def _results(summaries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What the stages found out: of RL its accuracies, of the others below their name."""
    results = {
        name: value
        for name, value in summaries.get("rl", {}).items()
        if "accuracy" in name or name.startswith(("best_", "mean_reward"))
    }
    for name in ("reward_model", "preference"):
        if name in summaries:
            measured = ("accuracy", "reward_margin")
            results[name] = {key: value for key, value in summaries[name].items() if key in measured}
    return results


def _title(name: str) -> str:
    if name.startswith(COMPARISON):
        return f"answers of the policy of {name.removeprefix(f'{COMPARISON}/')}"
    return STAGE_TITLES[name]


def _make_policy(config: PipelineConfig, sft_config: SFTConfig) -> None:
    folder = Path(sft_config.model.path)
    if folder.exists():
        return
    texts = [
        f"{cell(row, table.config.prompt_key) or ''}{cell(row, table.config.response_key)}"
        for part in sft_config.data.parts.values()
        for table in [load_table(part, Layout.RESPONSES)]
        for row in table.rows
    ]
    tokenizer = train_tokenizer(texts, config.policy.vocabulary_size)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    create_policy(config.policy, tokenizer, seed=config.seed, folder=partial)
    # Complete or absent: a pipeline that was killed here makes it again.
    partial.rename(folder)


def _finish_stage(config: Any) -> dict[str, Any]:
    """The summary of a stage that is finished, goes on, or is started, as its directory says."""
    path = Path(config.output_dir)
    if not (path / "config.yaml").exists():
        return TRAINERS[type(config)](config)
    return resume(path)
