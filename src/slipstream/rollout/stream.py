"""The stream of scored groups as the loop sees it: `take` groups to train on, `publish` weights.

Stands between the data and the loop. Admission control decides how many prompts are in flight (`group_stream.py`); a
group whose reward failed, or that dynamic sampling leaves out, is dropped with its reason in the ledger and replaced by
a fresh prompt.

In an asynchronous run a thread, the pump, takes whatever arrives, issues prompts and has lost engines started anew, so
that all this goes on while the loop trains. In a synchronous run there is none: `take` does the same itself, and
nothing else is done.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.algorithms.filters import has_signal
from slipstream.cluster.waits import waiting
from slipstream.data.trajectory import Group
from slipstream.errors import RewardError
from slipstream.rollout.admission import Admission
from slipstream.rollout.dynamic_sampling import DynamicSampling, TakeCounts, exhausted, no_signal
from slipstream.rollout.group_stream import NAMED_GROUPS, GroupStream

if TYPE_CHECKING:
    from slipstream.data.failure import FailureKind
    from slipstream.data.mixture import PromptCursor
    from slipstream.data.trajectory import PromptOccurrence
    from slipstream.observe.ledger import Ledger
    from slipstream.weights.publisher import PublishReport, WeightPublisher

# How soon the pump sees what was issued while it waits for something else, and that the run is over.
PUMP_LOOKS_S = 0.05
# The pump never waits longer than that for anything, so this is plenty.
PUMP_END_S = 10.0
CHANGED_DATA = "the data is not what it was when the prompt was issued"


class RolloutStream:
    """What the loop sees of generation: `take` groups to train on. Keeps the ledger and bounds staleness.

    In a synchronous run (`max_staleness` 0) replacements are issued in rounds: only when everything issued before has
    been answered and scored. What an engine is asked for in one call, and so every bit of its answers, then follows
    from the rewards and not from the moment at which each of them arrived. In an asynchronous one they are issued at
    once; the groups are still trained in the order in which they were issued, whichever was answered first, so that
    short answers are not trained on before, or instead of, long ones.
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
        self.last_failures: Counter[FailureKind] = Counter()
        self.last_queues: dict[str, float] = {}
        # Groups that were issued and neither taken nor dropped, in the order in which they were issued: a dictionary,
        # of which one in thousands is dropped without a search.
        self._open: dict[str, None] = {}
        self._ready: dict[str, Group] = {}
        # Groups that were in flight when the state was taken that this run was restored from.
        self._interrupted: list[PromptOccurrence] = []
        self._begin_counting()
        # Guards all of the above and the stream; told whenever some of it has changed.
        self._changed = threading.Condition()
        self._pump: threading.Thread | None = None
        self._pump_failure: BaseException | None = None
        self._is_closing = False

    def take(self, count: int, *, meanwhile: Callable[[list[Group]], None] | None = None) -> list[Group]:
        """The next `count` scored groups, in the order in which they were issued. `last_take` says what it cost.

        In an asynchronous run `meanwhile` is given those of them that have come while others are waited for, each once.

        `last_take` counts what was issued and dropped since the take before, `last_failures` the responses whose
        reward failed, by kind; their groups were dropped. `last_queues` has the number of groups that are left in
        each stage, and the mean length of the responses that have been scored meanwhile, whenever they are trained on.
        A group that finished early waits for those issued before it: admission bounds staleness on that promise.
        Raises RewardError if the reward failed and the policy is to stop, or if more groups fail than a step has;
        TrainingError if dynamic sampling has issued all it may and the groups with signal are still too few;
        EngineError if an engine fails, or is lost more often than it may be.
        """
        shown: set[str] = set()
        with self._changed:
            if self._is_synchronous:
                self._begin_counting()
        while True:
            with self._changed:
                if self._has_batch(count):
                    return self._hand_out(count)
                early = self._early(count, shown) if meanwhile is not None else []
                if not early:
                    self._issue()
                    if self.dynamic_sampling is not None and self.stream.is_empty:
                        # Whatever is open is ready, and no more may be issued.
                        limit = self.dynamic_sampling.limit
                        raise exhausted(self._counts, with_signal=len(self._open), needed=count, limit=limit)
                    self._advance(count)
            # The pump goes on meanwhile. The learner has nothing to do while its next groups are not there.
            self.stream.generators.restarts.bring_weights()
            if meanwhile is not None and early:
                shown.update(group.group_id for group in early)
                meanwhile(early)

    def _hand_out(self, count: int) -> list[Group]:
        chosen = list(islice(self._open, count))
        for group_id in chosen:
            del self._open[group_id]
        groups = [self._ready.pop(group_id) for group_id in chosen]
        self._end_counting()
        return groups

    def publish(self) -> PublishReport:
        """Give the learner's weights to the engines as the next policy version; prompts it has room for are issued.

        Raises WeightSyncError if an engine does not hold them afterwards.
        """
        report = self.publisher.publish(self.version + 1)
        with self._changed:
            self.version += 1
            if self._pump is not None:
                self._raise_failure()
                self._issue()
        return report

    def unchanging(self) -> AbstractContextManager[Any]:
        """Nothing is issued, received or dropped while the block runs: for a state that is of one moment."""
        return self._changed

    def close(self) -> None:
        """End the pump, whatever is in flight. Safe to repeat."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._pump is not None:
            self._pump.join(PUMP_END_S)

    def synchronize(self) -> PublishReport:
        """Give the learner's weights to the engines without a new version: at the start, and after a restore."""
        return self.publisher.publish(self.version)

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs. `open` has the groups that are issued and not trained, in that order."""
        with self._changed:
            return {
                "version": self.version,
                "issued": self.admission.issued,
                "dropped": self.admission.dropped,
                "open": list(self._open),
                "cursor": self.cursor.state(),
                "next_engine": self.stream.next_engine,
            }

    def restore(self, state: dict[str, Any]) -> list[str]:
        """Go on from `state`; returns the names of the sources whose rows are not what they were.

        Groups that were open are issued again by the first `take`, under the same ids and all of them, also those that
        had been scored: keeping these would favour short answers. Those whose prompt is no longer there are filtered.
        """
        with self._changed:
            self.version = state["version"]
            self.admission.issued, self.admission.dropped = state["issued"], state["dropped"]
            self.stream.next_engine = state["next_engine"]
            changed = self.cursor.restore(state["cursor"])
            for group_id in state["open"]:
                occurrence = self.cursor.find(group_id)
                self._open[group_id] = None
                if occurrence is None:
                    self.ledger.filtered(group_id, CHANGED_DATA)
                    self._drop(group_id)
                else:
                    self._interrupted.append(occurrence)
        return changed

    def check_ledger(self) -> None:
        """Raise LedgerError unless every prompt issued is trained, filtered, failed or still here."""
        with self._changed:
            self.ledger.check(self._open.keys())

    @property
    def _is_synchronous(self) -> bool:
        return self.admission.max_staleness == 0

    def _advance(self, count: int) -> None:
        """Let something arrive: in a synchronous run take it, in an asynchronous one wait until the pump has."""
        if self._is_synchronous:
            group = self.stream.next_group()
            if group is not None:
                self._sort_in(group)
            return
        if self._pump is None:
            self._pump = threading.Thread(target=self._pump_arrivals, name="rollout pump", daemon=True)
            self._pump.start()
        self._raise_failure()
        missing = (group_id for group_id in islice(self._open, count) if group_id not in self._ready)
        # The pump holds the deadlines of those that it waits for.
        with waiting(f"the {self._pump.name}: groups {', '.join(islice(missing, NAMED_GROUPS))}", deadline_s=None):
            self._changed.wait()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._pump_failure is not None:
            raise self._pump_failure

    def _pump_arrivals(self) -> None:
        """In a thread of its own: take what arrives until the end, or until something fails, which `take` raises."""
        try:
            with waiting("", deadline_s=self.stream.generators.call_timeout_s) as wait:
                while True:
                    with self._changed:
                        while self.stream.is_empty and not self._is_closing:
                            wait.renew("")
                            self._changed.wait()
                        if self._is_closing:
                            return
                        references = self.stream.references()
                    arrived = deque(self.stream.lookout.wait(references, PUMP_LOOKS_S))
                    has_news = bool(arrived)
                    while arrived:
                        # One at a time: the loop must not wait until hundreds have been taken.
                        with self._changed:
                            if self._is_closing:
                                return
                            reference = arrived.popleft()
                            self._pump_one(reference)
                            if self.stream.has_more(reference):
                                arrived.append(reference)
                    with self._changed:
                        self._supervise()
                        if has_news or not wait.whom:
                            wait.renew(self.stream.awaited())
        except BaseException as failure:  # Whatever it is: the loop is to end with it.
            with self._changed:
                self._pump_failure = failure
                self._changed.notify_all()

    def _supervise(self) -> None:
        self.stream.supervise()
        if self.stream.generators.lacks_weights:
            # Only the loop may bring them: now, if it waits.
            self._changed.notify_all()

    def _pump_one(self, arrived: Any) -> None:
        group = self.stream.receive(arrived)
        if group is not None:
            self._sort_in(group)
            self._issue()
        # That nothing is in flight any more is news as well: an engine's call ends after its last response, and `take`
        # may wait for no other thing.
        if group is not None or self.stream.is_empty:
            self._changed.notify_all()

    def _begin_counting(self) -> None:
        self._counts = TakeCounts()
        self._failures: Counter[FailureKind] = Counter()
        self._finished_lengths: list[int] = []

    def _end_counting(self) -> None:
        self.last_take, self.last_failures = self._counts, self._failures
        self.last_queues = {
            "queue/groups_generating": float(self.stream.groups_generating),
            "queue/groups_scoring": float(self.stream.groups_scoring),
            "queue/groups_ready": float(len(self._ready)),
        }
        if self._finished_lengths:
            self.last_queues["response_length/scored_mean"] = float(np.mean(self._finished_lengths))
        self._begin_counting()

    def _has_batch(self, count: int) -> bool:
        """Whether the groups to hand out are there and, in a synchronous run, every call has come to its end."""
        if len(self._ready) < count or (self._is_synchronous and not self.stream.is_empty):
            return False
        return all(group_id in self._ready for group_id in islice(self._open, count))

    def _early(self, count: int, shown: set[str]) -> list[Group]:
        """Groups that will be among the next `count` whatever else happens, without those that were shown.

        None in a synchronous run: there, what is computed together must not depend on when each of them came.
        """
        if self._is_synchronous:
            return []
        front = islice(self._open, count)
        return [self._ready[name] for name in front if name in self._ready and name not in shown]

    def _issue(self) -> None:
        if self._is_synchronous and not self.stream.is_empty:
            return
        if self._interrupted:
            interrupted, self._interrupted = self._interrupted, []
            self.stream.submit(interrupted)
        places = self.admission.open_places(self.version)
        if self.dynamic_sampling is not None:
            places = min(places, self._allowance(self.dynamic_sampling))
        if not places:
            return
        occurrences = self.cursor.take(places)
        for occurrence in occurrences:
            self._open[occurrence.group_id] = None
            self.admission.issued += 1
            self._counts.issued += 1
            self.ledger.issued(occurrence.group_id)
        self.stream.submit(occurrences)
        self._changed.notify_all()

    def _allowance(self, dynamic_sampling: DynamicSampling) -> int:
        """Groups that this step may still issue; those in flight for later steps have places of their own."""
        steps = dynamic_sampling.limit + self.admission.max_staleness
        return max(0, steps * self.admission.groups_per_step - self._counts.dropped - len(self._open))

    def _sort_in(self, group: Group) -> None:
        """Keep a scored group for `take`, or drop it with its reason."""
        if group.failures:
            self._fail(group)
        elif self.dynamic_sampling is not None and not has_signal(_rewards(group)):
            self._filter(group)
        else:
            self._ready[group.group_id] = group
            self._finished_lengths += [trajectory.response_length for trajectory in group.trajectories]

    def _fail(self, group: Group) -> None:
        trajectory_id, failure = next(iter(group.failures.items()))
        if self.on_failure == "stop":
            raise RewardError(f"the reward of trajectory {trajectory_id}: {failure} (reward.on_failure is 'stop')")
        self.ledger.failed(group.group_id, failure.message, kind=failure.kind)
        self._counts.failed += 1
        self._failures.update(each.kind for each in group.failures.values())
        self._drop(group.group_id)
        if self._counts.failed > self.admission.groups_per_step:
            raise RewardError(
                f"the reward failed for {self._counts.failed} groups within one step, more than the step has "
                f"({self.admission.groups_per_step}); the last one: {trajectory_id}: {failure}. "
                "Mend the reward function (reward.function) or service (reward.urls), then go on with "
                "`slipstream resume`"
            )

    def _filter(self, group: Group) -> None:
        reward = float(np.mean(_rewards(group)))
        self.ledger.filtered(group.group_id, no_signal(reward))
        self._counts.filtered_rewards.append(reward)
        self._drop(group.group_id)

    def _drop(self, group_id: str) -> None:
        self.admission.dropped += 1
        del self._open[group_id]


def _rewards(group: Group) -> list[float]:
    return [trajectory.reward for trajectory in group.trajectories if trajectory.reward is not None]
