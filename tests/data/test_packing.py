import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.data.packing import pack, plan_micro_batches, sequence_cost
from slipstream.data.trajectory import TrainingExample

lengths_strategy = st.lists(st.integers(1, 300), max_size=60)
ranks_strategy = st.integers(1, 5)
budgets = st.integers(1, 400)


@given(lengths=lengths_strategy, ranks=ranks_strategy, budget=budgets)
def test_a_plan_holds_every_sequence_once_in_as_many_micro_batches_on_every_rank(
    lengths: list[int], ranks: int, budget: int
) -> None:
    plan = plan_micro_batches(lengths, tokens_per_micro_batch=budget, ranks=ranks)
    assert len(plan) == ranks
    assert len({len(micro_batches) for micro_batches in plan}) == 1
    assert sorted(index for rank in plan for micro_batch in rank for index in micro_batch) == list(range(len(lengths)))


@given(lengths=lengths_strategy, ranks=ranks_strategy, budget=budgets)
def test_micro_batches_keep_the_budget_and_a_longer_sequence_sits_alone(
    lengths: list[int], ranks: int, budget: int
) -> None:
    for rank in plan_micro_batches(lengths, tokens_per_micro_batch=budget, ranks=ranks):
        for micro_batch in rank:
            tokens = [lengths[index] for index in micro_batch]
            assert sum(tokens) <= budget or len(tokens) == 1
            assert tokens == sorted(tokens), "equal lengths are adjacent"


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=60), ranks=ranks_strategy, budget=budgets)
def test_ranks_differ_by_no_more_than_the_cost_of_one_sequence(lengths: list[int], ranks: int, budget: int) -> None:
    plan = plan_micro_batches(lengths, tokens_per_micro_batch=budget, ranks=ranks)
    loads = [sum(sequence_cost(lengths[index]) for micro_batch in rank for index in micro_batch) for rank in plan]
    assert max(loads) - min(loads) <= sequence_cost(max(lengths)) * (1 + 1e-9)


@given(lengths=lengths_strategy, ranks=ranks_strategy, budget=budgets)
def test_no_two_micro_batches_of_a_rank_could_be_one(lengths: list[int], ranks: int, budget: int) -> None:
    for rank in plan_micro_batches(lengths, tokens_per_micro_batch=budget, ranks=ranks):
        filled = sorted(sum(lengths[index] for index in micro_batch) for micro_batch in rank if micro_batch)
        assert len(filled) < 2 or filled[0] + filled[1] > budget


def test_long_sequences_are_placed_first_and_gaps_are_filled_exactly() -> None:
    assert plan_micro_batches([1, 1, 2], tokens_per_micro_batch=10, ranks=2) == [[[2]], [[0, 1]]]
    assert plan_micro_batches([3, 4, 6, 7], tokens_per_micro_batch=10, ranks=1) == [[[0, 3], [1, 2]]]


def test_a_plan_is_the_same_each_time() -> None:
    lengths = np.random.default_rng(0).integers(1, 50, 200).tolist()
    first, second = (plan_micro_batches(lengths, tokens_per_micro_batch=128, ranks=3) for _ in range(2))
    assert first == second


def test_a_rank_without_sequences_has_empty_micro_batches() -> None:
    assert plan_micro_batches([7], tokens_per_micro_batch=10, ranks=2) == [[[0]], [[]]]
    # Three sequences on two ranks: both make two steps.
    assert plan_micro_batches([9, 9, 9], tokens_per_micro_batch=10, ranks=2) == [[[0], [2]], [[1], []]]


def test_ten_thousand_sequences_are_planned_in_well_under_a_second() -> None:
    lengths = np.random.default_rng(0).integers(10, 3000, 10_000).tolist()
    start = time.process_time()
    plan_micro_batches(lengths, tokens_per_micro_batch=8192, ranks=8)
    assert time.process_time() - start < 0.8


@pytest.mark.parametrize(("budget", "ranks", "lengths"), [(0, 1, [1]), (1, 0, [1]), (1, 1, [0])])
def test_senseless_sizes_are_refused(budget: int, ranks: int, lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        plan_micro_batches(lengths, tokens_per_micro_batch=budget, ranks=ranks)


def example(name: str, tokens: list[int], mask: list[int], **fields: list[float]) -> TrainingExample:
    return TrainingExample(
        name,
        np.asarray(tokens),
        np.asarray(mask, dtype=bool),
        {field: np.asarray(values, dtype=np.float32) for field, values in fields.items()},
    )


def test_packed_sequences_lie_end_to_end_with_targets_after_their_predictors() -> None:
    nothing = float("nan")
    packed = pack(
        [
            example("a", [5, 6, 7], [0, 1, 1], weight=[nothing, 0.1, 0.2]),
            example("b", [8, 9], [0, 0], weight=[nothing, nothing]),
            example("c", [1, 2, 3, 4], [0, 1, 0, 1], weight=[nothing, 0.3, nothing, 0.4]),
        ]
    )
    assert packed.tokens.tolist() == [5, 6, 7, 8, 9, 1, 2, 3, 4]
    assert packed.positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    assert packed.lengths == [3, 2, 4]
    assert packed.predictors.tolist() == [0, 1, 5, 7]
    assert packed.targets.tolist() == [6, 7, 2, 4]
    assert packed.sequence_index.tolist() == [0, 0, 2, 2]
    assert packed.example_ids == ["a", "b", "c"]
    # What lies in masked places never enters, not even as a NaN times zero.
    np.testing.assert_array_equal(packed.token_fields["weight"], np.float32([0.1, 0.2, 0.3, 0.4]))


@st.composite
def examples(draw: st.DrawFn) -> list[TrainingExample]:
    made = []
    for number, length in enumerate(draw(st.lists(st.integers(1, 8), max_size=6))):
        tokens = draw(st.lists(st.integers(0, 99), min_size=length, max_size=length))
        mask = [0, *draw(st.lists(st.integers(0, 1), min_size=length - 1, max_size=length - 1))]
        made.append(example(str(number), tokens, mask, value=[float(token) for token in tokens]))
    return made


@given(rows=examples())
def test_packed_loss_tokens_are_those_of_the_rows_apart(rows: list[TrainingExample]) -> None:
    packed = pack(rows)
    apart = [int(token) for row in rows for token in row.tokens[row.loss_mask]]
    assert packed.targets.tolist() == apart
    assert packed.tokens[packed.predictors + 1].tolist() == apart
    if rows:
        assert packed.token_fields["value"].tolist() == apart
    types = {array.dtype for array in (packed.tokens, packed.positions, packed.predictors, packed.targets)}
    assert types == {np.dtype(np.int64)}


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (example("b", [1, 2], [1, 0]), "example b: its first token is a loss token"),
        (example("b", [1, 2], [0]), "example b: 2 tokens and a loss mask of 1 entries"),
        (example("b", [], []), "example b: 0 tokens"),
        (example("b", [1, 2], [0, 1], weight=[0.0, 1.0]), r"example b has the token fields \['weight'\], others \[\]"),
    ],
)
def test_an_example_that_cannot_be_packed_is_named(second: TrainingExample, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack([example("a", [1, 2], [0, 1]), second])


def test_a_field_of_another_length_is_named() -> None:
    with pytest.raises(ValueError, match="example a: 1 values of weight for 2 tokens"):
        pack([example("a", [1, 2], [0, 1], weight=[0.5])])
