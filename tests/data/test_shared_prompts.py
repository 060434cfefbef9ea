"""Which examples share a prompt, and the plan in which each prompt is computed as seldom as it can be."""

import time
from collections import Counter
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.data.packing import ATTENTION_EQUALS_MATRICES_AT, pack, plan_micro_batches, sequence_cost
from slipstream.data.shared_prompts import EVEN_ENOUGH, plan_with_shared_prompts, shared_tokens
from slipstream.data.trajectory import TrainingExample

Plan = list[list[list[TrainingExample]]]


def example(name: str, prompt: list[int], answer: list[int], mask: list[int] | None = None) -> TrainingExample:
    learned = [0] * len(prompt) + ([1] * len(answer) if mask is None else mask)
    tokens = np.asarray(prompt + answer)
    return TrainingExample(name, tokens, np.asarray(learned, dtype=bool), {"value": tokens.astype(np.float32)})


@pytest.mark.parametrize(
    ("unit", "length"),
    [
        ([example("a", [5, 6], [7, 8])], 2),
        # What comes before the first loss token, whatever follows.
        ([example("a", [5, 6], [7, 8, 9], [0, 1, 0])], 3),
        ([example("a", [5, 6], [7], [0])], 0),
        # A pair that learns from whole answers, and one whose scores are read at the last token.
        ([example("a", [5, 6], [7, 8]), example("b", [5, 6], [7, 9])], 2),
        ([example("a", [5, 6], [7, 8], [0, 1]), example("b", [5, 6], [7, 9, 9], [0, 0, 1])], 3),
        ([example("a", [5, 6], [7], [1]), example("b", [5, 6], [7, 9], [0, 1])], 2),
        ([example("a", [5, 6], [7]), example("b", [4, 6], [7])], 0),
        ([example("a", [5, 6], [7]), example("b", [5, 6], [7], [0])], 0),
    ],
)
def test_a_prompt_is_what_all_examples_of_a_unit_begin_with_before_they_are_learned_from(
    unit: list[TrainingExample], length: int
) -> None:
    assert shared_tokens(unit) == length


def test_a_packed_row_has_a_shared_prompt_once_and_its_last_token_predicts_every_answer() -> None:
    rows = [example("a", [5, 6], [7, 8]), example("b", [5, 6], [9]), example("c", [5, 4], [3])]
    [[batch]] = plan_with_shared_prompts([[row] for row in rows], tokens_per_micro_batch=100, ranks=1)
    packed = pack(batch)
    # Pieces ascend by length: c is alone with its prompt.
    assert packed.example_ids == ["c", "b", "a"]
    assert packed.tokens.tolist() == [5, 4, 3, 5, 6, 9, 7, 8]
    assert packed.positions.tolist() == [0, 1, 2, 0, 1, 2, 2, 3]
    assert packed.lengths == [3, 2, 1, 2]
    assert packed.prompts == [None, None, 1, 1]
    assert packed.places.tolist() == [2, 5, 6, 7]
    assert packed.predictors.tolist() == [1, 4, 4, 6]
    assert packed.targets.tolist() == [3, 9, 7, 8] == packed.token_fields["value"].tolist()
    assert packed.sequence_index.tolist() == [0, 1, 2, 2]


@st.composite
def batches(draw: st.DrawFn) -> list[list[TrainingExample]]:
    """Units of one example or of two. Few different prompts and short answers, so that many are equal."""
    size = draw(st.integers(1, 2))
    units = []
    for number in range(draw(st.integers(0, 14))):
        prompt = draw(st.sampled_from([[3], [3, 4], [3, 4, 5, 6, 7], [8] * 9]))
        answers = [draw(st.lists(st.integers(3, 5), min_size=1, max_size=6)) for _ in range(size)]
        masks = [[*draw(st.lists(st.integers(0, 1), min_size=len(a) - 1, max_size=len(a) - 1)), 1] for a in answers]
        units.append(
            [example(f"{number}/{k}", prompt, a, m) for k, (a, m) in enumerate(zip(answers, masks, strict=True))]
        )
    return units


budgets, ranks_strategy = st.integers(1, 60), st.integers(1, 4)


@given(units=batches(), budget=budgets, ranks=ranks_strategy)
def test_a_plan_keeps_units_whole_and_the_budget_of_what_is_computed(
    units: list[list[TrainingExample]], budget: int, ranks: int
) -> None:
    plan = plan_with_shared_prompts(units, tokens_per_micro_batch=budget, ranks=ranks)
    assert len(plan) == ranks
    assert len({len(share) for share in plan}) == 1
    size = len(units[0]) if units else 1
    found = []
    for batch in (batch for share in plan for batch in share):
        names = [e.example_id for e in batch]
        found += [tuple(names[start : start + size]) for start in range(0, len(names), size)]
        assert len(pack(batch).tokens) <= budget or len(batch) == size
    assert sorted(found) == sorted(tuple(e.example_id for e in unit) for unit in units)


