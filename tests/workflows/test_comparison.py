"""Win rates of one policy's answers against another's."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import RewardError
from slipstream.workflows.comparison import compare, rewards_by_prompt, win_rate

rewards = st.dictionaries(st.sampled_from("abc"), st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=3), min_size=1)


def answers(path: Path, *rewards: list[float | None], source: str | None = None) -> Path:
    """A file as `slipstream generate` writes it: the rewards of the answers to each prompt."""
    origin = {} if source is None else {"source": source}
    rows = [{**origin, "row": row, "samples": [{"reward": each} for each in own]} for row, own in enumerate(rewards)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_answer_meets_every_other_and_a_tie_is_half_a_win() -> None:
    assert win_rate({"a": [1.0, 0.0]}, {"a": [0.0, 0.0]}) == 0.75
    assert win_rate({"a": [1.0], "b": [0.0]}, {"a": [0.0], "b": [1.0]}) == 0.5


def test_prompts_count_the_same_however_many_answers_they_have() -> None:
    assert win_rate({"a": [1.0], "b": [0.0]}, {"a": [0.0] * 9, "b": [1.0]}) == 0.5


def test_prompts_without_a_scored_answer_of_both_are_left_out() -> None:
    assert win_rate({"a": [1.0], "b": [], "c": [0.0]}, {"a": [0.0], "b": [1.0]}) == 1.0
    with pytest.raises(RewardError, match="no prompt has scored answers of both"):
        win_rate({"a": []}, {"a": [1.0]})


@given(one=rewards, other=rewards)
def test_what_one_wins_the_other_loses(one: dict[str, list[float]], other: dict[str, list[float]]) -> None:
    if not any(one.get(prompt) and other.get(prompt) for prompt in "abc"):
        return
    assert win_rate(one, other) + win_rate(other, one) == pytest.approx(1)


def test_each_policy_is_compared_with_the_first(tmp_path: Path) -> None:
    files = {
        "sft": answers(tmp_path / "sft.jsonl", [0.0, 1.0], [0.0, None]),
        "rl": answers(tmp_path / "rl.jsonl", [1.0, 1.0], [1.0, 0.0]),
    }
    assert compare(files) == {
        "sft": {"mean_reward": pytest.approx(1 / 3)},
        "rl": {"mean_reward": 0.75, "win_rate": 0.75},
    }


def test_rows_of_several_sources_are_told_apart(tmp_path: Path) -> None:
    file = answers(tmp_path / "mixed.jsonl", [1.0], source="b")
    assert rewards_by_prompt(file) == {"b:0": [1.0]}
