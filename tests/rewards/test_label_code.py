"""Test code of a label: what is refused because no program could pass or fail it, and what it counts."""

from typing import Any

import pytest

from slipstream.rewards.code import read_tests
from slipstream.rewards.label_code import COUNT, LabelError, names_under_test, read_pieces


def read(label: Any) -> Any:
    tests = read_tests(label)
    pieces, names = read_pieces([tests.setup, *tests.tests], check=tests.check)
    return pieces, names_under_test(names)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ({"test": "def test_f(x):\n    assert f(x) == 2"}, "only defines what nothing calls"),
        ({"test": "def check(candidate):\n    assert candidate(1) == 2"}, "needs an entry_point"),
        ({"test": "def check(candidate):\n    assert candidate(1) == 2", "entry_point": None}, "needs an entry_point"),
        ({"test": "# assert f(1) == 1"}, "checks nothing"),
        (["# assert f(1) == 1"], "checks nothing"),
        (["'assert'"], "checks nothing"),
        (["f(1)\nassert True"], "checks nothing"),
        (["assert (f(1) == 1, 'bad')"], "always true"),
        (["assert 'f(1) == 1'"], "always true"),
        (["assert sum(len([1])) == 1"], "not clear which of len, sum"),
        (["import numpy\nassert f(1) == 1"], "imports numpy"),
        (["try:\n    assert f(1) == 1\nexcept Exception:\n    pass"], "catches its own assertion"),
        (["try:\n    f(1)\n    assert False\nexcept:\n    pass"], "catches its own assertion"),
        (["assert isinstance(f(1), Node)"], "needs a type of the program"),
        (["try:\n    f(1)\n    assert False\nexcept MyError:\n    pass"], "needs a type of the program"),
        (["import asyncio\nassert asyncio.run(f(1)) == 1"], "awaits"),
    ],
)
def test_tests_that_no_program_could_fail_or_pass_are_the_fault_of_the_label(label: Any, message: str) -> None:
    with pytest.raises(LabelError, match=message):
        read(label)


@pytest.mark.parametrize(
    ("test", "names"),
    [
        ("assert f(1) == g(2)", {"f", "g"}),
        ("assert sum([1]) == 1", {"sum"}),
        ("assert set(sum([1])) == set([1])", {"sum"}),  # a type is seldom what a program is to define
        ("assert abs(result - 5) < 1", set()),
        ("from solution import sum as total\nassert total([1]) == len([1])", set()),
        ("assert calendar(1) == 2", {"calendar"}),
        ("import math\nassert math.isclose(f(1), 2)", {"f"}),
        ("def g(x): return f(x)\nassert g(1) == 2", {"f"}),
    ],
)
def test_which_names_mean_the_program_even_where_python_has_them(test: str, names: set[str]) -> None:
    assert read([test])[1] == names


@pytest.mark.parametrize(
    ("test", "checks"),
    [
        ("assert f(1) == 1", 1),
        ("for n in range(3): assert f(n) == n", 3),
        ("for n in []: assert f(n) == n", 0),
        ("assert f(1) == 1\nassert True", 1),
        ("if f(1) == 2: raise AssertionError", 1),
        ("try:\n    f(1) + ''\n    assert False\nexcept TypeError: pass", 1),
        ("try:\n    f(1) + ''\nexcept Exception: pass\nelse: assert False", 1),
        ("assert (n := f(1)) == 1 and n == 1", 1),
    ],
)
def test_test_code_counts_the_checks_that_it_makes(test: str, checks: int) -> None:
    (_, piece), _ = read([test])
    outcomes: list[Any] = []
    exec(piece.code, {"f": abs, COUNT: lambda outcome: outcomes.append(outcome) or outcome})
    assert len(outcomes) == checks
