"""Loading a causal language model for training: packed attention, no dropout, and words for all that can fail."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from slipstream.data.hub import hub_or_cache
from slipstream.errors import ModelError
from slipstream.models.attention import PACKED_ATTENTION
from slipstream.models.log_probs import verify_head

WEIGHT_FILE_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
# Configuration keys that make the forward pass of a model in training mode random. Log-probs must not be: the first
# ratio of new to old would no longer be 1.
RANDOMNESS_WORDS = ("dropout", "pdrop", "drop_rate", "jitter_noise")


def load_policy(path: str, *, dtype: str, activation_checkpointing: bool = False) -> PreTrainedModel:
    """A causal language model from a local folder or the hub, on the CPU, in training mode without any randomness.

    `dtype` is "float32" or "bfloat16". Raises ModelError if the folder, its configuration or its weights are missing,
    the hub cannot be reached, or the model computes log-probs in a way that is not known here.
    """
    # A progress bar per process, in a log nobody watches, helps nobody.
    disable_progress_bar()
    with from_folder_or_hub(path):
        config = _load_config(path)
    for section in (config, getattr(config, "text_config", None)):
        _remove_randomness(section)
    # Annotated for the type checker, which thinks a model comes alone whatever is asked for.
    loaded: Any
    try:
        with from_folder_or_hub(path):
            loaded = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=getattr(torch, dtype),
                attn_implementation=PACKED_ATTENTION,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(
            f"model.path: cannot load a causal language model from {path!r}: {_first_line(error)}"
        ) from error
    model, report = loaded
    if report["missing_keys"]:
        # Transformers would make these up at random and only warn.
        missing = sorted(report["missing_keys"])
        raise ModelError(f"model.path: {path!r} lacks {len(missing)} weights of the model, such as {missing[0]!r}")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.config.use_cache = False
    model.eval()
    verify_head(model)
    if activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


@contextmanager
def from_folder_or_hub(path: str) -> Iterator[None]:
    """Within it, a hub name is looked up in the local cache at once where the hub does not answer."""
    if Path(path).is_dir():
        yield
    else:
        with hub_or_cache():
            yield


def _load_config(path: str) -> Any:
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"model.path: folder {path!r} has no config.json; expected a Hugging Face model folder")
        if not any(any(folder.glob(pattern)) for pattern in WEIGHT_FILE_PATTERNS):
            raise ModelError(
                f"model.path: folder {path!r} has no weights; expected {' or '.join(WEIGHT_FILE_PATTERNS)}"
            )
    elif folder.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
        raise ModelError(f"model.path: no folder {path!r}; expected a Hugging Face model folder or a hub name")
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        if folder.is_dir():
            raise ModelError(f"model.path: cannot read {path}/config.json: {_first_line(error)}") from error
        raise ModelError(
            f"model.path: {path!r} is not a local folder, and the Hugging Face hub did not give a model of that name "
            f"({_first_line(error)}). Check the name and the connection, or give a local folder"
        ) from error


def _remove_randomness(section: Any) -> None:
    if section is None:
        return
    for name, value in section.to_dict().items():
        if isinstance(value, float) and any(word in name for word in RANDOMNESS_WORDS):
            setattr(section, name, 0.0)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
