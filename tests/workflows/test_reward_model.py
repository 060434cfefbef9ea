"""Training a reward model, and a policy from it: learns, repeats, resumes, the same on two ranks, exported whole."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.config.loader import load_config
from slipstream.config.reward_model import SCORE_MOMENTS, RewardModelConfig
from slipstream.config.schema import RewardConfig
from slipstream.data.preferences import PreferencePair, build_preference_pairs
from slipstream.data.tokenizer import load_tokenizer
from slipstream.errors import ConfigError
from slipstream.workflows.reward_model import load_reward_model_data
from slipstream.workflows.rl import require_reward
from slipstream.workflows.supervision import PairSupervision

Preferences = Callable[[Iterable[int], int], list[dict[str, str]]]


@pytest.fixture(scope="module")
def runs(
    make_workbench: Any,
    make_preferences: Preferences,
    write_rows: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    """One configuration: once, once interrupted and resumed, and on two ranks."""
    bench = make_workbench(tmp_path_factory.mktemp("reward_model"))
    write_rows(bench.folder / "pairs.jsonl", make_preferences([*range(80)] * 5, seed=0))
    write_rows(bench.folder / "held_out.jsonl", make_preferences([*range(80, 100)] * 2, seed=1))
    settings = {
        "steps": 60,
        "batch_size": 16,
        "max_tokens": 48,
        "model.path": str(bench.policy),
        "model.dtype": "float32",
        "data.source": "pairs.jsonl",
        "evaluation_data.source": "held_out.jsonl",
        "evaluate_every_steps": 20,
        "training.learning_rate": 1e-3,
        "training.zero_stage": 1,
        "training.tokens_per_micro_batch": 200,
        "checkpoint.every_steps": 10,
        "tracking.tensorboard": False,
    }
    bench.run("reward-model", "once", settings)
    bench.kill_at_step(bench.start("reward-model", "resumed", settings), "resumed", 15)
    bench.resume("resumed")
    bench.run("reward-model", "ranks", settings | {"training.data_parallel": 2, "steps": 10})
    return bench


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_learns_which_answers_of_held_out_questions_are_better(runs: Any) -> None:
    measured = {
        line["step"]: line["evaluation/accuracy"] for line in runs.measured("once") if "evaluation/loss" in line
    }
    assert list(measured) == [20, 40, 60]
    assert measured[60] > 0.9
    assert runs.measured("once")[-1]["evaluation/loss"] < 0.5 * runs.measured("once")[0]["loss"]
    summary = runs.summary("once")
    assert summary["workflow"] == "reward-model" and summary["accuracy"] == measured[60]
    scores = [json.loads(line) for line in (runs.folder / "once/scores.jsonl").read_text().splitlines()]
    assert [line["group"] for line in scores] == ["chosen", "rejected"] * 40
    assert np.mean([line["score"] for line in scores]) == pytest.approx(summary[SCORE_MOMENTS]["mean"], abs=1e-5)
    right = [better["score"] > worse["score"] for better, worse in zip(scores[::2], scores[1::2], strict=True)]
    assert np.mean(right) == summary["accuracy"]
    assert "Scores at the end" in (runs.folder / "once/report.html").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_was_killed_and_resumed_is_the_same_run(runs: Any) -> None:
    assert runs.metrics("resumed") == runs.metrics("once")
    assert len(runs.metrics("once")) == 60


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_train_as_one_does(runs: Any) -> None:
    for ours, single in zip(runs.measured("ranks"), runs.measured("once"), strict=False):
        assert ours["loss"] == pytest.approx(single["loss"], rel=1e-4)
        assert (ours["pairs"], ours["accuracy"]) == (16, single["accuracy"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_transformers_loads_the_export_and_gives_the_scores_that_were_measured(runs: Any) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = Path(runs.summary("once")["export"])
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    data = config(runs.folder / "held_out.jsonl", runs.policy).data
    pairs, _ = build_preference_pairs(data, load_tokenizer(str(runs.policy)), 48)
    sequences = [tokens for pair in pairs for tokens in (pair.chosen, pair.rejected)]
    batch = tokenizer.pad({"input_ids": [tokens.tolist() for tokens in sequences]}, return_tensors="pt")
    with torch.no_grad():
        scores = model(**batch).logits.squeeze(-1)
    moments = getattr(model.config, SCORE_MOMENTS)
    assert moments["mean"] == pytest.approx(scores.mean().item(), abs=1e-4)
    assert moments["std"] == pytest.approx(scores.std(correction=0).item(), rel=1e-4)
    chosen, rejected = scores.view(-1, 2).unbind(dim=1)
    assert (chosen > rejected).double().mean().item() == runs.measured("once")[-1]["evaluation/accuracy"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ppo_learns_from_the_reward_model_and_an_evaluation_reads_its_scores(runs: Any) -> None:
    settings = runs.rl_settings(
        steps=3, algorithm="ppo", reward__function="null", reward__model="once/export", critic__path="once/export",
        reward__normalize_model_scores=True, evaluation__data__source=str(runs.rows), evaluation__data__rows=4,
        evaluation__data__max_prompt_tokens=32, evaluation__success_reward=0.0,
    )  # fmt: skip
    runs.run("rl", "ppo", settings)
    for line in runs.measured("ppo"):
        assert line["reward/mean"] == pytest.approx(line["reward_part/model"])
        assert line["reward/std"] > 0 and abs(line["reward/mean"]) < 10
    both = settings | {"reward.function": "rewards.py:digest", "steps": 1}
    runs.run("rl", "both", both)
    [line] = runs.measured("both")
    parts = line["reward_part/model"] + line["reward_part/function"]
    assert line["reward/mean"] == pytest.approx(parts) and "reward_part/function/digest" in line


def config(pairs: Path, policy: Path, **keys: object) -> RewardModelConfig:
    settings = {"steps": 1, "output_dir": "o", "model.path": policy, "max_tokens": 64, "data.source": pairs} | keys
    return load_config(RewardModelConfig, None, [f"--{key}={value}" for key, value in settings.items()])


def test_held_out_questions_are_not_trained_on(
    tiny_policy: Path, tmp_path: Path, make_preferences: Preferences, write_rows: Callable[..., Path]
) -> None:
    rows = make_preferences(range(6), seed=1)
    everything = write_rows(tmp_path / "all.jsonl", rows)
    held_out = write_rows(tmp_path / "held_out.jsonl", rows[2:4])
    data = load_reward_model_data(config(everything, tiny_policy, **{"evaluation_data.source": held_out}))
    assert [pair.pair_id for pair in data.training.items] == ["0", "1", "4", "5"]
    assert [pair.pair_id for pair in data.held_out] == ["0", "1"]


def score(text: Any) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("settings", "function", "problem"),
    [
        ({}, score, None),
        ({"function": "math"}, None, None),
        ({"model": "m"}, None, None),
        ({"model": "m", "function": "math"}, None, None),
        ({"model": "m"}, score, None),
        ({}, None, "a reward is needed"),
        ({"function": "math", "model": "m"}, score, "there are two reward functions"),
        ({"urls": ["http://127.0.0.1:1"]}, None, None),
        ({"urls": ["http://127.0.0.1:1"], "model": "m"}, None, None),
        ({"urls": ["http://127.0.0.1:1"]}, score, "there are two rewards: reward.urls in the configuration"),
    ],
)
def test_a_reward_is_a_function_or_a_service_a_model_or_both(
    settings: dict, function: Any, problem: str | None
) -> None:
    if problem is None:
        require_reward(RewardConfig(**settings), function)
        return
    with pytest.raises(ConfigError, match=problem):
        require_reward(RewardConfig(**settings), function)


@pytest.mark.parametrize("ends_with_padding", [False, True])
def test_a_token_that_ends_answers_is_not_left_as_padding(
    tiny_policy: Path, tiny_tokenizer: Any, tmp_path: Path, ends_with_padding: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "pad_token_id": 3}))
    padding, moments = tiny_tokenizer.pad_token_id, {"mean": 0.5, "std": 2.0}
    answers = [np.array([7, 8, padding + ends]) for ends in (1, 0 if ends_with_padding else 2)]
    pair = PreferencePair("0", *answers, *[np.arange(3) > 0] * 2)
    supervision = PairSupervision(config(tmp_path / "none.jsonl", tiny_policy))
    supervision.complete_export(tmp_path, [pair], {SCORE_MOMENTS: moments})
    written = None if ends_with_padding else padding
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings == {"model_type": "llama", "pad_token_id": written, SCORE_MOMENTS: moments}
