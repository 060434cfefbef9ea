"""The built-in rules: which number a response ends up with, exact comparison, and texts that mean harm."""

import math
import os
import subprocess
import sys
import time
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rewards.function import ScoredText, check_reward_spec, resolve_reward
from slipstream.rewards.rules import BUILTIN_REWARDS, exact_match, final_number, number


def text(response: str, label: Any = None, **fields: Any) -> ScoredText:
    return ScoredText("", response, label, fields, "stop", 1)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("She needs 36 * 30 = 1080 beads.\n#### 1080", 1080),
        ("Total = 1,080 beads.\n#### 1,080", 1080),
        ("#### 109,200,000", 109200000),
        ("#### $1,200.50 in all", Fraction("1200.5")),
        ("#### -7", -7),
        ("#### \u22127", -7),
        ("#### +7", 7),
        ("#### 10 apples", 10),
        ("#### 5\nno, wait\n#### 6", 6),
        ("\\boxed{9,500}", 9500),
        ("\\boxed{.4}", Fraction(2, 5)),
        ("\\boxed{016}", 16),
        ("\\boxed{\n34\n}", 34),
        ("The answer is $\\boxed 7$.", 7),
        ("\\boxed{\\dfrac{1}{2}}", Fraction(1, 2)),
        ("\\boxed{-3/4}", Fraction(-3, 4)),
        ("\\boxed{125\\textnormal{ miles}}", 125),
        ("\\boxed{\\$10}", 10),
        ("\\boxed{42}<|endoftext|>", 42),
        ("\\boxed{10} \\boxed{11} \\boxed{14}", 14),
        ("\\boxed{72", 72),
        ("<think>Maybe \\boxed{7}? No.</think>It must be \\boxed{9}", 9),
        ("Answer: 34\n\nChecked by putting 2 and 3 in.", 34),
        ("Consistent.\n\nFinal Answer: **73**", 73),
        ("The answer is 12. It took 3 steps.", 12),
        ("It is certainly not 42; working it through I get 17.", 17),
        ("worth 80,000 + 150% of 80,000 = 200,000, so the profit is $70,000.", 70000),
        ("so 10-7", 7),
        ("10 - 14 = -4", -4),
        ("x = (-4)", -4),
        ("that makes 3.50.", Fraction("3.5")),
        ("half, that is 1/2", Fraction(1, 2)),
        ("15cm", 15),
        ("#### \u0667\u0662", 72),
    ],
)
def test_the_final_number_of_a_response(response, expected):
    assert final_number(response) == expected


@pytest.mark.parametrize(
    "response",
    [
        "",
        "   \n\n",
        "I don't know.",
        "The code word is AZYUK2A",  # a digit inside a word is no answer
        "7 it is\n#### unknown",  # a marker without a number says that there is none
        "7\n\\boxed{3 \\text{ or } 4 \\text{ or } 5}",  # several answers are none
        "7\n\\boxed{}",
        "7\n\\boxed",
        "\\boxed{\\infty}",
        "\\boxed{\\text{nan}}",
        "\\boxed{1/0}",
        "\\boxed{4 10/3}",
    ],
)
def test_responses_without_a_final_number(response):
    assert final_number(response) is None


@pytest.mark.parametrize(
    ("label", "response", "reward"),
    [
        ("1,080", "#### 1080", 1.0),
        ("-7", "#### 7", 0.0),
        ("500", "\\boxed{9,500}", 0.0),
        ("Half of 48 is 24.\n#### 72", "72", 1.0),
        ("\\boxed{72}", "72", 1.0),
        ("$6$", "\\boxed{6}", 1.0),
        ("10,\\!080", "\\boxed{10080}", 1.0),
        (" 72 ", "72.0", 1.0),
        (72, "72", 1.0),
        (0.1, "0.1", 1.0),
        (0.1, "1/10", 1.0),
        ("\\frac{1}{3}", "1/3", 1.0),
        ("1/3", "0.33", 0.0),
        ("1/3", "0.3333333333333333", 0.0),
        (2**53, str(2**53 + 1), 0.0),
        ("5", "She has 5 apples, buys 7 more.\n#### 12", 0.0),
    ],
)
def test_number_compares_exactly_with_the_label(label, response, reward):
    assert number(text(response, label)) == reward


