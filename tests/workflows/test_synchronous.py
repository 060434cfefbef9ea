"""With `max_staleness` 0 a run is the textbook's, bit for bit: answer all prompts, score all answers, learn, publish.

Each run is compared with the plain loop below, which has no stream, no admission and no pump, on engines of its own.
That two runs of one configuration are equal follows.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slipstream.cluster.calls import fetch, gather
from slipstream.cluster.session import ClusterSession
from slipstream.config.schema import RLConfig
from slipstream.data.mixture import PromptCursor
from slipstream.data.trajectory import Group, PromptOccurrence
from slipstream.observe.metrics import read_metrics
from slipstream.observe.timeline import Timeline
from slipstream.rollout.episodes import single_turn_trajectory
from slipstream.rollout.messages import GroupRequest, SamplingParameters
from slipstream.rollout.seeds import group_seed
from slipstream.workflows.algorithm import Algorithm
from slipstream.workflows.batch import TrainingBatch, prepare
from slipstream.workflows.engines import RLEngines, start_rl_engines
from slipstream.workflows.held_out import load_rl_data
from slipstream.workflows.rl import train_rl
from slipstream.workflows.training_run import numbers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 3
GROUPS_PER_STEP = 4
# A policy with random weights ends about half of its answers on one of these.
STOP = [chr(code) for code in range(ord("A"), ord("z") + 1)]

COMPARED = {"reward/mean", "advantage/std", "response_length/mean", "policy/loss", "policy/gradient_norm"}

REWARD = """\
def parity(text):
    return float(sum(text.response.encode()) % 2)
