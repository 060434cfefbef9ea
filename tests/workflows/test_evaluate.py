"""Evaluation: accuracy over exactly the prompts that there are."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def evaluation(finished_run: Any, write_rows: Callable[..., Path]) -> Any:
    """What training exported, on three prompts of which two count as right whatever the answer is; with vLLM.

    A second set has one prompt that is right and one that is not.
    """
    bench, _ = finished_run
    rows, others = (
        write_rows(
            bench.folder / name,
            [{"prompt": f"What is {number} + 1?", "label": str(number + 1)} for number in numbers],
        )
        for name, numbers in (("three.jsonl", (3, 5, 8)), ("two.jsonl", (4, 8)))
    )
    settings = {
        "model.path": str(bench.folder / "run/export"),
        "model.dtype": "float32",
        "evaluation.data.source": str(rows),
        "evaluation.data.max_prompt_tokens": 32,
        "evaluation.other_data.two.source": str(others),
        "evaluation.other_data.two.max_prompt_tokens": 40,
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
    assert (summary["prompts"], summary["unscored"]) == (3, 0)


def test_the_summary_has_pass_at_k_and_the_other_sets(evaluation: Any) -> None:
    _, process = evaluation
    summary = json.loads(process.stdout.splitlines()[-1])
    assert summary["pass@1"] == summary["pass@2"] == pytest.approx(2 / 3)
    assert summary["mean_reward"] == pytest.approx(2 / 3)
    (other,) = summary["other_data"].values()
    assert (other["accuracy"], other["greedy_accuracy"], other["pass@2"], other["prompts"]) == (0.5, 0.5, 0.5, 2)
    assert 0 < other["mean_length"] <= 8 and 0 <= other["truncated_share"] <= 1


def test_each_set_has_a_line_with_the_policy_version(evaluation: Any) -> None:
    bench, process = evaluation
    lines = [json.loads(line) for line in bench.evaluations("evaluation")]
    assert [(line["dataset"], line["step"], line["policy_version"]) for line in lines] == [
        ("held-out", 0, 0), ("two", 0, 0),
    ]  # fmt: skip
    assert "two accuracy after step 0: sampled 50.0%, greedy 50.0%, pass@2 50.0%" in process.stdout + process.stderr
    report = (bench.folder / "evaluation/report.html").read_text()
    assert "Held-out accuracy, 3 prompts" in report and "two: accuracy, 2 prompts" in report


def test_the_summary_on_disk_is_the_one_printed(evaluation: Any) -> None:
    bench, process = evaluation
    assert json.loads((bench.folder / "evaluation/summary.json").read_text()) == json.loads(
        process.stdout.splitlines()[-1]
    )


def test_an_evaluation_has_nothing_to_resume(evaluation: Any) -> None:
    bench, _ = evaluation
    process = bench.command("resume", "evaluation")
    assert process.finish() == 0
    assert "is complete" in process.stderr and "nothing to resume" in process.stderr
