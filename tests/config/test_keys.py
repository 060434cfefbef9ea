"""The flat list of configuration keys says what the schema says."""

import pytest
from pydantic import Field

from slipstream.config.base import Section
from slipstream.config.help_text import describe_keys
from slipstream.config.keys import (
    PIPELINE_OWNED_KEYS,
    config_keys,
    describe_type,
    keys_around,
    keys_below,
    nearest_keys,
)
from slipstream.config.pipeline import PipelineConfig
from slipstream.config.reward_model import RewardModelConfig
from slipstream.config.schema import EvaluateConfig, RLConfig, SFTConfig

KINDS = [RLConfig, SFTConfig, RewardModelConfig, EvaluateConfig, PipelineConfig]


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_has_a_description_and_says_what_it_expects(kind: type[Section]) -> None:
    for key in config_keys(kind).values():
        assert key.description.endswith("."), key.path
        assert key.expected, key.path


def test_sections_inside_sections_are_followed_even_where_they_may_be_null() -> None:
    keys = config_keys(RLConfig)
    assert keys["evaluation.data.prompt_key"].default == "auto"
    assert "evaluation.data" not in keys


def test_where_names_are_chosen_a_path_is_read_with_its_own() -> None:
    general = "evaluation.other_data.NAME.source"
    assert general in config_keys(RLConfig) and general in keys_around(RLConfig, "evaluation.data.source")
    around = keys_around(RLConfig, "evaluation.other_data.math.sauce")
    assert around["evaluation.other_data.math.source"].path == "evaluation.other_data.math.source"
    assert general not in around and "evaluation.data.source" in around
    assert keys_below(RLConfig, "evaluation.other_data") == ["NAME"]
    assert keys_below(RLConfig, "evaluation.other_data.math") == keys_below(RLConfig, "data")
    assert "rl.evaluation.other_data.math.source" in keys_around(PipelineConfig, "rl.evaluation.other_data.math")


def test_a_pipeline_has_the_keys_of_its_stages_but_those_it_fills_in() -> None:
    keys = config_keys(PipelineConfig)
    assert {f"rl.{path}" for path in config_keys(RLConfig)} - set(keys) == {
        f"rl.{path}" for path in PIPELINE_OWNED_KEYS
    }
    assert "policy.hidden_size" in keys


def test_required_and_default_are_told_apart() -> None:
    keys = config_keys(RLConfig)
    assert keys["steps"].default_text == "(required)"
    assert keys["rollout.threads"].default_text == "null"
    assert keys["data.prompt_template"].default_text == "'{prompt}'"


def test_keys_below_a_section_are_its_own_names() -> None:
    assert keys_below(RLConfig, "checkpoint") == ["every_steps", "keep", "best_metric"]
    assert keys_below(RLConfig, "")[:3] == ["seed", "steps", "optimizer_steps_per_batch"]


class _Example(Section):
    half_open: float = Field(1.0, gt=0, lt=2)
    closed: int = Field(1, ge=1, le=9)
    fixed: int = Field(0, ge=0, le=0)
    maybe: bool | None = None
    numbers: list[int] = Field(default_factory=list)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("half_open", "a number above 0 and below 2"),
        ("closed", "a whole number of at least 1 and at most 9"),
        ("fixed", "a whole number equal to 0"),
        ("maybe", "true or false, or null"),
        ("numbers", "a list of whole numbers"),
    ],
)
def test_types_and_ranges_are_put_in_words(name: str, words: str) -> None:
    assert describe_type(_Example.model_fields[name]) == words


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("learning_rate", ["training.learning_rate", "critic.learning_rate"]),
        ("threads", ["rollout.threads", "training.threads"]),
        ("data.promt_key", ["data.prompt_key"]),
        ("evaluation.data.source_", ["evaluation.data.source"]),
        ("LEARNING-RATE", ["training.learning_rate", "critic.learning_rate"]),
        ("lerning_rate", ["training.learning_rate"]),
        ("quux", []),
    ],
)
def test_the_nearest_key_is_found_across_sections(written: str, meant: list[str]) -> None:
    assert nearest_keys(written, config_keys(RLConfig)) == meant


@pytest.mark.parametrize("kind", KINDS)
def test_the_help_shows_every_key_or_refers_to_a_section_shown_above(kind: type[Section]) -> None:
    text = describe_keys(kind, width=100)
    referred = [line.split(".*")[0] for line in text.splitlines() if ".*:" in line]
    for path, key in config_keys(kind).items():
        if not any(path.startswith(f"{section}.") for section in referred):
            assert f"--{path} {key.default_text}" in text


def test_the_help_keeps_to_the_width() -> None:
    assert max(map(len, describe_keys(RLConfig, width=100).splitlines())) <= 100
