"""What MODEL means: a folder, a hub name, a run or a checkpoint; and the weights are those that were trained."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import ModelError, RunDirectoryError
from slipstream.observe.run_directory import RunDirectory
from slipstream.workflows.chat import load_model
from slipstream.workflows.model_folder import ModelFolder, find_model, started_in


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that has only begun."""
    RunDirectory.create(tmp_path / "run", "steps: 1\n", "sft").close()
    return tmp_path / "run"


def put_model(folder: Path) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return str(folder)


def put_checkpoint(run_dir: Path, step: int, *, damaged: bool = False) -> Path:
    folder = run_dir / "checkpoints" / f"step-{step:06d}"
    (folder / "learner").mkdir(parents=True)
    (folder / "learner" / "learner.json").write_text("{}")
    if not damaged:
        (folder / "manifest.json").write_text(json.dumps({"step": step, "files": {}}))
    return folder


def test_a_model_folder_and_a_hub_name_are_what_they_are(tmp_path: Path) -> None:
    path = put_model(tmp_path / "model")
    assert find_model(path) == ModelFolder(path)
    assert find_model("some/model") == ModelFolder("some/model")


def test_of_a_run_the_export_goes_before_the_best_policy_and_that_before_checkpoints(run_dir: Path) -> None:
    put_checkpoint(run_dir, 9)
    newest = put_checkpoint(run_dir, 12)
    put_checkpoint(run_dir, 15, damaged=True)
    (run_dir / "checkpoints" / "step-000018.partial").mkdir()
    assert find_model(str(run_dir)) == ModelFolder(None, newest / "learner")
    best = put_model(run_dir / "export-best")
    assert find_model(str(run_dir)) == ModelFolder(best)
    export = put_model(run_dir / "export")
    assert find_model(str(run_dir)) == ModelFolder(export)
    assert (run_dir / "checkpoints" / "step-000018.partial").exists(), "the run may be going on: nothing is tidied up"


def test_of_a_pipeline_the_last_stage_counts(tmp_path: Path) -> None:
    pipeline = RunDirectory.create(tmp_path / "pipeline", "seed: 0\n", "pipeline")
    pipeline.close()
    for stage in ("sft", "rl"):
        RunDirectory.create(pipeline.path / stage, "steps: 1\n", stage).close()
        export = put_model(pipeline.path / stage / "export")
        assert find_model(str(pipeline.path)) == ModelFolder(export)


@pytest.mark.parametrize("given", ["checkpoint", "learner"])
def test_a_checkpoint_is_its_learner(run_dir: Path, given: str) -> None:
    checkpoint = put_checkpoint(run_dir, 3)
    name = checkpoint if given == "checkpoint" else checkpoint / "learner"
    assert find_model(str(name)) == ModelFolder(None, checkpoint / "learner")
    assert started_in(checkpoint / "learner") == Path.cwd()


def test_what_is_no_model_is_named(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no folder '\./nowhere'; expected a model folder, a hub name"):
        find_model("./nowhere")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(ModelError, match=r"is no model \(found notes.txt\)"):
        find_model(str(tmp_path / "other"))
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").touch()
    with pytest.raises(ModelError, match="is an adapter: make a model of it and its base with `slipstream merge-lora`"):
        find_model(str(tmp_path / "adapter"))
    with pytest.raises(ModelError, match=r"is no model \(found a file\)"):
        find_model(str(tmp_path / "other" / "notes.txt"))
    with pytest.raises(RunDirectoryError, match=r"the run of `slipstream sft` in .* has no model"):
        find_model(str(run_dir))
    assert started_in(tmp_path / "other") is None


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_holds_the_very_weights_that_were_exported(bench: Any, stage: int) -> None:
    """Started with a relative path, from a folder other than that of the test."""
    from safetensors.torch import load_file

    from slipstream.training.checkpoint_weights import read_weights

    shutil.copytree(bench.policy, bench.folder / "policy")
    changes = {"model.path": "policy", "training.zero_stage": stage, "steps": 2, "batch_size": 4}
    bench.run("sft", "run", bench.sft_settings() | changes)
    run_dir = bench.folder / "run"
    exported = load_file(run_dir / "export" / "model.safetensors")
    (run_dir / "export").rename(bench.folder / "moved")
    folder = find_model(str(run_dir))
    assert folder.learner is not None and folder.learner.parent.name == "step-000002"
    weights = read_weights(folder.learner)
    assert exported.keys() <= weights.keys()
    assert all(bool((weights[name] == exported[name]).all()) for name in exported)
    model = load_model(folder)
    assert len("".join(model.answer([5, 6, 7], temperature=0.0, max_tokens=4))) >= 0
    state = model._model.state_dict()
    assert all(bool((state[name] == exported[name].to(state[name].dtype)).all()) for name in exported)

    shutil.rmtree(bench.folder / "policy")
    with pytest.raises(ModelError, match="was begun from 'policy', whose configuration and tokenizer are needed"):
        load_model(folder)
    for file in (folder.learner / "engine").iterdir():
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(RunDirectoryError, match="cannot be read"):
        read_weights(folder.learner)
    with pytest.raises(RunDirectoryError, match="has no model"):
        find_model(str(run_dir))
