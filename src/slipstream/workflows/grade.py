"""Grades a file of responses with a verifier, in the child processes that score responses in a run.

One line of JSON comes out for each row, in the order of the rows: what cannot be graded is answered with a failure.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from slipstream.config.schema import RewardConfig
from slipstream.errors import DataError
from slipstream.observe.files import encode, to_json
from slipstream.rewards.function import ScoredText, check_reward_spec
from slipstream.rewards.pool import RewardPool

LABEL_COLUMNS = ("gold", "label")
"""Where the reference answer is: in the first of these that is not null."""

ROWS_IN_FLIGHT = 4
"""Rows handed out for each worker. More would only hold more of a long file in memory."""


class UnusableRowError(Exception):
    """A line of the file that holds nothing to grade. The message says what was found and expected."""


def grade(path: Path, config: RewardConfig, output: BinaryIO) -> None:
    """Write one line for each row of a file of JSON lines to `output`, in UTF-8 and in the order of the rows.

    A row has `response` and `gold` or `label`; its other columns are there for verifiers that read them. A line of the
    output has the keys `reward` (null where the row could not be graded), `answer` (what was read from the response, or
    null), `milliseconds` and `failure` (why there is no reward, or null). Empty lines are no rows. Each row is tried
    once.

    Raises DataError if the file cannot be read, ConfigError if there is no such verifier, RewardError if it cannot be
    loaded.
    """
    assert config.function is not None
    check_reward_spec(config.function)
    try:
        lines = path.open("rb")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; expected a file of JSON lines") from error
    with lines:
        asyncio.run(_grade(_rows(lines), config.model_copy(update={"on_failure": "drop_group"}), output))


async def _grade(rows: Iterable[ScoredText | str], config: RewardConfig, output: BinaryIO) -> None:
    """Score with a bounded number of rows handed out, and write results in the order of the rows."""
    pool = RewardPool(config)
    waiting: deque[asyncio.Task[dict[str, Any]]] = deque()
    try:
        await pool.start()
        for row in rows:
            waiting.append(asyncio.create_task(_graded(pool, row)))
            if len(waiting) >= ROWS_IN_FLIGHT * config.workers:
                _write(output, await waiting.popleft())
        while waiting:
            _write(output, await waiting.popleft())
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await pool.close()


def _write(output: BinaryIO, line: dict[str, Any]) -> None:
    output.write(encode(to_json(line) + "\n"))
    output.flush()


async def _graded(pool: RewardPool, row: ScoredText | str) -> dict[str, Any]:
    """The output line of a row, or of what was wrong with it."""
    if isinstance(row, str):
        return {"reward": None, "answer": None, "milliseconds": 0.0, "failure": row}
    (result,) = await pool.score_texts([row])
    return {
        "reward": result.reward,
        "answer": result.answer,
        "milliseconds": round(1000 * result.seconds, 3),
        "failure": None if result.failure is None else str(result.failure),
    }


def _rows(lines: Iterable[bytes]) -> Iterator[ScoredText | str]:
    """What to score, row by row, or what is wrong with the row."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield _read_row(line)
        except UnusableRowError as error:
            yield f"unusable row: line {number}: {error}"


def _read_row(line: bytes) -> ScoredText:
    """The row of one line; UnusableRowError if there is nothing to grade in it."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UnusableRowError(f"not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise UnusableRowError(f"expected a JSON object, found {type(row).__name__}")
    response = row.get("response")
    if not isinstance(response, str):
        raise UnusableRowError(
            f"response must be text, found {'none' if response is None else type(response).__name__}"
        )
    label = next((row[name] for name in LABEL_COLUMNS if row.get(name) is not None), None)
    if label is None:
        raise UnusableRowError(f"it has neither gold nor label; found {', '.join(map(str, row))}")
    length = row.get("response_length") or 0
    if not isinstance(length, int):
        raise UnusableRowError(f"response_length must be a whole number, found {length!r}")
    return ScoredText(
        prompt=str(row.get("prompt", "")),
        response=response,
        label=label,
        fields=row,
        finish_reason=str(row.get("finish_reason", "stop")),
        response_length=length,
    )


def default_workers() -> int:
    """As many as this process may use processors."""
    return len(os.sched_getaffinity(0))
