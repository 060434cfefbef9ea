"""`slipstream grade`: a line out for every row in, whatever the rows hold."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli import main
from slipstream.config.schema import RewardConfig
from slipstream.errors import ConfigError, DataError
from slipstream.workflows.grade import grade

KEYS = {"reward", "answer", "milliseconds", "failure"}
SLOW_AND_FAULTY = """
import os
import time

from slipstream import Score


def verifier(text, *, bonus=0.0):
    if text.response == "slow":
        time.sleep(0.5)
    if text.response == "hang":
        time.sleep(60)
    if text.response == "exit":
        os._exit(3)
    return Score(float(text.response == str(text.label)) + bonus, answer=text.fields.get("unit"))
"""


@pytest.fixture
def graded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Grades lines of text with the verifier above."""
    (tmp_path / "mine.py").write_text(SLOW_AND_FAULTY)
    monkeypatch.chdir(tmp_path)

    def run(*rows: str | dict[str, Any], **settings: Any) -> list[dict[str, Any]]:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / "rows.jsonl").write_text("\n".join(lines))
        output = io.BytesIO()
        config = RewardConfig(**{"function": "mine.py:verifier", "workers": 2, "timeout_s": 2.0} | settings)
        grade(tmp_path / "rows.jsonl", config, output)
        return [json.loads(line) for line in output.getvalue().decode("utf-8").removesuffix("\n").split("\n") if line]

    return run


def test_each_row_has_its_line_in_the_order_of_the_rows(graded: Callable[..., list[dict[str, Any]]]) -> None:
    rows = [{"response": "slow" if number % 5 == 0 else str(number), "gold": number} for number in range(12)]
    lines = graded(*rows)
    assert [line["reward"] for line in lines] == [0.0 if number % 5 == 0 else 1.0 for number in range(12)]
    assert {frozenset(line) for line in lines} == {frozenset(KEYS)}
    assert all(line["failure"] is None and line["milliseconds"] > 0 for line in lines)
    assert lines[0]["milliseconds"] > 400, "what the call took"


def test_gold_or_label_is_the_reference_and_gold_goes_first(graded: Callable[..., list[dict[str, Any]]]) -> None:
    labels = [{"gold": "7"}, {"label": 7}, {"gold": 8, "label": 7}, {"gold": None, "label": 7}]
    assert [line["reward"] for line in graded(*({"response": "7"} | label for label in labels))] == [1.0, 1.0, 0.0, 1.0]


def test_half_a_character_and_other_scripts_arrive_as_they_are(graded: Callable[..., list[dict[str, Any]]]) -> None:
    lines = graded(*({"response": "1", "gold": "1", "unit": unit} for unit in ("\ud83d", "é", "\u2028", "\x00")))
    assert [line["answer"] for line in lines] == ["\ud83d", "é", "\u2028", "\x00"]


def test_a_row_that_cannot_be_graded_is_answered_with_a_failure_and_costs_no_other(
    graded: Callable[..., list[dict[str, Any]]],
) -> None:
    lines = graded(
        {"response": "hang", "gold": "1"},
        {"response": "exit", "gold": "1"},
        "{not json",
        "",
        "[1]",
        "[" * 100_000,
        {"response": 5, "gold": "5"},
        {"gold": "5"},
        {"response": "5"},
        {"response": "5", "gold": None},
        {"response": "5", "gold": "5", "response_length": "two"},
        {"response": "1", "gold": "1"},
    )
    assert [line["reward"] for line in lines] == [None] * 10 + [1.0], "the empty line is no row"
    failures = [line["failure"] for line in lines]
    assert failures[0] == "timed out after 2 s"
    assert failures[1].startswith("killed: the process ended with exit code 3")
    assert failures[2].startswith("unusable row: line 3: not valid JSON")
    assert failures[3] == "unusable row: line 5: expected a JSON object, found list"
    assert failures[4].startswith("unusable row: line 6: not valid JSON")
    assert failures[5] == "unusable row: line 7: response must be text, found int"
    assert failures[6] == "unusable row: line 8: response must be text, found none"
    assert failures[7] == "unusable row: line 9: it has neither gold nor label; found response"
    assert failures[8] == "unusable row: line 10: it has neither gold nor label; found response, gold"
    assert failures[9] == "unusable row: line 11: response_length must be a whole number, found 'two'"


def test_options_and_other_columns_reach_the_verifier(graded: Callable[..., list[dict[str, Any]]]) -> None:
    (line,) = graded({"response": "1", "gold": "1", "unit": "cm"}, options={"bonus": 0.5})
    assert (line["reward"], line["answer"]) == (1.5, "cm")


def test_an_empty_file_has_no_lines_and_a_missing_one_is_an_error(
    graded: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    assert graded() == []
    with pytest.raises(DataError, match=r"nothing\.jsonl: cannot be read: No such file or directory"):
        grade(tmp_path / "nothing.jsonl", RewardConfig(function="exact_match"), io.BytesIO())
    with pytest.raises(DataError, match="Is a directory"):
        grade(tmp_path, RewardConfig(function="exact_match"), io.BytesIO())
    with pytest.raises(ConfigError, match="did you mean 'exact_match'"):
        grade(tmp_path / "rows.jsonl", RewardConfig(function="exact_matc"), io.BytesIO())


def test_the_command_writes_nothing_but_lines_to_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"response": "The answer is $\\\\frac{1}{2}$.", "gold": "0.5"}\n')
    assert main(["grade", str(tmp_path / "rows.jsonl"), "--workers", "1", "--timeout_s", "30"]) == 0
    captured = capsys.readouterr()
    (line,) = map(json.loads, captured.out.splitlines())
    assert (line["reward"], line["failure"]) == (1.0, None)
    assert r"\frac{1}{2}" in line["answer"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "0"], "workers: found 0, expected a whole number of at least 1"),
        (["--options", "5"], "options: found 5, expected a mapping"),
        (["--verifier", "mth"], "'mth' is neither"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    assert main(["grade", str(tmp_path / "rows.jsonl"), *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_a_closed_standard_output_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"response": "1", "gold": "1"}\n')
    command = f'"{sys.executable}" -m slipstream.cli grade rows.jsonl --verifier exact_match >&-'
    run = subprocess.run(["sh", "-c", command], cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (run.returncode, run.stderr) == (0, "")
