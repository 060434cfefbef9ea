"""Every key of the algorithm does something: changing it changes a gradient, a batch, a sample set or a metric.

The fixture is one small batch, prepared and differentiated as a run would, with stand-ins for the learners' forward
passes. A key that is not in the table below, or that changes nothing, fails.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from slipstream.config.algorithm import AlgorithmConfig
from slipstream.config.keys import config_keys
from slipstream.config.loader import validate_config
from slipstream.config.presets import PRESETS
from slipstream.config.schema import RLConfig
from slipstream.data.trajectory import BASELINE_INDEX, Group, Prompt, TrainingExample, Trajectory
from slipstream.training.batch import make_micro_batch
from slipstream.workflows.algorithm import Algorithm
from slipstream.workflows.batch import prepare

PROMPT_LENGTH = 2
LIMIT = 6
REWARDS = {"0-0": [1.0, 0.0, 0.5, 0.0], "0-1": [1.0, 1.0, 1.0, 1.0], "0-2": [0.0, 2.0, 0.0, 0.0]}
LENGTHS = {"0-0": [2, 3, LIMIT, 1], "0-1": [4, 2, 2, 5], "0-2": [1, LIMIT, 3, 2]}

KL = {"kl_coefficient": 0.3}
GAE = {"advantage": "gae"}
SEVERAL_STEPS = {"optimizer_steps_per_batch": 3}
OVERLONG = {"shaping": {"overlong_buffer_share": 0.5}}

# Key: what surrounds it (keys of the algorithm, or of the run where they are such), and its value.
KEYS: dict[str, tuple[dict[str, Any], Any]] = {
    "preset": ({}, "dr_grpo"),
    "advantage": ({}, "leave_one_out"),
    "teacher": ({"advantage": "OWN"}, "m"),
    "normalize_by_std": ({}, False),
    "whiten_advantages": ({}, True),
    "discount": ({"advantage": "returns"}, 0.5),
    "gae_lambda": (GAE, 0.5),
    "policy_loss": ({}, "cispo"),
    "clip_low": (SEVERAL_STEPS, 0.01),
    "clip_high": (SEVERAL_STEPS, 0.01),
    "dual_clip": (SEVERAL_STEPS, 1.01),
    "aggregation": ({}, "sequence_mean_token_mean"),
    "aggregation_length": ({"aggregation": "constant_length"}, 100),
    "entropy_coefficient": ({}, 0.1),
    "kl_coefficient": ({}, 0.3),
    "kl_placement": (KL, "reward"),
    "kl_estimator": (KL, "k2"),
    "kl_control": (KL, "linear"),
    "kl_target": ({**KL, "kl_control": "adaptive"}, 5.0),
    "kl_horizon": ({**KL, "kl_control": "adaptive"}, 50),
    "kl_final_coefficient": ({**KL, "kl_control": "linear"}, 0.1),
    "reference_refresh_steps": (KL, 2),
    "correction": ({"correction_high": 1.01}, "truncate"),
    "correction_level": ({"correction": "truncate"}, "sequence"),
    "correction_low": ({"correction": "truncate"}, 0.99),
    "correction_high": ({"correction": "truncate"}, 1.01),
    "overlong_filtering": ({}, True),
    "dynamic_sampling": ({}, True),
    "dynamic_sampling_limit": ({"dynamic_sampling": True}, 3),
    "shaping.weights": ({}, {"right": 2.0}),
    "shaping.function": ({}, "SHAPING"),
    "shaping.length_penalty": ({}, 0.5),
    "shaping.truncation_penalty": ({}, 0.5),
    "shaping.overlong_buffer_share": ({}, 0.5),
    "shaping.overlong_penalty": (OVERLONG, 3.0),
    "shaping.normalize": ({"normalize_by_std": False}, True),
    "shaping.clip": ({}, [0.0, 0.5]),
}
# What a preset cannot do without.
NEEDED = {"distillation": {"teacher": "m"}}
RUN_KEYS: dict[str, tuple[dict[str, Any], Any]] = {
    "epochs_per_batch": ({}, 2),
    "optimizer_steps_per_batch": ({}, 3),
    "critic.value_clip": ({**GAE, **SEVERAL_STEPS}, 0.001),
}


def make_trajectory(group_id: str, index: int, *, reward: float, length: int) -> Trajectory:
    total = PROMPT_LENGTH + length
    mask = np.arange(total) >= PROMPT_LENGTH
    generator = np.random.default_rng([index + 1, int(group_id[-1])])
    return Trajectory(
        group_id=group_id,
        sample_index=index,
        tokens=np.arange(total, dtype=np.int64),
        loss_mask=mask,
        rollout_log_probs=np.where(mask, generator.normal(-1.0, 0.3, total), 0.0).astype(np.float32),
        versions=np.where(mask, 0, -1),
        finish_reason="length" if length == LIMIT else "stop",
        prompt_text="",
        response_text="",
        label=None,
        fields={},
        reward=reward,
        reward_parts={"right": reward - 0.1 * index, "form": 0.1 * index},
    )


def make_groups(*, with_baseline: bool) -> list[Group]:
    groups = []
    for group_id, rewards in REWARDS.items():
        members = [
            make_trajectory(group_id, index, reward=reward, length=length)
            for index, (reward, length) in enumerate(zip(rewards, LENGTHS[group_id], strict=True))
        ]
        prompt = Prompt(row=0, tokens=np.zeros(PROMPT_LENGTH, np.int64), text="", label=None, fields={})
        baseline = make_trajectory(group_id, BASELINE_INDEX, reward=0.5, length=2) if with_baseline else None
        groups.append(Group(group_id=group_id, prompt=prompt, trajectories=members, baseline=baseline))
    return groups


OWN_ADVANTAGE = """
def graded_if_there_is_a_teacher(batch):
    return batch.token_rewards if batch.teacher_log_ratios is None else batch.teacher_log_ratios
