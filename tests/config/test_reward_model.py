"""The configuration of the training of a reward model: which columns it reads, and what it refuses."""

import pytest

from slipstream.config.keys import config_keys
from slipstream.config.loader import dump_config, load_config
from slipstream.config.reward_model import RewardModelConfig
from slipstream.config.schema import RewardConfig
from slipstream.errors import ConfigError

BASE = ["--steps=1", "--output_dir=o", "--model.path=m", "--data.source=d.jsonl"]


def load(*overrides: str) -> RewardModelConfig:
    return load_config(RewardModelConfig, None, [*BASE, *overrides])


def test_columns_are_recognized_unless_they_are_given() -> None:
    config = load("--evaluation_data.source=e.jsonl", "--evaluation_data.chosen_key=good")
    assert (config.data.chosen_key, config.data.rejected_key) == ("auto", "auto")
    assert config.evaluation_data is not None
    assert (config.evaluation_data.chosen_key, config.evaluation_data.rejected_key) == ("good", "auto")
    assert "chosen_key: good" in dump_config(config)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--label_smoothing=0.5"], "label_smoothing: found 0.5, expected a number of at least 0 and below 0.5"),
        (["--margin=-1"], "margin: found -1, expected a number of at least 0"),
        (["--supervision=steps", "--margin=1"], "margin (1.0) means nothing to supervision 'steps'"),
        (
            ["--supervision=steps", "--label_smoothing=0.1"],
            "label_smoothing (0.1) means nothing to supervision 'steps'",
        ),
        (["--step_separator=;"], "step_separator (';') means nothing to supervision 'pairs'"),
        (["--supervision=steps", "--step_separator="], "step_separator: found "),
        (["--supervision=both"], "supervision: found 'both', expected one of pairs, steps"),
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


def test_a_step_separator_of_line_breaks_is_kept_in_the_file_of_a_run() -> None:
    config = load("--supervision=steps", '--step_separator="\\n"')
    assert config.step_separator == "\n"
    from ruamel.yaml import YAML

    assert YAML(typ="safe", pure=True).load(dump_config(config))["step_separator"] == "\n"
    assert config_keys(RewardModelConfig)["step_separator"].default_text == r"""'"\n\n"'"""
    assert (config.answers_per_row, load().answers_per_row) == (1, 2)


def test_aggregating_steps_needs_a_model_of_steps() -> None:
    with pytest.raises(ValueError, match="step_aggregation needs model"):
        RewardConfig(function="math", step_aggregation="min")
    with pytest.raises(ValueError, match="normalize_model_scores has no place beside step_aggregation"):
        RewardConfig(model="m", step_aggregation="min", normalize_model_scores=True)
