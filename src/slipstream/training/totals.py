"""What one optimizer step adds up over its micro-batches and its ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as distributed

from slipstream.algorithms.objective import ObjectiveOutput
from slipstream.training.batch import MicroBatch

MAXIMUM_SUFFIX = "_max"


@dataclass
class StepTotals:
    """Sums over loss tokens, maxima, and the ids of examples with non-finite values."""

    tokens: int = 0
    loss: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    nonfinite_examples: list[str] = field(default_factory=list)

    def add(self, batch: MicroBatch, loss: torch.Tensor, entropy: torch.Tensor, output: ObjectiveOutput) -> None:
        """Count one micro-batch: its weighted loss (a scalar) and its metrics and entropy, each [N]."""
        self.tokens += batch.loss_tokens
        self.loss += float(loss)
        for name, values in {"entropy": entropy, **output.metrics}.items():
            if name.endswith(MAXIMUM_SUFFIX):
                self.maxima[name] = max(self.maxima.get(name, -math.inf), float(values.max()))
            else:
                self.sums[name] = self.sums.get(name, 0.0) + float(values.double().sum())

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

    def over_all_ranks(self) -> StepTotals:
        """The totals of all ranks together, the same on every rank. All ranks must call it."""
        gathered: list[StepTotals] = [self] * distributed.get_world_size()
        distributed.all_gather_object(gathered, self)
        total = StepTotals()
        total.merge(gathered)
        return total

    def metrics(self) -> dict[str, float]:
        """Loss (already divided by its weights), token count, means over loss tokens, and maxima."""
        means = {name: value / max(self.tokens, 1) for name, value in self.sums.items()}
        return {"loss": self.loss, "tokens": float(self.tokens), **means, **self.maxima}


def nonfinite_examples(batch: MicroBatch, log_probs: torch.Tensor, loss: torch.Tensor) -> list[str]:
    """Ids of the examples of which a field, a log-prob or the loss is NaN or infinite at a loss token. All [N]."""
    finite = torch.isfinite(log_probs) & torch.isfinite(loss)
    for values in batch.fields.values():
        finite &= torch.isfinite(values)
    if bool(finite.all()):
        return []
    return [batch.example_ids[index] for index in batch.sequence_index[~finite].unique().tolist()]
