"""How the ranks of a learner are arranged: data x sequence.

Ranks that differ in their data coordinate learn from different sequences; ranks that differ in their sequence
coordinate alone share the tokens of the same rows (`models/ring_attention.py`). The sequence coordinate runs fastest:
ranks that exchange something in every layer are neighbours. To DeepSpeed all ranks are data parallel, so ZeRO
partitions over all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.models.sequence_group import SequenceGroup


@dataclass(frozen=True)
class Mesh:
    """`data` groups of `sequence` ranks each."""

    data: int
    sequence: int

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.data * self.sequence

    def data_coordinate(self, rank: int) -> int:
        """Which share of a batch a rank learns from."""
        return rank // self.sequence

    def sequence_coordinate(self, rank: int) -> int:
        """Which share of a row a rank computes."""
        return rank % self.sequence

    def sequence_members(self, rank: int) -> tuple[int, ...]:
        """The ranks that share rows with this one, itself among them, in the order of their coordinates."""
        first = rank - self.sequence_coordinate(rank)
        return tuple(range(first, first + self.sequence))

    def join_sequence_group(self, rank: int, *, timeout_s: float) -> SequenceGroup | None:
        """The group of a rank; None where it shares its rows with nobody. All ranks must call it.

        `timeout_s` bounds each exchange in the group.
        """
        from torch import distributed

        from slipstream.models.sequence_group import SequenceGroup

        if self.sequence == 1:
            return None
        members = self.sequence_members(rank)
        # Every rank takes part in making every group, its own or not.
        groups = {
            each: distributed.new_group(list(each), timeout=timedelta(seconds=timeout_s))
            for each in map(self.sequence_members, range(0, self.ranks, self.sequence))
        }
        return SequenceGroup(self.sequence_coordinate(rank), members, groups[members])
