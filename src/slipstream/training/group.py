"""A learner as the loop sees it, whatever its role: one object, whatever the number of ranks.

Cuts a batch into micro-batches, gives every rank its share, calls all ranks at once and waits for all with a
deadline. Every rank gets the same number of micro-batches, so that collectives always meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cluster.calls import PendingCall, RemoteEngine, gather
from slipstream.data.packing import plan_micro_batches
from slipstream.data.trajectory import FloatArray, IntArray, TrainingExample

if TYPE_CHECKING:
    from slipstream.algorithms.objective import Objective
    from slipstream.weights.plan import ChannelAddress, WeightPlan


class LearnerGroup:
    """All ranks of the learner. Every method is called by the controller."""

    def __init__(
        self,
        ranks: Sequence[RemoteEngine],
        *,
        tokens_per_micro_batch: int,
        call_timeout_s: float,
        examples_per_unit: int = 1,
    ) -> None:
        """`examples_per_unit`: so many examples, one after the other, always share a micro-batch, in their order."""
        self.ranks = list(ranks)
        self.tokens_per_micro_batch = tokens_per_micro_batch
        self.examples_per_unit = examples_per_unit
        self.call_timeout_s = call_timeout_s

    def update(self, optimizer_steps: Sequence[Sequence[TrainingExample]], objective: Objective) -> dict[str, Any]:
        """One optimizer step over each list of examples, in their order; returns the metrics of all together."""
        return merge_step_metrics([self._on_shares("update", examples, objective)[0] for examples in optimizer_steps])

    def loss(self, examples: Sequence[TrainingExample], objective: Objective) -> dict[str, Any]:
        """The metrics of `update` without an update: for held-out data."""
        return self._on_shares("loss", examples, objective)[0]

    def log_probs(self, role: str, examples: Sequence[TrainingExample]) -> dict[str, FloatArray]:
        """Log-probs under the policy or the reference, by example id; one value for each loss token."""
        return _merge(self._on_shares("log_probs", examples, role))

    def values(self, examples: Sequence[TrainingExample]) -> dict[str, FloatArray]:
        """What the critic expects before each loss token, by example id."""
        return _merge(self._on_shares("values", examples))

    def refresh_reference(self) -> None:
        """Make the policy as it is now the reference."""
        self._on_all("refresh_reference")

    def probe(self, tokens: IntArray) -> FloatArray:
        """Log-probs at temperature 1 of tokens[1:], each given what precedes it."""
        return self._on_all("probe", tokens)[0]

    def weight_plan(self, bucket_bytes: int, channel: ChannelAddress) -> WeightPlan:
        """Which tensor travels in which bucket."""
        return self._on_all("weight_plan", bucket_bytes, channel)[0]

    def submit_fill_bucket(self, index: int) -> list[PendingCall]:
        """Put one bucket of weights on its way; rank 0's call returns the checksum of each tensor in it."""
        return [rank.submit("fill_bucket", index) for rank in self.ranks]

    def save(self, folder: Path) -> None:
        """Write everything that training needs to go on bit for bit."""
        self._on_all("save", str(folder))

    def load(self, folder: Path) -> None:
        """Read what `save` wrote."""
        self._on_all("load", str(folder))

    def export(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder."""
        self._on_all("export", str(folder))

    def _on_shares(self, method: str, examples: Sequence[TrainingExample], *arguments: Any) -> list[Any]:
        size = self.examples_per_unit
        units = [examples[start : start + size] for start in range(0, len(examples), size)]
        plan = plan_micro_batches(
            [sum(len(example.tokens) for example in unit) for unit in units],
            tokens_per_micro_batch=self.tokens_per_micro_batch,
            ranks=len(self.ranks),
        )
        calls = []
        for rank, share in zip(self.ranks, plan, strict=True):
            micro_batches = [[example for index in micro_batch for example in units[index]] for micro_batch in share]
            calls.append(rank.submit(method, micro_batches, *arguments))
        return gather(calls, deadline_s=self.call_timeout_s)

    def _on_all(self, method: str, *arguments: Any) -> list[Any]:
        return gather([rank.submit(method, *arguments) for rank in self.ranks], deadline_s=self.call_timeout_s)


def _merge(parts: Sequence[dict[str, FloatArray]]) -> dict[str, FloatArray]:
    """What the ranks computed for their examples, as one."""
    return {example_id: values for part in parts for example_id, values in part.items()}


def merge_step_metrics(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Metrics of several optimizer steps as one: `_max` the largest, counts summed, the last rate, else the mean.

    `skipped_steps` says which of them were skipped, `nonfinite_examples` names the examples that caused it.
    """
    merged: dict[str, Any] = {
        "skipped_steps": [index for index, step in enumerate(steps) if step["skipped"]],
        "nonfinite_examples": [example for step in steps for example in step.get("nonfinite_examples", [])],
    }
    for name in steps[0].keys() - merged.keys():
        values = [step[name] for step in steps]
        if name in ("tokens", "skipped", "seconds"):
            merged[name] = sum(values)
        elif name.endswith("_max"):
            merged[name] = max(values)
        elif name == "learning_rate":
            merged[name] = values[-1]
        else:
            merged[name] = sum(values) / len(values)
    return dict(sorted(merged.items()))
