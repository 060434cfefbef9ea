"""The classic pipeline through the real engines: SFT, a reward model, PPO with it; and DPO on the same pairs."""

import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from slipstream.observe.evaluations import read_evaluations
from slipstream.observe.metrics import read_metrics
from slipstream.rewards.function import ScoredText

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "rlhf"
# Seven stages, each of which starts engines of its own.
PIPELINE_LIMIT_S = 1000


def load(name: str) -> ModuleType:
    """A module of the example."""
    spec = importlib.util.spec_from_file_location(f"rlhf_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kindness(response: str, label: str) -> float:
    value = load("rule").kindness(ScoredText("", response, label, {}, "stop", 1))
    assert isinstance(value, float)
    return value


def test_the_data_of_the_example_is_what_its_program_writes(tmp_path: Path) -> None:
    load("make_data").main(tmp_path)
    written = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert written == {file.name: file.read_bytes() for file in EXAMPLE.glob("*.jsonl")}


def test_the_rule_counts_kind_words_in_descriptions_of_what_was_asked_for() -> None:
    assert kindness("The red cat is calm, kind and warm.", "The red cat") == 1
    assert kindness("The red cat is calm, rude and mean.", "The red cat") == pytest.approx(-1 / 3)
    assert kindness("The red dog is calm, kind and warm.", "The red cat") == -1
    assert kindness("The red cat is kind kind kind kind.", "The red cat") == 1


def test_the_rule_made_the_pairs() -> None:
    for file in ("pairs.jsonl", "held_out_pairs.jsonl"):
        for line in (EXAMPLE / file).read_text().splitlines():
            row = json.loads(line)
            assert kindness(row["chosen"], row["label"]) > kindness(row["rejected"], row["label"])


@pytest.fixture(scope="module")
def finished(make_workbench: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The recipe as it is; only the last answers, which nothing is learned from, come from the simpler engine."""
    bench = make_workbench(tmp_path_factory.mktemp("rlhf"))
    shutil.copytree(EXAMPLE, bench.folder / "examples" / "rlhf")
    overrides = ["--comparison.rollout.engine=transformers", "--output_dir=run", "--json"]
    process = bench.command("pipeline", "rlhf_pipeline", *overrides)
    assert process.finish(limit_s=PIPELINE_LIMIT_S) == 0, process.stderr
    return bench.folder / "run", json.loads(process.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_reward_model_knows_the_better_answer_to_questions_it_has_not_seen(finished: Any) -> None:
    run, summary = finished
    accuracy = json.loads((run / "reward_model/summary.json").read_text())["accuracy"]
    assert summary["reward_model"]["accuracy"] == accuracy >= 0.9


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ppo_lifts_the_held_out_score_and_stays_near_its_start(finished: Any) -> None:
    run, _ = finished
    first, *_, last = read_evaluations(run / "rl/evaluations.jsonl")
    assert last.mean_reward > first.mean_reward + 0.5  # in standard deviations of the reward model's scores
    kls = [line["policy/kl"] for line in read_metrics(run / "rl/metrics.jsonl") if "policy/kl" in line]
    assert len(kls) > 30 and max(kls) < 0.6


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_dpo_widens_the_margin_of_held_out_pairs(finished: Any) -> None:
    run, summary = finished
    margins = [
        line["evaluation/reward_margin"]
        for line in read_metrics(run / "preference/metrics.jsonl")
        if "evaluation/reward_margin" in line
    ]
    assert 0 < margins[0] < margins[-1] == pytest.approx(summary["preference"]["reward_margin"])
    assert summary["preference"]["accuracy"] >= 0.8


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_both_win_under_the_rule_that_made_the_pairs(finished: Any) -> None:
    _, summary = finished
    compared = summary["comparison"]
    assert compared["rl"]["win_rate"] > 0.7 and compared["preference"]["win_rate"] > 0.6
    for name in ("rl", "preference"):
        assert compared[name]["mean_reward"] > compared["sft"]["mean_reward"] + 0.2


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_report_shows_every_stage(finished: Any) -> None:
    run, _ = finished
    page = (run / "report.html").read_text()
    titles = ("Supervised fine-tuning", "Reward model", "Reinforcement learning", "Preference training", "Generation")
    assert [title for title in titles if title not in page] == []
