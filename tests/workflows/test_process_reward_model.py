"""Training a process reward model, and a policy from it: learns, repeats, the same on two ranks, exported whole."""

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.config.data import DataConfig
from slipstream.data.steps import build_labelled_steps
from slipstream.data.tokenizer import load_tokenizer

HELD_OUT = 41


def answers(numbers: Iterable[int], seed: int) -> list[dict[str, Any]]:
    """Steps "a > b", right or wrong whatever the question, which `numbers` stand for; some labels are missing."""
    generator = random.Random(seed)
    rows = []
    for number in numbers:
        pairs = [generator.sample(range(10), 2) for _ in range(generator.randint(1, 4))]
        labels: list[Any] = [first > second for first, second in pairs]
        if number % 5 == 0 and len(labels) > 1:
            labels[generator.randrange(len(labels))] = generator.choice([-100, None])
        if number % 7 == 0:
            labels = [label if label is None else float(label) for label in labels]
        steps = [f"{first} > {second}" for first, second in pairs]
        rows.append({"prompt": f"What is {number}?", "completions": steps, "labels": labels})
    return rows


@pytest.fixture(scope="module")
def runs(make_workbench: Any, write_rows: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One configuration: once, once interrupted and resumed, and on two ranks."""
    bench = make_workbench(tmp_path_factory.mktemp("process_reward_model"))
    write_rows(bench.folder / "steps.jsonl", answers(range(600), seed=0))
    write_rows(bench.folder / "held_out.jsonl", answers(range(600, 600 + HELD_OUT), seed=1))
    settings = {
        "supervision": "steps",
        "steps": 160,
        "batch_size": 32,
        "max_tokens": 64,
        "model.path": str(bench.policy),
        "model.dtype": "float32",
        "data.source": "steps.jsonl",
        "evaluation_data.source": "held_out.jsonl",
        "evaluate_every_steps": 10,
        "training.learning_rate": 3e-3,
        "training.zero_stage": 1,
        "training.tokens_per_micro_batch": 300,
        "checkpoint.every_steps": 20,
        "tracking.tensorboard": False,
    }
    bench.run("reward-model", "once", settings)
    bench.kill_at_step(bench.start("reward-model", "resumed", settings), "resumed", 30)
    bench.resume("resumed")
    bench.run("reward-model", "ranks", settings | {"training.data_parallel": 2, "steps": 10})
    return bench


def scores(bench: Any, output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (bench.folder / output / "scores.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_learns_which_steps_of_held_out_answers_are_right(runs: Any) -> None:
    last = runs.measured("once")[-1]
    assert last["evaluation/accuracy"] > 0.9
    assert last["evaluation/loss"] < 0.5 * runs.measured("once")[0]["loss"]
    summary = runs.summary("once")
    assert summary["accuracy"] == last["evaluation/accuracy"]
    assert summary["true_share"] == last["evaluation/true_share"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_scores_of_every_held_out_step_with_a_label_are_written_and_drawn(runs: Any) -> None:
    rows = [json.loads(line) for line in (runs.folder / "held_out.jsonl").read_text().splitlines()]
    expected = [
        (str(number), step, "true" if label else "false")
        for number, row in enumerate(rows)
        for step, label in enumerate(row["labels"])
        if label not in (-100, None)
    ]
    found = scores(runs, "once")
    assert [(line["item"], line["step"], line["group"]) for line in found] == expected
    assert len(expected) == runs.measured("once")[-1]["evaluation/labelled_steps"]
    right = [(line["score"] >= 0.5) == (line["group"] == "true") for line in found]
    assert np.mean(right) == pytest.approx(runs.measured("once")[-1]["evaluation/accuracy"])
    report = (runs.folder / "once/report.html").read_text()
    assert "Scores at the end" in report and "right steps" in report and "wrong steps" in report


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_was_killed_and_resumed_is_the_same_run(runs: Any) -> None:
    assert runs.metrics("resumed") == runs.metrics("once")
    assert scores(runs, "resumed") == scores(runs, "once")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_train_and_measure_as_one_does(runs: Any) -> None:
    """Also an odd number of held-out answers: none is left out and none counted twice."""
    assert HELD_OUT % 2
    for ours, single in zip(runs.measured("ranks"), runs.measured("once"), strict=False):
        for name in ("loss", "accuracy", "true_share", "labelled_steps"):
            assert ours[name] == pytest.approx(single[name], rel=1e-4), name
    [measured] = [line for line in runs.measured("ranks") if "evaluation/loss" in line]
    single = runs.measured("once")[9]
    for name in ("loss", "accuracy", "true_share", "labelled_steps"):
        assert measured[f"evaluation/{name}"] == pytest.approx(single[f"evaluation/{name}"], rel=1e-4), name
    assert len(scores(runs, "ranks")) == measured["evaluation/labelled_steps"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_transformers_loads_the_export_and_gives_the_scores_that_were_measured(runs: Any) -> None:
    import torch
    from transformers import AutoModelForTokenClassification

    folder = runs.folder / "once/export"
    settings = json.loads((folder / "config.json").read_text())
    assert settings["architectures"] == ["LlamaForTokenClassification"] and settings["step_separator"] == "\n\n"
    model = AutoModelForTokenClassification.from_pretrained(folder).eval()
    assert model.config.num_labels == 1
    tokenizer = load_tokenizer(str(folder))
    data = DataConfig(source=str(runs.folder / "held_out.jsonl"))
    held_out, _ = build_labelled_steps(data, tokenizer, 64, separator="\n\n")
    found = []
    for answer in held_out:
        with torch.no_grad():
            logits = model(torch.as_tensor(answer.tokens).unsqueeze(0)).logits[0, :, 0]
        found += [torch.sigmoid(logits[answer.ends[step]]).item() for step, _ in answer.labelled]
    assert found == pytest.approx([line["score"] for line in scores(runs, "once")], abs=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_policy_learns_from_its_steps_and_the_rollouts_show_them(runs: Any) -> None:
    settings = runs.rl_settings(
        steps=2, reward__function="null", reward__model="once/export", reward__step_aggregation="product"
    )
    runs.run("rl", "rl", settings)
    for line in runs.measured("rl"):
        assert line["reward/mean"] == pytest.approx(line["reward_part/model"])
        assert 0 < line["reward/mean"] < 1 and line["reward_part/model/steps"] >= 1
    shown = json.loads((runs.folder / "rl/rollouts/step-000001.jsonl").read_text().splitlines()[0])
    assert shown["reward_parts"].keys() == {"model", "model/steps", "model/lowest_step"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_is_neither_a_critic_nor_a_reward_model_of_whole_answers(runs: Any) -> None:
    cases = [
        ({"reward.function": "null", "reward.model": "once/export"}, "set reward.step_aggregation"),
        ({"algorithm": "ppo", "critic.path": "once/export"}, "error: critic.path: 'once/export' is a process reward"),
        (
            {"reward.function": "null", "reward.model": str(runs.policy), "reward.step_aggregation": "min"},
            "is LlamaForCausalLM, no reward model",
        ),
    ]
    for changes, message in cases:
        process = runs.start("rl", "refused", runs.rl_settings() | changes)
        assert process.finish() == 2
        assert message in process.stderr and "Traceback" not in process.stderr