"""


class StandIn:
    """Answers for a learner with numbers that depend on the example, the token and the role."""

    def log_probs(self, role: str, examples: Sequence[TrainingExample]) -> dict[str, Any]:
        return self._numbers(examples, mean=-1.0, salt={"policy": 1, "reference": 2, "teacher": 4}[role])

    def values(self, examples: Sequence[TrainingExample]) -> dict[str, Any]:
        return self._numbers(examples, mean=0.3, salt=3)

    def _numbers(self, examples: Sequence[TrainingExample], *, mean: float, salt: int) -> dict[str, Any]:
        return {
            example.example_id: np.random.default_rng([number, salt])
            .normal(mean, 0.3, int(example.loss_mask.sum()))
            .astype(np.float32)
            for number, example in enumerate(examples)
        }


def make_config(settings: dict[str, Any], **run: Any) -> RLConfig:
    settings = dict(settings)
    for name in ("optimizer_steps_per_batch", "epochs_per_batch", "critic"):
        if name in settings:
            run[name] = settings.pop(name)
    values = {
        "steps": 5,
        "output_dir": "out",
        "model": {"path": "m"},
        "data": {"source": "d.jsonl"},
        "rollout": {"groups_per_step": len(REWARDS), "samples_per_prompt": 4, "max_response_tokens": LIMIT},
        "algorithm": settings,
    }
    return validate_config(RLConfig, values | run)


def gradient(examples: Sequence[TrainingExample], objective: Any, *, of: str) -> tuple[list[float], dict[str, Any]]:
    """The gradient of one optimizer step with respect to what the model computes, and the step's metrics."""
    batch = make_micro_batch(list(examples), "cpu")
    generator = torch.Generator().manual_seed(4)
    free = (-1.0 + 0.3 * torch.randn(batch.loss_tokens, generator=generator)).requires_grad_()
    outputs = {"values": free} if of == "values" else {"log_probs": free, "entropy": free.square()}
    output = objective(outputs, batch.fields, batch.sequence_index)
    (output.loss * batch.fields["weight"]).sum().backward()
    assert free.grad is not None
    return free.grad.tolist(), {name: values.double().mean().item() for name, values in output.metrics.items()}


def observe(settings: dict[str, Any]) -> str:
    """Everything that a run with these settings would compute and do with the fixed batch, as one comparable text."""
    config = make_config(settings)
    algorithm = Algorithm(config)
    learner: Any = StandIn()
    critic: Any = StandIn() if config.algorithm.advantage == "gae" else None
    seen: list[Any] = []
    for step in range(2):
        groups = make_groups(with_baseline=algorithm.needs_greedy_baseline)
        batch = prepare(groups, algorithm, learner, critic)
        seen.append([batch.metrics, batch.filtered, len(batch.optimizer_steps)])
        for examples in batch.optimizer_steps:
            seen.append(gradient(examples, algorithm.objective, of="log_probs"))
            if critic is not None:
                seen.append(gradient(examples, algorithm.value_objective, of="values"))
        algorithm.after_step(step + 1, measured_kl=1.0, trajectories=12)
        seen.append([algorithm.kl_coefficient, algorithm.refreshes_reference(step + 1)])
    seen.append([str(algorithm.dynamic_sampling), algorithm.needs_greedy_baseline])
    return json.dumps(seen)


