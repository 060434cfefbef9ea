"""Which sequences go into which micro-batch of which rank, and how they lie in one row of tokens.

Stands between the controller, which plans an optimizer step for all ranks, and the learner, which packs its share.
There is no padding anywhere. Pure numpy; leaves out the attention over packed rows (`models/attention.py`).
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

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


def plan_micro_batches(lengths: Sequence[int], *, tokens_per_micro_batch: int, ranks: int) -> MicroBatchPlan:
    """Distribute sequences over ranks and micro-batches: `plan[rank][micro_batch]` lists indices into `lengths`.

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
    longest_first = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    for index in longest_first:
        load, rank = loads[0]
        shares[rank].append(index)
        heapq.heapreplace(loads, (load + sequence_cost(lengths[index]), rank))
    plan = [_fill_micro_batches(share, lengths, tokens_per_micro_batch) for share in shares]
    most = max(len(micro_batches) for micro_batches in plan)
    return [micro_batches + [[] for _ in range(most - len(micro_batches))] for micro_batches in plan]


def _fill_micro_batches(longest_first: list[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Best-fit decreasing: each sequence joins the fullest micro-batch that has room for it."""
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
    """S sequences laid end to end in one row of T tokens, with N loss tokens among them.

    `positions` restart at 0 in every sequence. `predictors` are the places in the row whose logits predict a loss
    token: the place before it. `targets` are the loss tokens, `sequence_index` the number of the sequence each is in.
    Every array of `token_fields` holds a value per loss token, in the order of `targets`.
    """

    tokens: IntArray  # [T]
    positions: IntArray  # [T]
    lengths: list[int]  # [S]
    predictors: IntArray  # [N]
    targets: IntArray  # [N]
    sequence_index: IntArray  # [N]
    example_ids: list[str]  # [S]
    token_fields: dict[str, FloatArray]  # name -> [N]


def pack(examples: Sequence[TrainingExample]) -> PackedBatch:
    """Lay `examples` end to end, in their order. No example gives a row without tokens.

    Raises ValueError if the arrays of an example differ in length, if its first token is a loss token (nothing
    predicts it), or if examples differ in the names of their token fields.
    """
    names = tuple(examples[0].token_fields) if examples else ()
    for example in examples:
        _check_example(example, names)
    lengths = [len(example.tokens) for example in examples]
    starts = np.cumsum([0, *lengths[:-1]]) if lengths else np.zeros(0, dtype=np.int64)
    places = [np.flatnonzero(example.loss_mask) for example in examples]
    fields = {
        name: _join([example.token_fields[name][place] for example, place in zip(examples, places, strict=True)])
        for name in names
    }
    return PackedBatch(
        tokens=_join([example.tokens for example in examples]).astype(np.int64),
        positions=_join([np.arange(length) for length in lengths]).astype(np.int64),
        lengths=lengths,
        predictors=_join([start + place - 1 for start, place in zip(starts, places, strict=True)]).astype(np.int64),
        targets=_join([example.tokens[place] for example, place in zip(examples, places, strict=True)]).astype(
            np.int64
        ),
        sequence_index=np.repeat(np.arange(len(examples)), [len(place) for place in places]).astype(np.int64),
        example_ids=[example.example_id for example in examples],
        token_fields={name: values.astype(np.float32) for name, values in fields.items()},
    )


def _check_example(example: TrainingExample, names: tuple[str, ...]) -> None:
    length = len(example.tokens)
    if length == 0 or len(example.loss_mask) != length:
        raise ValueError(
            f"example {example.example_id}: {length} tokens and a loss mask of {len(example.loss_mask)} entries"
        )
    if example.loss_mask[0]:
        raise ValueError(f"example {example.example_id}: its first token is a loss token, but nothing predicts it")
    if set(example.token_fields) != set(names):
        raise ValueError(
            f"example {example.example_id} has the token fields {sorted(example.token_fields)}, others {sorted(names)}"
        )
    for name, values in example.token_fields.items():
        if len(values) != length:
            raise ValueError(f"example {example.example_id}: {len(values)} values of {name} for {length} tokens")


def _join(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if len(arrays) else np.zeros(0, dtype=np.int64)
