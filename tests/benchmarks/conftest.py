"""Benchmarks run in the process of the test, in a small version: real engines, few steps, little latency."""

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
# Enough for the form of an answer, and a tenth of what the benchmarks spend on it.
SFT_STEPS = 25


@pytest.fixture(scope="session")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """starts(folder, seed, tail=...): what `learning.make_start` makes, the same for all that want the same tail."""
    made: dict[str, Path] = {}

    def start(folder: Path, seed: int, *, tail: str = "") -> Path:
        learning = import_module("learning")
        if tail not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(learning, "SFT_STEPS", SFT_STEPS)
                patch.setattr(learning, "TAIL_SFT_STEPS", SFT_STEPS)
                made[tail] = learning.make_start(tmp_path_factory.mktemp("starts") / "start", seed, tail=tail)
        return made[tail]

    return start


@pytest.fixture
def run_benchmark(
    starts: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> Callable[..., tuple[int, dict[str, Any]]]:
    """run_benchmark(name, *arguments): the exit code and the JSON line. Its folder is `tmp_path / name`."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def run(name: str, *arguments: str) -> tuple[int, dict[str, Any]]:
        program = import_module(name)
        monkeypatch.setattr(program, "make_start", starts)
        monkeypatch.setattr(sys, "argv", [name, *arguments, "--output_dir", str(tmp_path / name)])
        code = program.main()
        return code, json.loads(capsys.readouterr().out.splitlines()[-1])

    return run
