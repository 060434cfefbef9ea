"""A learner as the loop sees it, whatever its role: one object, whatever the number of ranks.

Cuts a batch into micro-batches, gives every rank its share, calls all ranks at once and waits for all with a
deadline. Every rank gets the same number of micro-batches, so that collectives always meet. Ranks that share rows or
weights get the same ones, and divide each among themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cluster.calls import PendingCall, RemoteEngine, gather
from slipstream.data.packing import plan_micro_batches
from slipstream.data.shared_prompts import plan_with_shared_prompts
from slipstream.data.trajectory import FloatArray, IntArray, TrainingExample
from slipstream.training.mesh import Mesh

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
        share_prompts: bool = True,
        sequence_parallel: int = 1,
        tensor_parallel: int = 1,
    ) -> None:
        """`examples_per_unit`: so many examples, one after the other, always share a micro-batch, in their order.

        `share_prompts`: what examples have in common before their loss tokens is computed once in a micro-batch.
        `sequence_parallel` x `tensor_parallel` ranks, one after the other, compute the same micro-batches together.
        """
        self.mesh = Mesh(len(ranks) // (sequence_parallel * tensor_parallel), sequence_parallel, tensor_parallel)
        self.ranks = list(ranks)
        self.tokens_per_micro_batch = tokens_per_micro_batch
        self.examples_per_unit = examples_per_unit
        self.call_timeout_s = call_timeout_s
        self.share_prompts = share_prompts

    def update(self, optimizer_steps: Sequence[Sequence[TrainingExample]], objective: Objective) -> dict[str, Any]:
        """One optimizer step over each list of examples, in their order; returns the metrics of all together."""
        return merge_step_metrics([self._on_shares("update", examples, objective)[0] for examples in optimizer_steps])

    def accumulate(self, examples: Sequence[TrainingExample], objective: Objective) -> None:
        """Add the gradient of some examples of an optimizer step; the next `update` has the others and takes it."""
        self._on_shares("accumulate", examples, objective)

    def loss(self, examples: Sequence[TrainingExample], objective: Objective) -> dict[str, Any]:
        """The metrics of `update` without an update: for held-out data."""
        return self._on_shares("loss", examples, objective)[0]

    def log_probs(self, role: str, examples: Sequence[TrainingExample]) -> dict[str, FloatArray]:
        """Log-probs under the policy or the reference, by example id; one value for each loss token."""
        return _merge(self._on_shares("log_probs", examples, role))

    def values(self, examples: Sequence[TrainingExample]) -> dict[str, FloatArray]:
        """What the critic expects before each loss token, by example id."""
        return _merge(self._on_shares("values", examples))

    def scores(self, examples: Sequence[TrainingExample]) -> dict[str, FloatArray]:
        """What a reward model thinks at each loss token, by example id."""
        return _merge(self._on_shares("scores", examples))

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

    def load(self, folder: Path) -> str | None:
        """Read what `save` wrote; returns what is different in the layout of the ranks since then, in words."""
        change: str | None = self._on_all("load", str(folder))[0]
        return change

    def export(self, folder: Path, *, live: bool = False) -> None:
        """Write the model as a Hugging Face folder: the average of its weights where one is kept and not `live`."""
        self._on_all("export", str(folder), live)

    def _on_shares(self, method: str, examples: Sequence[TrainingExample], *arguments: Any) -> list[Any]:
        shares = self._plan(examples)
        calls = [
            engine.submit(method, shares[self.mesh.data_coordinate(rank)], *arguments)
            for rank, engine in enumerate(self.ranks)
        ]
        return gather(calls, deadline_s=self.call_timeout_s)

    def _plan(self, examples: Sequence[TrainingExample]) -> list[list[list[TrainingExample]]]:
        """The examples of each micro-batch, for each place of the mesh's data axis."""
        size = self.examples_per_unit
        units = [examples[start : start + size] for start in range(0, len(examples), size)]
        budget, ranks = self.tokens_per_micro_batch, self.mesh.data
        if self.share_prompts:
            return plan_with_shared_prompts(units, tokens_per_micro_batch=budget, ranks=ranks)
        lengths = [sum(len(example.tokens) for example in unit) for unit in units]
        plan = plan_micro_batches(lengths, tokens_per_micro_batch=budget, ranks=ranks)
        return [[[e for index in batch for e in units[index]] for batch in share] for share in plan]

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
