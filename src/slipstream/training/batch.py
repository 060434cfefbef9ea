"""From training examples to the tensors of one micro-batch, on the learner's device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slipstream.data.packing import pack
from slipstream.data.trajectory import TrainingExample


@dataclass(frozen=True)
class MicroBatch:
    """Sequences laid end to end in one row of T tokens, with N loss tokens.

    tokens, positions [T]; predictors, targets, sequence_index [N], int64; each of `fields` [N], float32. See
    `data.packing.PackedBatch` for what they mean.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    lengths: list[int]
    predictors: torch.Tensor
    targets: torch.Tensor
    sequence_index: torch.Tensor
    example_ids: list[str]
    fields: dict[str, torch.Tensor]

    @property
    def loss_tokens(self) -> int:
        """N."""
        return int(self.targets.shape[0])


def make_micro_batch(examples: Sequence[TrainingExample], device: str) -> MicroBatch:
    """Pack examples. None at all gives the zero-weight micro-batch: one token that nothing is learned from.

    A rank that has nothing left runs it, so that all ranks take part in the same collective operations.
    """
    if not examples:
        zero, nothing = torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
        parts = [part.to(device) for part in (zero, zero, nothing, nothing, nothing)]
        tokens, positions, predictors, targets, sequence_index = parts
        return MicroBatch(tokens, positions, [1], predictors, targets, sequence_index, [], {})
    packed = pack(examples)
    return MicroBatch(
        tokens=torch.from_numpy(packed.tokens).to(device),
        positions=torch.from_numpy(packed.positions).to(device),
        lengths=list(packed.lengths),
        predictors=torch.from_numpy(packed.predictors).to(device),
        targets=torch.from_numpy(packed.targets).to(device),
        sequence_index=torch.from_numpy(packed.sequence_index).to(device),
        example_ids=list(packed.example_ids),
        fields={name: torch.from_numpy(values).to(device) for name, values in packed.token_fields.items()},
    )
