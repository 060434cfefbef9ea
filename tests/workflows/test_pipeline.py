"""The pipeline: from a policy with random weights to a trained one, each stage feeding the next."""

import json
from typing import Any

import pytest

from slipstream.config.loader import load_config, pipeline_stages, resolve_recipe
from slipstream.config.pipeline import PipelineConfig

TINY = {
    "policy.hidden_size": 64, "policy.layers": 2, "policy.heads": 2, "policy.intermediate_size": 128,
    "policy.vocabulary_size": 320, "sft.steps": 3, "sft.batch_size": 32, "sft.data.rows": 200,
    "sft.evaluation_data.rows": 16, "rl.steps": 2, "rl.data.rows": 200, "rl.evaluation.data.rows": 16,
    "rl.rollout.groups_per_step": 4, "rl.rollout.samples_per_prompt": 4, "rl.rollout.kv_cache_bytes": 1 << 26,
    "rl.evaluation.every_steps": 0, "rl.checkpoint.every_steps": 0,
}  # fmt: skip


def test_each_stage_takes_the_model_of_the_one_before() -> None:
    config = load_config(PipelineConfig, resolve_recipe("demo"), ["--output_dir=somewhere"])
    stages = pipeline_stages(config)
    sft, rl = stages["sft"], stages["rl"]
    assert sft.model.path == "somewhere/policy"
    assert rl.model.path == f"{sft.output_dir}/export"
    assert len({config.output_dir, sft.output_dir, rl.output_dir}) == 3
    assert sft.seed == rl.seed == config.seed


@pytest.fixture(scope="module")
def finished(make_workbench: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The demo at a size of seconds."""
    bench = make_workbench(tmp_path_factory.mktemp("pipeline"))
    overrides = [f"--{key}={value}" for key, value in TINY.items()]
    process = bench.command("pipeline", "demo", *overrides, "--output_dir=run", "--json")
    assert process.finish() == 0, process.stderr
    return bench, process


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_last_line_is_the_result(finished: Any) -> None:
    bench, process = finished
    result = json.loads(process.stdout.splitlines()[-1])
    assert {"accuracy_before", "accuracy_after", "seconds", "steps", "run_dir"} <= result.keys()
    assert 0 <= result["accuracy_before"] <= 1 and 0 <= result["accuracy_after"] <= 1
    assert result["steps"] == 2
    assert result == json.loads((bench.folder / "run/summary.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_stage_is_a_run_of_its_own(finished: Any) -> None:
    bench, _ = finished
    for stage in ("sft", "rl"):
        assert json.loads((bench.folder / "run" / stage / "summary.json").read_text())["workflow"] == stage
    assert (bench.folder / "run/report.html").stat().st_size > 10_000
    assert (bench.folder / "run/policy/config.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_finished_stages_are_not_repeated(finished: Any) -> None:
    """As if the pipeline had been killed between the end of its last stage and its own summary."""
    bench, process = finished
    (bench.folder / "run/summary.json").unlink()
    before = (bench.folder / "run/rl/metrics.jsonl").stat().st_mtime_ns
    resumed = bench.resume("run")
    result, again = (json.loads(done.stdout.splitlines()[-1]) for done in (process, resumed))
    assert {**again, "seconds": 0} == {**result, "seconds": 0}
    assert (bench.folder / "run/rl/metrics.jsonl").stat().st_mtime_ns == before
