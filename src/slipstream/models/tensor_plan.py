"""How the matrices of a model are divided among tensor-parallel ranks: as its family says in Transformers.

A family's configuration class names, for each kind of module in its layers, how it is cut (`base_model_tp_plan`):
by its outputs (columns), by its inputs (rows), or not at all while its gradient is summed over the ranks, as that of a
norm over heads of which each rank has some. Rows follow columns, so a block exchanges its output alone (Megatron-LM,
arXiv 1909.08053, section 3). Here are the families whose whole plan is of these kinds; DeepSpeed carries it out.
Embeddings and heads stay whole: the learner reads log-probs of chosen tokens from them.

What can be known from config.json alone is checked before a run starts; imports nothing heavy.
"""

import re
from collections.abc import Mapping
from typing import Any

from slipstream.errors import ConfigError, ModelError

COLUMNS, ROWS, SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"
KINDS = {COLUMNS: "column", ROWS: "row", SUMMED: "skip"}
# Embeddings of which we know better.
LEFT_WHOLE = ("embedding_rowwise",)

# Keys of config.json that only models with experts have.
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
# Families that are refused when they are loaded, by Transformers' name: known here so that a dry run says so.
REFUSED_FAMILIES = ("gpt2", "olmo2", "phi3")

WHAT_WORKS = (
    "what works for any family is training.sequence_parallel, which divides the activations, and training.zero_stage "
    "3, which divides the weights; training.tensor_parallel is for families without experts and with separate "
    "matrices, such as Llama, Qwen2, Qwen3, Mistral, Gemma, SmolLM3 and Granite"
)


def tensor_plan(config: Any, path: str, key: str) -> list[dict[str, Any]]:
    """The layer rules for DeepSpeed (`partition_config.layer_specs`) of a model with this Transformers configuration.

    Raises ModelError for a family without a plan, and for one with a plan of other kinds; `key` is the configuration
    key that `path` stands in.
    """
    section = config.get_text_config()
    plan: dict[str, str] = getattr(section, "base_model_tp_plan", None) or {}
    parts = {pattern: style for pattern, style in plan.items() if style not in LEFT_WHOLE}
    if not parts or not set(parts.values()) <= KINDS.keys():
        raise _refusal(section.model_type, path, key)
    return [
        {
            "patterns": [rf".*\.{re.escape(pattern).replace(re.escape('*'), '[0-9]+')}\.weight$"],
            "partition_type": KINDS[style],
            "grad_allreduce": style == SUMMED,
        }
        for pattern, style in parts.items()
    ]


def require_pieces(settings: Mapping[str, Any], tensor_parallel: int, *, path: str, key: str) -> None:
    """Look at what config.json says of a model that `tensor_parallel` ranks are to share.

    Raises ModelError for a family that cannot be divided, and ConfigError where some ranks would have no attention to
    compute; says which layout is nearest.
    """
    if tensor_parallel == 1:
        return
    text = settings.get("text_config")
    settings = {**settings, **text} if isinstance(text, Mapping) else settings
    family = settings.get("model_type")
    if family in REFUSED_FAMILIES or any(settings.get(name) for name in EXPERT_KEYS):
        raise _refusal(family, path, key)
    heads = settings.get("num_key_value_heads") or settings.get("num_attention_heads")
    require_heads(heads, tensor_parallel, model=f"{key} {path!r}")


def require_heads(heads: int | None, tensor_parallel: int, *, model: str, prefix: str = "") -> None:
    """Raise ConfigError unless `model` has a head of keys and values for each rank; `heads` None where unknown."""
    if heads is not None and tensor_parallel > heads:
        raise ConfigError(
            f"{prefix}training.tensor_parallel ({tensor_parallel}) is more than the heads of keys and values that "
            f"{model} has ({heads}), which are divided among the ranks; the nearest that works is "
            f"{prefix}training.tensor_parallel {heads}"
        )


def require_equal_pieces(settings: Mapping[str, Any], workers: int, *, model: str, prefix: str = "") -> None:
    """Raise ConfigError unless vLLM can divide a model with this config.json among the `workers` of an engine.

    It gives each worker equally many heads and as much of the feed-forward layer; of fewer heads of keys and values
    than workers it gives each to equally many.
    """
    text = settings.get("text_config")
    settings = {**settings, **text} if isinstance(text, Mapping) else settings
    heads = settings.get("num_attention_heads") or settings.get("n_head")
    sizes = {
        "attention heads": heads,
        "heads of keys and values": settings.get("num_key_value_heads") or heads,
        "columns of the feed-forward layer": settings.get("intermediate_size") or settings.get("n_inner"),
    }
    known = {name: size for name, size in sizes.items() if isinstance(size, int)}

    def undivided(number: int) -> list[str]:
        found = [name for name, size in known.items() if size % number]
        are_copied = number % known.get("heads of keys and values", number) == 0
        return [name for name in found if not (name == "heads of keys and values" and are_copied)]

    if not undivided(workers):
        return
    name = undivided(workers)[0]
    nearest = max(number for number in range(1, workers) if not undivided(number))
    raise ConfigError(
        f"{prefix}rollout.tensor_parallel ({workers}) does not divide the {known[name]} {name} of {model} equally "
        f"among the workers of an engine; the nearest that does is {prefix}rollout.tensor_parallel {nearest}"
    )


def _refusal(family: Any, path: str, key: str) -> ModelError:
    return ModelError(
        f"training.tensor_parallel: {key} {path!r} is of the family {family}, whose layers cannot be divided among "
        f"ranks that train them; {WHAT_WORKS}"
    )
