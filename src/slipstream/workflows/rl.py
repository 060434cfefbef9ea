"""Reinforcement learning of a policy from a reward: the controller, and the one loop.

Four engines do the work and wait to be called: rollout engines generate, the reward engine scores, the learner
evaluates and learns. The loop below is the whole method. `take` streams groups in as they finish and bounds their
staleness by admission; with `rollout.max_staleness` 0 that is synchronous training. What the names in the loop stand
for is put together in `rl_run.py`, the algorithm from its pieces in `algorithm.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream.config.loader import dump_config
from slipstream.config.schema import RewardConfig, RLConfig
from slipstream.errors import ConfigError
from slipstream.observe.run_directory import RunDirectory
from slipstream.workflows.batch import prepare
from slipstream.workflows.checks import check_config
from slipstream.workflows.held_out import RLData, load_rl_data
from slipstream.workflows.rl_run import RLRun
from slipstream.workflows.training_run import start_or_restore


def train_rl(config: RLConfig, *, reward: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Train a policy as `config` says and return the summary that is also written to `summary.json`.

    `reward` may be a function in place of `reward.function` in the configuration: it takes a `ScoredText` and returns
    a number, or named numbers that are summed. Raises a SlipstreamError for anything the user can mend.
    """
    if config.needs_reward or reward is not None:
        require_reward(config.reward, reward)
    check_config(config, reward=reward)
    # Before there is a run directory: data that cannot be used leaves nothing behind.
    data = load_rl_data(config)
    with RunDirectory.create(config.output_dir, dump_config(config), "rl") as directory:
        return _train(config, data, directory=directory, reward=reward, checkpoint=None)


def resume_rl(
    config: RLConfig, directory: RunDirectory, checkpoint: Path | None, *, reward: Callable[..., Any] | None = None
) -> dict[str, Any]:
    """Go on with an interrupted run from `checkpoint`; from the beginning if there is none."""
    data = load_rl_data(config)
    return _train(config, data, directory=directory, reward=reward, checkpoint=checkpoint)


def _train(
    config: RLConfig,
    data: RLData,
    *,
    directory: RunDirectory,
    reward: Callable[..., Any] | None,
    checkpoint: Path | None,
) -> dict[str, Any]:
    with RLRun(config, data, directory=directory, reward=reward) as run:
        start_or_restore(run, checkpoint)
        loop(run)
        return run.finish()


def require_reward(config: RewardConfig, function: Callable[..., Any] | None) -> None:
    """Raise ConfigError unless there is a reward: a function, by name or as an object, or a service; a model; or both.

    That there are not both a function by name and a service is checked with the configuration.
    """
    if config.urls and function is not None:
        raise ConfigError("there are two rewards: reward.urls in the configuration, and reward= in Python; give one")
    if config.function is not None and function is not None:
        raise ConfigError(
            "there are two reward functions: reward.function in the configuration, and reward= in Python; give one"
        )
    if config.function is None and function is None and config.model is None and not config.urls:
        raise ConfigError(
            "a reward is needed: name a function by reward.function in the configuration, or pass it as reward= in "
            "Python, or give the path of a reward model as reward.model, or the address of a service in reward.urls"
        )


def loop(run: RLRun) -> None:
    """The method: generate, prepare, learn, publish, until all steps are done."""
    while run.step < run.config.steps:
        with run.phase("generate"):
            groups = run.rollouts.take(run.config.rollout.groups_per_step, meanwhile=run.work_ahead)
        with run.phase("prepare"):
            batch = prepare(groups, run.algorithm, run.learner, run.critic, headstart=run.headstart)
        with run.phase("train"):
            metrics = run.train(batch)
        with run.phase("publish"):
            publication = run.rollouts.publish()
        run.record(groups, batch, metrics, publication)
