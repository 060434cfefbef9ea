"""Tiny random models of several families, and packed rows to run them on."""

from collections.abc import Callable

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Each does something to attention or logits that the plain Llama does not.
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 4},
    "gemma3_text": {"sliding_window": 4, "final_logit_softcapping": 3.0},
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25},
}


@pytest.fixture(scope="session")
def make_model() -> Callable[..., PreTrainedModel]:
    """make_model(family, attention, **changes of the configuration): the same weights at every call."""

    def make(family: str, attention: str = "eager", **changes) -> PreTrainedModel:
        torch.manual_seed(11)
        config = AutoConfig.for_model(family, **(SIZES | FAMILIES.get(family, {}) | changes))
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention)

    return make
