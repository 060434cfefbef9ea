"""Runs inside the sandbox: whether what a program wrote or returned is what was expected."""

import re
from typing import Any

TOLERANCE = 1e-6

# A number whose last digits depend on how it was computed: with a decimal point or an exponent.
INEXACT = re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?", re.ASCII)
NUMERAL = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)
LONGEST_NUMERAL = 60


def same_output(found: str, expected: str) -> bool:
    """Whether two outputs agree line by line, white space at the ends of lines and of the text aside.

    Where a line differs its words are compared: a number with a decimal point or an exponent is met by one that is
    within a millionth of it, absolute or relative, the larger.
    """
    found_lines = [line.rstrip() for line in found.rstrip().splitlines()]
    expected_lines = [line.rstrip() for line in expected.rstrip().splitlines()]
    return len(found_lines) == len(expected_lines) and all(
        left == right or same_words(left.split(), right.split())
        for left, right in zip(found_lines, expected_lines, strict=True)
    )


def same_words(found: list[str], expected: list[str]) -> bool:
    """Whether two lines are the same words, numbers within the tolerance."""
    return len(found) == len(expected) and all(
        left == right or same_number(left, right) for left, right in zip(found, expected, strict=True)
    )


def same_number(found: str, expected: str) -> bool:
    """Whether a word is a number close enough to an inexact one."""
    if max(len(found), len(expected)) > LONGEST_NUMERAL:
        return False
    if not INEXACT.fullmatch(expected) or not NUMERAL.fullmatch(found):
        return False
    return close(float(found), float(expected))


def close(found: float, expected: float) -> bool:
    """Whether two numbers are within the tolerance; never for what is not finite."""
    return abs(found - expected) <= TOLERANCE * max(1.0, abs(expected)) < float("inf")


def same_result(found: Any, expected: Any) -> bool:
    """Whether a call returned what is expected. A list of one is met by its element too, as APPS writes results."""
    return same_value(found, expected) or (
        isinstance(expected, list) and len(expected) == 1 and same_value(found, expected[0])
    )


def same_value(found: Any, expected: Any) -> bool:
    """Equality for what has gone through JSON: tuples are lists, keys are texts, floats within the tolerance."""
    if isinstance(found, list | tuple) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(same_value, found, expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        by_text = {str(key): value for key, value in found.items()}
        return by_text.keys() == expected.keys() and all(
            same_value(by_text[key], value) for key, value in expected.items()
        )
    if isinstance(expected, float) and isinstance(found, int | float):
        return found == expected or close(float(found), expected)
    return bool(found == expected)
