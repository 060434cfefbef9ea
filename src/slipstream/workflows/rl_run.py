"""What the RL loop works with: engines, data and records, put together from a configuration and taken apart again.

On top of what every training run has (`training_run.py`) an `RLRun` holds the stream of rollouts and the held-out
prompts, times the phases of the loop and records its steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.config.schema import AlgorithmConfig, RLConfig
from slipstream.data.cursor import PromptCursor
from slipstream.data.trajectory import Group
from slipstream.observe.run_directory import RunDirectory
from slipstream.rollout.admission import Admission
from slipstream.rollout.messages import SamplingParameters
from slipstream.rollout.stream import GroupStream, RolloutStream
from slipstream.weights.publisher import PublishReport
from slipstream.workflows.batch import TrainingBatch
from slipstream.workflows.engines import start_rl_engines
from slipstream.workflows.held_out import HeldOutPrompts, RLData
from slipstream.workflows.training_run import TrainingRun, numbers

if TYPE_CHECKING:
    from slipstream.algorithms.objective import PolicyObjective


class RLRun(TrainingRun):
    """A reinforcement learning run in progress. `step` counts finished steps; `rollouts.version` the publishes."""

    config: RLConfig
    rollouts: RolloutStream
    held_out: HeldOutPrompts | None

    def __init__(
        self, config: RLConfig, data: RLData, *, directory: RunDirectory, reward: Callable[..., Any] | None
    ) -> None:
        super().__init__(directory)
        self.config = config
        self._data = data
        self.objective = policy_objective(config.algorithm)
        self._reward = reward
        self._phase_seconds: dict[str, float] = {}

    def _set_up(self) -> None:
        config, data = self.config, self._data
        self.records = self._open_records("rl")
        session = self._open_session()
        with self.records.console.phase("starting the engines"):
            engines = start_rl_engines(
                session, config, tokenizer=data.tokenizer, timeline=self.records.timeline, reward=self._reward
            )
        self.learner = engines.learner
        self.rollouts = RolloutStream(
            GroupStream(
                engines.generators,
                SamplingParameters(
                    temperature=config.rollout.temperature,
                    max_response_tokens=config.rollout.max_response_tokens,
                    stop=tuple(config.rollout.stop),
                ),
                samples_per_prompt=config.rollout.samples_per_prompt,
                purpose="training",
            ),
            PromptCursor(data.training, seed=config.seed, shuffle=config.data.shuffle),
            publisher=engines.publisher,
            ledger=self.records.ledger,
            admission=Admission(config.rollout.groups_per_step, config.rollout.max_staleness),
            on_failure=config.reward.on_failure,
        )
        self.held_out = None
        if data.held_out:
            self.held_out = HeldOutPrompts(data.held_out, engines.generators, config)

    def begin(self) -> None:
        """Start from the model as it is: bring its weights to the engines, and evaluate it."""
        super().begin()
        self.rollouts.synchronize()
        self._evaluate()

    def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint as if the run had never stopped; the engines get its weights."""
        super().restore(checkpoint)
        self.rollouts.synchronize()

    def _state(self) -> dict[str, Any]:
        return {"rollouts": self.rollouts.state()}

    def _restore_state(self, state: dict[str, Any]) -> str | None:
        return self.rollouts.restore(state["rollouts"])

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the loop: a span in the timeline and a metric `time/<name>`."""
        start = time.monotonic()
        with self.records.timeline.span("controller", name, step=self.step + 1):
            yield
        self._phase_seconds[name] = self._phase_seconds.get(name, 0.0) + time.monotonic() - start

    def record(
        self, groups: Sequence[Group], batch: TrainingBatch, metrics: dict[str, Any], publication: PublishReport
    ) -> None:
        """Close the step: metrics, ledger, samples; then evaluate and save where they are due."""
        self.step += 1
        self._close_groups(groups, batch, metrics)
        line = batch.metrics | policy_metrics(metrics) | {"weights/probe_difference": publication.probe_difference}
        line |= self._measured(groups, publication)
        shown = [group.trajectories[0] for group in groups]
        self.records.write_step(self.step, self.rollouts.version, metrics=line, trajectories=shown)
        self._phase_seconds.clear()
        self.check_finite(metrics)
        if self.is_due(self.config.evaluation.every_steps):
            self._evaluate()
        self.save_if_due()

    def finish(self) -> dict[str, Any]:
        """Check the books, export the policy, write summary and report."""
        self.rollouts.check_ledger()
        return self._finish("rl", self.records.accuracy_summary())

    def _evaluate(self) -> None:
        if self.held_out is None:
            return
        with self.records.timeline.span("controller", "evaluate"), self.records.console.phase("evaluating"):
            evaluation = self.held_out.evaluate(self.step, self.rollouts.version)
        self.records.write_evaluation(evaluation)

    def _close_groups(self, groups: Sequence[Group], batch: TrainingBatch, metrics: dict[str, Any]) -> None:
        """Enter in the ledger what became of the groups; each belongs to one of the batch's optimizer steps."""
        for index, group in enumerate(groups):
            if index * len(batch.optimizer_steps) // len(groups) in metrics["skipped_steps"]:
                self.records.ledger.filtered(group.group_id, "not finite")
            else:
                self.records.ledger.trained(group.group_id, self.step)

    def _measured(self, groups: Sequence[Group], publication: PublishReport) -> dict[str, float]:
        """What a clock measured: not part of what a resumed run repeats."""
        times = {f"time/{name}": seconds for name, seconds in self._phase_seconds.items()}
        total = sum(times.values())
        response_tokens = sum(trajectory.response_length for group in groups for trajectory in group.trajectories)
        all_tokens = sum(len(trajectory.tokens) for group in groups for trajectory in group.trajectories)
        return times | {
            "time/step": total,
            "throughput/tokens_per_s": all_tokens / total,
            "throughput/generated_tokens_per_s": response_tokens / times["time/generate"],
            "throughput/publish_bytes_per_s": publication.sent_bytes / publication.seconds,
        }


def policy_objective(algorithm: AlgorithmConfig) -> PolicyObjective:
    """What the learner minimizes."""
    # Only here: it imports torch, and bad input is to be refused at once.
    from slipstream.algorithms.objective import PolicyObjective

    return PolicyObjective(
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        kl_coefficient=algorithm.kl_coefficient,
        kl_estimator=algorithm.kl_estimator,
    )


def policy_metrics(metrics: dict[str, Any]) -> dict[str, float]:
    """The learner's metrics under the names they have in `metrics.jsonl`."""
    return {f"policy/{name}": value for name, value in numbers(metrics).items()}
