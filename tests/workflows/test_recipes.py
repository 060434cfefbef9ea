"""Every recipe is valid, says what it would do, and runs in a small version."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.config.loader import load_config
from slipstream.config.pipeline import PipelineConfig
from slipstream.config.schema import RLConfig

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
WORKFLOW = {
    "demo": ("pipeline", PipelineConfig),
    "grpo_gsm8k_smollm2": ("rl", RLConfig),
    "rlhf_pipeline": ("pipeline", PipelineConfig),
}


def test_every_recipe_is_known_here() -> None:
    assert {path.stem for path in RECIPES.glob("*.yaml")} == set(WORKFLOW)


@pytest.mark.parametrize("name", sorted(WORKFLOW))
def test_a_recipe_is_valid(name: str) -> None:
    _, kind = WORKFLOW[name]
    config = load_config(kind, RECIPES / f"{name}.yaml", [])
    assert config.output_dir == f"runs/{name}"  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", sorted(WORKFLOW))
def test_a_dry_run_of_a_recipe_says_what_it_would_do(bench: Any, name: str) -> None:
    # Recipes whose data comes with the project are run from its folder.
    (bench.folder / "examples").symlink_to(RECIPES.parent / "examples")
    process = bench.command(WORKFLOW[name][0], name, "--dry-run", "--json")
    assert process.finish() == 0, process.stderr
    assert json.loads(process.stdout.splitlines()[-1])
    assert not (bench.folder / "runs").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_gsm8k_recipe_runs_on_a_local_model_and_local_data(bench: Any, write_rows: Callable[..., Path]) -> None:
    rows = write_rows(
        bench.folder / "gsm8k.jsonl",
        [{"prompt": f"Tom has {n} apples and buys 2.", "label": f"{n} + 2 = {n + 2}\n#### {n + 2}"} for n in range(8)],
    )
    changes = {
        "steps": 1, "model.path": bench.policy, "data.source": rows, "data.prompt_key": "prompt",
        "data.label_key": "label", "data.prompt_template": "{prompt}", "data.max_prompt_tokens": 48,
        "rollout.max_response_tokens": 16, "rollout.groups_per_step": 4, "rollout.samples_per_prompt": 2,
        "rollout.engine": "transformers",
    }  # fmt: skip
    overrides = [f"--{key}={value}" for key, value in changes.items()]
    process = bench.command("rl", "grpo_gsm8k_smollm2", *overrides, "--json")
    assert process.finish() == 0, process.stderr
    assert json.loads(process.stdout.splitlines()[-1])["steps"] == 1
    assert (bench.folder / "runs/grpo_gsm8k_smollm2/export/model.safetensors").exists()
