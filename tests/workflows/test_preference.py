"""Preference training as a whole: learns, repeats, resumes, on two ranks, from pairs and from single answers."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from slipstream.algorithms.preference_loss import PairObjective, UnpairedObjective
from slipstream.config.loader import load_config
from slipstream.config.preference import PreferenceConfig
from slipstream.errors import DataError
from slipstream.workflows.preference import load_answers, make_objective

Preferences = Callable[[Iterable[int], int], list[dict[str, str]]]


def labelled(pairs: list[dict[str, str]]) -> list[dict[str, Any]]:
    """One answer of each pair, by turns the better and the worse one, with its label."""
    return [
        {"prompt": pair["prompt"], "completion": pair["rejected" if odd else "chosen"], "label": not odd}
        for pair, odd in ((pair, number % 2) for number, pair in enumerate(pairs))
    ]


@pytest.fixture(scope="module")
def runs(
    make_workbench: Any,
    make_preferences: Preferences,
    write_rows: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    """DPO with a cached reference, once and once interrupted and resumed; KTO on two ranks with one in memory."""
    bench = make_workbench(tmp_path_factory.mktemp("preference"))
    training, held_out = make_preferences([*range(80)] * 3, seed=0), make_preferences([*range(80, 100)] * 2, seed=1)
    write_rows(bench.folder / "pairs.jsonl", training)
    write_rows(bench.folder / "held_out.jsonl", held_out)
    write_rows(bench.folder / "labelled.jsonl", labelled(training))
    write_rows(bench.folder / "held_out_labelled.jsonl", labelled(held_out))
    settings = {
        "steps": 30,
        "batch_size": 16,
        "max_tokens": 48,
        "beta": 0.2,
        "model.path": str(bench.policy),
        "model.dtype": "float32",
        "data.source": "pairs.jsonl",
        "evaluation_data.source": "held_out.jsonl",
        "evaluate_every_steps": 10,
        "training.learning_rate": 1e-3,
        "training.zero_stage": 1,
        "training.tokens_per_micro_batch": 200,
        "checkpoint.every_steps": 5,
        "tracking.tensorboard": False,
    }
    pairs = settings | {"loss": "dpo", "reference": "cached"}
    bench.run("preference", "once", pairs)
    bench.kill_at_step(bench.start("preference", "resumed", pairs), "resumed", 12)
    bench.resume("resumed")
    single = {"data.source": "labelled.jsonl", "evaluation_data.source": "held_out_labelled.jsonl"}
    bench.run("preference", "kto", settings | single | {"loss": "kto", "training.data_parallel": 2})
    return bench


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("run", ["once", "kto"])
def test_it_learns_which_answers_of_held_out_questions_are_better(runs: Any, run: str) -> None:
    found = runs.measured(run)
    measured = {line["step"]: line for line in found if "evaluation/loss" in line}
    assert list(measured) == [10, 20, 30]
    # 0.5 is chance. The loss starts where policy and reference are one: log 2, and for KTO half.
    assert measured[30]["evaluation/accuracy"] > 0.8
    assert measured[30]["evaluation/reward_margin"] > 0.3
    assert measured[30]["evaluation/loss"] < found[0]["loss"]
    assert found[0]["loss"] == pytest.approx(0.5 if run == "kto" else 0.693147, rel=1e-5)
    summary = runs.summary(run)
    assert summary["workflow"] == "preference" and summary["accuracy"] == measured[30]["evaluation/accuracy"]
    assert (runs.folder / run / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_was_killed_and_resumed_is_the_same_run(runs: Any) -> None:
    assert runs.metrics("resumed") == runs.metrics("once")
    assert len(runs.metrics("once")) == 30


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_export_is_a_policy_with_the_margins_that_were_measured(runs: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    summary = runs.summary("once")
    policy = AutoModelForCausalLM.from_pretrained(summary["export"], dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(runs.policy, dtype=torch.float32)

    def log_prob(model: Any, example: Any) -> float:
        tokens = torch.as_tensor(example.tokens)
        with torch.no_grad():
            every = torch.log_softmax(model(tokens.unsqueeze(0)).logits[0], dim=-1)[:-1]
        answer = torch.as_tensor(example.loss_mask[1:])
        return float(every.gather(-1, tokens[1:].unsqueeze(-1)).squeeze(-1)[answer].sum())

    margins = []
    for row in load_answers(config(runs.folder / "held_out.jsonl", runs.policy, max_tokens=48)).training.items:
        chosen, rejected = (log_prob(policy, example) - log_prob(reference, example) for example in row.examples)
        margins.append(0.2 * (chosen - rejected))
    assert summary["reward_margin"] == pytest.approx(sum(margins) / len(margins), rel=1e-3)
    assert summary["accuracy"] == pytest.approx(sum(margin > 0 for margin in margins) / len(margins))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kto_reports_the_divergence_it_measures(runs: Any) -> None:
    found = [line["kl"] for line in runs.measured("kto")]
    assert found[0] == 0.0 and min(found) >= 0.0


def config(pairs: Path, policy: Path, **keys: object) -> PreferenceConfig:
    settings = {"steps": 1, "output_dir": "o", "model.path": policy, "max_tokens": 64, "data.source": pairs} | keys
    return load_config(PreferenceConfig, None, [f"--{key}={value}" for key, value in settings.items()])


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_held_out_questions_are_not_trained_on(
    loss: str, tiny_policy: Path, tmp_path: Path, make_preferences: Preferences, write_rows: Callable[..., Path]
) -> None:
    rows = make_preferences(range(6), seed=1)
    rows = rows if loss == "dpo" else labelled(rows)
    everything = write_rows(tmp_path / "all.jsonl", rows)
    held_out = write_rows(tmp_path / "held_out.jsonl", rows[2:4])
    data = load_answers(config(everything, tiny_policy, loss=loss, **{"evaluation_data.source": held_out}))
    assert [row.examples[0].example_id.split("/")[0] for row in data.training.items] == ["0", "1", "4", "5"]
    assert len(data.held_out) == 2
    assert all((row.mismatched is None) == (loss == "dpo") for row in data.training.items)


def test_data_that_cannot_be_used_is_named_by_its_section(
    tiny_policy: Path, tmp_path: Path, make_preferences: Preferences, write_rows: Callable[..., Path]
) -> None:
    good = write_rows(tmp_path / "good.jsonl", make_preferences(range(3), seed=1))
    bad = write_rows(tmp_path / "bad.jsonl", [{"prompt": "a?", "chosen": "1", "rejected": "1"}])
    with pytest.raises(DataError, match=r"evaluation_data\.source: no row .* 1 both answers are the same"):
        load_answers(config(good, tiny_policy, **{"evaluation_data.source": bad}))


def test_the_objective_is_the_one_of_the_configuration(tmp_path: Path) -> None:
    keys = {"beta": 0.3, "label_smoothing": 0.1, "sft_coefficient": 0.2}
    assert make_objective(config(tmp_path, tmp_path, **keys)) == PairObjective(loss="dpo", **keys)
    assert make_objective(config(tmp_path, tmp_path, loss="simpo", beta=2.0, target_margin=0.5)) == PairObjective(
        loss="simpo", beta=2.0, target_margin=0.5
    )
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.5}
    assert make_objective(config(tmp_path, tmp_path, loss="kto", beta=0.3, **weights)) == UnpairedObjective(
        beta=0.3, **weights
    )
