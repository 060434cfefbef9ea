"""Prompts in flight: from a rollout engine's responses, as they end, to scored groups.

A response goes on to scoring when it has ended, whatever the others of its group are still at; those of a group that
end together are scored by one call. A group is complete when its last response is scored. How many prompts are in
flight is for others to say.

What an engine had under way that died or hung is asked for again, from whole groups: to keep the answers that had come
would favour short ones. The reward engine's successor scores what the old one had not.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from slipstream.cluster.calls import (
    EngineState,
    Lookout,
    PendingCall,
    RemoteEngine,
    fetch,
    has_next,
    log_text,
    next_reference,
)
from slipstream.cluster.restarts import LOOK_S, EngineRestarts
from slipstream.cluster.waits import describe_waits, waiting
from slipstream.data.trajectory import BASELINE_INDEX, Group, PromptOccurrence, Trajectory
from slipstream.errors import EngineLostError
from slipstream.rollout.episodes import single_turn_trajectory
from slipstream.rollout.messages import GroupRequest, ResponseResult, SamplingParameters
from slipstream.rollout.seeds import group_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slipstream.data.failure import RewardFailure
    from slipstream.observe.occupancy import Occupancy
    from slipstream.observe.timeline import Timeline
    from slipstream.rewards.pool import RewardResult


NAMED_GROUPS = 5


@dataclass(frozen=True)
class Generators:
    """What turns prompts into scored groups: the rollout engines, the reward engine and the tokenizer."""

    engines: list[RemoteEngine]
    reward_engine: RemoteEngine
    tokenizer: PreTrainedTokenizerBase
    timeline: Timeline
    occupancy: Occupancy
    restarts: EngineRestarts
    seed: int
    call_timeout_s: float

    @property
    def lacks_weights(self) -> bool:
        """Whether an engine that was started anew cannot be asked before it gets the weights in force."""
        return any(engine.state is EngineState.LOADED for engine in self.engines)


@dataclass(frozen=True)
class _Generation:
    """A call of `generate` in flight for `requests`. `waiting` counts the responses that have not come, by group id.

    `asks_baselines`: the call is for the greedy baselines; the samples are asked of the same engine once it has ended.
    """

    call: PendingCall
    requests: list[GroupRequest]
    waiting: dict[str, int]
    asks_baselines: bool


@dataclass(frozen=True)
class _Scoring:
    """A call of `score` in flight, for trajectories of a group."""

    call: PendingCall
    group: _OpenGroup
    trajectories: list[Trajectory]


@dataclass
class _OpenGroup:
    """One attempt at a group. `trajectories` are those that have been generated, by their place in the group."""

    occurrence: PromptOccurrence
    size: int
    trajectories: dict[int, Trajectory] = field(default_factory=dict)
    scored: int = 0
    failures: dict[str, RewardFailure] = field(default_factory=dict)
    reads_answers: bool = False

    @property
    def is_generated(self) -> bool:
        return len(self.trajectories) == self.size


class GroupStream:
    """Prompts in flight through generation and scoring. Yields groups in the order in which they complete.

    With `greedy_baseline` every group gets one more answer, sampled greedily and scored with the others. An engine
    gives the baselines first and the samples in a call after that: two calls at a time would share its batches in a
    way that depends on time, and its answers would not repeat bit for bit.

    `repeats_calls`: what is asked of an engine follows from the prompts alone. The successor of an engine that was lost
    is asked for exactly what the old one was, so that the answers are the same, bit for bit, as if nothing had
    happened. Otherwise an engine that is there takes over at once.
    """

    def __init__(
        self,
        generators: Generators,
        sampling: SamplingParameters,
        *,
        samples_per_prompt: int,
        purpose: str,
        greedy_baseline: bool = False,
        repeats_calls: bool = True,
    ) -> None:
        """`purpose` ("training", "evaluation") keeps the seeds of two streams of the same prompts apart."""
        self.purpose = purpose
        self.generators = generators
        self.sampling = sampling
        self.samples_per_prompt = samples_per_prompt
        self.greedy_baseline = greedy_baseline
        self.repeats_calls = repeats_calls
        self._groups: dict[str, _OpenGroup] = {}
        self._generating: dict[Any, _Generation] = {}
        self._scoring: dict[Any, _Scoring] = {}
        # What waits for an engine that is being started anew: that one, or None for whichever comes first.
        self._unasked: list[tuple[RemoteEngine | None, list[GroupRequest]]] = []
        self._unscored: list[tuple[_OpenGroup, list[Trajectory]]] = []
        self.next_engine = 0
        self.lookout = Lookout()
        # Found ready by `next_group`, and not received yet.
        self._arrived: deque[Any] = deque()

    def submit(self, occurrences: Sequence[PromptOccurrence]) -> None:
        """Send prompts to the engines, each group to one engine, in turn."""
        for occurrence in occurrences:
            self._groups[occurrence.group_id] = self._new_group(occurrence)
        self._place([self._request(occurrence) for occurrence in occurrences])

    def _new_group(self, occurrence: PromptOccurrence) -> _OpenGroup:
        return _OpenGroup(occurrence, self.samples_per_prompt + self.greedy_baseline)

    def _request(self, occurrence: PromptOccurrence) -> GroupRequest:
        return GroupRequest(
            group_id=occurrence.group_id,
            prompt_tokens=occurrence.prompt.tokens,
            samples=self.samples_per_prompt,
            seed=group_seed(self.generators.seed, occurrence.group_id, purpose=self.purpose),
        )

    def _place(self, requests: Sequence[GroupRequest]) -> None:
        """Divide requests among the engines; what has none for now waits for one."""
        shares: dict[RemoteEngine | None, list[GroupRequest]] = {}
        for request in requests:
            shares.setdefault(self._engine_in_turn(), []).append(request)
        for engine, share in shares.items():
            self._ask(engine, share)

    def _engine_in_turn(self) -> RemoteEngine | None:
        engines = self.generators.engines
        for _ in engines:
            engine = engines[self.next_engine]
            self.next_engine = (self.next_engine + 1) % len(engines)
            if self.repeats_calls or engine.state is EngineState.READY:
                return engine
        return None

    def _ask(self, engine: RemoteEngine | None, requests: list[GroupRequest]) -> None:
        if engine is None or engine.state is not EngineState.READY:
            self._unasked.append((engine, requests))
        else:
            self._generate(engine, requests, asks_baselines=self.greedy_baseline)

    @property
    def is_empty(self) -> bool:
        """True if nothing is in flight."""
        return not (self._generating or self._scoring or self._unasked or self._unscored)

    @property
    def groups_generating(self) -> int:
        """Groups of which a response is still being generated."""
        return sum(not group.is_generated for group in self._groups.values())

    @property
    def groups_scoring(self) -> int:
        """Groups that are generated and not scored yet."""
        return len(self._groups) - self.groups_generating

    def next_group(self) -> Group | None:
        """Wait for the next event; return the group that it completed, if it did.

        For the loop that may call the learner: engines that were started anew get their weights here. Raises
        EngineError if an engine failed, or was lost more often than it may be.
        """
        if not self._arrived:
            with waiting(self.awaited(), deadline_s=self.generators.call_timeout_s):
                while not self._arrived:
                    self.supervise()
                    if self.generators.restarts.bring_weights():
                        self.supervise()
                    self._arrived.extend(self.lookout.wait(self.references(), LOOK_S))
        reference = self._arrived.popleft()
        group = self.receive(reference)
        if self.has_more(reference):
            self._arrived.append(reference)
        return group

    def references(self) -> list[Any]:
        """What may be waited for, by the `lookout`; `receive` takes one that is ready."""
        return [*self._scoring, *self._generating]

    def receive(self, reference: Any) -> Group | None:
        """Take what has arrived: a response goes on to scoring, a reward may complete the group that is returned.

        If the engine was lost, what it had under way is asked for anew. Raises as `EngineRestarts.report` does.
        """
        arrived = self._scoring.get(reference) or self._generating.get(reference)
        if arrived is None:
            return None  # Its engine was lost after it arrived; what that had under way is asked for anew.
        try:
            if isinstance(arrived, _Scoring):
                return self._receive_rewards(reference, arrived)
            self._receive_responses(arrived)
        except EngineLostError as loss:
            self.generators.restarts.report(arrived.call, loss)
            self._recover()
        return None

    def has_more(self, reference: Any) -> bool:
        """Whether `receive` may be called for it once more at once: its engine has given another response already.

        An engine's responses end by the dozen, and each look at all that is waited for costs time. False when the look
        is some time ago: then it is time for another one, and to supervise.
        """
        generation = self._generating.get(reference)
        return generation is not None and self.lookout.is_recent and has_next(generation.call)

    def supervise(self) -> None:
        """Look after the engines: report those that are silent too long, and ask the successors of those lost.

        To be called every now and then by whoever waits. Raises as `EngineRestarts.report` does.
        """
        for calls in self._calls_by_engine().values():
            heard = max(calls[0].engine.last_heard, min(call.started for call in calls))
            if not calls[0].is_lost and time.monotonic() - heard > self.generators.call_timeout_s:
                self.generators.restarts.report(calls[0], self.silence(calls))
        self.generators.restarts.advance()
        self._recover()
        unasked, self._unasked = self._unasked, []
        for engine, requests in unasked:
            if engine is None:
                self._place(requests)
            else:
                self._ask(engine, requests)
        unscored, self._unscored = self._unscored, []
        for group, trajectories in unscored:
            self._score(group, trajectories)

    def awaited(self) -> str:
        """Whom the stream waits for, and for which groups."""
        starting = self.generators.restarts.starting()
        calls = [call for calls in self._calls_by_engine().values() for call in calls]
        return ", ".join([self._describe(calls)] * bool(calls) + [starting] * bool(starting))

    def silence(self, calls: Sequence[PendingCall]) -> EngineLostError:
        """The error for an engine whose deadline passed: who it is, for which groups, and its last log lines."""
        return EngineLostError(
            f"nothing arrived within {self.generators.call_timeout_s:.0f} s from {self._describe(calls)}; if so long a "
            f"silence is to be expected, raise cluster.call_timeout_s{describe_waits()}{log_text(calls)}"
        )

    def _calls_by_engine(self) -> dict[str, list[PendingCall]]:
        by_engine: dict[str, list[PendingCall]] = {}
        calls = [generation.call for generation in self._generating.values()]
        calls += [scoring.call for scoring in self._scoring.values()]
        for call in calls:
            by_engine.setdefault(call.engine.name, []).append(call)
        return by_engine

    def _describe(self, calls: Sequence[PendingCall]) -> str:
        groups: dict[str, set[str]] = {}
        for call in calls:
            arriving = self._generating.get(call.reference) or self._scoring[call.reference]
            ids = arriving.waiting if isinstance(arriving, _Generation) else {arriving.group.occurrence.group_id}
            groups.setdefault(call.description, set()).update(ids)
        return ", ".join(f"{description}{_some(group_ids)}" for description, group_ids in groups.items())

    def _recover(self) -> None:
        """Ask anew for what engines had under way that have been lost since."""
        for reference, generation in list(self._generating.items()):
            if generation.call.is_lost:
                del self._generating[reference]
                self.generators.occupancy.end(generation.call.engine.name)
                self._repeat(generation)
        for reference, scoring in list(self._scoring.items()):
            if scoring.call.is_lost:
                del self._scoring[reference]
                self.generators.occupancy.end(scoring.call.engine.name)
                self._unscored.append((scoring.group, scoring.trajectories))

    def _repeat(self, generation: _Generation) -> None:
        missing = [request for request in generation.requests if self._is_missing(request.group_id)]
        for request in missing:
            # Another object: rewards of the attempt that was lost are not for this one.
            self._groups[request.group_id] = self._new_group(self._groups[request.group_id].occurrence)
        if missing and self.repeats_calls:
            # With the groups that were complete: the batches of the engine are to be the same.
            self._ask(generation.call.engine, generation.requests)
        elif missing:
            self._place(missing)

    def _is_missing(self, group_id: str) -> bool:
        return group_id in self._groups and not self._groups[group_id].is_generated

    def _generate(self, engine: RemoteEngine, requests: list[GroupRequest], *, asks_baselines: bool) -> None:
        if asks_baselines:
            sampling = replace(self.sampling, temperature=0.0)
            call = engine.stream("generate", [replace(request, samples=1) for request in requests], sampling)
        else:
            call = engine.stream("generate", requests, self.sampling)
        self.generators.occupancy.begin(engine.name)
        waiting_for = {request.group_id: 1 if asks_baselines else request.samples for request in requests}
        self._generating[call.reference] = _Generation(call, requests, waiting_for, asks_baselines)

    def _receive_responses(self, generation: _Generation) -> None:
        """Take the responses that ended together; those of a group go on to scoring together."""
        call = generation.call
        reference = next_reference(call)
        if reference is None:
            self._end_call(generation)
            return
        results: list[ResponseResult] = fetch(call, reference)
        call.engine.last_heard = time.monotonic()
        ended: dict[str, list[Trajectory]] = {}
        for result in results:
            self._count(generation, result)
            index = BASELINE_INDEX if generation.asks_baselines else result.sample_index
            group = self._groups.get(result.group_id)
            # What was asked for again, beside something else, may be there already.
            if group is not None and index not in group.trajectories:
                ended.setdefault(result.group_id, []).append(self._add(group, result, index))
        for group_id, trajectories in ended.items():
            self._score(self._groups[group_id], trajectories)

    def _count(self, generation: _Generation, result: ResponseResult) -> None:
        """One response less to wait for."""
        generation.waiting[result.group_id] -= 1
        if not generation.waiting[result.group_id]:
            del generation.waiting[result.group_id]
            end, engine = time.time(), generation.call.engine.name
            self.generators.timeline.add(engine, "generate", start=end - result.sample.seconds, end=end)

    def _end_call(self, generation: _Generation) -> None:
        call = generation.call
        if generation.waiting:
            raise EngineLostError(f"{call.description} ended without {_some(set(generation.waiting)).strip()}")
        del self._generating[call.reference]
        self.generators.occupancy.end(call.engine.name)
        if generation.asks_baselines:
            # A successor, if there is one by now, has not given the baselines, but nothing depends on who did.
            if call.engine.state is EngineState.READY:
                self._generate(call.engine, generation.requests, asks_baselines=False)
            else:
                self._repeat(generation)

    def _add(self, group: _OpenGroup, result: ResponseResult, index: int) -> Trajectory:
        """Put a response in its place; returns it as a trajectory."""
        tokenizer = self.generators.tokenizer
        trajectory = single_turn_trajectory(group.occurrence, result.sample, sample_index=index, tokenizer=tokenizer)
        group.trajectories[index] = trajectory
        return trajectory

    def _score(self, group: _OpenGroup, trajectories: list[Trajectory]) -> None:
        if self._groups.get(group.occurrence.group_id) is not group:
            return  # Of an attempt that was lost meanwhile.
        engine = self.generators.reward_engine
        if engine.state is not EngineState.READY:
            self._unscored.append((group, trajectories))
            return
        call = engine.submit("score", trajectories)
        self.generators.occupancy.begin(engine.name)
        self._scoring[call.reference] = _Scoring(call, group, trajectories)

    def _receive_rewards(self, reference: Any, scoring: _Scoring) -> Group | None:
        """Enter rewards; return the group if these were its last."""
        results: list[RewardResult] = fetch(scoring.call, reference)
        engine, group = scoring.call.engine, scoring.group
        del self._scoring[reference]
        self.generators.occupancy.end(engine.name)
        engine.last_heard = time.monotonic()
        end = time.time()
        busy = sum(result.seconds for result in results)
        self.generators.timeline.add(engine.name, "score", start=end - busy, end=end)
        if self._groups.get(group.occurrence.group_id) is not group:
            return None  # Of an attempt that was lost meanwhile.
        for trajectory, result in zip(scoring.trajectories, results, strict=True):
            trajectory.reward, trajectory.reward_parts = result.reward, result.parts
            trajectory.answer = result.answer
            if result.failure is not None:
                group.failures[trajectory.trajectory_id] = result.failure
        group.reads_answers |= any(result.reads_answers for result in results)
        group.scored += len(scoring.trajectories)
        if group.scored < group.size:
            return None
        del self._groups[group.occurrence.group_id]
        return _complete(group)


def _in_order(group: _OpenGroup) -> list[Trajectory]:
    """The samples of a group in their order, and the baseline after them."""
    baseline = [group.trajectories[BASELINE_INDEX]] if BASELINE_INDEX in group.trajectories else []
    return [group.trajectories[index] for index in sorted(group.trajectories) if index != BASELINE_INDEX] + baseline


def _complete(group: _OpenGroup) -> Group:
    in_order = _in_order(group)
    baseline = group.trajectories.get(BASELINE_INDEX)
    order = [trajectory.trajectory_id for trajectory in in_order]
    return Group(
        group_id=group.occurrence.group_id,
        prompt=group.occurrence.prompt,
        trajectories=in_order if baseline is None else in_order[:-1],
        # In the order of the samples, whichever failed first.
        failures={name: group.failures[name] for name in order if name in group.failures},
        baseline=baseline,
        reads_answers=group.reads_answers,
    )


def _some(group_ids: set[str]) -> str:
    """The ids in brackets, for an error message; the first few of many."""
    if not group_ids:
        return ""
    more = len(group_ids) - NAMED_GROUPS
    return f" ({', '.join(sorted(group_ids)[:NAMED_GROUPS])}" + (f" and {more} more)" if more > 0 else ")")
