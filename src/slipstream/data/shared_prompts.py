"""Which sequences share a prompt, and how many of them lie in a row together.

Stands before the plan of micro-batches (`data/packing.py`): from units, which are examples that must stay together (one
example, or a pair), it makes larger ones whose prompt is computed once. Pure numpy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from slipstream.data.packing import (
    ATTENTION_EQUALS_MATRICES_AT,
    MicroBatchPlan,
    fill_micro_batches,
    plan_micro_batches,
    sequence_cost,
)
from slipstream.data.trajectory import TrainingExample

Unit = Sequence[TrainingExample]

# The load of the busiest rank, as a share of the mean, at which no better plan is looked for.
EVEN_ENOUGH = 1.01


def shared_tokens(unit: Unit) -> int:
    """The length of a unit's prompt: what all its examples begin with, before the first loss token of any of them.

    0 if one of them has no loss token, since it does not say where its prompt ends.
    """
    first = unit[0].tokens
    length = len(first)
    for example in unit:
        if not example.loss_mask.any():
            return 0
        most = min(length, int(example.loss_mask.argmax()))
        differs = np.flatnonzero(example.tokens[:most] != first[:most])
        length = int(differs[0]) if len(differs) else most
    return length


def plan_with_shared_prompts(
    units: Sequence[Unit], *, tokens_per_micro_batch: int, ranks: int
) -> list[list[list[TrainingExample]]]:
    """The examples of each micro-batch of each rank: as `plan_micro_batches`, with each prompt once where it can be.

    Units whose prompts are equal, token by token, lie side by side and say how much they share. A prompt with more
    answers than a micro-batch holds is computed once in each of several; so it is where that loads ranks more evenly:
    of pieces of at most `tokens_per_micro_batch` tokens, half of it, a quarter and so on, those are taken with which
    the rank that has most to do has least. The same arguments give the same plan.
    """
    groups = _by_prompt(units)
    most = tokens_per_micro_batch
    pieces, plan, least = _plan(groups, most, tokens_per_micro_batch=tokens_per_micro_batch, ranks=ranks)
    # Smaller pieces repeat prompts, so no plan is better than this one spread evenly; that of one rank is.
    even = sum(piece.cost for piece in pieces) / ranks
    while least > EVEN_ENOUGH * even and most > 0:
        most //= 2
        candidate = _plan(groups, most, tokens_per_micro_batch=tokens_per_micro_batch, ranks=ranks)
        if candidate[2] < least:
            pieces, plan, least = candidate
    return [[[e for index in batch for e in pieces[index].examples] for batch in share] for share in plan]


@dataclass(frozen=True)
class _Piece:
    """Units that share a prompt of so many tokens, 0 for none, and lie in a row together."""

    units: tuple[Unit, ...]
    prompt: int

    @property
    def examples(self) -> list[TrainingExample]:
        return [replace(example, shared_tokens=self.prompt) for unit in self.units for example in unit]

    @cached_property
    def own_lengths(self) -> list[int]:
        """How many tokens of each example lie behind the prompt."""
        return [len(example.tokens) - self.prompt for unit in self.units for example in unit]

    @property
    def cost(self) -> float:
        """As `sequence_cost`: an answer of length a attends to a prompt of length p, which is 2 p a more than to a."""
        answers = [own + own * (own + 2 * self.prompt) / ATTENTION_EQUALS_MATRICES_AT for own in self.own_lengths]
        return sequence_cost(self.prompt) + sum(answers)


def _plan(
    groups: Sequence[_Piece], most: int, *, tokens_per_micro_batch: int, ranks: int
) -> tuple[list[_Piece], MicroBatchPlan, float]:
    """Groups in pieces of at most `most` tokens, their plan, and the cost of the rank that has most to do."""
    pieces = [piece for group in groups for piece in _cut(group, most)]
    costs = [piece.cost for piece in pieces]
    lengths = [piece.prompt + sum(piece.own_lengths) for piece in pieces]
    plan = plan_micro_batches(lengths, tokens_per_micro_batch=tokens_per_micro_batch, ranks=ranks, costs=costs)
    return pieces, plan, max(sum(costs[index] for batch in share for index in batch) for share in plan)


def _by_prompt(units: Sequence[Unit]) -> list[_Piece]:
    """All units with the same prompt together, in the order in which prompts come first."""
    groups: dict[bytes, list[Unit]] = {}
    alone: list[_Piece] = []
    for unit in units:
        prompt = shared_tokens(unit)
        if prompt:
            groups.setdefault(unit[0].tokens[:prompt].tobytes(), []).append(unit)
        else:
            alone.append(_Piece((unit,), 0))
    shared = [_Piece(tuple(members), shared_tokens(members[0])) for members in groups.values()]
    return [_without_prompt(piece) for piece in shared] + alone


def _cut(group: _Piece, most: int) -> list[_Piece]:
    """Pieces of at most `most` tokens, but of one unit at least."""
    lengths = [sum(len(example.tokens) - group.prompt for example in unit) for unit in group.units]
    parts = fill_micro_batches(range(len(lengths)), lengths, most - group.prompt)
    return [_without_prompt(_Piece(tuple(group.units[index] for index in part), group.prompt)) for part in parts]


def _without_prompt(piece: _Piece) -> _Piece:
    """The piece; without a prompt if it has one example, which shares it with nobody."""
    return replace(piece, prompt=0) if len(piece.own_lengths) == 1 else piece
