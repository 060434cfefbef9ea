"""What the RL loop works with: engines, data and records, put together from a configuration and taken apart again.

An `RLRun` is entered to start everything and left to stop everything, whatever happened in between. Between the two
it keeps the step count, times the phases, records each step, and saves and restores checkpoints.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cluster.session import ClusterSession, terminate_as_interrupt
from slipstream.config.schema import AlgorithmConfig, RLConfig
from slipstream.data.cursor import PromptCursor
from slipstream.data.trajectory import Group
from slipstream.errors import TrainingError
from slipstream.observe.logs import get_logger
from slipstream.observe.run_directory import RunDirectory
from slipstream.rollout.admission import Admission
from slipstream.rollout.messages import SamplingParameters
from slipstream.rollout.stream import GroupStream, RolloutStream
from slipstream.training.group import LearnerGroup
from slipstream.weights.publisher import PublishReport
from slipstream.workflows.batch import TrainingBatch
from slipstream.workflows.engines import start_rl_engines
from slipstream.workflows.held_out import HeldOutPrompts, load_prompts
from slipstream.workflows.records import RunRecords

if TYPE_CHECKING:
    from slipstream.algorithms.objective import PolicyObjective

SKIPPED_STEPS_BEFORE_STOP = 3
CONTROLLER_STATE = "controller.json"

logger = get_logger("rl")


class RLRun:
    """A reinforcement learning run in progress. `step` counts finished steps; `rollouts.version` the publishes."""

    learner: LearnerGroup
    rollouts: RolloutStream
    held_out: HeldOutPrompts | None

    def __init__(self, config: RLConfig, directory: RunDirectory, *, reward: Callable[..., Any] | None) -> None:
        self.config = config
        self.directory = directory
        self.step = 0
        self.objective = policy_objective(config.algorithm)
        self._reward = reward
        self._skipped_in_a_row = 0
        self._elapsed_before_s = 0.0
        self._started = time.monotonic()
        self._phase_seconds: dict[str, float] = {}
        self._stack = ExitStack()

    def __enter__(self) -> RLRun:
        try:
            self._set_up()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _set_up(self) -> None:
        config, enter = self.config, self._stack.enter_context
        enter(terminate_as_interrupt())
        tokenizer, training_prompts, evaluation_prompts = load_prompts(
            config.model, config.data, config.evaluation
        )
        self.records = enter(
            RunRecords(
                self.directory, config.tracking, title="rl", total_steps=config.steps, keep=config.checkpoint.keep
            )
        )
        session = enter(ClusterSession(config.cluster, log_folder=self.directory.path / "logs"))
        with self.records.console.phase("starting the engines"):
            engines = start_rl_engines(
                session, config, tokenizer=tokenizer, timeline=self.records.timeline, reward=self._reward
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
            PromptCursor(training_prompts, seed=config.seed, shuffle=config.data.shuffle),
            publisher=engines.publisher,
            ledger=self.records.ledger,
            admission=Admission(config.rollout.groups_per_step, config.rollout.max_staleness),
            on_failure=config.reward.on_failure,
        )
        self.held_out = None
        if evaluation_prompts:
            self.held_out = HeldOutPrompts(evaluation_prompts, engines.generators, config)

    def begin(self) -> None:
        """Start from the model as it is: bring its weights to the engines, and evaluate it."""
        self.records.begin()
        self.rollouts.synchronize()
        self._evaluate()

    def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint as if the run had never stopped; forget what was recorded after it."""
        state = json.loads((checkpoint / CONTROLLER_STATE).read_text(encoding="utf-8"))
        self.step = state["step"]
        self._skipped_in_a_row = state["skipped_in_a_row"]
        self._elapsed_before_s = state["elapsed_s"]
        self.records.restore(step=self.step, ledger_state=state["ledger"])
        warning = self.rollouts.restore(state["rollouts"])
        if warning:
            logger.warning(warning)
        self.learner.load(checkpoint / "learner")
        self.rollouts.synchronize()
        logger.info("resumed", step=self.step, checkpoint=str(checkpoint))

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
        self._close_groups(groups, metrics)
        line = batch.metrics | policy_metrics(metrics) | {"weights/probe_difference": publication.probe_difference}
        line |= self._measured(groups, publication)
        shown = [group.trajectories[0] for group in groups]
        self.records.write_step(self.step, self.rollouts.version, metrics=line, trajectories=shown)
        self._phase_seconds.clear()
        if is_due(self.step, self.config.evaluation.every_steps, last=self.config.steps):
            self._evaluate()
        if is_due(self.step, self.config.checkpoint.every_steps, last=self.config.steps):
            self._save()

    def finish(self) -> dict[str, Any]:
        """Export the policy, check the books, write summary and report."""
        self.rollouts.check_ledger()
        with self.records.console.phase("exporting the policy"):
            self.learner.export(self.directory.export_folder)
        summary = {
            "workflow": "rl",
            **self.records.accuracy_summary(),
            "seconds": round(self._elapsed_s(), 1),
            "steps": self.step,
            "run_dir": str(self.directory.path),
        }
        return self.records.finish(summary)

    def _evaluate(self) -> None:
        if self.held_out is None:
            return
        with self.records.timeline.span("controller", "evaluate"), self.records.console.phase("evaluating"):
            evaluation = self.held_out.evaluate(self.step, self.rollouts.version)
        self.records.write_evaluation(evaluation)

    def _save(self) -> None:
        def write(folder: Path) -> None:
            self.learner.save(folder / "learner")
            state = {
                "step": self.step,
                "skipped_in_a_row": self._skipped_in_a_row,
                "elapsed_s": self._elapsed_s(),
                "rollouts": self.rollouts.state(),
                "ledger": self.records.ledger.state(),
            }
            (folder / CONTROLLER_STATE).write_text(json.dumps(state), encoding="utf-8")

        self.records.save_checkpoint(self.step, write)

    def _close_groups(self, groups: Sequence[Group], metrics: dict[str, Any]) -> None:
        """Enter in the ledger what became of the groups. Raises TrainingError after three skipped steps in a row."""
        skipped = bool(metrics["skipped"])
        for group in groups:
            if skipped:
                self.records.ledger.filtered(group.group_id, "non-finite loss")
            else:
                self.records.ledger.trained(group.group_id, self.step)
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if not skipped:
            return
        culprits = ", ".join(metrics["nonfinite_examples"][:3])
        logger.warning("step skipped: the loss is not finite", step=self.step, trajectories=culprits)
        if self._skipped_in_a_row >= SKIPPED_STEPS_BEFORE_STOP:
            raise TrainingError(
                f"the loss was not finite in {SKIPPED_STEPS_BEFORE_STOP} steps in a row (last: step {self.step}, "
                f"trajectories {culprits}); lower training.learning_rate, or look at these trajectories in "
                f"{self.directory.rollouts_folder}"
            )

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

    def _elapsed_s(self) -> float:
        return self._elapsed_before_s + time.monotonic() - self._started


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
    return {f"policy/{name}": value for name, value in metrics.items() if name not in ("nonfinite_examples", "seconds")}


def is_due(step: int, every_steps: int, *, last: int) -> bool:
    """Whether something that happens every so many steps, and at the last one, happens at this one."""
    return step == last or (every_steps > 0 and step % every_steps == 0)
