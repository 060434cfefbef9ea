"""The ranks that compute one row together, and how they exchange tensors: around a ring, or each with all.

With them here is the row itself: `SharedRow` is what attention, the routers and the learner know of its division.

Every method must be called by all ranks of the group, in the same order. How long they wait for each other is the time
limit of the process group (training/mesh.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as distributed

from slipstream.models.row_split import RowSplit


@dataclass(frozen=True)
class SequenceGroup:
    """`rank` of this process in the group, and the group's members by their rank among all, in their order."""

    rank: int
    members: tuple[int, ...]
    process_group: Any

    @property
    def size(self) -> int:
        """How many ranks share a row."""
        return len(self.members)

    def pass_on(self, tensors: Sequence[torch.Tensor], lengths: int, *, tag: int = 0) -> Arriving:
        """Send tensors [heads, tokens, D] to the next rank, and begin to receive those of the one before.

        Theirs have `lengths` tokens and otherwise the same shapes. `tag` tells apart what is under way at one time.
        """
        following = self.members[(self.rank + 1) % self.size]
        previous = self.members[(self.rank - 1) % self.size]
        leaving = [tensor.contiguous() for tensor in tensors]
        received = [tensor.new_empty(tensor.shape[0], lengths, tensor.shape[2]) for tensor in tensors]
        operations = []
        for number, (outgoing, incoming) in enumerate(zip(leaving, received, strict=True)):
            label = tag + number
            operations.append(
                distributed.P2POp(distributed.isend, outgoing, following, group=self.process_group, tag=label)
            )
            operations.append(
                distributed.P2POp(distributed.irecv, incoming, previous, group=self.process_group, tag=label)
            )
        return Arriving(distributed.batch_isend_irecv(operations), leaving, received)

    def gather(self, values: torch.Tensor, ranks: torch.Tensor, *, sums_gradients: bool = False) -> torch.Tensor:
        """Put together what all ranks have: values [n, ...] of each -> [N, ...], the same on every rank.

        Item i of the result is the next one of rank `ranks[i]`. The gradient of a rank's values is the part of its own
        gradient that belongs to them: right where every rank goes on to compute the same from the result. Where each
        computes a share of the loss, it is the sum of what comes back on all ranks: `sums_gradients`.
        """
        gathered: torch.Tensor = _Gather.apply(values, ranks, self, sums_gradients)
        return gathered


@dataclass
class Arriving:
    """Tensors on their way."""

    works: list[Any]
    leaving: list[torch.Tensor]
    received: list[torch.Tensor]

    def wait(self) -> list[torch.Tensor]:
        """The tensors of the rank before this one."""
        for work in self.works:
            work.wait()
        return self.received


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        values: torch.Tensor,
        ranks: torch.Tensor,
        group: SequenceGroup,
        sums_gradients: bool,
    ) -> torch.Tensor:
        counts = torch.bincount(ranks, minlength=group.size)
        # Equally many from each rank is what collective operations take.
        most = int(counts.max()) if len(ranks) else 0
        sent = values.new_zeros(most, *values.shape[1:])
        sent[: len(values)] = values
        received = values.new_empty(group.size * most, *values.shape[1:])
        if most:
            distributed.all_gather_into_tensor(received, sent, group=group.process_group)
        places = torch.empty_like(ranks)
        for rank in range(group.size):
            belongs = ranks == rank
            places[belongs] = torch.arange(int(belongs.sum()), device=ranks.device) + rank * most
        context.save_for_backward(ranks == group.rank)
        context.group, context.sums_gradients = group, sums_gradients
        return received[places]

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        [own], [gradient] = context.saved_tensors, gradients
        if context.sums_gradients:
            gradient = gradient.contiguous().clone()
            distributed.all_reduce(gradient, group=context.group.process_group)
        return gradient[own], None, None, None


@dataclass(frozen=True)
class SharedRow:
    """A row that the ranks of a group compute together."""

    split: RowSplit
    group: SequenceGroup

    @property
    def tokens(self) -> int:
        """How many tokens of the row are with this rank."""
        return self.split.tokens(self.group.rank)

    @property
    def places(self) -> torch.Tensor:
        """Where in the row they are: [tokens]."""
        return self.split.places(self.group.rank)

    def gather_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """What each rank computed for its tokens, of which it goes on to use a share: [tokens, ...] -> [T, ...]."""
        ranks, _ = self.split.locate(torch.arange(self.split.layout.tokens, device=values.device))
        return self.group.gather(values, ranks, sums_gradients=True)
