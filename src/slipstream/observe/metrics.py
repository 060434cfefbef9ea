"""The numbers of a run: `metrics.jsonl`, one line a step, exact to the last bit.

Names are grouped by a prefix: `reward/mean`, `policy/kl`, `response_length/mean`, `time/generate`,
`throughput/tokens_per_s`, `memory/learner_bytes`. What is measured in seconds or bytes, and what happened to the
engines, differs from run to run; all else is the same whenever the run is repeated, and `deterministic_part` keeps
just that.
"""

import math
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from slipstream.observe.files import JsonLinesFile, read_json_lines

MEASURED_PREFIXES = ("time/", "throughput/", "memory/", "idle/", "pause/", "faults/")
RESERVED_NAMES = ("step", "policy_version", "non_finite")


class MetricsWriter:
    """Appends to `metrics.jsonl`; each line is on disk (in the kernel) when `write` returns."""

    def __init__(self, path: Path) -> None:
        self._file = JsonLinesFile(path)
        lines = read_json_lines(path)
        self._last_step = int(lines[-1]["step"]) if lines else None

    def write(self, step: int, policy_version: int, *, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Append the line of a step and return it as it will be read back.

        Floats are written so that reading gives the same bits. JSON has no NaN or infinity: such a value is written
        as null, and named under `non_finite` as "nan", "inf" or "-inf".
        Raises ValueError if a name is reserved or the step is smaller than the last one written, TypeError if a value
        is not a number, TrainingError if the disk is full.
        """
        if self._last_step is not None and step < self._last_step:
            raise ValueError(f"metrics of step {step} come after those of step {self._last_step}: truncate_after first")
        line: dict[str, Any] = {"step": step, "policy_version": policy_version}
        non_finite: dict[str, str] = {}
        for name, value in metrics.items():
            if name in RESERVED_NAMES:
                raise ValueError(f"metric name {name!r} is reserved")
            line[name] = number = _plain_number(name, value)
            if not math.isfinite(number):
                line[name], non_finite[name] = None, str(number)
        if non_finite:
            line["non_finite"] = non_finite
        self._file.write(line)
        self._last_step = step
        return line

    def truncate_after(self, step: int) -> None:
        """Drop the lines of later steps: what an interrupted run wrote after the checkpoint it is resumed from."""
        self._file.truncate_after(step)
        if self._last_step is not None:
            self._last_step = min(self._last_step, step)

    def sync(self) -> None:
        """Make the lines durable; call it before a checkpoint is declared complete."""
        self._file.sync()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl` with non-finite values put back; empty if there is no such file."""
    lines = read_json_lines(path)
    for line in lines:
        for name, text in line.pop("non_finite", {}).items():
            line[name] = float(text)
    return lines


def deterministic_part(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line without what is measured by a clock or a memory counter: equal in a resumed and an uninterrupted run."""
    return {name: value for name, value in line.items() if not name.startswith(MEASURED_PREFIXES)}


def _plain_number(name: str, value: object) -> int | float:
    """NumPy scalars and booleans become Python numbers (a float32 becomes the float of equal value)."""
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"metric {name!r} must be a number, found {type(value).__name__}")
