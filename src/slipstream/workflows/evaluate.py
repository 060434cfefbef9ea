"""Evaluation of a model on held-out prompts, sampled and greedily, without training."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from slipstream.cluster.session import ClusterSession, terminate_as_interrupt
from slipstream.config.loader import dump_config
from slipstream.config.schema import EvaluateConfig
from slipstream.data.tokenizer import load_tokenizer
from slipstream.observe.evaluations import Evaluation
from slipstream.observe.run_directory import RunDirectory
from slipstream.workflows.checks import check_config
from slipstream.workflows.engines import start_answering_engines
from slipstream.workflows.held_out import HeldOutPrompts, load_held_out
from slipstream.workflows.records import RunRecords
from slipstream.workflows.rl import require_reward


def evaluate(config: EvaluateConfig, *, reward: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Evaluate a model as `config` says; returns the summary that is also written to `summary.json`.

    `reward` may be a function in place of `reward.function` in the configuration.
    """
    require_reward(config.reward, reward)
    check_config(config, reward=reward)
    started = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(terminate_as_interrupt())
        # Before there is a run directory: data that cannot be used leaves nothing behind.
        tokenizer = load_tokenizer(config.model.path)
        sets = load_held_out(config.evaluation, tokenizer, needs_label=config.reward.compares)
        directory = stack.enter_context(RunDirectory.create(config.output_dir, dump_config(config), "evaluate"))
        records = stack.enter_context(RunRecords(directory, config.tracking, title="evaluate", total_steps=1, keep=1))
        session = stack.enter_context(ClusterSession(config.cluster, log_folder=directory.path / "logs"))
        with records.console.phase("starting the engines"):
            generators = start_answering_engines(
                session, config, tokenizer=tokenizer, timeline=records.timeline, reward=reward
            )
        with records.console.phase("evaluating"):
            evaluations = HeldOutPrompts(sets, generators, config).evaluate(step=0, policy_version=0)
        records.write_evaluations(evaluations)
        return records.finish(
            {
                "workflow": "evaluate",
                **_result(evaluations[0]),
                "other_data": {evaluation.dataset: _result(evaluation) for evaluation in evaluations[1:]},
                "seconds": round(time.monotonic() - started, 1),
                "run_dir": str(directory.path),
            }
        )


def _result(evaluation: Evaluation) -> dict[str, Any]:
    """What the summary says of one held-out set."""
    return {
        "accuracy": evaluation.sampled_accuracy,
        "greedy_accuracy": evaluation.greedy_accuracy,
        **evaluation.pass_at_k,
        "mean_reward": evaluation.mean_reward,
        "mean_length": evaluation.mean_length,
        "truncated_share": evaluation.truncated_share,
        "unscored": evaluation.unscored,
        "prompts": evaluation.prompts,
    }
