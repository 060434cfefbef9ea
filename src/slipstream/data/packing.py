"""Which sequences go into which micro-batch of which rank, and how they lie in one row of tokens.

Stands between the controller, which plans an optimizer step for all ranks, and the learner, which packs its share.
There is no padding anywhere, and what sequences share lies in the row once (which do is decided in
`data/shared_prompts.py`). Pure numpy; leaves out the attention over packed rows (`models/attention.py`).
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from slipstream.data.trajectory import FloatArray, IntArray, TrainingExample

MicroBatchPlan = list[list[list[int]]]

# A transformer layer of width d spends about 24 d^2 operations a token on its matrices and 4 d L on attention to L
# tokens (half of that under a causal mask, plus memory traffic), so attention costs as much as the matrices at about
# L = 6 d. 6 x 1024 is right for mid-sized models and a slight correction at the lengths where small ones are used.
ATTENTION_EQUALS_MATRICES_AT = 6144


def sequence_cost(length: int) -> float:
    """Cost of a forward and backward pass over one sequence, in units of a token's matrix products."""
    return length + length * length / ATTENTION_EQUALS_MATRICES_AT


def plan_micro_batches(
    lengths: Sequence[int], *, tokens_per_micro_batch: int, ranks: int, costs: Sequence[float] | None = None
) -> MicroBatchPlan:
    """Distribute sequences over ranks and micro-batches: `plan[rank][micro_batch]` lists indices into `lengths`.

    `costs` are those of sequences that are more than one: without them each has the cost of its length.

    - Every index occurs exactly once.
    - Ranks are balanced by cost: the costliest sequence goes to the least loaded rank, and so on down, so loads
      differ by no more than the cost of one sequence.
    - A micro-batch holds at most `tokens_per_micro_batch` tokens; a longer sequence sits alone.
    - All ranks have the same number of micro-batches, else they would wait for each other for ever; an empty list is
      a micro-batch of weight zero.
    - Within a micro-batch lengths ascend, so that equal ones are adjacent.
    - The same arguments give the same plan.
    """
    if tokens_per_micro_batch < 1 or ranks < 1 or any(length < 1 for length in lengths):
        raise ValueError("tokens_per_micro_batch, ranks and all lengths must be at least 1")
    costs = [sequence_cost(length) for length in lengths] if costs is None else costs
    costliest_first = sorted(range(len(lengths)), key=lambda index: (-costs[index], index))
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    for index in costliest_first:
        load, rank = loads[0]
        shares[rank].append(index)
        heapq.heapreplace(loads, (load + costs[index], rank))
    plan = [fill_micro_batches(share, lengths, tokens_per_micro_batch) for share in shares]
    most = max(len(micro_batches) for micro_batches in plan)
    return [micro_batches + [[] for _ in range(most - len(micro_batches))] for micro_batches in plan]


