"""From training examples to the tensors of one micro-batch, on the learner's device, and a rank's share of its row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from slipstream.data.packing import pack
from slipstream.data.trajectory import TrainingExample
from slipstream.models.distillation import TeacherStates
from slipstream.models.sequence_group import SharedRow


@dataclass(frozen=True)
class MicroBatch:
    """Sequences laid end to end in one row of T tokens, with N loss tokens.

    tokens, positions [T]; lengths and prompts of the row's segments; places, predictors, targets, sequence_index [N],
    int64; each of `fields` [N], float32. See `data.packing.PackedBatch` for what they mean.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    lengths: list[int]
    prompts: list[int | None]
    places: torch.Tensor
    predictors: torch.Tensor
    targets: torch.Tensor
    sequence_index: torch.Tensor
    example_ids: list[str]
    fields: dict[str, torch.Tensor]

    @property
    def loss_tokens(self) -> int:
        """N."""
        return int(self.targets.shape[0])


def make_micro_batch(examples: Sequence[TrainingExample], device: str, *, least_tokens: int = 1) -> MicroBatch:
    """Pack examples into a row of `least_tokens` tokens or more, as many as there are ranks to share it.

    What is lacking is made up for by sequences of one token that nothing is learned from. Of no examples at all these
    are the zero-weight micro-batch: a rank that has nothing left runs it, so that all ranks take part in the same
    collective operations.
    """
    packed = pack(examples)
    lacking = max(0, least_tokens - len(packed.tokens))
    filling = torch.zeros(lacking, dtype=torch.int64)
    return MicroBatch(
        tokens=torch.cat([torch.from_numpy(packed.tokens), filling]).to(device),
        positions=torch.cat([torch.from_numpy(packed.positions), filling]).to(device),
        lengths=[*packed.lengths, *[1] * lacking],
        prompts=[*packed.prompts, *[None] * lacking],
        places=torch.from_numpy(packed.places).to(device),
        predictors=torch.from_numpy(packed.predictors).to(device),
        targets=torch.from_numpy(packed.targets).to(device),
        sequence_index=torch.from_numpy(packed.sequence_index).to(device),
        example_ids=packed.example_ids,
        fields={name: torch.from_numpy(values).to(device) for name, values in packed.token_fields.items()},
    )


@dataclass(frozen=True)
class ModelInput:
    """What a model computes of a micro-batch: all of it, or the share of a rank that shares its row with others.

    tokens, positions [t]; places, which of these tokens are read, and targets [n], int64. `teacher`: what a teacher
    thinks there, if one is asked.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    targets: torch.Tensor
    teacher: TeacherStates | None = None


class RowShare:
    """The share of one rank: `inputs` of the model, and how its outputs become those of the whole micro-batch."""

    def __init__(self, batch: MicroBatch, reads: Literal["predictors", "places"], shared: SharedRow | None) -> None:
        """`reads` says at which tokens of the row the model is read; `shared` who computes it, None for this rank."""
        self._shared = shared
        places: torch.Tensor = getattr(batch, reads)
        if shared is None:
            self.inputs = ModelInput(batch.tokens, batch.positions, places, batch.targets)
            return
        self._ranks, numbers = shared.split.locate(places)
        is_own = self._ranks == shared.group.rank
        tokens = shared.places.to(batch.tokens.device)
        self.inputs = ModelInput(batch.tokens[tokens], batch.positions[tokens], numbers[is_own], batch.targets[is_own])

    def whole(self, outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Outputs [n] of each rank -> [N], the same on all of them, for each to compute the same loss."""
        if self._shared is None:
            return dict(outputs)
        gather = self._shared.group.gather
        return {name: gather(values, self._ranks) for name, values in outputs.items()}
