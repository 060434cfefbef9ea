"""A small Llama-type policy with random weights, so that a whole run needs no download.

The pipeline workflow makes one, with a tokenizer from `data.tokenizer.train_tokenizer`, and hands the folder to SFT
and then to RL like any other model. Leaves out every architecture but Llama.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.config.schema import ScratchPolicyConfig
from slipstream.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def create_policy(
    config: ScratchPolicyConfig, tokenizer: "PreTrainedTokenizerBase", *, seed: int, folder: Path
) -> None:
    """Write a Hugging Face model folder: float32 weights drawn from `seed`, configuration, tokenizer, chat template.

    Embedding and output matrix are tied. The same arguments write the same weights. Raises ModelError if `folder`
    exists and is not an empty folder.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder} exists and is not an empty folder; choose another folder or remove it")

    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    special_ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model_config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        head_dim=config.hidden_size // config.heads,
        max_position_embeddings=config.max_tokens,
        tie_word_embeddings=True,
        dtype=torch.float32,
        **special_ids,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(model_config)
    model.generation_config = GenerationConfig(**special_ids)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