def fill_micro_batches(indices: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Best-fit decreasing: from the longest down, each sequence joins the fullest micro-batch that has room for it.

    `indices` point into `lengths`. A sequence longer than the budget sits alone; each micro-batch ascends by length.
    """
    longest_first = sorted(indices, key=lambda index: (-lengths[index], index))
    micro_batches: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, micro-batch), ascending
    for index in longest_first:
        place = bisect_left(rooms, (lengths[index], 0))
        if place < len(rooms):
            room, chosen = rooms.pop(place)
        else:
            room, chosen = budget, len(micro_batches)
            micro_batches.append([])
        micro_batches[chosen].append(index)
        if room > lengths[index]:
            insort(rooms, (room - lengths[index], chosen))
    return [sorted(micro_batch, key=lambda index: (lengths[index], index)) for micro_batch in micro_batches]


@dataclass(frozen=True)
class PackedBatch:
    """S sequences in one row of T tokens, with N loss tokens among them.

    The row is made of G segments. A sequence is one of them, or two: the first `shared_tokens` of neighbours that have
    them in common are a segment of their own, and what follows in each of them is another one, right behind it.
    `prompts` says of each segment which one it continues, None for one that begins a sequence.

    `positions` are those within the sequence. `places` are where the loss tokens lie in the row, `predictors` the
    places whose logits predict them: those of the tokens before. `targets` are the loss tokens, `sequence_index` the
    number of the sequence each is in. Every array of `token_fields` holds a value per loss token, in the order of
    `targets`.
    """

    tokens: IntArray  # [T]
    positions: IntArray  # [T]
    lengths: list[int]  # [G]
    prompts: list[int | None]  # [G]
    places: IntArray  # [N]
    predictors: IntArray  # [N]
    targets: IntArray  # [N]
    sequence_index: IntArray  # [N]
    example_ids: list[str]  # [S]
    token_fields: dict[str, FloatArray]  # name -> [N]


def pack(examples: Sequence[TrainingExample]) -> PackedBatch:
    """Lay `examples` end to end, in their order. No example gives a row without tokens.

    Neighbours with the same number of `shared_tokens` that do begin with the same tokens have them once.

    Raises ValueError if the arrays of an example differ in length, if its first token is a loss token (nothing
    predicts it), if all its tokens are shared, or if examples differ in the names of their token fields.
    """
    names = tuple(examples[0].token_fields) if examples else ()
    for example in examples:
        _check_example(example, names)
    row = _Row()
    maps = [place for bundle in _bundles(examples) for place in row.add(bundle)]
    masks = [np.flatnonzero(example.loss_mask) for example in examples]
    fields = {
        name: _join([example.token_fields[name][mask] for example, mask in zip(examples, masks, strict=True)])
        for name in names
    }
    targets = [example.tokens[mask] for example, mask in zip(examples, masks, strict=True)]
    return PackedBatch(
        tokens=_join(row.tokens).astype(np.int64),
        positions=_join(row.positions).astype(np.int64),
        lengths=row.lengths,
        prompts=row.prompts,
        places=_join([place[mask] for place, mask in zip(maps, masks, strict=True)]).astype(np.int64),
        predictors=_join([place[mask - 1] for place, mask in zip(maps, masks, strict=True)]).astype(np.int64),
        targets=_join(targets).astype(np.int64),
        sequence_index=np.repeat(np.arange(len(examples)), [len(mask) for mask in masks]).astype(np.int64),
        example_ids=[example.example_id for example in examples],
        token_fields={name: values.astype(np.float32) for name, values in fields.items()},
    )


def _bundles(examples: Sequence[TrainingExample]) -> Iterator[list[TrainingExample]]:
    """Neighbours that begin with the same shared tokens, together; every other example alone."""
    for (shared, _), run in groupby(examples, key=lambda e: (e.shared_tokens, e.tokens[: e.shared_tokens].tobytes())):
        neighbours = list(run)
        yield from [neighbours] if shared else ([example] for example in neighbours)


class _Row:
    """Segments of tokens, laid end to end."""

    def __init__(self) -> None:
        self.tokens: list[IntArray] = []
        self.positions: list[IntArray] = []
        self.lengths: list[int] = []
        self.prompts: list[int | None] = []
        self._end = 0

    def add(self, bundle: Sequence[TrainingExample]) -> list[IntArray]:
        """Lay a bundle, what it shares once; returns for each example where in the row each of its tokens is."""
        if len(bundle) == 1:
            [example] = bundle
            return [self._lay(example.tokens, 0, None)]
        shared = bundle[0].shared_tokens
        prompt = len(self.lengths)
        common = self._lay(bundle[0].tokens[:shared], 0, None)
        return [np.concatenate([common, self._lay(example.tokens[shared:], shared, prompt)]) for example in bundle]

    def _lay(self, tokens: IntArray, position: int, prompt: int | None) -> IntArray:
        start, self._end = self._end, self._end + len(tokens)
        self.tokens.append(tokens)
        self.positions.append(np.arange(position, position + len(tokens)))
        self.lengths.append(len(tokens))
        self.prompts.append(prompt)
        return np.arange(start, self._end)


def _check_example(example: TrainingExample, names: tuple[str, ...]) -> None:
    length = len(example.tokens)
    if length == 0 or len(example.loss_mask) != length:
        raise ValueError(
            f"example {example.example_id}: {length} tokens and a loss mask of {len(example.loss_mask)} entries"
        )
    if example.loss_mask[0]:
        raise ValueError(f"example {example.example_id}: its first token is a loss token, but nothing predicts it")
    if not 0 <= example.shared_tokens < length:
        raise ValueError(f"example {example.example_id}: {example.shared_tokens} of {length} tokens are shared")
    if set(example.token_fields) != set(names):
        raise ValueError(
            f"example {example.example_id} has the token fields {sorted(example.token_fields)}, others {sorted(names)}"
        )
    for name, values in example.token_fields.items():
        if len(values) != length:
            raise ValueError(f"example {example.example_id}: {len(values)} values of {name} for {length} tokens")


def _join(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if len(arrays) else np.zeros(0, dtype=np.int64)
