"""The stream of scored groups: issues prompts to the rollout engines, has responses scored, hands out groups.

Stands between the data and the loop. Admission control decides how many prompts are in flight; what comes back is
scored as soon as it arrives; a group whose reward failed, or that dynamic sampling leaves out, is dropped with its
reason in the ledger and replaced by a fresh prompt. The loop only ever calls `take` and `publish`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.algorithms.filters import has_signal
from slipstream.cluster.calls import PendingCall, RemoteEngine, fetch, log_text
from slipstream.data.trajectory import BASELINE_INDEX, Group, PromptOccurrence, Sample, Trajectory
from slipstream.errors import EngineError, RewardError
from slipstream.rollout.admission import Admission
from slipstream.rollout.dynamic_sampling import DynamicSampling, TakeCounts, exhausted, no_signal
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


NAMED_GROUPS = 5


@dataclass(frozen=True)
class Generators:
    """What turns prompts into scored groups: the rollout engines, the reward engine and the tokenizer."""

    engines: list[RemoteEngine]
    reward_engine: RemoteEngine
    tokenizer: PreTrainedTokenizerBase
    timeline: Timeline
    seed: int
    call_timeout_s: float


@dataclass(frozen=True)
class _Generation:
    """A call of `generate` in flight. `waiting` has the ids of the groups that it has not answered yet.

    `samples` is None, or, if the call asks for greedy baselines, what to ask of the same engine once it has ended.
    """

    call: PendingCall
    waiting: set[str]
    samples: list[GroupRequest] | None


class GroupStream:
    """Prompts in flight through generation and scoring. Yields groups in the order in which they complete.

    With `greedy_baseline` every group gets one more answer, sampled greedily and scored with the others. An engine
    gives the baselines first and the samples in a call after that: two calls at a time would share its batches in a
    way that depends on time, and its answers would not repeat bit for bit.
    """

    def __init__(
        self,
        generators: Generators,
        sampling: SamplingParameters,
        *,
        samples_per_prompt: int,
        purpose: str,
        greedy_baseline: bool = False,
    ) -> None:
        """`purpose` ("training", "evaluation") keeps the seeds of two streams of the same prompts apart."""
        self.purpose = purpose
        self.generators = generators
        self.sampling = sampling
        self.samples_per_prompt = samples_per_prompt
        self.greedy_baseline = greedy_baseline
        self._occurrences: dict[str, PromptOccurrence] = {}
        self._baselines: dict[str, Sample] = {}
        self._generating: dict[Any, _Generation] = {}
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
            if requests and self.greedy_baseline:
                self._generate_baselines(engine, requests)
            elif requests:
                self._generate(engine, requests, self.sampling)

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
        ready, _ = ray.wait(references, num_returns=1, timeout=self.generators.call_timeout_s)
        if not ready:
            raise self._silence()
        if ready[0] in self._scoring:
            call, group = self._scoring.pop(ready[0])
            return self._with_rewards(group, fetch(call, ready[0]), call)
        self._receive(self._generating[ready[0]])
        return None

    def _generate_baselines(self, engine: RemoteEngine, requests: list[GroupRequest]) -> None:
        greedy = [replace(request, samples=1) for request in requests]
        self._generate(engine, greedy, replace(self.sampling, temperature=0.0), samples=requests)

    def _generate(
        self,
        engine: RemoteEngine,
        requests: list[GroupRequest],
        sampling: SamplingParameters,
        *,
        samples: list[GroupRequest] | None = None,
    ) -> None:
        call = engine.stream("generate", requests, sampling)
        waiting = {request.group_id for request in requests}
        self._generating[call.reference] = _Generation(call, waiting, samples)

    def _receive(self, generation: _Generation) -> None:
        """Take the next answer of an engine: keep a baseline for its group, send a group on to scoring."""
        call = generation.call
        try:
            reference = next(call.reference)
        except StopIteration:
            del self._generating[call.reference]
            if generation.samples is not None:
                self._generate(call.engine, generation.samples, self.sampling)
            return
        result: GroupResult = fetch(call, reference)
        generation.waiting.remove(result.group_id)
        end = time.time()
        self.generators.timeline.add(call.engine.name, "generate", start=end - result.seconds, end=end)
        if generation.samples is not None:
            [self._baselines[result.group_id]] = result.samples
            return
        group = self._assemble(result)
        scoring = self.generators.reward_engine.submit("score", _to_score(group))
        self._scoring[scoring.reference] = (scoring, group)

    def _assemble(self, result: GroupResult) -> Group:
        occurrence = self._occurrences.pop(result.group_id)

        def trajectory(sample: Sample, index: int) -> Trajectory:
            tokenizer = self.generators.tokenizer
            return single_turn_trajectory(occurrence, sample, sample_index=index, tokenizer=tokenizer)

        group = Group(
            group_id=result.group_id,
            prompt=occurrence.prompt,
            trajectories=[trajectory(sample, index) for index, sample in enumerate(result.samples)],
        )
        if self.greedy_baseline:
            group.baseline = trajectory(self._baselines.pop(result.group_id), BASELINE_INDEX)
        return group

    def _with_rewards(self, group: Group, results: list[RewardResult], call: PendingCall) -> Group:
        end = time.time()
        busy = sum(result.seconds for result in results)
        self.generators.timeline.add(call.engine.name, "score", start=end - busy, end=end)
        for trajectory, result in zip(_to_score(group), results, strict=True):
            trajectory.reward, trajectory.reward_parts = result.reward, result.parts
            if result.failure is not None:
                group.failures.append(f"{trajectory.trajectory_id}: {result.failure}")
        return group

    def _silence(self) -> EngineError:
        """The error for a deadline that passed: whom was waited for, for which groups, and their last log lines."""
        calls = [(generation.call, generation.waiting) for generation in self._generating.values()]
        calls += [(call, {group.group_id}) for call, group in self._scoring.values()]
        groups: dict[str, set[str]] = {}
        for call, group_ids in calls:
            groups.setdefault(call.description, set()).update(group_ids)
        waiting = ", ".join(f"{description}{_some(group_ids)}" for description, group_ids in groups.items())
        return EngineError(
            f"nothing arrived within {self.generators.call_timeout_s:.0f} s from {waiting}; if so long a silence is to "
            f"be expected, raise cluster.call_timeout_s{log_text(call for call, _ in calls)}"
        )


def _to_score(group: Group) -> list[Trajectory]:
    """Everything of a group that gets a reward, in a fixed order."""
    return group.trajectories + ([] if group.baseline is None else [group.baseline])


def _some(group_ids: set[str]) -> str:
    """The ids in brackets, for an error message; the first few of many."""
    if not group_ids:
        return ""
    more = len(group_ids) - NAMED_GROUPS
    return f" ({', '.join(sorted(group_ids)[:NAMED_GROUPS])}" + (f" and {more} more)" if more > 0 else ")")


class RolloutStream:
    """What the loop sees of generation: `take` groups to train on. Keeps the ledger and bounds staleness.

    In a synchronous run (`max_staleness` 0) replacements are issued in rounds: only when everything issued before has
    been answered and scored. What an engine is asked for in one call, and so every bit of its answers, then follows
    from the rewards and not from the moment at which each of them arrived.
    """

    def __init__(
        self,
        stream: GroupStream,
        cursor: PromptCursor,
        *,
        publisher: WeightPublisher,
        ledger: Ledger,
        admission: Admission,
        on_failure: str,
        dynamic_sampling: DynamicSampling | None = None,
    ) -> None:
        """`dynamic_sampling` replaces groups whose rewards are all the same; None trains on them as they are."""
        self.stream = stream
        self.cursor = cursor
        self.publisher = publisher
        self.ledger = ledger
        self.admission = admission
        self.on_failure = on_failure
        self.dynamic_sampling = dynamic_sampling
        self.version = 0
        self.last_take = TakeCounts()
        # Groups that were issued and neither taken nor dropped, in the order in which they were issued.
        self._open: list[str] = []
        self._ready: dict[str, Group] = {}

    def take(self, count: int) -> list[Group]:
        """The next `count` scored groups, in the order in which they were issued. `last_take` says what it cost.

        A group that finished early waits for those issued before it: admission bounds staleness on that promise.
        Raises RewardError if the reward failed and the policy is to stop, or if more groups fail than a step has;
        TrainingError if dynamic sampling has issued all it may and the groups with signal are still too few;
        EngineError if an engine fails or does not answer in time.
        """
        self.last_take = TakeCounts()
        while not self._has_batch(count):
            self._issue()
            if self.dynamic_sampling is not None and self.stream.is_empty:
                # Whatever is open is ready, and no more may be issued.
                limit = self.dynamic_sampling.limit
                raise exhausted(self.last_take, with_signal=len(self._open), needed=count, limit=limit)
            group = self.stream.next_group()
            if group is not None:
                self._sort_in(group)
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

    @property
    def _is_synchronous(self) -> bool:
        return self.admission.max_staleness == 0

    def _has_batch(self, count: int) -> bool:
        """Whether the groups to hand out are there and, in a synchronous run, every call has come to its end."""
        front = self._open[:count]
        is_full = len(front) == count and self._ready.keys() >= set(front)
        return is_full and (self.stream.is_empty or not self._is_synchronous)

    def _issue(self) -> None:
        if self._is_synchronous and not self.stream.is_empty:
            return
        places = self.admission.open_places(self.version)
        if self.dynamic_sampling is not None:
            places = min(places, self._allowance(self.dynamic_sampling))
        if not places:
            return
        occurrences = self.cursor.take(places)
        for occurrence in occurrences:
            self._open.append(occurrence.group_id)
            self.admission.issued += 1
            self.last_take.issued += 1
            self.ledger.issued(occurrence.group_id)
        self.stream.submit(occurrences)

    def _allowance(self, dynamic_sampling: DynamicSampling) -> int:
        """Groups that this step may still issue; those in flight for later steps have places of their own."""
        steps = dynamic_sampling.limit + self.admission.max_staleness
        return max(0, steps * self.admission.groups_per_step - self.last_take.dropped - len(self._open))

    def _sort_in(self, group: Group) -> None:
        """Keep a scored group for `take`, or drop it with its reason."""
        if group.failures:
            self._fail(group)
        elif self.dynamic_sampling is not None and not has_signal(_rewards(group)):
            self._filter(group)
        else:
            self._ready[group.group_id] = group

    def _fail(self, group: Group) -> None:
        if self.on_failure == "stop":
            raise RewardError(f"the reward of trajectory {group.failures[0]} (reward.on_failure is 'stop')")
        self.ledger.failed(group.group_id, group.failures[0].partition(": ")[2])
        self.last_take.failed += 1
        self._drop(group)
        if self.last_take.failed > self.admission.groups_per_step:
            raise RewardError(
                f"the reward failed for {self.last_take.failed} groups within one step, more than the step has "
                f"({self.admission.groups_per_step}); the last one: {group.failures[0]}. "
                "Mend the reward function (reward.function), then go on with `slipstream resume`"
            )

    def _filter(self, group: Group) -> None:
        reward = float(np.mean(_rewards(group)))
        self.ledger.filtered(group.group_id, no_signal(reward))
        self.last_take.filtered_rewards.append(reward)
        self._drop(group)

    def _drop(self, group: Group) -> None:
        self.admission.dropped += 1
        self._open.remove(group.group_id)


def _rewards(group: Group) -> list[float]:
    return [trajectory.reward for trajectory in group.trajectories if trajectory.reward is not None]
