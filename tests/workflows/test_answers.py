"""What is chosen from the answers to a prompt, and what all answers are worth, on answers written down by hand."""

from typing import Any

import pytest

from slipstream.workflows.answers import AnswerCounts, best_answer, best_rows, pair_rows, worst_answer

MESSAGES = [{"role": "user", "content": "What is 1 + 1?"}]


def sample(response: str, reward: float | None, finish_reason: str = "stop") -> dict[str, Any]:
    return {
        "response": response,
        "finish_reason": finish_reason,
        "tokens": len(response),
        "reward": reward,
        "parts": {},
        "answer": None,
        "failure": None if reward is not None else "raised: KeyError",
    }


def record(*samples: dict[str, Any], prompt: Any = "What is 1 + 1?", row: int = 0) -> dict[str, Any]:
    return {"row": row, "prompt": prompt, "label": "2", "samples": list(samples)}


def test_the_best_answer_is_the_first_of_those_with_the_highest_reward() -> None:
    best = best_answer(record(sample("a", 0.0), sample("b", 1.0), sample("c", 1.0)), None)
    assert best is not None and best["response"] == "b"


def test_the_worst_answer_is_the_first_of_those_with_the_lowest_reward() -> None:
    asked = record(sample("a", 0.5), sample("b", 0.0), sample("c", 1.0), sample("d", 0.0))
    worst = worst_answer(asked, asked["samples"][2])
    assert worst is not None and worst["response"] == "b"


@pytest.mark.parametrize(
    "unusable",
    [sample("cut", 2.0, "length"), sample("stopped", 2.0, "aborted"), sample(" \n", 2.0), sample("failed", None)],
    ids=["cut at the limit", "not finished", "empty", "not scored"],
)
def test_an_answer_that_cannot_be_learned_from_is_never_chosen(unusable: dict[str, Any]) -> None:
    best = best_answer(record(unusable, sample("fine", 1.0)), None)
    assert best is not None and best["response"] == "fine"
    assert best_answer(record(unusable), None) is None
    low = unusable | {"reward": None if unusable["reward"] is None else -1.0}
    assert list(pair_rows([record(low, sample("fine", 1.0))], None)) == []


def test_an_answer_below_the_minimum_is_not_the_best_and_makes_no_pair() -> None:
    asked = record(sample("a", 0.25), sample("b", 0.0))
    assert best_answer(asked, 0.5) is None
    assert list(best_rows([asked], 0.5)) == list(pair_rows([asked], 0.5)) == []
    assert [row["response"] for row in best_rows([asked], 0.25)] == ["a"]
    assert [(row["chosen"], row["rejected"]) for row in pair_rows([asked], 0.25)] == [("a", "b")]


def test_equal_rewards_and_equal_answers_make_no_pair() -> None:
    equal = record(sample("a", 1.0), sample("b", 1.0))
    twins = record(sample("a", 1.0), sample("a", 0.0))
    assert list(pair_rows([equal, twins], None)) == []
    assert len(list(best_rows([equal, twins], None))) == 2


def test_selections_have_the_columns_of_the_other_workflows_and_the_prompt_as_it_was() -> None:
    records = [record(sample("2", 1.0), sample("3", 0.0), prompt=MESSAGES, row=7) | {"source": "sums"}]
    assert list(best_rows(records, None)) == [
        {"source": "sums", "row": 7, "prompt": MESSAGES, "response": "2", "reward": 1.0}
    ]
    assert list(pair_rows(records, None)) == [
        {
            "source": "sums",
            "row": 7,
            "prompt": MESSAGES,
            "chosen": "2",
            "rejected": "3",
            "chosen_reward": 1.0,
            "rejected_reward": 0.0,
        }
    ]


def test_counts_are_those_of_a_calculation_by_hand() -> None:
    counts = AnswerCounts(minimum_reward=1.0)
    counts.add(record(sample("aa", 1.0), sample("bbbb", 0.0)))
    counts.add(record(sample("cc", 0.0, "length"), sample("dd", 0.0)))
    counts.add(record(sample("ee", 2.0), sample("ff", None)))
    counts.add(record(sample("gg", None), sample("hh", None)))
    assert counts.summary(is_scored=True) == {
        "prompts": 4,
        "answers": 8,
        "mean_length": 18 / 8,
        "truncated_share": 1 / 8,
        "mean_reward": 3 / 5,
        "best_mean_reward": (1 + 0 + 2) / 3,
        # Of the prompts with a scored answer: half of the first one's, none of the second's, the third's.
        "pass@1": pytest.approx((0.5 + 0.0 + 1.0) / 3),
        "pass@2": 0.5,
        "equal_rewards_share": 2 / 4,
        "unscored": 3,
    }


def test_without_a_reward_there_is_nothing_to_say_about_rewards() -> None:
    counts = AnswerCounts(minimum_reward=None)
    counts.add(record(sample("aa", None)))
    assert counts.summary(is_scored=False) == {"prompts": 1, "answers": 1, "mean_length": 2.0, "truncated_share": 0.0}


def test_without_a_minimum_no_answer_counts_as_right() -> None:
    counts = AnswerCounts(minimum_reward=None)
    counts.add(record(sample("aa", 1.0)))
    assert not [name for name in counts.summary(is_scored=True) if name.startswith("pass@")]
