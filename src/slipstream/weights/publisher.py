"""Publishing: executes the weight plan, and proves that every rollout engine holds the trainer's weights.

Called by the loop after each step. Engines pause, load bucket by bucket, drop the prefix cache of the older weights
and resume under the next policy version. Two proofs, on by default: the checksum of each tensor is compared between
what the learner sent and what each engine received; then both compute the log-probs of a fixed probe sequence with
the weights they hold. The second finds what the first cannot, such as an engine that received a weight but computes
with an older copy of it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from slipstream.cluster.calls import RemoteEngine, gather
from slipstream.data.trajectory import IntArray
from slipstream.errors import WeightSyncError
from slipstream.training.group import LearnerGroup
from slipstream.weights.plan import WeightPlan

# Largest absolute difference of a probe's log-probs between two implementations of the same model.
PROBE_TOLERANCE = {"float32": 1e-4, "bfloat16": 1.0}
PROBE_TOKENS = 12


@dataclass(frozen=True)
class PublishReport:
    """What a publish cost and how well the engines agree with the trainer afterwards."""

    seconds: float
    sent_bytes: int
    probe_difference: float


class WeightPublisher:
    """Moves the learner's weights into the rollout engines by one plan, made once."""

    def __init__(
        self,
        learner: LearnerGroup,
        engines: list[RemoteEngine],
        plan: WeightPlan,
        *,
        verify: bool,
        dtype: str,
        vocabulary_size: int,
        call_timeout_s: float,
    ) -> None:
        self.learner = learner
        self.engines = engines
        self.plan = plan
        self.verify = verify
        self.tolerance = PROBE_TOLERANCE[dtype]
        self.call_timeout_s = call_timeout_s
        self.probe_tokens = probe_sequence(vocabulary_size)

    def publish(self, version: int) -> PublishReport:
        """Bring all engines to the learner's weights and to policy `version`.

        Raises WeightSyncError naming engine and tensor if an engine did not receive, or does not compute with, what
        the learner has.
        """
        start = time.monotonic()
        self._on_engines("begin_update")
        for index in range(len(self.plan.buckets)):
            self._move_bucket(index)
        self._on_engines("finish_update", version)
        difference = self._compare_probe(version) if self.verify else float("nan")
        return PublishReport(time.monotonic() - start, self.plan.total_bytes, difference)

    def _move_bucket(self, index: int) -> None:
        sending = self.learner.submit_fill_bucket(index)
        if not self.plan.channel.needs_both_sides:
            sent = gather(sending, deadline_s=self.call_timeout_s)[0]
            loading = [engine.submit("load_bucket", self.plan, index) for engine in self.engines]
            received = gather(loading, deadline_s=self.call_timeout_s)
        else:
            loading = [engine.submit("load_bucket", self.plan, index) for engine in self.engines]
            results = gather([*sending, *loading], deadline_s=self.call_timeout_s)
            sent, received = results[0], results[len(sending) :]
        if self.verify:
            for engine, checksums in zip(self.engines, received, strict=True):
                compare_checksums(sent, checksums, engine.name)

    def _compare_probe(self, version: int) -> float:
        calls = [learner_rank.submit("probe", self.probe_tokens) for learner_rank in self.learner.ranks]
        calls += [engine.submit("probe", self.probe_tokens) for engine in self.engines]
        results = gather(calls, deadline_s=self.call_timeout_s)
        expected, found = results[0], results[len(self.learner.ranks) :]
        worst = 0.0
        for engine, log_probs in zip(self.engines, found, strict=True):
            difference = float(np.abs(np.asarray(log_probs) - np.asarray(expected)).max())
            # The negation is true for NaN as well.
            if not difference <= self.tolerance:
                raise WeightSyncError(
                    f"{engine.name} does not compute with the trainer's weights of version {version}: log-probs of "
                    f"the probe differ by {difference:.3g}, expected at most {self.tolerance:g}"
                )
            worst = max(worst, difference)
        return worst

    def _on_engines(self, method: str, *arguments: object) -> None:
        gather([engine.submit(method, *arguments) for engine in self.engines], deadline_s=self.call_timeout_s)


def compare_checksums(sent: dict[str, int], received: dict[str, int], engine_name: str) -> None:
    """Raises WeightSyncError naming the first tensor that is missing, extra or different."""
    for name, checksum in sent.items():
        if name not in received:
            raise WeightSyncError(f"{engine_name} did not receive weight {name!r}")
        if received[name] != checksum:
            raise WeightSyncError(
                f"{engine_name} received weight {name!r} damaged: checksum {received[name]:#x}, expected {checksum:#x}"
            )
    extra = received.keys() - sent.keys()
    if extra:
        raise WeightSyncError(f"{engine_name} received weight {min(extra)!r}, which the trainer did not send")


def probe_sequence(vocabulary_size: int) -> IntArray:
    """A fixed sequence of tokens spread over the vocabulary; what it spells does not matter."""
    return (np.arange(1, PROBE_TOKENS + 1, dtype=np.int64) * 7919) % vocabulary_size
