"""How the matrices of a model are divided among tensor-parallel ranks: as its family says in Transformers.

A family's configuration class names, for each kind of module in its layers, how it is cut (`base_model_tp_plan`):
by its outputs (columns), by its inputs (rows), or not at all while its gradient is summed over the ranks, as that of a
norm over heads of which each rank has some. Rows follow columns, so a block exchanges its output alone (Megatron-LM,
arXiv 1909.08053, section 3). Here are the families whose whole plan is of these kinds; DeepSpeed carries it out.
Embeddings and heads stay whole: the learner reads log-probs of chosen tokens from them.
"""

import re
from typing import Any

from slipstream.errors import ConfigError, ModelError

COLUMNS, ROWS, SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"
# Embeddings of which we know better.
LEFT_WHOLE = ("embedding_rowwise",)

WHAT_WORKS = (
    "What works for any family is training.sequence_parallel, which divides the activations, and training.zero_stage "
    "3, which divides the weights; tensor parallelism works for Llama, Qwen2, Qwen3, Mistral, Gemma, SmolLM3, Granite "
    "and others with separate matrices and no experts"
)


def tensor_plan(config: Any, path: str, key: str) -> list[dict[str, Any]]:
    """The layer rules for DeepSpeed (`partition_config.layer_specs`) of a model with this Transformers configuration.

    Raises ModelError for a family without a plan, and for one with a plan of other kinds; `key` is the configuration
    key that `path` stands in.
    """
    section = config.get_text_config()
    plan: dict[str, str] = getattr(section, "base_model_tp_plan", None) or {}
    parts = {pattern: style for pattern, style in plan.items() if style not in LEFT_WHOLE}
    foreign = sorted({style for style in parts.values() if style not in (COLUMNS, ROWS, SUMMED)})
    if not parts or foreign:
        found = f"is divided by Transformers as {', '.join(foreign)}" if parts else "has no plan for it in Transformers"
        raise ModelError(
            f"training.tensor_parallel: {key} {path!r} ({section.model_type}) {found}, which cannot be trained here. "
            f"{WHAT_WORKS}"
        )
    kinds = {COLUMNS: "column", ROWS: "row", SUMMED: "skip"}
    return [
        {
            "patterns": [rf".*\.{re.escape(pattern).replace(re.escape('*'), '[0-9]+')}\.weight$"],
            "partition_type": kinds[style],
            "grad_allreduce": style == SUMMED,
        }
        for pattern, style in parts.items()
    ]


def require_divisible_heads(heads: int, tensor_parallel: int, path: str) -> None:
    """Raise ConfigError where some ranks would have no attention to compute. `heads` are those of keys and values."""
    if tensor_parallel > heads:
        raise ConfigError(
            f"training.tensor_parallel ({tensor_parallel}): {path!r} has {heads} heads of keys and values, which are "
            f"divided among the ranks; the nearest that works is training.tensor_parallel {heads}"
        )
