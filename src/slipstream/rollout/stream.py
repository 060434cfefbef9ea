"""The stream of scored groups: issues prompts to the rollout engines, has responses scored, hands out groups.

Stands between the data and the loop. Admission control decides how many prompts are in flight; what comes back is
scored as soon as it arrives; a group whose reward failed is dropped with its reason in the ledger and replaced by a
fresh prompt. The loop only ever calls `take` and `publish`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.cluster.calls import PendingCall, RemoteEngine, fetch
from slipstream.data.trajectory import Group, PromptOccurrence
from slipstream.errors import EngineError, RewardError
from slipstream.rollout.admission import Admission
from slipstream.rollout.episodes import single_turn_trajectory
from slipstream.rollout.messages import GroupRequest, GroupResult, SamplingParameters
from slipstream.rollout.seeds import group_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slipstream.data.cursor import PromptCursor
    from slipstream.observe.ledger import Ledger
    from slipstream.observe.timeline import Timeline
    from slipstream.rewards.pool import RewardResult
    from slipstream.weights.publisher import PublishReport, WeightPublisher


@dataclass(frozen=True)
class Generators:
    """What turns prompts into scored groups: the rollout engines, the reward engine and the tokenizer."""

    engines: list[RemoteEngine]
    reward_engine: RemoteEngine
    tokenizer: PreTrainedTokenizerBase
    timeline: Timeline
    seed: int
    call_timeout_s: float


class GroupStream:
    """Prompts in flight through generation and scoring. Yields groups in the order in which they complete."""

    def __init__(
        self, generators: Generators, sampling: SamplingParameters, *, samples_per_prompt: int, purpose: str
    ) -> None:
        """`purpose` ("training", "evaluation") keeps the seeds of two streams of the same prompts apart."""
        self.purpose = purpose
        self.generators = generators
        self.sampling = sampling
        self.samples_per_prompt = samples_per_prompt
        self._occurrences: dict[str, PromptOccurrence] = {}
        self._generating: dict[Any, PendingCall] = {}
        self._scoring: dict[Any, tuple[PendingCall, Group]] = {}
        self.next_engine = 0

    def submit(self, occurrences: Sequence[PromptOccurrence]) -> None:
        """Send prompts to the engines, each group to one engine, in turn."""
        engines = self.generators.engines
        shares: list[list[GroupRequest]] = [[] for _ in engines]
        for occurrence in occurrences:
            self._occurrences[occurrence.group_id] = occurrence
            shares[self.next_engine].append(
                GroupRequest(
                    group_id=occurrence.group_id,
                    prompt_tokens=occurrence.prompt.tokens,
                    samples=self.samples_per_prompt,
                    seed=group_seed(self.generators.seed, occurrence.group_id, purpose=self.purpose),
                )
            )
            self.next_engine = (self.next_engine + 1) % len(engines)
        for engine, requests in zip(engines, shares, strict=True):
            if requests:
                call = engine.stream("generate", requests, self.sampling)
                self._generating[call.reference] = call

    @property
    def is_empty(self) -> bool:
        """True if nothing is in flight."""
        return not self._generating and not self._scoring

    def next_group(self) -> Group | None:
        """Wait for the next event; return the group that it completed, if it did.

        Raises EngineError if nothing happens before the deadline or an engine failed.
        """
        import ray

        references = [*self._scoring, *self._generating]
        timeout_s = self.generators.call_timeout_s
        ready, _ = ray.wait(references, num_returns=1, timeout=timeout_s)
        if not ready:
            waiting = [call.description for call, _ in self._scoring.values()]
            waiting += [call.description for call in self._generating.values()]
            raise EngineError(f"nothing arrived within {timeout_s:.0f} s from {', '.join(waiting)}")
        if ready[0] in self._scoring:
            call, group = self._scoring.pop(ready[0])
            return self._with_rewards(group, fetch(call, ready[0]), call)
        self._receive(self._generating[ready[0]])
        return None

    def _receive(self, call: PendingCall) -> None:
        """Take the next finished groups of an engine and send them on to scoring."""
        try:
            reference = next(call.reference)
        except StopIteration:
            del self._generating[call.reference]
            return
        result: GroupResult = fetch(call, reference)
        end = time.time()
        self.generators.timeline.add(call.engine.name, "generate", start=end - result.seconds, end=end)
        group = self._assemble(result)
        scoring = self.generators.reward_engine.submit("score", group.trajectories)
        self._scoring[scoring.reference] = (scoring, group)

    def _assemble(self, result: GroupResult) -> Group:
        occurrence = self._occurrences.pop(result.group_id)
        trajectories = [
            single_turn_trajectory(occurrence, sample, sample_index=index, tokenizer=self.generators.tokenizer)
            for index, sample in enumerate(result.samples)
        ]
        return Group(group_id=result.group_id, prompt=occurrence.prompt, trajectories=trajectories)

    def _with_rewards(self, group: Group, results: list[RewardResult], call: PendingCall) -> Group:
        end = time.time()
        busy = sum(result.seconds for result in results)
        self.generators.timeline.add(call.engine.name, "score", start=end - busy, end=end)
        for trajectory, result in zip(group.trajectories, results, strict=True):
            trajectory.reward, trajectory.reward_parts = result.reward, result.parts
            if result.failure is not None:
                group.failures.append(f"{trajectory.trajectory_id}: {result.failure}")
        return group


class RolloutStream:
    """What the loop sees of generation: `take` groups to train on. Keeps the ledger and bounds staleness."""

    def __init__(
        self,
        stream: GroupStream,
        cursor: PromptCursor,
        *,
        publisher: WeightPublisher,
        ledger: Ledger,
        admission: Admission,
        on_failure: str,
    ) -> None:
        self.stream = stream
        self.cursor = cursor
        self.publisher = publisher
        self.ledger = ledger
        self.admission = admission
        self.on_failure = on_failure
        self.version = 0
        # Groups that were issued and neither taken nor dropped, in the order in which they were issued.
        self._open: list[str] = []
        self._ready: dict[str, Group] = {}
        self._failed_since_take = 0

    def take(self, count: int) -> list[Group]:
        """The next `count` scored groups, in the order in which they were issued.

        A group that finished early waits for those issued before it: admission bounds staleness on that promise.
        Raises RewardError if the reward failed and the policy is to stop, or if more groups fail than a step has;
        EngineError if an engine fails or does not answer in time.
        """
        self._failed_since_take = 0
        self._issue()
        while len(self._open) < count or not self._ready.keys() >= set(self._open[:count]):
            group = self.stream.next_group()
            if group is not None:
                self._sort_in(group)
                self._issue()
        chosen, self._open = self._open[:count], self._open[count:]
        return [self._ready.pop(group_id) for group_id in chosen]

    def publish(self) -> PublishReport:
        """Give the learner's weights to the engines as the next policy version.

        Raises WeightSyncError if an engine does not hold them afterwards.
        """
        report = self.publisher.publish(self.version + 1)
        self.version += 1
        return report

    def synchronize(self) -> PublishReport:
        """Give the learner's weights to the engines without a new version: at the start, and after a restore."""
        return self.publisher.publish(self.version)

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs. Nothing is in flight when it is asked for: the loop saves after a publish."""
        return {
            "version": self.version,
            "issued": self.admission.issued,
            "dropped": self.admission.dropped,
            "cursor": self.cursor.state(),
            "next_engine": self.stream.next_engine,
        }

    def restore(self, state: dict[str, Any]) -> str | None:
        """Go on from `state`; returns a warning if the data is not what it was."""
        self.version = state["version"]
        self.admission.issued, self.admission.dropped = state["issued"], state["dropped"]
        self.stream.next_engine = state["next_engine"]
        return self.cursor.restore(state["cursor"])

    def check_ledger(self) -> None:
        """Raise LedgerError unless every prompt issued is trained, filtered, failed or still here."""
        self.ledger.check(self._open)

    def _issue(self) -> None:
        places = self.admission.open_places(self.version)
        if not places:
            return
        occurrences = self.cursor.take(places)
        for occurrence in occurrences:
            self._open.append(occurrence.group_id)
            self.admission.issued += 1
            self.ledger.issued(occurrence.group_id)
        self.stream.submit(occurrences)

    def _sort_in(self, group: Group) -> None:
        if not group.failures:
            self._ready[group.group_id] = group
            return
        reason = group.failures[0].partition(": ")[2]
        if self.on_failure == "stop":
            raise RewardError(f"the reward of trajectory {group.failures[0]} (reward.on_failure is 'stop')")
        self.ledger.failed(group.group_id, reason)
        self.admission.dropped += 1
        self._open.remove(group.group_id)
        self._failed_since_take += 1
        if self._failed_since_take > self.admission.groups_per_step:
            raise RewardError(
                f"the reward failed for {self._failed_since_take} groups within one step, more than the step has "
                f"({self.admission.groups_per_step}); the last one: {group.failures[0]}. "
                "Mend the reward function (reward.function), then go on with `slipstream resume`"
            )