@given(units=batches(), budget=budgets, ranks=ranks_strategy)
def test_what_is_packed_is_each_example_whatever_it_shares(
    units: list[list[TrainingExample]], budget: int, ranks: int
) -> None:
    by_name = {e.example_id: e for unit in units for e in unit}
    for batch in (
        batch
        for share in plan_with_shared_prompts(units, tokens_per_micro_batch=budget, ranks=ranks)
        for batch in share
    ):
        packed = pack(batch)
        paths = _sequences(packed.lengths, packed.prompts)
        for index, name in enumerate(packed.example_ids):
            own, chosen = by_name[name], packed.sequence_index == index
            np.testing.assert_array_equal(packed.targets[chosen], own.tokens[own.loss_mask])
            np.testing.assert_array_equal(packed.tokens[packed.places[chosen]], own.tokens[own.loss_mask])
            np.testing.assert_array_equal(packed.token_fields["value"][chosen], own.tokens[own.loss_mask])
            # The whole sequence lies on the path that its last loss token, which is its last token, sees.
            path = paths[int(packed.places[chosen][-1])]
            np.testing.assert_array_equal(packed.tokens[path], own.tokens)
            np.testing.assert_array_equal(packed.positions[path], np.arange(len(own.tokens)))
            np.testing.assert_array_equal(packed.predictors[chosen], path[np.flatnonzero(own.loss_mask) - 1])


def _sequences(lengths: list[int], prompts: list[int | None]) -> dict[int, np.ndarray]:
    """By the place of its last token, the places of each sequence."""
    ends = np.cumsum(lengths)
    segments = [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    return {
        int(own[-1]): own if prompt is None else np.concatenate([segments[prompt], own])
        for own, prompt in zip(segments, prompts, strict=True)
    }


@given(units=batches())
def test_with_room_for_all_each_prompt_is_computed_once(units: list[list[TrainingExample]]) -> None:
    [share] = plan_with_shared_prompts(units, tokens_per_micro_batch=10_000, ranks=1)
    [batch] = share or [[]]
    prompts = [unit[0].tokens[: shared_tokens(unit)].tobytes() for unit in units]
    own = sum(len(e.tokens) - shared_tokens(unit) for unit in units for e in unit)
    once = sum(len(prompt) // 8 for prompt in set(prompts))
    assert len(pack(batch).tokens) == own + once


def cost(share: list[list[TrainingExample]]) -> float:
    """Of all that one rank computes."""
    total = 0.0
    for batch in share:
        for (shared, _), run in groupby(batch, key=lambda e: (e.shared_tokens, e.tokens[: e.shared_tokens].tobytes())):
            own = [len(e.tokens) - shared for e in run]
            total += sequence_cost(shared)
            total += sum(o + o * (o + 2 * shared) / ATTENTION_EQUALS_MATRICES_AT for o in own)
    return total


@given(units=batches(), budget=budgets, ranks=st.integers(2, 4))
def test_no_rank_has_more_to_do_than_with_plain_packing(
    units: list[list[TrainingExample]], budget: int, ranks: int
) -> None:
    units = [unit[:1] for unit in units]
    shared = plan_with_shared_prompts(units, tokens_per_micro_batch=budget, ranks=ranks)
    lengths = [len(unit[0].tokens) for unit in units]
    plain = plan_micro_batches(lengths, tokens_per_micro_batch=budget, ranks=ranks)
    loads = [sum(sequence_cost(lengths[index]) for batch in share for index in batch) for share in plain]
    assert max(cost(share) for share in shared) <= max(loads) * EVEN_ENOUGH * (1 + 1e-9)


def test_a_group_is_split_where_it_does_not_fit_and_where_ranks_would_wait() -> None:
    group = [[example(str(n), [9] * 10, [1, 2, 3, 4, 5])] for n in range(4)]

    def rows(budget: int, ranks: int) -> list[list[tuple[int, int]]]:
        plan = plan_with_shared_prompts(group, tokens_per_micro_batch=budget, ranks=ranks)
        return [[(len(batch), len(pack(batch).tokens)) for batch in share] for share in plan]

    assert rows(30, 1) == [[(4, 30)]]
    assert rows(29, 1) == [[(3, 25), (1, 15)]]
    assert rows(14, 1) == [[(1, 15)] * 4]
    assert rows(40, 2) == [[(2, 20)], [(2, 20)]]
    assert rows(40, 4) == [[(1, 15)]] * 4


def test_prompts_that_only_begin_alike_are_not_shared() -> None:
    rows = [[example("a", [5, 6, 7], [8])], [example("b", [5, 6], [7, 8])], [example("c", [5, 6, 9], [8])]]
    [[batch]] = plan_with_shared_prompts(rows, tokens_per_micro_batch=100, ranks=1)
    assert pack(batch).prompts == [None] * 3


def test_a_plan_is_the_same_each_time_and_ten_thousand_answers_are_planned_soon() -> None:
    generator = np.random.default_rng(0)
    units = []
    for number in range(1250):
        prompt = generator.integers(3, 99, 200)
        for member in range(8):
            tokens = np.concatenate([prompt, generator.integers(3, 99, int(generator.integers(10, 1000)))])
            units.append([TrainingExample(f"{number}/{member}", tokens, np.arange(len(tokens)) >= 200)])
    start = time.process_time()
    plans = [plan_with_shared_prompts(units, tokens_per_micro_batch=8192, ranks=8) for _ in range(2)]
    assert time.process_time() - start < 5
    names = [[[[e.example_id for e in batch] for batch in share] for share in plan] for plan in plans]
    assert names[0] == names[1]
    assert Counter(name for share in names[0] for batch in share for name in batch).most_common(1)[0][1] == 1


def test_an_example_that_shares_all_its_tokens_cannot_be_packed() -> None:
    whole = TrainingExample("a", np.arange(3), np.zeros(3, dtype=bool), shared_tokens=3)
    with pytest.raises(ValueError, match="example a: 3 of 3 tokens are shared"):
        pack([whole])
