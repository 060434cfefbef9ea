"""The scores of a reward model at its end: a line each, and histograms of them in the report."""

import json
import math
from pathlib import Path

import pytest

from slipstream.errors import RunDirectoryError
from slipstream.observe.scores import ScoredItem, score_histogram, write_scores

SCORES = [
    ScoredItem("0", "chosen", 1.5),
    ScoredItem("0", "rejected", -0.5),
    ScoredItem("1", "chosen", math.nan),
    ScoredItem("1", "rejected", 0.25),
]


def test_scores_are_written_one_a_line_and_those_that_are_no_numbers_as_null(tmp_path: Path) -> None:
    write_scores(tmp_path / "scores.jsonl", [*SCORES, ScoredItem("2", "true", 0.9, step=3)])
    lines = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert lines[0] == {"item": "0", "group": "chosen", "score": 1.5}
    assert lines[2]["score"] is None
    assert lines[4] == {"item": "2", "step": 3, "group": "true", "score": 0.9}


def test_a_histogram_has_the_finite_scores_of_each_group(tmp_path: Path) -> None:
    write_scores(tmp_path / "scores.jsonl", SCORES)
    histogram = score_histogram(tmp_path / "scores.jsonl")
    assert histogram is not None
    assert histogram.groups == {"better answers": [1.5], "worse answers": [-0.5, 0.25]}


def test_without_scores_there_is_no_histogram(tmp_path: Path) -> None:
    assert score_histogram(tmp_path / "scores.jsonl") is None
    write_scores(tmp_path / "scores.jsonl", [])
    assert score_histogram(tmp_path / "scores.jsonl") is None


@pytest.mark.parametrize("line", ['{"group": "odd", "score": 1}', '{"group": "true", "score": "high"}', "[]", "no"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "scores.jsonl").write_text(line + "\n")
    with pytest.raises(RunDirectoryError, match=r"scores\.jsonl"):
        score_histogram(tmp_path / "scores.jsonl")
