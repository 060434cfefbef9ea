"""The stages of a pipeline: what each of them is given by those before it."""

from typing import Any

import pytest

from slipstream.config.generate import GenerateConfig
from slipstream.config.loader import load_config, pipeline_stages
from slipstream.config.pipeline import PipelineConfig
from slipstream.config.preference import PreferenceConfig
from slipstream.config.reward_model import RewardModelConfig
from slipstream.config.schema import RLConfig, SFTConfig
from slipstream.errors import ConfigError

SFT = ["--sft.steps=1", "--sft.data.source=a.jsonl"]
REWARD_MODEL = ["--reward_model.steps=1", "--reward_model.data.source=b.jsonl"]
RL = ["--rl.steps=2", "--rl.data.source=c.jsonl"]
PREFERENCE = ["--preference.steps=1", "--preference.data.source=b.jsonl"]
COMPARISON = ["--comparison.data.source=d.jsonl", "--comparison.reward.function=exact_match"]


def stages(*arguments: str) -> dict[str, Any]:
    return pipeline_stages(load_config(PipelineConfig, None, ["--output_dir=out", "--seed=7", *arguments]))


def test_all_stages_start_from_what_sft_made() -> None:
    found = stages(*SFT, *REWARD_MODEL, *RL, *PREFERENCE)
    kinds = {"sft": SFTConfig, "reward_model": RewardModelConfig, "rl": RLConfig, "preference": PreferenceConfig}
    assert {name: type(stage) for name, stage in found.items()} == kinds
    for name, stage in found.items():
        assert (stage.seed, stage.output_dir) == (7, f"out/{name}")
        assert stage.model.path == ("out/policy" if name == "sft" else "out/sft/export")


def test_the_reward_model_is_the_reward_and_the_start_of_a_critic() -> None:
    ppo = stages(*SFT, *REWARD_MODEL, *RL, "--rl.algorithm=ppo")["rl"]
    assert ppo.reward.model == ppo.critic.path == "out/reward_model/export"
    grpo = stages(*SFT, *REWARD_MODEL, *RL)["rl"]
    assert (grpo.reward.model, grpo.critic.path) == ("out/reward_model/export", None)
    chosen = stages(*SFT, *REWARD_MODEL, *RL, "--rl.algorithm=ppo", "--rl.critic.path=other")["rl"]
    assert chosen.critic.path == "other"
    assert stages(*SFT, *RL)["rl"].reward.model is None


def test_every_policy_there_is_is_compared() -> None:
    found = stages(*SFT, *RL, *PREFERENCE, *COMPARISON)
    compared = {name: stage for name, stage in found.items() if isinstance(stage, GenerateConfig)}
    assert {name: (stage.model.path, stage.output_dir) for name, stage in compared.items()} == {
        f"comparison/{name}": (f"out/{name}/export", f"out/comparison/{name}") for name in ("sft", "rl", "preference")
    }
    assert list(stages(*SFT, *PREFERENCE, *COMPARISON)) == [
        "sft", "preference", "comparison/sft", "comparison/preference",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (SFT, "a pipeline has a stage rl or preference, or both, after sft; found neither"),
        ([*SFT, *PREFERENCE, *REWARD_MODEL], "reward_model is there for a stage rl, which is missing"),
        (
            [*SFT, *RL, *REWARD_MODEL, "--rl.reward.model=x"],
            "rl.reward.model: a stage's reward.model is made by an earlier stage; remove it from rl",
        ),
        ([*SFT, *PREFERENCE, "--preference.beta=0"], "preference.beta: found 0, expected a number above 0"),
        ([*SFT, *RL, *COMPARISON, "--comparison.rows=1"], "comparison.rows: unknown key"),
    ],
)
def test_a_mistake_is_named_with_its_stage(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        stages(*arguments)
    assert str(caught.value).startswith(message)
