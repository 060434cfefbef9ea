import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.data.cursor import Draw, RowCursor
from slipstream.data.trajectory import Prompt, TrainingExample
from slipstream.errors import DataError


def prompts(count: int, *, salt: int = 0) -> list[Prompt]:
    return [Prompt(row, np.asarray([row, salt]), str(row), None, {}) for row in range(count)]


def cursor(count: int, *, seed: int = 0, shuffle: bool = True, salt: int = 0) -> RowCursor[Prompt]:
    return RowCursor(prompts(count, salt=salt), seed=seed, shuffle=shuffle)


def drawn(source: RowCursor[Prompt], count: int) -> list[tuple[str, int]]:
    return [(draw.draw_id, draw.item.row) for draw in source.take(count)]


sizes = st.integers(1, 12)
counts = st.integers(0, 40)


@given(size=sizes, first=counts, second=counts, seed=st.integers(0, 2**32))
def test_taking_twice_is_taking_once(size: int, first: int, second: int, seed: int) -> None:
    in_two, in_one = cursor(size, seed=seed), cursor(size, seed=seed)
    assert drawn(in_two, first) + drawn(in_two, second) == drawn(in_one, first + second)


@given(size=sizes, first=counts, second=counts)
def test_restoring_equals_not_having_stopped(size: int, first: int, second: int) -> None:
    running = cursor(size, seed=5)
    running.take(first)
    state = json.loads(json.dumps(running.state()))
    resumed = cursor(size, seed=5)
    assert resumed.restore(state)
    assert drawn(resumed, second) == drawn(running, second)


@given(size=sizes, epochs=st.integers(1, 4), shuffle=st.booleans())
def test_every_epoch_holds_every_prompt_once_and_ids_never_recur(size: int, epochs: int, shuffle: bool) -> None:
    draws = drawn(cursor(size, shuffle=shuffle), size * epochs)
    assert len({group_id for group_id, _ in draws}) == size * epochs
    for epoch in range(epochs):
        rows = [row for _, row in draws[epoch * size : (epoch + 1) * size]]
        assert sorted(rows) == list(range(size))
        assert shuffle or rows == list(range(size))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    first = [row for _, row in drawn(cursor(50), 100)]
    assert first[:50] != first[50:]
    assert first[:50] != [row for _, row in drawn(cursor(50, seed=1), 50)]


def test_a_checkpoint_at_the_end_of_an_epoch_starts_the_next_one_in_full() -> None:
    finished = cursor(5)
    finished.take(5)
    resumed = cursor(5)
    resumed.restore(finished.state())
    draws = drawn(resumed, 5)
    assert [group_id for group_id, _ in draws] == [f"1-{position}" for position in range(5)]
    assert sorted(row for _, row in draws) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("size", "salt"), [(4, 0), (20, 0), (10, 1)])
def test_the_place_in_another_dataset_is_not_used(size: int, salt: int) -> None:
    before = cursor(10)
    before.take(7)
    other = cursor(size, salt=salt)
    assert not other.restore(before.state())
    rows = [row for _, row in drawn(other, size)]
    assert sorted(rows) == list(range(size))


def test_ids_stay_unique_when_a_run_goes_on_with_another_dataset() -> None:
    before = cursor(5)
    ids = {group_id for group_id, _ in drawn(before, 12)}
    other = cursor(9, salt=1)
    other.restore(before.state())
    assert ids.isdisjoint(group_id for group_id, _ in drawn(other, 20))


def test_the_state_does_not_grow_with_the_run() -> None:
    long = cursor(3)
    long.take(3000)
    assert len(json.dumps(long.state())) < 200


def test_examples_are_drawn_like_prompts() -> None:
    examples = [TrainingExample(str(row), np.asarray([row, 1]), np.asarray([False, True])) for row in range(6)]
    draws = RowCursor(examples, seed=0, shuffle=True).take(9)
    rows = [(draw.draw_id, int(draw.item.example_id)) for draw in draws]
    assert rows == drawn(cursor(6), 9)


def test_nothing_can_be_drawn_from_no_prompts() -> None:
    with pytest.raises(DataError, match="no row to draw from"):
        cursor(0)


def row_of(draw: Draw[Prompt] | None) -> object:
    return None if draw is None else draw.item.row


@given(size=st.integers(1, 8), taken=st.integers(1, 30), shuffle=st.booleans())
def test_what_was_drawn_is_found_by_its_id_also_after_a_restore(size: int, taken: int, shuffle: bool) -> None:
    original, restored = cursor(size, shuffle=shuffle), cursor(size, shuffle=shuffle)
    draws = original.take(taken)
    restored.restore(original.state())
    assert [row_of(restored.find(draw.draw_id)) for draw in draws] == [draw.item.row for draw in draws]


def test_what_was_drawn_from_other_data_is_not_found() -> None:
    original, changed = cursor(4), cursor(4, salt=1)
    [draw] = original.take(1)
    changed.restore(original.state())
    assert changed.find(draw.draw_id) is None
    [later] = changed.take(1)
    resumed = cursor(4, salt=1)
    assert resumed.restore(changed.state())
    assert row_of(resumed.find(later.draw_id)) == later.item.row
    assert resumed.find(draw.draw_id) is None, "a second restore does not make it come back"
