"""The configuration of an adapter: what it defaults to, and what has no place beside it."""

import pytest

from slipstream.config.loader import load_config
from slipstream.config.schema import RLConfig, SFTConfig
from slipstream.errors import ConfigError

BASE = ["--steps=1", "--output_dir=o", "--model.path=m", "--data.source=d.jsonl"]


def test_one_key_is_enough_and_none_means_all_weights() -> None:
    assert load_config(SFTConfig, None, BASE).model.lora is None
    lora = load_config(SFTConfig, None, [*BASE, "--model.lora.rank=4"]).model.lora
    assert load_config(SFTConfig, None, [*BASE, "--model.lora.rank=4", "--training.zero_stage=3"]).model.lora == lora
    assert lora is not None and (lora.rank, lora.alpha, lora.target_modules) == (4, 32.0, None)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["--training.tensor_parallel=2"], r"training\.tensor_parallel \(2\) cannot train an adapter.*set it to 1"),
        (["--algorithm.kl_coefficient=0.1", "--algorithm.reference_refresh_steps=5"], "no place beside model.lora"),
        (["--model.lora.target_modules=[]"], r"model\.lora\.target_modules"),
        (["--model.lora.rank=0"], r"model\.lora\.rank"),
    ],
)
def test_what_has_no_place_beside_an_adapter_is_refused_before_anything_starts(settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(RLConfig, None, [*BASE, "--reward.function=exact_match", "--model.lora.rank=4", *settings])
