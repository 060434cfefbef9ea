"""How often, and how fast, does the math verifier judge like a person? Beside plain math-verify, in one run.

    python benchmarks/grading.py graded.jsonl [--disagreements 20] [--limit 1000]

The file has one JSON object a line: `prompt`, `label`, `response`, `correct` (true or false, the judgement to agree
with). math-verify is called as its documentation shows, `verify(parse(label), parse(response))`, with its own settings
and time limits; since it reads LaTeX only between dollars or in a box, a bare label is put between dollars for it. Each
call is guarded: one that raises is a failure, and counts as a judgement of incorrect.

Time is wall time of all rows in this one process, imports and one warming call left out, divided by their number.
Prints a table to standard error and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from math_verify import parse, verify
from rich.console import Console
from rich.table import Table

from slipstream.rewards.function import ScoredText
from slipstream.rewards.mathematics.verifier import math

FIELDS = ("prompt", "label", "response", "correct")

Judge = Callable[[dict[str, Any]], bool]


@dataclass(frozen=True)
class Result:
    """How one verifier did. `agreement` is the share of rows judged like the file does."""

    rows: int
    agreement: float
    false_positives: int
    false_negatives: int
    failures: int
    microseconds: float


def main() -> int:
    """Grade the file with both verifiers and compare. Returns the exit code, 2 for a file that cannot be read."""
    arguments = parse_arguments(sys.argv[1:])
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    try:
        rows = read_rows(arguments.file)[: arguments.limit]
    except (OSError, ValueError) as error:
        print(f"grading: {error}", file=sys.stderr)
        return 2
    results = {}
    for name, judge in (("slipstream", judge_with_slipstream), ("math_verify", judge_with_math_verify)):
        results[name], verdicts = measure(judge, rows)
        show_disagreements(name, rows, verdicts, arguments.disagreements)
    show(results)
    print(json.dumps({"benchmark": "grading", **{name: asdict(result) for name, result in results.items()}}))
    return 0


def parse_arguments(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--limit", type=int, default=None, help="rows to grade; all of them by default")
    parser.add_argument("--disagreements", type=int, default=0, help="rows to show that a verifier judges otherwise")
    return parser.parse_args(words)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of graded responses. Raises ValueError that names the first line that is none."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is no JSON: {error}") from error
        missing = [field for field in FIELDS if not isinstance(row, dict) or field not in row]
        if missing:
            raise ValueError(f"{path}, line {number} lacks {', '.join(missing)}; expected {', '.join(FIELDS)}")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} has no rows")
    return rows


def judge_with_slipstream(row: dict[str, Any]) -> bool:
    """The verdict of the built-in reward `math`."""
    text = ScoredText(row["prompt"], row["response"], row["label"], row, "stop", 1)
    return math(text).reward == 1.0


def judge_with_math_verify(row: dict[str, Any]) -> bool:
    """The verdict of math-verify with its own settings, gold first."""
    label = str(row["label"])
    is_bare = not any(mark in label for mark in ("$", "\\boxed", "####"))
    return bool(verify(parse(f"${label}$" if is_bare else label), parse(row["response"])))


def measure(judge: Judge, rows: Sequence[dict[str, Any]]) -> tuple[Result, list[bool]]:
    """Judge all rows; returns the counts and the verdicts."""
    verdicts, failures = [], 0
    judge({"prompt": "", "label": "\\pi", "response": "\\boxed{2\\pi}"})  # what is loaded on first use
    started = time.perf_counter()
    for row in rows:
        try:
            verdicts.append(judge(row))
        except Exception:  # whatever a verifier raises is what this benchmark counts
            failures += 1
            verdicts.append(False)
    seconds = time.perf_counter() - started
    pairs = [(verdict, bool(row["correct"])) for verdict, row in zip(verdicts, rows, strict=True)]
    result = Result(
        rows=len(rows),
        agreement=round(sum(verdict == correct for verdict, correct in pairs) / len(rows), 6),
        false_positives=pairs.count((True, False)),
        false_negatives=pairs.count((False, True)),
        failures=failures,
        microseconds=round(seconds / len(rows) * 1e6, 1),
    )
    return result, verdicts


def show_disagreements(name: str, rows: Sequence[dict[str, Any]], verdicts: Sequence[bool], most: int) -> None:
    """Print the first rows that a verifier judges otherwise than the file."""
    wrong = [(row, verdict) for row, verdict in zip(rows, verdicts, strict=True) if verdict != bool(row["correct"])]
    for row, verdict in wrong[:most]:
        print(f"{name} says {verdict}: label {row['label']!r}, response ...{row['response'][-120:]!r}", file=sys.stderr)


def show(results: dict[str, Result]) -> None:
    """Print the table."""
    table = Table("verifier", "rows", "agreement", "false +", "false -", "failures", "us/grade")
    for name, result in results.items():
        counts = (result.false_positives, result.false_negatives, result.failures)
        table.add_row(
            name, str(result.rows), f"{result.agreement:.2%}", *map(str, counts), f"{result.microseconds:.0f}"
        )
    Console(stderr=True).print(table)


if __name__ == "__main__":
    sys.exit(main())
