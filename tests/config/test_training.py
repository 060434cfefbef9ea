"""Combinations of training keys that cannot be trained are refused by name, with the ways out."""

import pytest

from slipstream.config.loader import load_config
from slipstream.config.schema import SFTConfig
from slipstream.errors import ConfigError

BASE = ["--steps=1", "--output_dir=o", "--model.path=m", "--data.source=d.jsonl", "--data.response_key=r"]


def test_options_of_scale_that_go_together_are_accepted() -> None:
    for keys in (
        ["--training.offload_optimizer=true", "--training.zero_stage=1"],
        ["--training.offload_optimizer=true", "--training.offload_parameters=true", "--training.zero_stage=3"],
        ["--training.optimizer=muon", "--training.zero_stage=0"],
        ["--training.optimizer=fused_adamw", "--training.zero_stage=3"],
    ):
        load_config(SFTConfig, None, [*BASE, *keys])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ["--training.offload_optimizer=true", "--training.zero_stage=0"],
            "offload_optimizer needs zero_stage 1, 2 or",
        ),
        (["--training.offload_parameters=true"], "offload_parameters needs zero_stage 3, .*found 2"),
        (
            ["--training.offload_parameters=true", "--training.zero_stage=3"],
            "offload_parameters needs offload_optimizer",
        ),
        (["--training.optimizer=muon"], "optimizer muon needs zero_stage 0, found 2"),
        (
            ["--training.optimizer=muon", "--training.zero_stage=0", "--model.lora.rank=4"],
            r"training\.optimizer muon has no place beside model\.lora",
        ),
        (
            ["--training.optimizer=muon", "--training.zero_stage=0", "--training.tensor_parallel=2"],
            r"optimizer muon needs whole weights on every rank, which tensor_parallel \(2\) divides",
        ),
        (["--training.ema_decay=0.9", "--training.tensor_parallel=2"], "ema_decay needs whole weights on every rank"),
        (["--training.ema_decay=1.0"], r"training\.ema_decay: found 1\.0, expected .* below 1"),
        (["--training.optimizer=lion"], "training.optimizer: found 'lion', expected one of"),
        (["--model.dtype=float16"], "model.dtype: found 'float16', expected one of"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_key_and_the_way_out(keys: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(SFTConfig, None, [*BASE, *keys])
