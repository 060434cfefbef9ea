"""Ranks that share a row compute together what one computes alone: outputs and gradients, whatever lies in the row.

The ranks are threads that hand each other tensors; processes that send them are in training/test_layouts.py.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import pytest
import torch
from torch.nn import functional

from slipstream.models import attention_block
from slipstream.models.attention_block import Scoring
from slipstream.models.ring_attention import ring_attention
from slipstream.models.row_layout import RowLayout
from slipstream.models.row_split import RowSplit
from slipstream.models.sequence_group import SharedRow

PATIENCE_S = 60


class ThreadGroup:
    """A rank of a group of threads. `mail[rank, tag]` is where a rank finds what the one before it has sent."""

    def __init__(self, rank: int, size: int, mail: dict[tuple[int, int], Queue]) -> None:
        self.rank, self.size, self._mail = rank, size, mail

    def pass_on(self, tensors: Sequence[torch.Tensor], lengths: int, *, tag: int = 0) -> Any:
        self._mail[(self.rank + 1) % self.size, tag].put([tensor.clone() for tensor in tensors])
        own = self._mail[self.rank, tag]

        class Arriving:
            @staticmethod
            def wait() -> list[torch.Tensor]:
                received = own.get(timeout=PATIENCE_S)
                assert all(tensor.shape[1] == lengths for tensor in received)
                return received

        return Arriving()


def on_ranks(size: int, compute: Callable[[Any], Any]) -> list[Any]:
    """What each of `size` ranks computes, all at the same time."""
    mail: dict[tuple[int, int], Queue] = {(rank, tag): Queue() for rank in range(size) for tag in (0, 2)}
    with ThreadPoolExecutor(size) as pool:
        running = [pool.submit(compute, ThreadGroup(rank, size, mail)) for rank in range(size)]
        return [each.result(timeout=PATIENCE_S) for each in running]


def visible(layout: RowLayout, window: int | None) -> torch.Tensor:
    """Who sees whom, as a matrix [T, T] that nothing but a test ever builds."""
    sees = torch.zeros(layout.tokens, layout.tokens, dtype=torch.bool)
    for rows, prompt in layout.segments:
        before = [] if prompt is None else list(range(prompt.start, prompt.stop))
        sequence = before + list(range(rows.start, rows.stop))
        for position, place in enumerate(sequence[len(before) :], start=len(before)):
            first = 0 if window is None else max(0, position + 1 - window)
            sees[place, sequence[first : position + 1]] = True
    return sees


def reference(query, key, value, sinks, layout, scoring):
    """The whole matrix of scores at once: [heads, T, D] -> [T, heads, D]."""
    sharing = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(sharing, 0), value.repeat_interleave(sharing, 0)
    scores = query @ key.transpose(-1, -2) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores.masked_fill(~visible(layout, scoring.window), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, layout.tokens, 1)], -1)
    return (functional.softmax(scores, -1)[..., : layout.tokens] @ value).transpose(0, 1)


def random_heads(tokens: int, widths: tuple[int, int] = (8, 8)) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((4, tokens, widths[0]), (2, tokens, widths[0]), (2, tokens, widths[1]))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


ROWS = {
    "one long sequence": RowLayout([37]),
    "as many tokens as ranks": RowLayout([4]),
    "one token each": RowLayout([1] * 9),
    "sequences across the borders of chunks": RowLayout([3, 3, 3, 7, 1, 12, 3, 5, 5]),
    "a long one among short ones": RowLayout([1, 2, 30, 1, 1]),
    "a row that ends within a chunk": RowLayout([5, 6]),
    "answers that share a prompt": RowLayout([4, 3, 3, 2, 5, 1, 2, 2, 9], [None, 0, 0, 0, None, None, 5, 5, 5]),
    "a prompt longer than a chunk": RowLayout([20, 1, 2, 4, 4], [None, 0, 0, 0, 0]),
}
SCORINGS = {
    "plain": Scoring(0.3, None, None),
    "window of 1": Scoring(0.3, 1, None),
    "window of 4": Scoring(0.3, 4, None),
    "capped": Scoring(0.9, None, 1.5),
    "capped in a window": Scoring(0.9, 5, 1.5),
}


def compare(size: int, layout: RowLayout, scoring: Scoring, *, has_sinks: bool = False, widths=(8, 8)) -> None:
    heads = random_heads(layout.tokens, widths)
    sinks = torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=torch.float64) if has_sinks else None
    direction = torch.randn(layout.tokens, 4, widths[1], generator=torch.Generator().manual_seed(1)).double()
    leaves = [tensor.clone().requires_grad_() for tensor in [*heads, *([sinks] if has_sinks else [])]]
    expected = reference(*leaves[:3], leaves[3] if has_sinks else None, layout, scoring)
    (expected * direction).sum().backward()

    def share(group: ThreadGroup):
        split = RowSplit(layout, size)
        places = split.places(group.rank)
        own = [tensor[:, places].clone().requires_grad_() for tensor in heads]
        own_sinks = sinks.clone().requires_grad_() if has_sinks else None
        output = ring_attention(*own, shared=SharedRow(split, group), scoring=scoring, sinks=own_sinks)
        (output * direction[places]).sum().backward()
        return places, output.detach(), [tensor.grad for tensor in own], own_sinks.grad if has_sinks else None

    shares = on_ranks(size, share)
    assert sorted(place for places, *_ in shares for place in places.tolist()) == list(range(layout.tokens))
    for places, output, gradients, _ in shares:
        torch.testing.assert_close(output, expected[places])
        for found, leaf in zip(gradients, leaves[:3], strict=True):
            torch.testing.assert_close(found, leaf.grad[:, places])
    if has_sinks:
        torch.testing.assert_close(sum(gradient for *_, gradient in shares), leaves[3].grad)


@pytest.mark.parametrize("layout", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_outputs_and_gradients_are_those_of_the_whole_matrix(size, layout):
    for scoring in SCORINGS.values():
        compare(size, layout, scoring)


@pytest.mark.parametrize("size", [1, 3])
def test_sinks_take_their_share_and_learn(size):
    for scoring in SCORINGS.values():
        compare(size, ROWS["answers that share a prompt"], scoring, has_sinks=True)


def test_values_may_be_wider_or_narrower_than_keys():
    compare(3, ROWS["sequences across the borders of chunks"], SCORINGS["plain"], widths=(8, 5))


def test_some_queries_at_a_time_compute_what_all_at_once_do(monkeypatch):
    monkeypatch.setattr(attention_block, "SCORES_AT_A_TIME", 40)
    for scoring in (SCORINGS["capped"], SCORINGS["window of 4"]):
        compare(2, ROWS["one long sequence"], scoring)


def test_the_whole_matrix_of_scores_never_exists(monkeypatch):
    """Neither in the open nor by the kernel, which is given keys of one rank and keeps nothing of their size."""
    largest: list[int] = []
    original = torch.tanh

    def measured(scores: torch.Tensor) -> torch.Tensor:
        largest.append(scores.numel())
        return original(scores)

    monkeypatch.setattr(torch, "tanh", measured)
    monkeypatch.setattr(attention_block, "SCORES_AT_A_TIME", 4 * 19 * 5)
    compare(2, ROWS["one long sequence"], SCORINGS["capped"])
    assert len(largest) > 8 and max(largest[1:]) <= 4 * 19 * 5, "all but the first, which is the reference's"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types_differ_by_their_rounding_alone(dtype):
    layout, scoring = ROWS["sequences across the borders of chunks"], SCORINGS["plain"]
    heads = [tensor.to(dtype) for tensor in random_heads(layout.tokens)]
    expected = reference(*(tensor.double() for tensor in heads), None, layout, scoring)

    def share(group: ThreadGroup):
        split = RowSplit(layout, 2)
        places = split.places(group.rank)
        own = [tensor[:, places].clone().requires_grad_() for tensor in heads]
        output = ring_attention(*own, shared=SharedRow(split, group), scoring=scoring)
        output.float().sum().backward()
        assert output.dtype == dtype and all(tensor.grad.dtype == dtype for tensor in own)
        return places, output.detach()

    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-6
    for places, output in on_ranks(2, share):
        torch.testing.assert_close(output.double(), expected[places], rtol=0, atol=tolerance)


def test_flash_attention_gives_the_shapes_that_blocks_have():
    """On tensors without contents: the kernel itself needs a GPU."""
    query = torch.empty(3, 4, 5, 16, device="meta", dtype=torch.bfloat16)
    key = torch.empty(3, 2, 7, 16, device="meta", dtype=torch.bfloat16)
    output, sums = attention_block._flash_forward(query, key, key, False, 0.25)
    assert output.shape == query.shape and sums.shape == query.shape[:3]
    gradients = attention_block._flash_backward(output, query, key, key, output, sums, False, 0.25)
    assert [gradient.shape for gradient in gradients] == [query.shape, key.shape, key.shape]
