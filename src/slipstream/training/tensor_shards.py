"""The weights of a model that tensor-parallel ranks have in pieces, and how one of them is put together.

DeepSpeed cuts the modules when its engine is made, in place; weights keep their names. Which were cut, and where, is
seen by comparing shapes with those from before, on all ranks that hold a piece.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as distributed

Shape = tuple[int, ...]
"""Of a weight."""


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that hold the pieces of the same weights: `rank` of this process among them, all in their order."""

    rank: int
    members: tuple[int, ...]
    process_group: Any

    def gradient_norm(self, parameters: Iterable[torch.nn.Parameter]) -> float:
        """The norm of all gradients, each element counted once: of the pieces here and elsewhere, and of what is whole.

        All ranks of the group must call it.
        """
        gradients = [(is_piece(parameter), parameter.grad) for parameter in parameters if parameter.grad is not None]
        pieces, whole = (
            torch.nn.utils.get_total_norm([gradient for cut, gradient in gradients if cut == wanted]).double().square()
            for wanted in (True, False)
        )
        distributed.all_reduce(pieces, group=self.process_group)
        return math.sqrt(float(pieces + whole)) if bool(torch.isfinite(pieces + whole)) else math.inf


def is_piece(parameter: torch.nn.Parameter) -> bool:
    """Whether DeepSpeed has cut this parameter, by the mark that its own norm goes by."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


@dataclass(frozen=True)
class Cut:
    """A weight in pieces along `dimension`; `sizes` of the pieces in the order of the ranks."""

    dimension: int
    sizes: tuple[int, ...]


class TensorShards:
    """Which weights are in pieces on the ranks of `group`."""

    def __init__(self, group: TensorGroup, shapes: Mapping[str, Shape], pieces: Mapping[str, Shape]) -> None:
        """`shapes` of the whole weights by name, `pieces` those on this rank. All ranks of the group must call it."""
        self._group = group
        self._shapes = dict(shapes)
        gathered: list[Mapping[str, Shape]] = [pieces] * len(group.members)
        distributed.all_gather_object(gathered, dict(pieces), group=group.process_group)
        cuts = {name: find_cut(shape, [piece[name] for piece in gathered]) for name, shape in shapes.items()}
        self._cuts = {name: cut for name, cut in cuts.items() if cut is not None}

    def whole(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        """A weight put together on every rank of the group: a new tensor if it was in pieces, else `piece` itself.

        Beside it there is room for one piece at a time. All ranks of the group must call it.
        """
        cut = self._cuts.get(name)
        if cut is None:
            return piece
        found = piece.new_empty(self._shapes[name])
        for place, part in enumerate(found.split(cut.sizes, dim=cut.dimension)):
            own = place == self._group.rank
            sent = piece.contiguous() if own else torch.empty_like(part, memory_format=torch.contiguous_format)
            distributed.broadcast(sent, self._group.members[place], group=self._group.process_group)
            part.copy_(sent)
        return found


def find_cut(shape: Shape, pieces: Sequence[Shape]) -> Cut | None:
    """How a weight of this shape lies in the pieces of these shapes; None where every rank has all of it."""
    for dimension, size in enumerate(shape):
        sizes = tuple(piece[dimension] for piece in pieces)
        if any(found != size for found in sizes):
            return Cut(dimension, sizes)
    return None
