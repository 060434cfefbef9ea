"""Naming a reward function, and what it may return."""

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.errors import ConfigError, RewardError
from slipstream.rewards.conventions import check_options
from slipstream.rewards.function import (
    Score,
    UnusableRewardError,
    check_reward_spec,
    check_reward_value,
    resolve_reward,
)

SOURCE = """
from os.path import basename as imported
def score_length(text, *, longest=10): return 1.0
async def score_remotely(text): return 2.0
assigned = lambda text: 3.0
LIMIT = 5
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with `rewards_of_mine.py` in it, from which modules are importable."""
    (tmp_path / "rewards_of_mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_function_is_found_by_relative_path_absolute_path_module_and_object(folder):
    for spec in ("rewards_of_mine.py:score_length", f"{folder}/rewards_of_mine.py:score_length"):
        assert resolve_reward(spec)(None) == 1.0
    assert resolve_reward("rewards_of_mine:assigned")(None) == 3.0
    assert resolve_reward(len) is len


def test_a_file_may_import_its_neighbours(folder):
    (folder / "deep").mkdir()
    (folder / "deep" / "neighbour_of_mine.py").write_text("VALUE = 4.0")
    (folder / "deep" / "main.py").write_text("from neighbour_of_mine import VALUE\ndef f(text): return VALUE")
    assert resolve_reward("deep/main.py:f")(None) == 4.0


BAD_SPECS = [
    ("maths", "'maths' is neither .* built-in rule .*exact_match.*; did you mean 'math'"),
    ("module.function", "neither 'module:function'"),
    (":function", "neither"),
    ("rewards_of_mine:", "neither"),
    ("no_such_module:f", "there is no module 'no_such_module'; .* working directory"),
    ("no_such.module:f", "there is no module 'no_such.module'"),
    ("missing.py:f", "there is no file .*missing.py"),
    ("rewards_of_mine.py:score_lenght", "no function 'score_lenght'; found .*; did you mean 'score_length'"),
    ("rewards_of_mine:score_lenght", "no function 'score_lenght'; found .*; did you mean 'score_length'"),
]


@pytest.mark.parametrize(("spec", "message"), BAD_SPECS)
def test_a_wrong_name_is_an_error_that_says_what_there_is(folder, spec, message):
    with pytest.raises(ConfigError, match=message):
        resolve_reward(spec)


@pytest.mark.parametrize(("spec", "message"), BAD_SPECS)
def test_the_check_without_running_user_code_finds_the_same(folder, spec, message):
    with pytest.raises(ConfigError, match=message):
        check_reward_spec(spec)


def test_the_check_without_running_user_code_runs_none(folder):
    (folder / "loud.py").write_text("raise SystemExit('imported')\ndef f(text): return 1.0")
    check_reward_spec("loud.py:f")
    for name in ("score_length", "score_remotely", "assigned", "imported"):
        check_reward_spec(f"rewards_of_mine.py:{name}")
    check_reward_spec("math")
    check_reward_spec("reasoning_gym")


def test_a_syntax_error_is_named_with_its_line(folder):
    (folder / "broken.py").write_text("x = 1\ndef f(text:\n")
    with pytest.raises(ConfigError, match=r"broken.py, line 2"):
        check_reward_spec("broken.py:f")
    with pytest.raises(RewardError, match=r"importing .*broken.py raised SyntaxError"):
        resolve_reward("broken.py:f")


@pytest.mark.parametrize("spec", ["failing.py:f", "failing:f"])
def test_an_import_that_fails_keeps_its_own_error_and_place(folder, spec):
    (folder / "failing.py").write_text("import slipstream\nimport a_library_that_is_not_there\n")
    with pytest.raises(
        RewardError, match=r"raised ModuleNotFoundError: No module named 'a_library_that_is_not_there' .*, line 2\)"
    ):
        resolve_reward(spec)


def test_something_that_cannot_be_called_is_no_function(folder):
    with pytest.raises(ConfigError, match="LIMIT in rewards_of_mine is a int, no function"):
        resolve_reward("rewards_of_mine:LIMIT")


def test_options_must_fit_the_function(folder):
    function = resolve_reward("rewards_of_mine:score_length")
    check_options(function, {"longest": 3})
    with pytest.raises(ConfigError, match=r"score_length\(text, \*, longest=10\) .* unexpected keyword argument 'max'"):
        check_options(function, {"max": 3})


@pytest.mark.parametrize(
    "value", [1, 1.0, True, Fraction(1), np.float32(1), np.bool_(True), np.array(1.0), torch.tensor(1.0)]
)
def test_any_scalar_is_a_reward(value):
    score = check_reward_value(value)
    assert score == Score(1.0)
    assert type(score.reward) is float


def test_named_parts_add_up_unless_one_of_them_is_the_reward():
    assert check_reward_value({"right": 1.0, "format": np.float64(0.25)}) == Score(1.25, {"right": 1.0, "format": 0.25})
    assert check_reward_value({"reward": 0.5, "words": 12}) == Score(0.5, {"words": 12.0})


def test_a_score_is_checked_like_what_it_holds_and_keeps_its_answer():
    score = check_reward_value(Score(np.float32(1), {"right": True}, "72"))
    assert score == Score(1.0, {"right": 1.0}, "72")
    with pytest.raises(UnusableRewardError, match=r"returned nan, expected a finite number"):
        check_reward_value(Score(float("nan")))
    with pytest.raises(UnusableRewardError, match=r"for 'right'"):
        check_reward_value(Score(1.0, {"right": None}))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "returned None, expected one number"),
        (math.nan, "returned nan, expected a finite number"),
        (-math.inf, "returned -inf, expected a finite number"),
        (torch.tensor(math.nan), "returned nan, expected a finite number"),
        ("1.0", "returned the string '1.0', expected one number"),
        ([1.0, 0.0, 1.0], "returned 3 values, expected one number"),
        ((1.0,), "returned 1 values, expected one number"),
        (np.zeros(3), r"returned an array of shape \(3,\), expected one number"),
        (torch.zeros(2, 1), r"returned an array of shape \(2, 1\), expected one number"),
        (10**400, "returned a number too large for a float"),
        (1j, "returned a complex, expected one number"),
        (object(), "returned a object, expected one number"),
        ({}, "returned an empty dict"),
        ({"right": 1.0, "format": None}, "returned None, expected one number for 'format'"),
        ({"a": 1e308, "b": 1e308}, "returned inf"),
    ],
)
def test_everything_else_is_refused_with_what_it_was(value, message):
    with pytest.raises(UnusableRewardError, match=message):
        check_reward_value(value)
