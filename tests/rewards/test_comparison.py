"""What counts as the expected output, and as the expected result of a call."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rewards.comparison import same_output, same_result


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ("1 2\n3", "1 2\n3\n", True),
        ("1 2  \n3\n\n\n", "1 2\n3", True),
        ("1\r\n2", "1\n2", True),
        ("1  2", "1 2", True),
        (" 1", "1", True),
        ("1\n\n2", "1\n2", False),
        ("1 2", "12", False),
        ("YES", "Yes", False),
        ("", "0", False),
        ("0.3333333333", "0.333333333333", True),
        ("1000000.5", "1000000.0", True),  # within a millionth
        ("0.34", "0.33", False),
        ("3", "3.0", True),
        ("3.0", "3", False),  # an integer is expected as one
        ("1000001", "1000000", False),
        ("1e3", "1000.0", True),
        ("nan", "0.5", False),
        ("inf", "1e309", False),
        ("\uff10.5", "0.5", False),  # digits of other scripts are not what a program prints
        ("0.5 apples", "0.5 pears", False),
        ("9" * 10_000, "0.5", False),
    ],
)
def test_outputs_are_compared_line_by_line_and_numbers_within_a_millionth(
    found: str, expected: str, same: bool
) -> None:
    assert same_output(found, expected) is same


@given(st.text(max_size=200))
def test_every_output_is_the_same_as_itself_whatever_follows_its_lines(output: str) -> None:
    assert same_output(output, output)
    assert same_output("\n".join(line + " \t" for line in output.splitlines()) + "\n\n", output)


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ((1, 2), [1, 2], True),
        ({1: "a"}, {"1": "a"}, True),
        (0.1 + 0.2, 0.3, True),
        (3, [3], True),  # as APPS writes results
        ([3], [3], True),
        ([3], [[3]], True),
        ([3, 4], [3], False),
        ("3", 3, False),
        (None, [], False),
        (0.2, 0.3, False),
        (float("nan"), 0.3, False),
    ],
)
def test_results_of_calls_are_compared_as_json(found: Any, expected: Any, same: bool) -> None:
    assert same_result(found, expected) is same
