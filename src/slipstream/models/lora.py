"""A LoRA adapter inside a model: small matrices A and B beside frozen weights, W x + scale * B (A x).

LoRA is that of arXiv 2106.09685 (section 4.1), with scale = alpha / rank; peft makes and computes it. B begins as
zeros, so an untrained adapter changes nothing. Elsewhere a model with an adapter is asked for its weights by the names
of the Hugging Face model, and answers with the merged ones, W + scale * B A, one at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch

from slipstream.config.lora import LoraConfig
from slipstream.errors import ConfigError
from slipstream.models.value import VALUE_HEAD

ADAPTER_NAME = "default"
ADAPTER_FOLDER = "adapter"
WEIGHT_FILE = "adapter_model.safetensors"
# What peft puts before the name of a module, and between a module and its weight.
PEFT_PREFIX = "base_model.model."
BASE_LAYER = ".base_layer"
ADAPTER_MARK = ".lora_"


def add_adapter(model: Any, config: LoraConfig) -> None:
    """Put an adapter into the model, in place; nothing but it, and the head of a model with one, learns then.

    Raises ConfigError where no module of the model has the names asked for, or where one of them is its head.
    """
    with redirect_stdout(sys.stderr):  # DeepSpeed, which peft imports if it is there, has its log on standard output
        from peft import inject_adapter_in_model
    head = model.get_output_embeddings()
    try:
        inject_adapter_in_model(_peft_config(model, config), model, adapter_name=ADAPTER_NAME)
    except ValueError as error:
        raise ConfigError(f"model.lora.target_modules: {str(error).strip().splitlines()[0]}") from error
    if model.get_output_embeddings() is not head:
        raise ConfigError(
            "model.lora.target_modules: names the head of the language model, which has no adapter here; leave it out"
        )
    for name, parameter in model.named_parameters():
        if name.startswith(f"{VALUE_HEAD}."):
            parameter.requires_grad_(True)


def _peft_config(model: Any, config: LoraConfig) -> Any:
    from peft import LoraConfig as PeftLoraConfig

    is_policy = model.can_generate()
    return PeftLoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules="all-linear" if config.target_modules is None else list(config.target_modules),
        exclude_modules=None if is_policy else [VALUE_HEAD],
        task_type="CAUSAL_LM" if is_policy else "SEQ_CLS",
    )


def named_weights(model: Any) -> dict[str, torch.nn.Parameter]:
    """The parameters, frozen ones too, by the names they have without an adapter; those of the adapter are left out."""
    return {
        name.replace(BASE_LAYER, ""): parameter
        for name, parameter in model.named_parameters()
        if ADAPTER_MARK not in name
    }


@torch.no_grad()
def merged_weights(model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights, given by name, each with what the adapter adds to it: new tensors where it does."""
    layers = dict(adapted_layers(model))
    return {
        name: weight + layers[name].get_delta_weight(ADAPTER_NAME).to(weight.dtype) if name in layers else weight
        for name, weight in weights.items()
    }


def adapter_factors(model: Any, names: Sequence[str]) -> dict[str, torch.nn.Parameter]:
    """The parameters, by name, of the adapters of the weights `names`: what `merged_weights` needs besides these."""
    layers = dict(adapted_layers(model))
    return {
        f"{name}/{key}": parameter
        for name in names
        if name in layers
        for key, parameter in layers[name].named_parameters()
        if ADAPTER_MARK in f".{key}"
    }


def adapted_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Name of the weight that has an adapter, and peft's layer around it."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            yield f"{name}.weight", module


def leave_out_frozen(module: torch.nn.Module) -> None:
    """Have `state_dict` of a module hold what learns, and buffers, alone: a frozen head has a second name there."""

    def drop(owner: torch.nn.Module, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
        frozen = {name for name, p in owner.named_parameters(remove_duplicate=False) if not p.requires_grad}
        for name in frozen:
            state.pop(f"{prefix}{name}", None)

    module.register_state_dict_post_hook(drop)


@contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """Within it the model computes what it did before it had an adapter."""
    layers = [layer for _, layer in adapted_layers(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def save_adapter(model: Any, folder: Path, *, config: LoraConfig, model_path: str) -> None:
    """Write the adapter as peft does, to be loaded onto the model at `model_path`."""
    from safetensors.torch import save_file

    peft_config = _peft_config(model, config)
    peft_config.base_model_name_or_path = model_path
    peft_config.inference_mode = True
    names = {name.removesuffix(".weight").rpartition(".")[2] for name, _ in adapted_layers(model)}
    peft_config.target_modules = names
    heads = {name: tensor for name, tensor in named_weights(model).items() if name.startswith(f"{VALUE_HEAD}.")}
    peft_config.modules_to_save = [VALUE_HEAD] if heads else None
    adapter = {
        name.replace(f".{ADAPTER_NAME}", ""): tensor
        for name, tensor in model.named_parameters()
        if ADAPTER_MARK in name
    }
    folder.mkdir(parents=True, exist_ok=True)
    state = {f"{PEFT_PREFIX}{name}": tensor.detach().cpu().contiguous() for name, tensor in (adapter | heads).items()}
    save_file(state, folder / WEIGHT_FILE, metadata={"format": "pt"})
    peft_config.save_pretrained(str(folder))
