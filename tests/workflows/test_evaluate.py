"""Evaluation: accuracy over exactly the prompts that there are."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def evaluation(finished_run: Any, write_rows: Callable[..., Path]) -> Any:
    """What training exported, on three prompts of which two count as right whatever the answer is; with vLLM."""
    bench, _ = finished_run
    rows = write_rows(
        bench.folder / "three.jsonl",
        [{"prompt": f"What is {number} + 1?", "label": str(number + 1)} for number in (3, 5, 8)],
    )
    settings = {
        "model.path": str(bench.folder / "run/export"),
        "model.dtype": "float32",
        "evaluation.data.source": str(rows),
        "evaluation.data.max_prompt_tokens": 32,
        "evaluation.samples_per_prompt": 2,
        "reward.function": "rewards.py:right_unless_nine",
        "rollout.max_response_tokens": 8,
        "rollout.kv_cache_bytes": 1 << 26,
    }
    return bench, bench.run("evaluate", "evaluation", settings)


def test_accuracy_counts_each_prompt_once(evaluation: Any) -> None:
    _, process = evaluation
    summary = json.loads(process.stdout.splitlines()[-1])
    assert summary["accuracy"] == pytest.approx(2 / 3)
    assert summary["greedy_accuracy"] == pytest.approx(2 / 3)
    assert summary["prompts"] == 3


def test_the_summary_on_disk_is_the_one_printed(evaluation: Any) -> None:
    bench, process = evaluation
    assert json.loads((bench.folder / "evaluation/summary.json").read_text()) == json.loads(
        process.stdout.splitlines()[-1]
    )


def test_an_evaluation_has_nothing_to_resume(evaluation: Any) -> None:
    bench, _ = evaluation
    process = bench.command("resume", "evaluation")
    assert process.finish() == 2
    assert "error: " in process.stderr and "Traceback" not in process.stderr
