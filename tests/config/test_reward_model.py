"""The configuration of the training of a reward model: which columns it reads, and what it refuses."""

import pytest

from slipstream.config.loader import dump_config, load_config
from slipstream.config.reward_model import RewardModelConfig
from slipstream.errors import ConfigError

BASE = ["--steps=1", "--output_dir=o", "--model.path=m", "--data.source=d.jsonl"]


def load(*overrides: str) -> RewardModelConfig:
    return load_config(RewardModelConfig, None, [*BASE, *overrides])


def test_the_columns_of_the_answers_have_the_usual_names_unless_others_are_given() -> None:
    config = load("--evaluation_data.source=e.jsonl", "--evaluation_data.chosen_key=good")
    assert (config.data.chosen_key, config.data.rejected_key) == ("chosen", "rejected")
    assert config.evaluation_data is not None
    assert (config.evaluation_data.chosen_key, config.evaluation_data.rejected_key) == ("good", "rejected")
    assert "chosen_key: good" in dump_config(config)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["--data.chosen_key=null"],
            "data.chosen_key and data.rejected_key must name the columns with the two answers",
        ),
        (["--label_smoothing=0.5"], "label_smoothing: found 0.5, expected a number of at least 0 and below 0.5"),
        (["--margin=-1"], "margin: found -1, expected a number of at least 0"),
        (["--batch_size=1", "--training.ranks=2"], "batch_size (1) must be at least training.ranks (2)"),
        (["--checkpoint.best_metric=mean_reward"], "checkpoint.best_metric belongs to rl"),
        (["--model.dtype=bfloat16", "--training.zero_stage=0"], "training.zero_stage 0 cannot train bfloat16 weights"),
    ],
)
def test_what_makes_no_sense_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    assert str(caught.value).startswith(message)
