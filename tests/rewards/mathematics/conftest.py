"""What the tests of the math verifier share: one grade, in this process."""

from collections.abc import Callable
from typing import Any

import pytest

from slipstream.rewards.function import Score, ScoredText
from slipstream.rewards.mathematics.verifier import math


@pytest.fixture(scope="session")
def grade() -> Callable[..., Score]:
    """`grade(label, response, prompt="", **options)`."""

    def grade_one(label: Any, response: str, prompt: str = "", **options: Any) -> Score:
        return math(ScoredText(prompt, response, label, {}, "stop", 1), **options)

    return grade_one
