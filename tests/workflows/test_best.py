"""A whole RL run that keeps its best policy, beside the same run that does not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def keeping_run(make_workbench: Callable[[Path], Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    bench = make_workbench(tmp_path_factory.mktemp("keeping"))
    settings = bench.evaluated_settings(checkpoint__best_metric="mean_reward", checkpoint__keep=1)
    return bench, bench.run("rl", "run", settings)


def test_keeping_the_best_changes_nothing_else(keeping_run: Any, finished_run: Any) -> None:
    bench, _ = keeping_run
    undisturbed, _ = finished_run
    assert bench.metrics("run") == undisturbed.metrics("run")
    assert bench.evaluations("run") == undisturbed.evaluations("run")
    assert bench.rollouts("run") == undisturbed.rollouts("run")


def test_the_best_is_the_first_of_the_highest_evaluations(keeping_run: Any) -> None:
    bench, process = keeping_run
    lines = [json.loads(line) for line in bench.evaluations("run")]
    expected = max(lines, key=lambda line: line["mean_reward"])
    best = json.loads((bench.folder / "run/best.json").read_text())
    assert (best["step"], best["value"]) == (expected["step"], expected["mean_reward"])
    assert best["policy_version"] == expected["policy_version"]
    summary = json.loads(process.stdout.splitlines()[-1])
    assert (summary["best_step"], summary["best_value"]) == (best["step"], best["value"])


def test_its_export_is_its_checkpoint_or_the_model_it_started_from(keeping_run: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    bench, _ = keeping_run
    run = bench.folder / "run"
    best = json.loads((run / "best.json").read_text())
    exported = dict(AutoModelForCausalLM.from_pretrained(run / "export-best", dtype=torch.float32).named_parameters())
    if best["checkpoint"] is None:
        assert best["step"] == 0
        model = AutoModelForCausalLM.from_pretrained(bench.policy, dtype=torch.float32)
        kept = dict(model.named_parameters())
    else:
        file = run / best["checkpoint"] / "learner/engine/mp_rank_00_model_states.pt"
        states = torch.load(file, weights_only=False)["module"]
        kept = {name.removeprefix("model."): value for name, value in states.items()}
    assert all(torch.equal(value, kept[name]) for name, value in exported.items())


def test_only_the_newest_checkpoint_and_that_of_the_best_are_left(keeping_run: Any) -> None:
    bench, _ = keeping_run
    run = bench.folder / "run"
    best = json.loads((run / "best.json").read_text())["step"]
    steps = {int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir()}
    assert steps == {6, best} - {0}
