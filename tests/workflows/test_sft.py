"""Supervised fine-tuning: repeatable, resumable, the same on two ranks, and honest about held-out rows."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from slipstream.config.loader import load_config, validate_config
from slipstream.config.schema import SFTConfig
from slipstream.data.mixture import Mixture
from slipstream.data.trajectory import TrainingExample
from slipstream.errors import ConfigError
from slipstream.workflows.learned_rows import LearnedRows
from slipstream.workflows.sft import SFTRun, load_sft_data


@pytest.fixture(scope="module")
def runs(make_workbench: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One configuration: once, once interrupted and resumed, with another seed, and on two ranks in three layouts."""
    bench = make_workbench(tmp_path_factory.mktemp("sft"))
    held_out = {
        "evaluation_data.source": str(bench.rows),
        "evaluation_data.rows": 10,
        "evaluation_data.response_key": "response",
        "evaluate_every_steps": 2,
    }
    settings = bench.settings = bench.sft_settings(steps=6) | held_out
    bench.run("sft", "once", settings)
    bench.kill_at_step(bench.start("sft", "resumed", settings), "resumed", 3)
    bench.resume("resumed")
    pair = [bench.start("sft", "other", settings | {"seed": 1})]
    pair.append(bench.start("sft", "ranks", settings | {"training.data_parallel": 2}))
    pair.append(bench.start("sft", "sharing", settings | {"training.sequence_parallel": 2}))
    pair.append(bench.start("sft", "pieces", settings | {"training.tensor_parallel": 2}))
    for process in pair:
        assert process.finish() == 0, process.stderr
    return bench