@pytest.mark.parametrize("label", [None, "", "see the solution above", True, math.nan, math.inf, [5], "5 or 6", "1/0"])
def test_a_label_that_is_no_number_is_a_failure_and_pays_nobody(label):
    with pytest.raises(ValueError, match="the label must be a number, found"):
        number(text("5", label))


@pytest.mark.parametrize(
    "response",
    [
        "\\boxed{9**9**9**9}",
        "\\boxed{10^{10^{10}}}",
        "\\boxed{(10^{9})!}",
        "#### 1e999999999",
        "9" * 200_000,
        "1," * 100_000,
        "\\boxed{" * 50_000,
        "{" * 200_000,
        "#### " + "(" * 200_000,
        "-" * 200_000,
        "answer is" * 20_000,
        "\\text{ " * 50_000,
        "1/" * 100_000,
        " " * 200_000,
    ],
)
def test_texts_that_would_hang_an_evaluating_rule_are_done_at_once(response):
    started = time.process_time()
    assert number(text(response, "72")) == 0.0
    assert time.process_time() - started < 2.0


def test_a_response_that_is_code_has_no_effect(monkeypatch):
    monkeypatch.delenv("SLIPSTREAM_PWNED", raising=False)
    attack = "\\boxed{[exec(\"import os;os.environ.update({'SLIPSTREAM_PWNED':'1'})\")]}"
    assert number(text(attack, "72")) == 0.0
    assert "SLIPSTREAM_PWNED" not in os.environ


@given(st.text(), st.integers(-(10**20), 10**20))
def test_any_text_before_the_marker_leaves_the_answer_alone(noise, value):
    assert final_number(f"{noise}\n#### {value:,}") == value


@given(st.text(alphabet="0123456789.,-+/ \\{}#$%boxedfrac\ud83d\u0662"))
def test_any_text_gives_a_number_or_none(response):
    assert final_number(response) is None or isinstance(final_number(response), Fraction)


def test_exact_match_ignores_white_space_around_both_and_nothing_else():
    assert exact_match(text(" Paris\n", "Paris ")) == 1.0
    assert exact_match(text("paris", "Paris")) == 0.0
    assert exact_match(text("Paris.", "Paris")) == 0.0
    assert exact_match(text("7", 7)) == 1.0


@pytest.mark.parametrize("label", [None, "", "  "])
def test_exact_match_without_a_label_is_a_failure(label):
    with pytest.raises(ValueError, match="the label must be a text"):
        exact_match(text("", label))


def test_every_built_in_name_leads_to_a_function():
    for name in BUILTIN_REWARDS:
        check_reward_spec(name)
    assert resolve_reward("number") is number
    assert resolve_reward("exact_match") is exact_match


@pytest.mark.slow
def test_a_reasoning_gym_answer_is_scored_by_its_own_task():
    import reasoning_gym as gym

    reward = resolve_reward("reasoning_gym")
    entry = gym.create_dataset("chain_sum", size=1, seed=1)[0]
    assert reward(text(f" {entry['answer']} \n", **entry)) == 1.0
    assert reward(text("no idea", **entry)) == 0.0
    with pytest.raises(ValueError, match="lacks metadata; found answer, question"):
        reward(text("1", question="1", answer="1"))
    with pytest.raises(ValueError, match="lacks source_dataset"):
        reward(text("1", question="1", answer="1", metadata={}))


def test_the_names_of_the_rules_cost_no_heavy_import():
    code = (
        "import sys, slipstream.rewards.rules, slipstream.rewards.worker;"
        "print([name for name in ('torch', 'reasoning_gym', 'numpy', 'ray') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "[]"
