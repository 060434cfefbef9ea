"""How the ranks of a learner are arranged: data x sequence x tensor.

Ranks that differ in their data coordinate learn from different sequences; ranks that differ in their sequence
coordinate alone share the tokens of the same rows (`models/ring_attention.py`); ranks that differ in their tensor
coordinate alone compute the same tokens, each with its pieces of the weights (`training/tensor_shards.py`). The tensor
coordinate runs fastest, then the sequence coordinate: ranks that exchange most are neighbours. To DeepSpeed the first
two are data parallel: ZeRO partitions over them, and gradients are averaged over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.models.sequence_group import SequenceGroup
    from slipstream.training.tensor_shards import TensorGroup


@dataclass(frozen=True)
class Mesh:
    """`data` groups of `sequence` groups of `tensor` ranks each."""

    data: int
    sequence: int
    tensor: int

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.data * self.sequence * self.tensor

    @property
    def averaged_ranks(self) -> int:
        """Over how many ranks DeepSpeed averages a gradient: those that have the same piece of each weight."""
        return self.data * self.sequence

    @property
    def ranks_per_share(self) -> int:
        """So many ranks, one after the other, learn from the same sequences and compute the same loss."""
        return self.sequence * self.tensor

    def data_coordinate(self, rank: int) -> int:
        """Which share of a batch a rank learns from."""
        return rank // self.ranks_per_share

    def sequence_coordinate(self, rank: int) -> int:
        """Which share of a row a rank computes."""
        return rank // self.tensor % self.sequence

    def tensor_coordinate(self, rank: int) -> int:
        """Which pieces of the weights a rank has."""
        return rank % self.tensor

    def sequence_members(self, rank: int) -> tuple[int, ...]:
        """The ranks that share rows with this one, itself among them, in the order of their coordinates."""
        first = rank - self.sequence_coordinate(rank) * self.tensor
        return tuple(range(first, first + self.ranks_per_share, self.tensor))

    def tensor_members(self, rank: int) -> tuple[int, ...]:
        """The ranks that have pieces of the same weights, this one among them, in the order of their coordinates."""
        first = rank - self.tensor_coordinate(rank)
        return tuple(range(first, first + self.tensor))

    def join_sequence_group(self, rank: int, *, timeout_s: float) -> SequenceGroup | None:
        """The group of a rank; None where it shares its rows with nobody. All ranks must call it.

        `timeout_s` bounds each exchange in the group.
        """
        from slipstream.models.sequence_group import SequenceGroup

        if self.sequence == 1:
            return None
        members = self.sequence_members(rank)
        groups = _make_groups({self.sequence_members(each) for each in range(self.ranks)}, timeout_s)
        return SequenceGroup(self.sequence_coordinate(rank), members, groups[members])

    def join_tensor_group(self, rank: int, *, timeout_s: float) -> TensorGroup | None:
        """The group of a rank; None where its weights are whole. All ranks must call it.

        `timeout_s` bounds each exchange in the group.
        """
        from slipstream.training.tensor_shards import TensorGroup

        if self.tensor == 1:
            return None
        members = self.tensor_members(rank)
        groups = _make_groups({self.tensor_members(each) for each in range(self.ranks)}, timeout_s)
        return TensorGroup(self.tensor_coordinate(rank), members, groups[members])


def _make_groups(members: set[tuple[int, ...]], timeout_s: float) -> dict[tuple[int, ...], Any]:
    """The process group of each of these: every rank takes part in making every one, its own or not, in one order."""
    from torch import distributed

    timeout = timedelta(seconds=timeout_s)
    return {each: distributed.new_group(list(each), timeout=timeout) for each in sorted(members)}
