"""The rule that compares texts, the names of the built-in rewards, and reasoning-gym's own scoring."""

import os
import subprocess
import sys
from typing import Any

import pytest

from slipstream.rewards.builtin import BUILTIN_REWARDS
from slipstream.rewards.function import ScoredText, check_reward_spec, resolve_reward
from slipstream.rewards.mathematics.verifier import math
from slipstream.rewards.rules import exact_match


def text(response: str, label: Any = None, **fields: Any) -> ScoredText:
    return ScoredText("", response, label, fields, "stop", 1)


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
    assert resolve_reward("math") is math
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
