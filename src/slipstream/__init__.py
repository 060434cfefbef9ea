"""Slipstream: reinforcement learning of language models, with Ray, vLLM, DeepSpeed and Transformers.

    from slipstream import RLConfig, train_rl
    train_rl(RLConfig.model_validate({...}), reward=my_function)

Names are loaded when they are first used: `import slipstream` itself is instant.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.config.generate import GenerateConfig
    from slipstream.config.loader import load_config
    from slipstream.config.pipeline import PipelineConfig
    from slipstream.config.preference import PreferenceConfig
    from slipstream.config.reward_model import RewardModelConfig
    from slipstream.config.schema import EvaluateConfig, RLConfig, SFTConfig
    from slipstream.errors import SlipstreamError
    from slipstream.rewards.function import Score, ScoredText
    from slipstream.workflows.evaluate import evaluate
    from slipstream.workflows.generate import generate
    from slipstream.workflows.pipeline import run_pipeline
    from slipstream.workflows.preference import train_preference
    from slipstream.workflows.resume import resume
    from slipstream.workflows.reward_model import train_reward_model
    from slipstream.workflows.rl import train_rl
    from slipstream.workflows.sft import train_sft

_HOMES = {
    "EvaluateConfig": "slipstream.config.schema",
    "GenerateConfig": "slipstream.config.generate",
    "PipelineConfig": "slipstream.config.pipeline",
    "PreferenceConfig": "slipstream.config.preference",
    "RLConfig": "slipstream.config.schema",
    "RewardModelConfig": "slipstream.config.reward_model",
    "SFTConfig": "slipstream.config.schema",
    "Score": "slipstream.rewards.function",
    "ScoredText": "slipstream.rewards.function",
    "SlipstreamError": "slipstream.errors",
    "evaluate": "slipstream.workflows.evaluate",
    "generate": "slipstream.workflows.generate",
    "load_config": "slipstream.config.loader",
    "resume": "slipstream.workflows.resume",
    "run_pipeline": "slipstream.workflows.pipeline",
    "train_preference": "slipstream.workflows.preference",
    "train_reward_model": "slipstream.workflows.reward_model",
    "train_rl": "slipstream.workflows.rl",
    "train_sft": "slipstream.workflows.sft",
}

__all__ = [
    "EvaluateConfig",
    "GenerateConfig",
    "PipelineConfig",
    "PreferenceConfig",
    "RLConfig",
    "RewardModelConfig",
    "SFTConfig",
    "Score",
    "ScoredText",
    "SlipstreamError",
    "evaluate",
    "generate",
    "load_config",
    "resume",
    "run_pipeline",
    "train_preference",
    "train_reward_model",
    "train_rl",
    "train_sft",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