"""

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"optimizer_steps_per_batch": 1},
    "ppo": {"optimizer_steps_per_batch": 2, "critic": {"learning_rate": 1e-3}},
    "dapo": {"optimizer_steps_per_batch": 2},
}


def make_config(preset: str, folder: Path, *, policy: Path, rows: Path) -> RLConfig:
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    settings: dict[str, Any] = {
        "steps": STEPS,
        "output_dir": str(folder / "run"),
        "model": {"path": str(policy), "dtype": "float32"},
        "data": {"source": str(rows), "max_prompt_tokens": 32},
        "reward": {"function": f"{folder / 'reward.py'}:parity", "workers": 2},
        "rollout": {
            "engine": "transformers",
            "groups_per_step": GROUPS_PER_STEP,
            "samples_per_prompt": 3,
            "max_response_tokens": 8,
            "stop": STOP,
            "threads": 1,
        },
        "algorithm": preset,
        "training": {"learning_rate": 1e-3, "zero_stage": 1, "threads": 1},
        "tracking": {"tensorboard": False},
        **PRESETS[preset],
    }
    return RLConfig.model_validate(settings)


class PlainRun:
    """The same parts, called one after the other: nothing begins before the thing before it has ended."""

    def __init__(self, config: RLConfig, folder: Path) -> None:
        folder.mkdir()
        self.config = config
        self.folder = folder
        self.algorithm = Algorithm(config)
        self.data = load_rl_data(config)
        self.cursor = PromptCursor(self.data.training, seed=config.seed, shuffle=config.data.shuffle)
        self.issued = 0

    def train(self) -> list[dict[str, Any]]:
        """All steps; the metrics of each, and the policy in `export`."""
        timeline = Timeline(self.folder / "timeline.json")
        with ClusterSession(self.config.cluster, log_folder=self.folder / "logs") as session:
            engines = start_rl_engines(
                session, self.config, tokenizer=self.data.tokenizer, timeline=timeline, reward=None
            )
            engines.publisher.publish(0)
            lines = [self.step(step, engines) for step in range(1, STEPS + 1)]
            engines.learner.export(self.folder / "export")
        return lines

    def step(self, step: int, engines: RLEngines) -> dict[str, Any]:
        batch = prepare(self.sample(engines), self.algorithm, engines.learner, engines.critic)
        metrics: dict[str, Any] = dict(batch.metrics)
        if engines.critic is not None:
            updated = engines.critic.update(batch.optimizer_steps, self.algorithm.value_objective)
            metrics |= {f"critic/{name}": value for name, value in numbers(updated).items()}
        updated = engines.learner.update(batch.optimizer_steps, self.algorithm.objective)
        metrics |= {f"policy/{name}": value for name, value in numbers(updated).items()}
        report = engines.publisher.publish(step)
        self.steer(step, batch)
        return metrics | {"weights/probe_difference": report.probe_difference}

    def steer(self, step: int, batch: TrainingBatch) -> None:
        trajectories = GROUPS_PER_STEP * self.config.rollout.samples_per_prompt
        self.algorithm.after_step(step, measured_kl=batch.measured_kl, trajectories=trajectories)

    def sample(self, engines: RLEngines) -> list[Group]:
        """A batch of groups; under dynamic sampling those whose rewards differ, with fresh prompts for the others."""
        kept: list[Group] = []
        while len(kept) < GROUPS_PER_STEP:
            answered = self.answer(self.cursor.take(GROUPS_PER_STEP - len(kept)), engines)
            self.issued += len(answered)
            if self.config.algorithm.dynamic_sampling:
                answered = [group for group in answered if len({t.reward for t in group.trajectories}) > 1]
            kept += answered
        return kept

    def answer(self, occurrences: Sequence[PromptOccurrence], engines: RLEngines) -> list[Group]:
        """Answer all prompts, and when the last answer has come score them all."""
        rollout, seed = self.config.rollout, self.config.seed
        requests = [
            GroupRequest(
                group_id=occurrence.group_id,
                prompt_tokens=occurrence.prompt.tokens,
                samples=rollout.samples_per_prompt,
                seed=group_seed(seed, occurrence.group_id, purpose="training"),
            )
            for occurrence in occurrences
        ]
        sampling = SamplingParameters(rollout.temperature, rollout.max_response_tokens, stop=tuple(rollout.stop))
        [engine] = engines.generators.engines
        call = engine.stream("generate", requests, sampling)
        results = [result for reference in call.reference for result in fetch(call, reference)]
        answers = {(result.group_id, result.sample_index): result.sample for result in results}
        groups = [
            Group(
                group_id=occurrence.group_id,
                prompt=occurrence.prompt,
                trajectories=[
                    single_turn_trajectory(
                        occurrence,
                        answers[occurrence.group_id, index],
                        sample_index=index,
                        tokenizer=self.data.tokenizer,
                    )
                    for index in range(rollout.samples_per_prompt)
                ],
            )
            for occurrence in occurrences
        ]
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        [scores] = gather([engines.generators.reward_engine.submit("score", trajectories)], deadline_s=60)
        for trajectory, score in zip(trajectories, scores, strict=True):
            trajectory.reward, trajectory.reward_parts = score.reward, score.parts
        return groups


@pytest.mark.parametrize("preset", PRESETS)
def test_a_run_without_staleness_is_the_plain_loop_bit_for_bit(
    preset: str, tmp_path: Path, tiny_policy: Path, additions: Path
) -> None:
    config = make_config(preset, tmp_path, policy=tiny_policy, rows=additions)
    assert config.rollout.max_staleness == 0
    plain = PlainRun(config, tmp_path / "plain")
    expected = plain.train()
    train_rl(config)

    found = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(found) == STEPS
    for line, own in zip(found, expected, strict=True):
        assert {
            "reward/mean",
            "advantage/std",
            "response_length/mean",
            "policy/loss",
            "policy/gradient_norm",
        } <= own.keys()
        assert {name: line[name] for name in own} == own
    weights = [
        (folder / "export" / "model.safetensors").read_bytes() for folder in (tmp_path / "plain", tmp_path / "run")
    ]
    assert weights[0] == weights[1]
    assert weights[0] != (tiny_policy / "model.safetensors").read_bytes(), "something was learned"
    if preset == "dapo":
        assert plain.issued > STEPS * GROUPS_PER_STEP, "groups without signal were replaced"
        filtered = sum(line["dynamic_sampling/groups_filtered"] for line in found)
        assert filtered == plain.issued - STEPS * GROUPS_PER_STEP
