"""What one optimizer step adds up over its micro-batches and its ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as distributed

from slipstream.algorithms.objective import ObjectiveOutput
from slipstream.training.batch import MicroBatch

MAXIMUM_SUFFIX = "_max"


@dataclass
class StepTotals:
    """Sums over loss tokens, maxima, and the ids of examples with non-finite values.

    `derived` says how a metric is computed from means over loss tokens, whose sums are in `moments`, both by its name.
    """

    tokens: int = 0
    loss: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    derived: dict[str, Callable[..., float]] = field(default_factory=dict)
    moments: dict[str, dict[str, float]] = field(default_factory=dict)
    nonfinite_examples: list[str] = field(default_factory=list)

    def add(
        self, batch: MicroBatch, loss: torch.Tensor, model_metrics: Mapping[str, torch.Tensor], output: ObjectiveOutput
    ) -> None:
        """Count one micro-batch: its weighted loss (a scalar), and the metrics of model and objective, each [N]."""
        self.tokens += batch.loss_tokens
        self.loss += float(loss)
        for name, values in {**model_metrics, **output.metrics}.items():
            if name.endswith(MAXIMUM_SUFFIX):
                self.maxima[name] = max(self.maxima.get(name, -math.inf), float(values.max()))
            else:
                self.sums[name] = self.sums.get(name, 0.0) + float(values.double().sum())
        for name, metric in output.derived.items():
            sums = {moment: float(values.double().sum()) for moment, values in metric.moments.items()}
            self._add_moments(name, metric.compute, sums)

    def merge(self, others: Iterable[StepTotals]) -> None:
        """Take in the totals of other ranks."""
        for other in others:
            self.tokens += other.tokens
            self.loss += other.loss
            self.nonfinite_examples += other.nonfinite_examples
            for name, value in other.sums.items():
                self.sums[name] = self.sums.get(name, 0.0) + value
            for name, value in other.maxima.items():
                self.maxima[name] = max(self.maxima.get(name, -math.inf), value)
            for name, compute in other.derived.items():
                self._add_moments(name, compute, other.moments[name])

    def _add_moments(self, name: str, compute: Callable[..., float], sums: dict[str, float]) -> None:
        self.derived[name] = compute
        so_far = self.moments.setdefault(name, dict.fromkeys(sums, 0.0))
        for moment, value in sums.items():
            so_far[moment] += value

    def over_all_ranks(self, *, ranks_per_share: int) -> StepTotals:
        """The totals of all ranks together, the same on every rank. All ranks must call it.

        `ranks_per_share` neighbours learn from the same sequences and have the same totals, which count once.
        """
        gathered: list[StepTotals] = [self] * distributed.get_world_size()
        distributed.all_gather_object(gathered, self)
        total = StepTotals()
        total.merge(gathered[::ranks_per_share])
        return total

    def metrics(self) -> dict[str, float]:
        """Loss (already divided by its weights), token count, means over loss tokens, derived metrics and maxima."""
        means = self._means(self.sums)
        derived = {name: compute(**self._means(self.moments[name])) for name, compute in self.derived.items()}
        return {"loss": self.loss, "tokens": float(self.tokens), **means, **derived, **self.maxima}

    def _means(self, sums: dict[str, float]) -> dict[str, float]:
        return {name: value / max(self.tokens, 1) for name, value in sums.items()}


def nonfinite_examples(batch: MicroBatch, learned: torch.Tensor, loss: torch.Tensor) -> list[str]:
    """Ids of the examples with a NaN or an infinity at a loss token. All [N].

    In a field, in the loss, or in the output that is learned by: log-probs or values.
    """
    finite = torch.isfinite(learned) & torch.isfinite(loss)
    for values in batch.fields.values():
        finite &= torch.isfinite(values)
    if bool(finite.all()):
        return []
    return [batch.example_ids[index] for index in batch.sequence_index[~finite].unique().tolist()]
