"""Slipstream: reinforcement learning of language models, with Ray, vLLM, DeepSpeed and Transformers.

    from slipstream import RLConfig, train_rl
    train_rl(RLConfig.model_validate({...}), reward=my_function)

Names are loaded when they are first used: `import slipstream` itself is instant.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.config.loader import load_config
    from slipstream.config.reward_model import RewardModelConfig
    from slipstream.config.schema import EvaluateConfig, PipelineConfig, RLConfig, SFTConfig
    from slipstream.errors import SlipstreamError
    from slipstream.rewards.function import ScoredText
    from slipstream.workflows.evaluate import evaluate
    from slipstream.workflows.pipeline import run_pipeline
    from slipstream.workflows.resume import resume
    from slipstream.workflows.reward_model import train_reward_model
    from slipstream.workflows.rl import train_rl
    from slipstream.workflows.sft import train_sft

_HOMES = {
    "EvaluateConfig": "slipstream.config.schema",
    "PipelineConfig": "slipstream.config.schema",
    "RLConfig": "slipstream.config.schema",
    "RewardModelConfig": "slipstream.config.reward_model",
    "SFTConfig": "slipstream.config.schema",
    "ScoredText": "slipstream.rewards.function",
    "SlipstreamError": "slipstream.errors",
    "evaluate": "slipstream.workflows.evaluate",
    "load_config": "slipstream.config.loader",
    "resume": "slipstream.workflows.resume",
    "run_pipeline": "slipstream.workflows.pipeline",
    "train_reward_model": "slipstream.workflows.reward_model",
    "train_rl": "slipstream.workflows.rl",
    "train_sft": "slipstream.workflows.sft",
}

__all__ = [
    "EvaluateConfig",
    "PipelineConfig",
    "RLConfig",
    "RewardModelConfig",
    "SFTConfig",
    "ScoredText",
    "SlipstreamError",
    "evaluate",
    "load_config",
    "resume",
    "run_pipeline",
    "train_reward_model",
    "train_rl",
    "train_sft",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
