"""Publishing: executes the weight plan, and proves that every rollout engine holds the trainer's weights.

Called by the loop after each step. Engines pause, load bucket by bucket, drop the prefix cache of the older weights
and resume under the next policy version. Two proofs, on by default: the checksum of each tensor is compared between
what the learner sent and what each worker of each engine received; then learner and engines compute the log-probs of
a fixed probe sequence with the weights they hold. The second finds what the first cannot, such as an engine that
received a weight but computes with an older copy of it.

An engine that is lost meanwhile costs the others a second attempt. Its successor gets the weights of the same version
as soon as the loop waits for groups, by the same way and with the same proofs, or those of the next publish.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.cluster.calls import EngineState, PendingCall, RemoteEngine, gather, outcomes
from slipstream.cluster.restarts import LOOK_S, EngineRestarts
from slipstream.cluster.waits import waiting
from slipstream.data.trajectory import IntArray
from slipstream.errors import EngineLostError, WeightSyncError
from slipstream.training.group import LearnerGroup
from slipstream.weights.plan import ChannelAddress, receiver_name

# Largest absolute difference of a probe's log-probs between two implementations of the same model.
PROBE_TOLERANCE = {"float32": 1e-4, "bfloat16": 1.0}
PROBE_TOKENS = 12
# How long an engine may take to say that it is there, where a broadcast got stuck and it is not known on whom.
PING_DEADLINE_S = 20.0


@dataclass(frozen=True)
class PublishReport:
    """What a publish cost and how well the engines agree with the trainer afterwards.

    Engines stood still for `pause_seconds` of all `seconds`.
    """

    seconds: float
    pause_seconds: float
    sent_bytes: int
    probe_difference: float


class _BrokenOffError(Exception):
    """A publish was broken off: an engine that took part has been lost."""


class WeightPublisher:
    """Moves the learner's weights into the rollout engines by a plan.

    The plan is made once; anew, through a new channel, where the channel is for exactly those that opened it, and an
    engine was lost.
    """

    def __init__(
        self,
        learner: LearnerGroup,
        engines: list[RemoteEngine],
        *,
        open_channel: Callable[[Sequence[int]], ChannelAddress],
        restarts: EngineRestarts,
        bucket_bytes: int,
        verify: bool,
        dtype: str,
        vocabulary_size: int,
        call_timeout_s: float,
    ) -> None:
        """`open_channel` makes the channel to the engines of the given indices."""
        self.learner = learner
        self.engines = engines
        self.restarts = restarts
        self.bucket_bytes = bucket_bytes
        self.verify = verify
        self.tolerance = PROBE_TOLERANCE[dtype]
        self.call_timeout_s = call_timeout_s
        self.probe_tokens = probe_sequence(vocabulary_size)
        self.version = 0
        self._open_channel = open_channel
        self._make_plan([(index, engine.incarnation) for index, engine in enumerate(engines)])
        restarts.bring_weights = self.bring

    def publish(self, version: int) -> PublishReport:
        """Bring all engines that run to the learner's weights and to policy `version`.

        Raises WeightSyncError naming engine and tensor if an engine did not receive, or does not compute with, what
        the learner has; EngineError if the learner fails, or an engine is lost more often than it may be.
        """
        self.version = version
        while True:
            try:
                return self._send(self._await_engines())
            except _BrokenOffError:
                continue  # Once more, to those that are left.

    def bring(self) -> bool:
        """Bring engines that were started anew to the weights in force; False if there are none. Raises as `publish`.

        Only for the loop, and only while the learner has the weights of the last publish.
        """
        loaded = [engine for engine in self.engines if engine.state is EngineState.LOADED]
        if not loaded:
            return False
        # One that is lost again meanwhile is started anew once more, and gets them after that.
        with suppress(_BrokenOffError):
            self._send(loaded)
        return True

    def _await_engines(self) -> list[RemoteEngine]:
        """The engines that run; waits, if there are none, for one that is being started anew."""
        with waiting(self.restarts.starting(), deadline_s=None):
            while not (engines := [engine for engine in self.engines if engine.state is not EngineState.STARTING]):
                # Holds the deadline of each start.
                self.restarts.advance()
                time.sleep(LOOK_S)
        return engines

    def _send(self, engines: list[RemoteEngine]) -> PublishReport:
        start = time.monotonic()
        chosen = set(engines)
        receivers = [(place, engine.incarnation) for place, engine in enumerate(self.engines) if engine in chosen]
        if self.plan.channel.needs_both_sides and receivers != self._receivers:
            self._make_plan(receivers)
        self._on_engines(engines, "begin_update")
        for index in range(len(self.plan.buckets)):
            self._move_bucket(engines, index)
        self._on_engines(engines, "finish_update", self.version)
        paused = time.monotonic() - start
        difference = self._compare_probe(engines) if self.verify else float("nan")
        for engine, (_, incarnation) in zip(engines, receivers, strict=True):
            self.restarts.holds_weights(engine, incarnation)
        return PublishReport(time.monotonic() - start, paused, self.plan.total_bytes, difference)

    def _make_plan(self, receivers: list[tuple[int, int]]) -> None:
        channel = self._open_channel([index for index, _ in receivers])
        self.plan, self._receivers = self.learner.weight_plan(self.bucket_bytes, channel), receivers

    def _move_bucket(self, engines: list[RemoteEngine], index: int) -> None:
        sending = self.learner.submit_fill_bucket(index)
        if not self.plan.channel.needs_both_sides:
            sent = gather(sending, deadline_s=self.call_timeout_s)[0]
            received = self._on_engines(engines, "load_bucket", self.plan, index)
        else:
            loading = [engine.submit("load_bucket", self.plan, index) for engine in engines]
            results = self._results(sending, loading)
            sent, received = results[0], results[len(sending) :]
        if self.verify:
            for engine, workers in zip(engines, received, strict=True):
                for rank, checksums in enumerate(workers):
                    compare_checksums(sent, checksums, receiver_name(engine.name, rank, len(workers)))

    def _compare_probe(self, engines: list[RemoteEngine]) -> float:
        sending = [learner_rank.submit("probe", self.probe_tokens) for learner_rank in self.learner.ranks]
        results = self._results(sending, [engine.submit("probe", self.probe_tokens) for engine in engines])
        expected, found = results[0], results[len(sending) :]
        worst = 0.0
        for engine, log_probs in zip(engines, found, strict=True):
            difference = float(np.abs(np.asarray(log_probs) - np.asarray(expected)).max())
            # The negation is true for NaN as well.
            if not difference <= self.tolerance:
                raise WeightSyncError(
                    f"{engine.name} does not compute with the trainer's weights of version {self.version}: log-probs "
                    f"of the probe differ by {difference:.3g}, expected at most {self.tolerance:g}"
                )
            worst = max(worst, difference)
        return worst

    def _on_engines(self, engines: list[RemoteEngine], method: str, *arguments: object) -> list[Any]:
        return self._results([], [engine.submit(method, *arguments) for engine in engines])

    def _results(self, sending: list[PendingCall], loading: list[PendingCall]) -> list[Any]:
        """The results of the learner's and the engines' calls, once all have ended.

        Raises _BrokenOffError after a loss has been reported: what the others met in consequence is no error.
        """
        calls = [*sending, *loading]
        found = outcomes(calls, deadline_s=self.call_timeout_s)
        failed = {call: outcome for call, outcome in zip(calls, found, strict=True) if isinstance(outcome, Exception)}
        lost = {call: error for call, error in failed.items() if isinstance(error, EngineLostError)}
        losses = {call: error for call, error in lost.items() if call in loading}
        if len(losses) < len(lost):
            # A broadcast waits for all. One that hangs does not say that it is there.
            losses = self._without_answer(losses)
        for call, error in losses.items():
            self.restarts.report(call, error)
        if losses:
            self._receivers = []  # A channel with an end that is gone is of no use.
            raise _BrokenOffError
        if failed:
            # Of the learner's ranks the one that died, whatever the others met in consequence.
            raise next(iter((lost or failed).values()))
        return found

    def _without_answer(self, losses: dict[PendingCall, EngineLostError]) -> dict[PendingCall, EngineLostError]:
        """Those of the losses whose engine does not even say that it is there: not the learner is to blame for them."""
        pings = [call.engine.submit("statistics") for call in losses]
        answers = outcomes(pings, deadline_s=PING_DEADLINE_S)
        return {call: losses[call] for call, answer in zip(losses, answers, strict=True) if _is_lost(answer)}


def _is_lost(outcome: object) -> bool:
    return isinstance(outcome, EngineLostError)


def compare_checksums(sent: dict[str, int], received: dict[str, int], receiver: str) -> None:
    """Raises WeightSyncError naming the first tensor that is missing, extra or different."""
    for name, checksum in sent.items():
        if name not in received:
            raise WeightSyncError(f"{receiver} did not receive weight {name!r}")
        if received[name] != checksum:
            raise WeightSyncError(
                f"{receiver} received weight {name!r} damaged: checksum {received[name]:#x}, expected {checksum:#x}"
            )
    extra = received.keys() - sent.keys()
    if extra:
        raise WeightSyncError(f"{receiver} received weight {min(extra)!r}, which the trainer did not send")


def probe_sequence(vocabulary_size: int) -> IntArray:
    """A fixed sequence of tokens spread over the vocabulary; what it spells does not matter."""
    return (np.arange(1, PROBE_TOKENS + 1, dtype=np.int64) * 7919) % vocabulary_size
