"""Supervised fine-tuning: repeatable, resumable, the same on two ranks, and honest about held-out rows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.config.loader import load_config
from slipstream.config.schema import SFTConfig
from slipstream.workflows.sft import load_sft_data


@pytest.fixture(scope="module")
def runs(make_workbench: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One configuration: once, once interrupted and resumed, with another seed, and on two ranks."""
    bench = make_workbench(tmp_path_factory.mktemp("sft"))
    held_out = {
        "evaluation_data.source": str(bench.rows),
        "evaluation_data.rows": 10,
        "evaluation_data.response_key": "response",
        "evaluate_every_steps": 2,
    }
    settings = bench.sft_settings(steps=6) | held_out
    bench.run("sft", "once", settings)
    interrupted = bench.start("sft", "resumed", settings | {"steps": 6, "checkpoint.every_steps": 2})
    bench.wait_for_step(interrupted, "resumed", 3)
    interrupted.kill_all()
    interrupted.finish()
    bench.interrupted_after = len(bench.metrics("resumed"))
    bench.resume("resumed")
    pair = [bench.start("sft", "other", settings | {"seed": 1})]
    pair.append(bench.start("sft", "ranks", settings | {"training.ranks": 2}))
    for process in pair:
        assert process.finish() == 0, process.stderr
    return bench


def losses(bench: Any, output: str) -> list[float]:
    return [json.loads(line)["loss"] for line in (bench.folder / output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_same_seed_gives_the_same_run_also_when_it_was_killed_and_resumed(runs: Any) -> None:
    assert runs.metrics("resumed") == runs.metrics("once")
    assert len(runs.metrics("once")) == 6


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_another_seed_gives_another_run(runs: Any) -> None:
    assert losses(runs, "other") != losses(runs, "once")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_train_as_one_does(runs: Any) -> None:
    assert losses(runs, "ranks") == pytest.approx(losses(runs, "once"), rel=1e-5)
    for mine, other in zip(runs.metrics("ranks"), runs.metrics("once"), strict=True):
        assert float(mine["gradient_norm"]) == pytest.approx(float(other["gradient_norm"]), rel=1e-4)
        assert mine["tokens"] == other["tokens"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_loss_falls_and_that_of_held_out_rows_is_reported_where_it_is_due(runs: Any) -> None:
    assert losses(runs, "once")[-1] < losses(runs, "once")[0]
    steps = [int(line["step"]) for line in runs.metrics("once") if "evaluation/loss" in line]
    assert steps == [2, 4, 6]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_finished_run_names_its_export(runs: Any) -> None:
    summary = json.loads((runs.folder / "once/summary.json").read_text())
    assert summary["workflow"] == "sft" and summary["steps"] == 6
    assert (Path(summary["export"]) / "model.safetensors").exists()
    assert (Path(summary["export"]) / "tokenizer.json").exists()


def test_held_out_rows_are_not_trained_on(tiny_policy: Path, tmp_path: Path, write_rows: Callable[..., Path]) -> None:
    rows = [{"prompt": f"What is {number}?", "response": str(number)} for number in range(6)]
    everything = write_rows(tmp_path / "all.jsonl", rows)
    held_out = write_rows(tmp_path / "held_out.jsonl", rows[2:4])
    keys = {
        "steps": 1, "output_dir": tmp_path / "run", "model.path": tiny_policy, "max_tokens": 64,
        "data.source": everything, "data.response_key": "response", "data.label_key": "null",
        "evaluation_data.source": held_out, "evaluation_data.response_key": "response",
        "evaluation_data.label_key": "null",
    }  # fmt: skip
    config = load_config(SFTConfig, None, [f"--{key}={value}" for key, value in keys.items()])
    data = load_sft_data(config)
    training, evaluation = data.training, data.held_out
    assert (len(training), len(evaluation)) == (4, 2)
    held = {tuple(example.tokens.tolist()) for example in evaluation}
    assert held.isdisjoint(tuple(example.tokens.tolist()) for example in training)
