"""What the RL loop works with: engines, data and records, put together from a configuration and taken apart again.

On top of what every training run has (`training_run.py`) an `RLRun` holds the stream of rollouts and the held-out
prompts, times the phases of the loop and records its steps.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.cluster.session import ClusterSession
from slipstream.config.schema import RLConfig
from slipstream.data.failure import FailureKind
from slipstream.data.mixture import PromptCursor
from slipstream.data.trajectory import Group
from slipstream.observe.alarm import RewardAlarm
from slipstream.observe.best import Best
from slipstream.observe.occupancy import IdleShares
from slipstream.observe.run_directory import RunDirectory
from slipstream.rollout.admission import Admission, staleness_metrics
from slipstream.rollout.dynamic_sampling import TakeCounts
from slipstream.rollout.group_stream import GroupStream
from slipstream.rollout.messages import SamplingParameters
from slipstream.rollout.stream import RolloutStream
from slipstream.training.group import LearnerGroup
from slipstream.weights.publisher import PublishReport
from slipstream.workflows.algorithm import Algorithm
from slipstream.workflows.batch import Headstart, TrainingBatch, forward_passes, policy_example, prepare
from slipstream.workflows.engines import RLEngines, start_rl_engines
from slipstream.workflows.held_out import HeldOutPrompts, RLData
from slipstream.workflows.training_run import TrainingRun, numbers

LEARNER = "learner"
LEARNING_PHASES = ("prepare", "train")


class RLRun(TrainingRun):
    """A reinforcement learning run in progress. `step` counts finished steps; `rollouts.version` the publishes."""

    config: RLConfig
    rollouts: RolloutStream
    critic: LearnerGroup | None
    held_out: HeldOutPrompts | None

    def __init__(
        self, config: RLConfig, data: RLData, *, directory: RunDirectory, reward: Callable[..., Any] | None
    ) -> None:
        super().__init__(directory)
        self.config = config
        self._data = data
        self.algorithm = Algorithm(config)
        self._reward = reward
        self._alarm = RewardAlarm(config.evaluation.success_reward)
        self._phase_seconds: dict[str, float] = {}
        self.headstart = Headstart()

    def _set_up(self) -> None:
        config, data = self.config, self._data
        self.records = self._open_records()
        session = self._open_session()
        with self.records.console.phase("starting the engines"):
            engines = self._start_engines(session)
        self.learner, self.critic = engines.learner, engines.critic
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
                greedy_baseline=self.algorithm.needs_greedy_baseline,
                # A synchronous run repeats bit for bit, also where an engine was lost.
                repeats_calls=config.rollout.max_staleness == 0,
            ),
            PromptCursor(data.training, seed=config.seed, shuffle=config.data.shuffle),
            publisher=engines.publisher,
            ledger=self.records.ledger,
            admission=Admission(config.rollout.groups_per_step, config.rollout.max_staleness, config.steps),
            on_failure=config.reward.on_failure,
            dynamic_sampling=self.algorithm.dynamic_sampling,
        )
        self._stack.callback(self.rollouts.close)
        self._restarts = engines.generators.restarts
        self._occupancy = engines.generators.occupancy
        self._idle_shares = IdleShares(
            self._occupancy,
            [LEARNER, *(engine.name for engine in (*engines.generators.engines, engines.generators.reward_engine))],
        )
        self.held_out = None
        if data.held_out:
            self.held_out = HeldOutPrompts(data.held_out, engines.generators, config)

    def _start_engines(self, session: ClusterSession) -> RLEngines:
        """All engines of the run, ready; one who has other engines puts them in here."""
        return start_rl_engines(
            session,
            self.config,
            tokenizer=self._data.tokenizer,
            timeline=self.records.timeline,
            reward=self._reward,
        )

    def begin(self) -> None:
        """Start from the model as it is: bring its weights to the engines, and evaluate it."""
        super().begin()
        self.rollouts.synchronize()
        self._keep(self._evaluate())

    def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint as if the run had never stopped; the engines get its weights."""
        super().restore(checkpoint)
        self.rollouts.synchronize()
        # The run may have been killed after it saved a policy that was the best, and before it kept it.
        self._keep(self.records.best_at(self.step))

    def _controller_state(self) -> dict[str, Any]:
        # Stream and ledger are to be of one moment.
        with self.rollouts.unchanging():
            return super()._controller_state()

    def _state(self) -> dict[str, Any]:
        return {"rollouts": self.rollouts.state(), "algorithm": self.algorithm.state()}

    def _restore_state(self, state: dict[str, Any]) -> list[str]:
        self.algorithm.restore(state["algorithm"])
        return self.rollouts.restore(state["rollouts"])

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the loop: a span in the timeline and a metric `time/<name>`."""
        start = time.monotonic()
        is_learning = name in LEARNING_PHASES
        with (
            self.records.timeline.span("controller", name, step=self.step + 1),
            self._occupancy.busy(LEARNER) if is_learning else nullcontext(),
        ):
            yield
        self._phase_seconds[name] = self._phase_seconds.get(name, 0.0) + time.monotonic() - start

    def work_ahead(self, groups: list[Group]) -> None:
        """Do for groups of the next batch what need not wait for the others: forward passes, and gradients if possible.

        The gradient of a group is computed where nothing that is learned from it depends on other groups.
        """
        passes = forward_passes(self.algorithm, self.learner, self.critic)
        learns = self.algorithm.learns_by_group
        if not passes and not learns:
            return
        with self.records.timeline.span("controller", "work ahead"), self._occupancy.busy(LEARNER):
            trajectories = [trajectory for group in groups for trajectory in group.trajectories]
            self.headstart.compute(passes, [policy_example(trajectory) for trajectory in trajectories])
            if learns:
                self._learn_ahead(groups)

    def _learn_ahead(self, groups: list[Group]) -> None:
        rollout = self.config.rollout
        batch = prepare(
            groups,
            self.algorithm,
            self.learner,
            headstart=self.headstart,
            step_sequences=rollout.groups_per_step * rollout.samples_per_prompt,
        )
        [examples] = batch.optimizer_steps
        self.learner.accumulate(examples, self.algorithm.objective)
        self.headstart.learned.update(example.example_id for example in examples)

    def train(self, batch: TrainingBatch) -> dict[str, dict[str, Any]]:
        """The optimizer steps of the critic, where there is one, and of the policy, once the critic has warmed up.

        Returns the metrics of each by role.
        """
        metrics = {}
        if self.critic is not None:
            metrics["critic"] = self.critic.update(batch.optimizer_steps, self.algorithm.value_objective)
        if self.critic is None or self.step >= self.config.critic.warmup_steps:
            metrics["policy"] = self.learner.update(batch.optimizer_steps, self.algorithm.objective)
        return metrics

    def record(
        self,
        groups: Sequence[Group],
        batch: TrainingBatch,
        metrics: dict[str, dict[str, Any]],
        publication: PublishReport,
    ) -> None:
        """Close the step: metrics, ledger, samples; then evaluate and save where they are due."""
        self.step += 1
        self.headstart = Headstart()
        self._close_groups(groups, batch, metrics)
        self._alarm.look(self.step, groups)
        line = batch.metrics | {"weights/probe_difference": publication.probe_difference}
        for role, values in metrics.items():
            line |= {f"{role}/{name}": value for name, value in numbers(values).items()}
        if self.algorithm.needs_reference:
            line["kl/coefficient"] = self.algorithm.kl_coefficient
        if self.algorithm.dynamic_sampling is not None:
            line |= _sampled(batch.metrics["reward/mean"], len(groups), self.rollouts.last_take)
        line |= _failures(self.rollouts.last_failures) | self.rollouts.last_queues
        bound = self.config.rollout.max_staleness
        # The version that trained is the one before this publish.
        line |= staleness_metrics(groups, version=self.rollouts.version - 1, max_staleness=bound)
        line |= self._measured(groups, publication)
        shown = [group.trajectories[0] for group in groups]
        self.records.write_step(self.step, self.rollouts.version, metrics=line, trajectories=shown)
        self._phase_seconds.clear()
        self.check_finite(*metrics.values())
        self._update_algorithm(batch, metrics)
        best = self._evaluate() if self.is_due(self.config.evaluation.every_steps) else None
        self.save_if_due(needed=best is not None)
        self._keep(best)

    def _update_algorithm(self, batch: TrainingBatch, metrics: dict[str, dict[str, Any]]) -> None:
        measured_kl = batch.measured_kl
        if measured_kl is None and "policy" in metrics:
            measured_kl = metrics["policy"].get("kl")
        trajectories = self.config.rollout.groups_per_step * self.config.rollout.samples_per_prompt
        self.algorithm.after_step(self.step, measured_kl=measured_kl, trajectories=trajectories)
        if self.algorithm.refreshes_reference(self.step):
            self.learner.refresh_reference()

    def _learners(self) -> dict[str, LearnerGroup]:
        learners = super()._learners()
        return learners if self.critic is None else learners | {"critic": self.critic}

    def finish(self) -> dict[str, Any]:
        """Check the books, export the policy, write summary and report."""
        self.rollouts.check_ledger()
        return self._finish(self.records.accuracy_summary())

    def _evaluate(self) -> Best | None:
        """Evaluate the policy on all held-out sets; returns what makes it the best so far, if it is."""
        if self.held_out is None:
            return None
        with self.records.timeline.span("controller", "evaluate"), self.records.console.phase("evaluating"):
            evaluations = self.held_out.evaluate(self.step, self.rollouts.version)
        return self.records.write_evaluations(evaluations)

    def _keep(self, best: Best | None) -> None:
        """Keep the policy of this step, of which there is a checkpoint, where it is the best so far."""
        if best is not None:
            # What was evaluated, and not the average of it and its predecessors.
            self.records.keep_best(best, partial(self.learner.export, live=True))

    def _close_groups(self, groups: Sequence[Group], batch: TrainingBatch, metrics: dict[str, dict[str, Any]]) -> None:
        """Enter in the ledger what became of the groups; each belongs to one of the batch's optimizer steps."""
        learned = [set(range(len(batch.optimizer_steps))) - set(role["skipped_steps"]) for role in metrics.values()]
        parts_learned = {step % batch.parts for steps in learned for step in steps}
        for index, group in enumerate(groups):
            if group.group_id in batch.filtered:
                self.records.ledger.filtered(group.group_id, batch.filtered[group.group_id])
            elif index * batch.parts // len(groups) not in parts_learned:
                self.records.ledger.filtered(group.group_id, "not finite")
            else:
                self.records.ledger.trained(group.group_id, self.step)

    def _measured(self, groups: Sequence[Group], publication: PublishReport) -> dict[str, float]:
        """What a clock measured, and which engines were lost: not part of what a resumed run repeats."""
        times = {f"time/{name}": seconds for name, seconds in self._phase_seconds.items()}
        total = sum(times.values())
        response_tokens = sum(trajectory.response_length for group in groups for trajectory in group.trajectories)
        all_tokens = sum(len(trajectory.tokens) for group in groups for trajectory in group.trajectories)
        idle = {f"idle/{name.replace(' ', '_')}": share for name, share in self._idle_shares.read().items()}
        return (
            times
            | idle
            | {
                "time/step": total,
                "pause/publish_seconds": publication.pause_seconds,
                "faults/engine_restarts": float(self._restarts.take_count()),
                "throughput/tokens_per_s": all_tokens / total,
                "throughput/generated_tokens_per_s": response_tokens / times["time/generate"],
                "throughput/publish_bytes_per_s": publication.sent_bytes / publication.seconds,
            }
        )


def _failures(counts: Counter[FailureKind]) -> dict[str, float]:
    """Responses of the step that could not be scored, in all and by kind."""
    by_kind = {f"reward/failures/{kind}": float(count) for kind, count in sorted(counts.items())}
    return {"reward/failures": float(counts.total())} | by_kind


def _sampled(kept_mean: float, kept: int, counts: TakeCounts) -> dict[str, float]:
    """What dynamic sampling left out, and the mean reward of all that was sampled: that of the kept groups is biased.

    Groups are equally large, so each counts the same.
    """
    total = kept + counts.filtered
    return {
        "dynamic_sampling/groups_filtered": float(counts.filtered),
        "dynamic_sampling/reward_mean": (kept_mean * kept + sum(counts.filtered_rewards)) / total,
    }
