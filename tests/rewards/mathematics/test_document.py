"""Every row of the tables in docs/math_grading.md is true."""

import re
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "math_grading.md"
ROW = re.compile(r"\| `(.+?)` \| `(.+?)` \| (0|1|failure) \| .*\|")
LINES = DOCUMENT.read_text(encoding="utf-8").splitlines()
ROWS = [match.groups() for match in map(ROW.fullmatch, LINES) if match]


def test_no_row_is_left_out():
    assert len(ROWS) == sum(line.startswith("| `") for line in LINES) > 90


@pytest.mark.parametrize(("label", "response", "reward"), ROWS)
def test_the_document_says_what_the_verifier_does(grade, label, response, reward):
    response = response.replace("\\|", "|")
    if reward == "failure":
        with pytest.raises(ValueError, match="the label must be"):
            grade(label, response)
    else:
        assert grade(label, response).reward == float(reward)
