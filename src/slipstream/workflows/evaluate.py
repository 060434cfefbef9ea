"""Evaluation of a model on held-out prompts, sampled and greedily, without training."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from slipstream.cluster.session import ClusterSession, terminate_as_interrupt
from slipstream.config.loader import dump_config
from slipstream.config.schema import EvaluateConfig
from slipstream.data.prompts import build_prompts
from slipstream.data.tokenizer import load_tokenizer
from slipstream.observe.logs import get_logger
from slipstream.observe.run_directory import RunDirectory
from slipstream.workflows.checks import check_config
from slipstream.workflows.engines import start_evaluation_engines
from slipstream.workflows.held_out import HeldOutPrompts
from slipstream.workflows.records import RunRecords
from slipstream.workflows.rl import require_one_reward

logger = get_logger("evaluate")


def evaluate(config: EvaluateConfig, *, reward: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Evaluate a model as `config` says; returns the summary that is also written to `summary.json`.

    `reward` may be a function in place of `reward.function` in the configuration.
    """
    require_one_reward(config.reward.function, reward)
    check_config(config, reward=reward)
    assert config.evaluation.data is not None
    started = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(terminate_as_interrupt())
        # Before there is a run directory: data that cannot be used leaves nothing behind.
        tokenizer = load_tokenizer(config.model.path)
        prompts, report = build_prompts(config.evaluation.data, tokenizer)
        logger.info(f"held-out prompts: {report}")
        directory = stack.enter_context(RunDirectory.create(config.output_dir, dump_config(config), "evaluate"))
        records = stack.enter_context(RunRecords(directory, config.tracking, title="evaluate", total_steps=1, keep=1))
        session = stack.enter_context(ClusterSession(config.cluster, log_folder=directory.path / "logs"))
        with records.console.phase("starting the engines"):
            generators = start_evaluation_engines(
                session, config, tokenizer=tokenizer, timeline=records.timeline, reward=reward
            )
        with records.console.phase("evaluating"):
            evaluation = HeldOutPrompts(prompts, generators, config).evaluate(step=0, policy_version=0)
        records.write_evaluation(evaluation)
        return records.finish(
            {
                "workflow": "evaluate",
                "accuracy": evaluation.sampled_accuracy,
                "greedy_accuracy": evaluation.greedy_accuracy,
                "prompts": evaluation.prompts,
                "seconds": round(time.monotonic() - started, 1),
                "run_dir": str(directory.path),
            }
        )
