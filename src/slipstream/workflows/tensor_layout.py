"""Whether the models that a run trains can be divided among its tensor-parallel ranks: known before it starts.

Reads config.json and nothing else. A model that is not on this machine yet is looked at when it is loaded.
"""

from collections.abc import Iterator

from slipstream.config.loader import pipeline_stages
from slipstream.config.pipeline import PipelineConfig
from slipstream.config.reward_model import SupervisedConfig
from slipstream.config.schema import RLConfig
from slipstream.models.tensor_plan import require_heads, require_pieces
from slipstream.workflows.model_facts import local_folder, read_json


def check_tensor_layout(config: RLConfig | SupervisedConfig) -> None:
    """Raise ModelError or ConfigError for a local model that cannot be divided as `training.tensor_parallel` says."""
    for key, path in _trained_models(config):
        folder = local_folder(path)
        if folder is not None:
            require_pieces(read_json(folder / "config.json"), config.training.tensor_parallel, path=path, key=key)


def check_tensor_layouts(config: PipelineConfig) -> None:
    """Raise ConfigError for a stage with more tensor-parallel ranks than the policy it will make has heads."""
    for name, stage in pipeline_stages(config).items():
        if isinstance(stage, RLConfig | SupervisedConfig):
            prefix = f"{name.partition('/')[0]}."
            require_heads(
                config.policy.heads, stage.training.tensor_parallel, model="the policy of policy.heads", prefix=prefix
            )


def _trained_models(config: RLConfig | SupervisedConfig) -> Iterator[tuple[str, str]]:
    yield "model.path", config.model.path
    if isinstance(config, RLConfig) and config.has_critic and config.critic.path is not None:
        yield "critic.path", config.critic.path
