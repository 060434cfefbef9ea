"""The configuration of preference training: which columns it reads, and what it refuses."""

import pytest

from slipstream.config.loader import dump_config, load_config, validate_config
from slipstream.config.preference import PreferenceConfig
from slipstream.errors import ConfigError
from slipstream.observe.run_directory import parse_config

BASE = ["--steps=1", "--output_dir=o", "--model.path=m", "--data.source=d.jsonl"]


def load(*overrides: str) -> PreferenceConfig:
    return load_config(PreferenceConfig, None, [*BASE, *overrides])


def test_columns_are_recognized_unless_they_are_given() -> None:
    config = load("--evaluation_data.source=e.jsonl", "--evaluation_data.chosen_key=good")
    assert (config.data.chosen_key, config.data.rejected_key) == ("auto", "auto")
    assert config.evaluation_data is not None
    assert (config.evaluation_data.chosen_key, config.evaluation_data.rejected_key) == ("good", "auto")
    assert "chosen_key: good" in dump_config(config)


@pytest.mark.parametrize("loss", ["dpo", "simpo", "kto"])
def test_what_a_run_directory_holds_is_the_same_configuration_again(loss: str) -> None:
    config = load(f"--loss={loss}", "--evaluation_data.source=e.jsonl")
    assert validate_config(PreferenceConfig, parse_config(dump_config(config))) == config


@pytest.mark.parametrize(
    ("overrides", "needed", "loaded"),
    [
        ([], True, True),
        (["--loss=ipo"], True, True),
        (["--loss=kto", "--reference=cached"], True, False),
        (["--loss=simpo"], False, False),
        (["--loss=orpo"], False, False),
    ],
)
def test_a_reference_is_loaded_where_the_loss_has_one_and_it_is_not_cached(
    overrides: list[str], needed: bool, loaded: bool
) -> None:
    config = load(*overrides)
    assert (config.needs_reference, config.loads_reference) == (needed, loaded)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--loss=kto", "--data.label_key=null"], "data.label_key must name the column that says whether an answer"),
        (["--beta=0"], "beta: found 0, expected a number above 0"),
        (["--loss=cpo"], "loss: found 'cpo', expected one of"),
        (["--label_smoothing=0.5"], "label_smoothing: found 0.5, expected a number of at least 0 and below 0.5"),
        (["--loss=ipo", "--label_smoothing=0.1"], "label_smoothing (0.1) means nothing to loss 'ipo', only to dpo"),
        (["--target_margin=1"], "target_margin (1.0) means nothing to loss 'dpo', only to simpo"),
        (["--loss=orpo", "--sft_coefficient=1"], "sft_coefficient (1.0) means nothing to loss 'orpo', only to dpo,"),
        (["--desirable_weight=2"], "desirable_weight (2.0) means nothing to loss 'dpo', only to kto"),
        (["--loss=simpo", "--reference=cached"], "reference (cached) means nothing to loss 'simpo', only to dpo, ipo"),
        (
            ["--batch_size=1", "--training.data_parallel=2"],
            "batch_size (1) must be at least training.data_parallel (2)",
        ),
        (["--checkpoint.best_metric=mean_reward"], "checkpoint.best_metric belongs to rl"),
        (["--model.dtype=bfloat16", "--training.zero_stage=0"], "training.zero_stage 0 cannot train bfloat16 weights"),
    ],
)
def test_what_makes_no_sense_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    assert str(caught.value).startswith(message)
