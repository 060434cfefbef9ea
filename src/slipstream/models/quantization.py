"""Weights of fewer bits on disk that cannot be trained here. Imports nothing heavy: a dry run looks, too."""

from collections.abc import Mapping
from typing import Any

from slipstream.errors import ModelError

# Transformers computes with these weights as they are, by a package that this project does not have.
REFUSED_METHOD = "bitsandbytes"


def require_trainable_weights(settings: Mapping[str, Any], *, path: str, key: str) -> None:
    """Raise ModelError for a model whose weights are of four or eight bits, of bitsandbytes.

    `settings` is what its config.json holds.
    """
    quantization = settings.get("quantization_config") or {}
    if quantization.get("quant_method") == REFUSED_METHOD:
        raise ModelError(
            f"{key}: the weights of {path!r} are quantized by {REFUSED_METHOD}, and an adapter on such weights (QLoRA) "
            "is not supported; take the model they were made from, with model.lora and training.zero_stage 3 where "
            "memory is short"
        )
