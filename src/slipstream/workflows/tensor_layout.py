"""Whether the models of a run can be divided among tensor-parallel ranks and workers: known before it starts.

Reads config.json and nothing else. A model that is not on this machine yet is looked at when it is loaded.
"""

from collections.abc import Iterator

from slipstream.config.generate import AnsweringConfig
from slipstream.config.loader import pipeline_stages
from slipstream.config.pipeline import PipelineConfig
from slipstream.config.reward_model import SupervisedConfig
from slipstream.config.schema import RLConfig
from slipstream.models.tensor_plan import require_equal_pieces, require_heads, require_pieces
from slipstream.workflows.model_facts import local_folder, read_json


def check_tensor_layout(config: RLConfig | SupervisedConfig) -> None:
    """Raise ModelError or ConfigError for a local model that cannot be divided as `training.tensor_parallel` says."""
    for key, path in _trained_models(config):
        folder = local_folder(path)
        if folder is not None:
            require_pieces(read_json(folder / "config.json"), config.training.tensor_parallel, path=path, key=key)


def check_worker_layout(config: RLConfig | AnsweringConfig) -> None:
    """Raise ConfigError for a local model that cannot be divided as `rollout.tensor_parallel` says."""
    folder = local_folder(config.model.path)
    if folder is not None:
        settings = read_json(folder / "config.json")
        require_equal_pieces(settings, config.rollout.tensor_parallel, model=f"model.path {config.model.path!r}")


def check_tensor_layouts(config: PipelineConfig) -> None:
    """Raise ConfigError for a stage whose ranks or workers cannot share the policy it will make as its keys say."""
    policy = config.policy
    shapes = {"num_attention_heads": policy.heads, "intermediate_size": policy.intermediate_size}
    for name, stage in pipeline_stages(config).items():
        prefix = f"{name.partition('/')[0]}."
        if isinstance(stage, RLConfig | SupervisedConfig):
            require_heads(
                policy.heads, stage.training.tensor_parallel, model="the policy of policy.heads", prefix=prefix
            )
        if isinstance(stage, RLConfig | AnsweringConfig):
            require_equal_pieces(shapes, stage.rollout.tensor_parallel, model="the policy", prefix=prefix)


def _trained_models(config: RLConfig | SupervisedConfig) -> Iterator[tuple[str, str]]:
    yield "model.path", config.model.path
    if isinstance(config, RLConfig) and config.has_critic and config.critic.path is not None:
        yield "critic.path", config.critic.path