def losses(bench: Any, output: str) -> list[float]:
    return [line["loss"] for line in bench.measured(output)]


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
@pytest.mark.parametrize("ranks", ["ranks", "sharing", "pieces"])
def test_two_ranks_train_as_one_does(ranks: str, runs: Any) -> None:
    assert losses(runs, ranks) == pytest.approx(losses(runs, "once"), rel=1e-5)
    for mine, other in zip(runs.metrics(ranks), runs.metrics("once"), strict=True):
        assert float(mine["gradient_norm"]) == pytest.approx(float(other["gradient_norm"]), rel=1e-4)
        assert mine["tokens"] == other["tokens"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_goes_on_with_fewer_ranks_at_another_stage_and_then_as_before(runs: Any) -> None:
    # Small micro-batches, of which a step has many: slow enough to be interrupted twice.
    settings = runs.settings | {"training.tokens_per_micro_batch": 48, "checkpoint.every_steps": 1}
    two = ["--training.data_parallel=2", "--training.zero_stage=2"]
    process = runs.start("sft", "moved", settings, extra=two)
    runs.kill_at_step(process, "moved", 2)
    process = runs.command("resume", "moved", "--json", "--training.data_parallel=1", "--training.zero_stage=1")
    runs.kill_at_step(process, "moved", 4)
    assert "ranks 2 to 1, ZeRO stage 2 to 1" in process.stdout + process.stderr
    assert "training.data_parallel: 2 there, 1 here" in process.stdout + process.stderr
    process = runs.command("resume", "moved", "--json", *two)
    assert process.finish() == 0, process.stderr
    assert "ranks 1 to 2, ZeRO stage 1 to 2" in process.stdout + process.stderr
    assert losses(runs, "moved") == pytest.approx(losses(runs, "once"), rel=1e-5)
    assert not list((runs.folder / "moved/checkpoints").glob("*.partial"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_loss_falls_and_that_of_held_out_rows_is_reported_where_it_is_due(runs: Any) -> None:
    assert losses(runs, "once")[-1] < losses(runs, "once")[0]
    steps = [int(line["step"]) for line in runs.metrics("once") if "evaluation/loss" in line]
    assert steps == [2, 4, 6]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_finished_run_names_its_export(runs: Any) -> None:
    summary = runs.summary("once")
    assert summary["workflow"] == "sft" and summary["steps"] == 6
    assert (Path(summary["export"]) / "model.safetensors").exists()
    assert (Path(summary["export"]) / "tokenizer.json").exists()


@pytest.fixture(scope="module")
def uneven_run(make_workbench: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two ranks with three rows a step, one held-out row, and a learning rate that rises until the last step."""
    bench = make_workbench(tmp_path_factory.mktemp("uneven"))
    rows = shutil.copy(bench.rows, bench.folder / "rows.jsonl")
    held_out = {
        "evaluation_data.source": str(bench.rows),
        "evaluation_data.rows": 1,
        "evaluation_data.response_key": "response",
        "evaluate_every_steps": 2,
    }
    settings = bench.sft_settings(batch_size=3, data__source=Path(rows).name, training__data_parallel=2)
    schedule = {"training.schedule": "cosine", "training.warmup_steps": 4}
    bench.run("sft", "run", settings | held_out | schedule)
    return bench


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rows_that_do_not_divide_among_the_ranks_are_trained_on_and_measured(uneven_run: Any) -> None:
    metrics = uneven_run.measured("run")
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    assert all(line["tokens"] > 0 and np.isfinite(line["loss"]) for line in metrics)
    assert [line["step"] for line in metrics if "evaluation/loss" in line] == [2, 4]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_warm_up_may_take_all_steps(uneven_run: Any) -> None:
    rates = [line["learning_rate"] for line in uneven_run.measured("run")]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_is_resumed_with_other_rows_begins_anew_in_them_and_says_so(uneven_run: Any) -> None:
    """As if it had been killed after its third step, and the file replaced by a shorter one since."""
    run, rows = uneven_run.folder / "run", uneven_run.folder / "rows.jsonl"
    before = uneven_run.metrics("run")
    (run / "summary.json").unlink()
    shutil.rmtree(run / "checkpoints/step-000004")
    other = [{"prompt": f"Which is {number}?", "label": "", "response": str(number)} for number in range(5)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in other))
    resumed = uneven_run.resume("run")
    assert "WARNING run: data.source: 'rows.jsonl' is not the dataset that the checkpoint was made" in resumed.stderr
    after = uneven_run.metrics("run")
    assert after[:2] == before[:2] and len(after) == 4
    assert after[2]["loss"] != before[2]["loss"]


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
    training, evaluation = data.training.items, data.held_out
    assert (len(training), len(evaluation)) == (4, 2)
    held = {tuple(example.tokens.tolist()) for example in evaluation}
    assert held.isdisjoint(tuple(example.tokens.tolist()) for example in training)


def make_run(tmp_path: Path, held_out_losses: list[float], **settings: Any) -> SFTRun:
    """A run of at most 8 steps whose learner only reports held-out losses, one after another."""
    data = {"source": "rows.jsonl", "response_key": "response"}
    values = {"steps": 8, "output_dir": str(tmp_path), "model": {"path": "m"}, "data": data, "evaluation_data": data}
    config = validate_config(SFTConfig, values | {"batch_size": 1, "evaluate_every_steps": 2} | settings)
    example = TrainingExample("0", np.arange(3), np.arange(3) > 0)
    run = SFTRun(config, LearnedRows(Mixture({"": [example]}, {"": 1.0}), [example]), directory=MagicMock())
    run.objective, run.records, run.learner = MagicMock(), MagicMock(), MagicMock()
    run.learner.update.return_value = {"loss": 1.0, "skipped": 0.0}
    run.learner.loss.side_effect = [{"loss": loss} for loss in held_out_losses]
    while not run.is_done:
        run.train_step()
    return run


def test_it_ends_and_saves_once_the_held_out_loss_is_low_enough(tmp_path: Path) -> None:
    run = make_run(tmp_path, [0.9, 0.5, 0.4], stop_at_loss=0.5)
    assert run.step == 4
    assert [call.args[0] for call in run.records.save_checkpoint.call_args_list] == [4]
    restored = make_run(tmp_path, [0.9] * 4, stop_at_loss=0.5)
    assert restored.step == 8, "a loss that is never reached changes nothing"
    restored.step = 4
    restored._restore_state(run._state())
    assert restored.is_done, "a run that was resumed after its end has nothing to do"


def test_a_loss_to_stop_at_needs_held_out_rows_and_a_time_to_look(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="stop_at_loss needs evaluation_data and evaluate_every_steps"):
        make_run(tmp_path, [], stop_at_loss=0.5, evaluate_every_steps=0)
