"""What may be another when a run goes on, and what not: refused before anything starts or is written."""

from pathlib import Path

import pytest

from slipstream.config.loader import dump_config, load_config
from slipstream.config.schema import SFTConfig
from slipstream.errors import ConfigError
from slipstream.observe.run_directory import RunDirectory, parse_config
from slipstream.workflows import sft as sft_module
from slipstream.workflows.resume import CHANGEABLE_KEYS, resume

BASE = ["--steps=3", "--model.path=m", "--data.source=d.jsonl", "--data.response_key=r"]


def make_run(folder: Path, *, zero_stage: int = 2, workflow: str = "sft") -> Path:
    """A run that was interrupted after its first step."""
    keys = [*BASE, f"--output_dir={folder}", f"--training.zero_stage={zero_stage}"]
    with RunDirectory.create(folder, dump_config(load_config(SFTConfig, None, keys)), workflow) as run:
        run.metrics_path.write_text('{"step": 1}\n')
    return folder


@pytest.fixture
def resumed(monkeypatch: pytest.MonkeyPatch) -> list[SFTConfig]:
    """The configurations that runs go on with; nothing is started."""
    configs: list[SFTConfig] = []

    def go_on(config: SFTConfig, *_: object) -> dict[str, int]:
        configs.append(config)
        return {"steps": 3}

    monkeypatch.setattr(sft_module, "resume_sft", go_on)
    return configs


def test_a_changed_layout_is_that_of_the_run_from_then_on(tmp_path: Path, resumed: list[SFTConfig]) -> None:
    run = make_run(tmp_path / "run")
    resume(run, ["--training.data_parallel=4", "--training.zero_stage", "3", "--training.offload_optimizer=true"])
    resume(run)
    assert resumed[0] == resumed[1]
    training = resumed[1].training
    assert (training.data_parallel, training.zero_stage, training.offload_optimizer) == (4, 3, True)
    unchanged = load_config(SFTConfig, None, [*BASE, f"--output_dir={run}"])
    keys = {key.removeprefix("training.") for key in CHANGEABLE_KEYS}
    assert training.model_dump(exclude=keys) == unchanged.training.model_dump(exclude=keys)
    assert resumed[1].model_dump(exclude={"training"}) == unchanged.model_dump(exclude={"training"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--training.learning_rate=1"], r"--training\.learning_rate cannot be changed when a run goes on"),
        (["--training.data_paralel=2"], r"--training\.data_paralel cannot be changed.*training\.data_parallel"),
        (["--training.data_parallel=0"], r"training\.data_parallel: found 0"),
        (["--training.data_parallel"], r"--training\.data_parallel has no value"),
        (["--training.zero_stage=0"], r"ZeRO stage 2, whose checkpoints cannot be loaded at stage 0"),
        (["--training.offload_parameters=true"], "offload_parameters needs zero_stage 3"),
        (["--training.data_parallel=64"], r"batch_size \(32\) must be at least training\.data_parallel"),
    ],
)
def test_what_a_run_cannot_go_on_with_is_refused_and_changes_nothing(
    changes: list[str], message: str, tmp_path: Path, resumed: list[SFTConfig]
) -> None:
    run = make_run(tmp_path / "run")
    before = RunDirectory.open(run).config_text
    with pytest.raises(ConfigError, match=message):
        resume(run, changes)
    assert RunDirectory.open(run).config_text == before and not resumed


def test_the_same_values_once_more_change_nothing(tmp_path: Path, resumed: list[SFTConfig]) -> None:
    run = make_run(tmp_path / "run", zero_stage=0)
    before = parse_config(RunDirectory.open(run).config_text)
    resume(run, ["--training.zero_stage=0"])
    assert parse_config(RunDirectory.open(run).config_text) == before and len(resumed) == 1


def test_workflows_that_train_nothing_themselves_have_no_layout_to_change(tmp_path: Path) -> None:
    for workflow, words in (("generate", "goes on as it is"), ("pipeline", "resume the run of one of its stages")):
        run = make_run(tmp_path / workflow, workflow=workflow)
        with pytest.raises(ConfigError, match=words):
            resume(run, ["--training.data_parallel=2"])
