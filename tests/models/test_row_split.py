"""Who has which tokens of a row: everything once, evenly, and as much to do for each."""

from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.models.row_layout import RowLayout
from slipstream.models.row_split import RowSplit

lengths = st.lists(st.integers(1, 20), min_size=1, max_size=12)
sizes = st.integers(1, 5)


def covered(split: RowSplit, window: int | None) -> list[list[int]]:
    """How often blocks let each token see each other one, [T, T]."""
    tokens = split.layout.tokens
    counts = torch.zeros(tokens, tokens, dtype=torch.int64)
    for rank in range(split.ranks):
        for other in range(split.ranks):
            queries, keys = split.places(rank), split.places(other)
            for block in split.blocks(rank, other, window):
                own = queries[block.queries].view(block.count, -1)
                seen = keys[block.keys].view(block.count, -1)
                for stretch, stretch_keys in zip(own, seen, strict=True):
                    for row, query in enumerate(stretch.tolist()):
                        for column, key in enumerate(stretch_keys.tolist()):
                            distance = row + block.offset - column
                            looks = distance >= 0 and (window is None or distance < window)
                            counts[query, key] += looks or block.sees_all(window)
    return counts.tolist()


@settings(max_examples=30)
@given(lengths, sizes, st.sampled_from([None, 1, 3, 8]))
def test_each_token_sees_each_of_those_it_may_see_once(lengths: list[int], size: int, window: int | None) -> None:
    if sum(lengths) < size:
        return
    layout = RowLayout(lengths)
    expected = torch.zeros(layout.tokens, layout.tokens, dtype=torch.int64)
    for rows, _ in layout.segments:
        for place in range(rows.start, rows.stop):
            first = rows.start if window is None else max(rows.start, place + 1 - window)
            expected[place, first : place + 1] = 1
    assert covered(RowSplit(layout, size), window) == expected.tolist()


@given(lengths, sizes)
def test_every_token_is_with_one_rank_and_all_have_as_many_but_for_one(lengths: list[int], size: int) -> None:
    if sum(lengths) < size:
        return
    split = RowSplit(RowLayout(lengths), size)
    held = [split.places(rank).tolist() for rank in range(size)]
    counts = [len(places) for places in held]
    assert sorted(chain(*held)) == list(range(sum(lengths)))
    assert counts == [split.tokens(rank) for rank in range(size)]
    assert min(counts) >= 1 and max(counts) - min(counts) <= 1
    assert all(places == sorted(places) for places in held)
    ranks, numbers = split.locate(torch.arange(sum(lengths)))
    assert [held[rank][number] for rank, number in zip(ranks.tolist(), numbers.tolist(), strict=True)] == list(
        range(sum(lengths))
    )


@pytest.mark.parametrize("size", [2, 4, 8])
def test_one_long_sequence_is_as_much_work_for_every_rank_at_every_step(size: int) -> None:
    tokens = 64 * size
    split = RowSplit(RowLayout([tokens]), size)

    def work(rank: int, other: int) -> int:
        queries, keys = split.places(rank), split.places(other)
        return int((queries.unsqueeze(-1) >= keys).sum())

    for step in range(size):
        at_once = [work(rank, (rank - step) % size) for rank in range(size)]
        assert max(at_once) <= 1.04 * min(at_once), "within half the diagonal of a chunk"
    contiguous = [sum(range(tokens // size * rank, tokens // size * (rank + 1))) for rank in range(size)]
    assert max(contiguous) > 2 * min(contiguous), "what the order of the chunks is for"


def test_neighbours_are_one_block_where_they_can_be() -> None:
    split = RowSplit(RowLayout([8, 2, 2, 2, 2], [None, 0, 0, 0, 0]), 1)
    # The prompt beside itself, all answers beside the prompt, all answers beside themselves.
    assert len(split.blocks(0, 0, None)) == 3
    assert len(split.blocks(0, 0, 9)) > 3, "with a window the answers' distances to the prompt matter"


def test_a_row_that_is_too_short_to_be_divided_is_refused() -> None:
    with pytest.raises(ValueError, match="a row of 2 tokens cannot be divided among 3 ranks"):
        RowSplit(RowLayout([2]), 3)
