"""How a row is divided among ranks that compute it together, and which of its keys which queries see.

The row of T tokens is cut into 2 R chunks, as even as whole tokens allow, for R ranks; rank r has chunks r and
2 R - 1 - r. A token sees those before it, so late chunks cost more than early ones, and each rank has one of either
kind: for one long sequence all ranks then have the same work (the zig-zag order of ring attention, in use since
arXiv 2311.09431 showed that contiguous shares leave most ranks idle). Cuts follow the row and not its sequences, which
may lie in several chunks; nothing is padded.

Pure: `ring_attention.py` computes, `sequence_group.py` communicates.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from slipstream.models.row_layout import RowLayout


@dataclass(frozen=True)
class Block:
    """Queries of one rank beside keys of one rank that some of them see, neither of which is cut by a segment's end.

    `count` stretches of queries of one length, and as many of keys, where stretch i of the queries belongs to stretch i
    of the keys. `queries` and `keys` count the tokens of their ranks. `offset` is the position of a stretch's first
    query in its sequence minus that of its first key: query i sees key j if j <= i + offset, and with a window of w if
    also i + offset - j < w.
    """

    queries: slice
    keys: slice
    count: int
    offset: int

    @property
    def query_length(self) -> int:
        """Queries in a stretch."""
        return (self.queries.stop - self.queries.start) // self.count

    @property
    def key_length(self) -> int:
        """Keys in a stretch."""
        return (self.keys.stop - self.keys.start) // self.count

    def sees_all(self, window: int | None) -> bool:
        """Whether every query of a stretch sees every key of it."""
        reaches = window is None or self.offset + self.query_length - 1 < window
        return self.offset >= self.key_length - 1 and reaches

    def sees_none(self, window: int | None) -> bool:
        """Whether no query sees any key."""
        is_out_of_reach = window is not None and self.offset - (self.key_length - 1) >= window
        return self.offset + self.query_length - 1 < 0 or is_out_of_reach

    def is_causal(self, window: int | None) -> bool:
        """Whether each query sees the key of its own token and those before it: a square without its upper half."""
        reaches = window is None or self.query_length <= window
        return self.offset == 0 and self.query_length == self.key_length and reaches


class RowSplit:
    """The division of one row among `ranks` ranks. `layout.tokens` must be at least `ranks`: each gets a token."""

    def __init__(self, layout: RowLayout, ranks: int) -> None:
        """Raises ValueError for a row with fewer tokens than ranks."""
        if layout.tokens < ranks:
            raise ValueError(f"a row of {layout.tokens} tokens cannot be divided among {ranks} ranks")
        self.layout = layout
        self.ranks = ranks
        length, longer = divmod(layout.tokens, 2 * ranks)
        self._ends = [0]
        for chunk in range(2 * ranks):
            self._ends.append(self._ends[-1] + length + (chunk < longer))
        self._starts = [rows.start for rows, _ in layout.segments]
        self.blocks = cache(self._blocks)

    def chunks(self, rank: int) -> tuple[range, range]:
        """The places in the row that a rank has, in the order in which it has them; the second may be empty."""
        first, second = rank, 2 * self.ranks - 1 - rank
        return range(*self._ends[first : first + 2]), range(*self._ends[second : second + 2])

    def tokens(self, rank: int) -> int:
        """How many tokens a rank has: no two ranks differ by more than one."""
        return sum(map(len, self.chunks(rank)))

    def places(self, rank: int) -> torch.Tensor:
        """Where in the row the tokens of a rank are: [tokens], int64, ascending."""
        return torch.tensor([place for chunk in self.chunks(rank) for place in chunk])

    def locate(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rank that has each of some places of the row, and which of its tokens it is: int64, [N] each."""
        ranks = torch.empty(self.layout.tokens, dtype=torch.int64)
        numbers = torch.empty_like(ranks)
        for rank in range(self.ranks):
            own = self.places(rank)
            ranks[own], numbers[own] = rank, torch.arange(len(own))
        chosen = places.cpu()
        return ranks[chosen].to(places.device), numbers[chosen].to(places.device)

    def _blocks(self, rank: int, other: int, window: int | None) -> list[Block]:
        """`blocks(rank, other, window)`: what queries of `rank` see among the keys of `other`, each pair in one block.

        Neighbours are one block where they can be. Computed once: all layers ask for the same.
        """
        found: list[Block] = []
        for block in self._pieces(rank, other):
            if block.sees_none(window):
                continue
            joint = _together(found[-1], block, window) if found else None
            if joint is None:
                found.append(block)
            else:
                found[-1] = joint
        return found

    def _pieces(self, rank: int, other: int) -> Iterator[Block]:
        """A block for each segment among the queries and each stretch of the keys that it may see."""
        query_start = 0
        for queries in self.chunks(rank):
            key_start = 0
            for keys in self.chunks(other):
                # All prompts first, so that what can be one block comes one after the other.
                for sees_prompt in (True, False):
                    for rows, prompt in self._segments_in(queries):
                        seen = prompt if sees_prompt else rows
                        if seen is not None:
                            begun = 0 if prompt is None else prompt.stop - prompt.start
                            yield from _piece(rows, seen, begun, queries, keys, query_start, key_start)
                key_start += len(keys)
            query_start += len(queries)

    def _segments_in(self, chunk: range) -> Sequence[tuple[slice, slice | None]]:
        """The segments that have a token in a chunk."""
        if not chunk:
            return []
        first, last = (bisect_right(self._starts, place) - 1 for place in (chunk.start, chunk.stop - 1))
        return self.layout.segments[first : last + 1]


def _piece(
    rows: slice, seen: slice, begun: int, queries: range, keys: range, query_start: int, key_start: int
) -> Iterator[Block]:
    """What lies in both chunks of a segment and what it sees: its prompt of `begun` tokens, or itself."""
    own = range(max(rows.start, queries.start), min(rows.stop, queries.stop))
    part = range(max(seen.start, keys.start), min(seen.stop, keys.stop))
    if own and part:
        position = begun + own.start - rows.start
        key_position = part.start - seen.start + (begun if seen == rows else 0)
        first, first_key = query_start + own.start - queries.start, key_start + part.start - keys.start
        stretches = slice(first, first + len(own)), slice(first_key, first_key + len(part))
        yield Block(*stretches, count=1, offset=position - key_position)


def _together(first: Block, second: Block, window: int | None) -> Block | None:
    """Both as one block, if they are neighbours of one shape, or neighbours that see all of the same keys."""
    if first.queries.stop != second.queries.start:
        return None
    queries = slice(first.queries.start, second.queries.stop)
    if window is None and first.keys == second.keys and first.sees_all(None) and second.sees_all(None):
        return replace(first, queries=queries) if first.count == second.count == 1 else None
    shapes = [(block.query_length, block.key_length, block.offset) for block in (first, second)]
    if shapes[0] == shapes[1] and first.keys.stop == second.keys.start:
        return Block(queries, slice(first.keys.start, second.keys.stop), first.count + second.count, first.offset)
    return None
