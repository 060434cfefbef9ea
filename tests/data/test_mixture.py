"""Several sources are drawn from by their weights, in a seeded order, from where a run stopped."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from slipstream.config.data import DataConfig
from slipstream.data.conversation import build_sft_examples
from slipstream.data.mixture import Mixture, MixtureCursor, PromptCursor, build_mixture
from slipstream.data.trajectory import Prompt

NAMES = "abcd"


def prompts(count: int) -> list[Prompt]:
    return [Prompt(row, np.asarray([row]), str(row), None, {}) for row in range(count)]


def mixture(*parts: tuple[int, float]) -> Mixture[Prompt]:
    """Sources of so many rows, with so much weight."""
    return Mixture(
        {name: prompts(size) for name, (size, _) in zip(NAMES, parts, strict=False)},
        {name: weight for name, (_, weight) in zip(NAMES, parts, strict=False)},
    )


def drawn(cursor: MixtureCursor[Prompt], count: int) -> list[tuple[str, int]]:
    return [(draw.draw_id, draw.item.row) for draw in cursor.take(count)]


parts = st.lists(st.tuples(st.integers(1, 9), st.floats(0.1, 10)), min_size=1, max_size=4)


@given(parts=parts, count=st.integers(0, 200), seed=st.integers(0, 2**32))
def test_counts_follow_the_weights_at_every_length(parts: list[tuple[int, float]], count: int, seed: int) -> None:
    draws = drawn(MixtureCursor(mixture(*parts), seed=seed, shuffle=True), count)
    found = Counter(draw_id.split(":")[0] for draw_id, _ in draws)
    total = sum(weight for _, weight in parts)
    for name, (_, weight) in zip(NAMES, parts, strict=False):
        assert abs(found[name] - count * weight / total) < len(parts) + 1


@given(parts=parts, count=st.integers(0, 60))
def test_every_source_has_epochs_of_its_own_and_ids_never_recur(parts: list[tuple[int, float]], count: int) -> None:
    draws = drawn(MixtureCursor(mixture(*parts), seed=1, shuffle=True), count)
    assert len({draw_id for draw_id, _ in draws}) == count
    for name, (size, _) in zip(NAMES, parts, strict=False):
        rows = [row for draw_id, row in draws if draw_id.startswith(f"{name}:")]
        for start in range(0, len(rows) - size + 1, size):
            assert sorted(rows[start : start + size]) == list(range(size))


@given(parts=parts, first=st.integers(0, 40), second=st.integers(0, 40))
def test_restoring_equals_not_having_stopped(parts: list[tuple[int, float]], first: int, second: int) -> None:
    running = MixtureCursor(mixture(*parts), seed=3, shuffle=True)
    running.take(first)
    state = json.loads(json.dumps(running.state()))
    resumed = MixtureCursor(mixture(*parts), seed=3, shuffle=True)
    assert resumed.restore(state) == []
    assert drawn(resumed, second) == drawn(running, second)


def test_a_state_at_the_end_of_the_epochs_of_all_sources_starts_the_next_ones_in_full() -> None:
    finished = MixtureCursor(mixture((2, 1.0), (4, 2.0)), seed=3, shuffle=True)
    finished.take(6)
    resumed = MixtureCursor(mixture((2, 1.0), (4, 2.0)), seed=3, shuffle=True)
    resumed.restore(json.loads(json.dumps(finished.state())))
    draws = drawn(resumed, 6)
    expected = [f"a:1-{position}" for position in range(2)] + [f"b:1-{position}" for position in range(4)]
    assert sorted(draw_id for draw_id, _ in draws) == expected
    assert Counter(row for draw_id, row in draws if draw_id.startswith("b")) == {0: 1, 1: 1, 2: 1, 3: 1}


def test_a_source_whose_rows_changed_begins_anew_and_is_named() -> None:
    before = MixtureCursor(mixture((4, 1), (6, 1)), seed=0, shuffle=False)
    before.take(5)
    after = MixtureCursor(mixture((4, 1), (7, 1)), seed=0, shuffle=False)
    assert after.restore(before.state()) == ["b"]
    assert {row for draw_id, row in drawn(after, 4) if draw_id.startswith("b:")} == {0, 1}


def test_the_seed_decides_how_sources_alternate() -> None:
    def order(seed: int) -> str:
        return "".join(
            draw_id[0] for draw_id, _ in drawn(MixtureCursor(mixture((9, 1), (9, 1)), seed=seed, shuffle=True), 1)
        )

    assert {order(seed) for seed in range(20)} == {"a", "b"}


def test_a_source_alone_has_no_name_in_its_ids() -> None:
    cursor = PromptCursor(Mixture({"": prompts(3)}, {"": 1.0}), seed=0, shuffle=False)
    assert [(each.group_id, each.prompt.row) for each in cursor.take(4)] == [
        ("0-0", 0),
        ("0-1", 1),
        ("0-2", 2),
        ("1-0", 0),
    ]


def test_each_source_is_read_by_its_own_keys(qwen_like: Any, tmp_path: Path, write_rows: Callable[..., Path]) -> None:
    ours = write_rows(tmp_path / "ours.jsonl", [{"prompt": "who?", "response": "me"}])
    theirs = write_rows(tmp_path / "theirs.jsonl", [{"q": "what?", "a": "it"}, {"q": ""}])
    data = DataConfig(
        system_prompt="Be brief.",
        mix={
            "ours": {"source": str(ours), "weight": 3},
            "theirs": {
                "source": str(theirs),
                "prompt_key": "q",
                "response_key": "a",
            },
        },
    )
    mixed, reports = build_mixture(data, lambda part, prefix: build_sft_examples(part, qwen_like, 64, id_prefix=prefix))
    assert [example.example_id for example in mixed.items] == ["ours:0", "theirs:0"]
    assert mixed.weights == {"ours": 3.0, "theirs": 1.0}
    assert "Be brief." in qwen_like.decode(mixed.items[1].tokens)
    assert {name: report.counts for name, report in reports.items()} == {"ours": {}, "theirs": {"empty prompt": 1}}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "source is missing"),
        ({"source": "a", "mix": {"b": {"source": "b"}}}, "source belongs to one source: with mix, set mix.NAME.source"),
        ({"rows": 3, "mix": {"b": {"source": "b"}}}, "rows belongs to one source"),
        ({"mix": {"b": {"weight": 2}}}, "source is missing"),
        ({"mix": {"b": {"source": "b", "weight": 0}}}, "greater than 0"),
        ({"mix": {"b/c": {"source": "b"}}}, "must name its sources with letters, digits"),
    ],
)
def test_a_mix_that_makes_no_sense_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DataConfig(**keys)


def test_a_draw_is_found_by_its_id_in_its_source() -> None:
    cursor = MixtureCursor(mixture((3, 1.0), (5, 2.0)), seed=0, shuffle=True)
    draws = cursor.take(12)
    found = [cursor.find(draw.draw_id) for draw in draws]
    assert [(draw.draw_id, draw.item.row) for draw in found if draw is not None] == [
        (draw.draw_id, draw.item.row) for draw in draws
    ]