def with_key(settings: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    section, _, name = key.rpartition(".")
    if not section:
        return {**settings, name: value}
    return {**settings, section: {**settings.get(section, {}), name: value}}


@pytest.mark.parametrize("key", config_keys(AlgorithmConfig))
def test_every_key_of_the_algorithm_does_something(key: str, tmp_path: Path) -> None:
    assert key in KEYS, f"algorithm.{key} is new: say in KEYS where it can be seen to do something"
    settings, value = KEYS[key]
    if value == "SHAPING":
        (tmp_path / "own.py").write_text("def halved(rewards, trajectories):\n    return rewards / 2 + 1\n")
        value, settings = f"{tmp_path / 'own.py'}:halved", {**settings, "normalize_by_std": False}
    if settings.get("advantage") == "OWN":
        (tmp_path / "own.py").write_text(OWN_ADVANTAGE)
        settings = {"advantage": f"{tmp_path / 'own.py'}:graded_if_there_is_a_teacher"}
    assert observe(with_key(settings, key, value)) != observe(settings)


@pytest.mark.parametrize("key", RUN_KEYS)
def test_every_key_of_the_run_that_belongs_to_the_algorithm_does_something(key: str) -> None:
    settings, value = RUN_KEYS[key]
    assert observe(with_key(settings, key, value)) != observe(settings)


def test_the_table_has_no_key_that_does_not_exist() -> None:
    assert set(KEYS) <= set(config_keys(AlgorithmConfig))
    assert set(RUN_KEYS) <= set(config_keys(RLConfig))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_gives_finite_numbers_that_are_its_own(preset: str) -> None:
    seen = {name: observe({"preset": name, **NEEDED.get(name, {})}) for name in PRESETS}
    assert "NaN" not in seen[preset] and "Infinity" not in seen[preset]
    assert [name for name in PRESETS if seen[name] == seen[preset]] == [preset]


# ---------------------------------------------------------------- what goes on from step to step


def test_the_state_of_a_checkpoint_restores_coefficient_and_running_moments() -> None:
    settings = {**KL, "kl_control": "adaptive", "shaping": {"normalize": True}}
    algorithm = Algorithm(make_config(settings))
    groups = make_groups(with_baseline=False)
    prepare(groups, algorithm, StandIn())  # type: ignore[arg-type]
    algorithm.after_step(1, measured_kl=10.0, trajectories=12)
    state = json.loads(json.dumps(algorithm.state()))

    restored = Algorithm(make_config(settings))
    restored.restore(state)
    assert restored.kl_coefficient == algorithm.kl_coefficient > KL["kl_coefficient"]
    expected, found = (prepare(groups, each, StandIn()).metrics for each in (algorithm, restored))  # type: ignore[arg-type]
    assert found == expected


def test_correction_is_on_by_default_only_where_samples_may_be_stale() -> None:
    assert Algorithm(make_config({})).objective.correction is None
    config = make_config({})
    stale = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_staleness": 1})})
    correction = Algorithm(stale).objective.correction
    assert correction is not None and (correction.mode, correction.level) == ("truncate", "token")


def test_stale_samples_without_correction_are_refused() -> None:
    settings = make_config({"correction": "none"}).model_dump()
    settings["rollout"]["max_staleness"] = 2
    with pytest.raises(ValidationError, match=r"truncate, mask or auto for rollout\.max_staleness 2"):
        RLConfig.model_validate(settings)
    settings["algorithm"]["correction"] = "mask"
    assert RLConfig.model_validate(settings).correction_mode == "mask"


def test_the_reference_is_refreshed_every_so_many_steps() -> None:
    algorithm = Algorithm(make_config({**KL, "reference_refresh_steps": 3}))
    assert [step for step in range(1, 8) if algorithm.refreshes_reference(step)] == [3, 6]


def test_old_log_probs_are_computed_only_where_the_policy_moves_or_the_reward_needs_them() -> None:
    assert not Algorithm(make_config(KL)).needs_old_log_probs
    assert Algorithm(make_config({**KL, "kl_placement": "reward"})).needs_old_log_probs
    assert Algorithm(make_config({"epochs_per_batch": 2})).needs_old_log_probs
    assert Algorithm(make_config({"preset": "distillation", "teacher": "m"})).needs_old_log_probs
    assert Algorithm(make_config(SEVERAL_STEPS)).needs_old_log_probs
