"""What can be known of a model from its folder without loading it: shapes, size, longest sequence, chat template.

For the checks and the estimates made before anything starts. Reads config.json and the headers of safetensors files,
imports neither torch nor transformers, and never asks the hub: a hub model is known once it is in the local cache.
"""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.config.schema import ScratchPolicyConfig
from slipstream.errors import ModelError

LONGEST_HEADER = 100 << 20
"""Bytes; the format's own limit on a safetensors header."""


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a causal language model. `key_value_width` is heads x width of the keys of one layer.

    `parameters` is exact where `is_exact`, else computed from the shapes of a Llama-type model.
    """

    parameters: int
    is_exact: bool
    layers: int
    hidden_size: int
    intermediate_size: int
    key_value_width: int
    vocabulary_size: int
    max_tokens: int | None


def local_folder(path: str) -> Path | None:
    """The folder of a local model, or of a hub model's newest snapshot in the local cache; None if there is none."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    if looks_like_path(path):
        return None
    from huggingface_hub import constants

    cached = Path(constants.HF_HUB_CACHE) / f"models--{path.replace('/', '--')}"
    revision = cached / "refs" / "main"
    if not revision.is_file():
        return None
    snapshot = cached / "snapshots" / revision.read_text().strip()
    return snapshot if (snapshot / "config.json").is_file() else None


def looks_like_path(name: str) -> bool:
    """Whether a name can only be a path: a hub name is `name` or `organisation/name`."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or name.endswith("/")


def read_model_facts(folder: Path) -> ModelFacts:
    """Facts of a model folder. Raises ModelError if its config.json or a weight file cannot be read."""
    config = read_json(folder / "config.json")
    text = config.get("text_config")
    if isinstance(text, dict):
        config = {**config, **text}
    hidden = _whole_number(config, folder, "hidden_size", "n_embd")
    layers = _whole_number(config, folder, "num_hidden_layers", "n_layer")
    heads = _whole_number(config, folder, "num_attention_heads", "n_head")
    head_width = config.get("head_dim") or hidden // heads
    longest = next((config[key] for key in ("max_position_embeddings", "n_positions") if config.get(key)), None)
    shapes = _Shapes(
        layers=layers,
        hidden_size=hidden,
        intermediate_size=int(config.get("intermediate_size") or config.get("n_inner") or 4 * hidden),
        key_value_width=int(config.get("num_key_value_heads") or heads) * int(head_width),
        vocabulary_size=_whole_number(config, folder, "vocab_size"),
    )
    files = sorted(folder.glob("*.safetensors"))
    parameters = sum(count_parameters(file) for file in files)
    return ModelFacts(
        parameters=parameters or shapes.parameters(tied_embeddings=bool(config.get("tie_word_embeddings"))),
        is_exact=parameters > 0,
        max_tokens=int(longest) if longest is not None else None,
        **vars(shapes),
    )


def scratch_model_facts(config: ScratchPolicyConfig) -> ModelFacts:
    """Facts of a policy that a pipeline is going to make."""
    shapes = _Shapes(
        layers=config.layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        key_value_width=config.hidden_size,
        vocabulary_size=config.vocabulary_size,
    )
    parameters = shapes.parameters(tied_embeddings=True)
    return ModelFacts(parameters=parameters, is_exact=False, max_tokens=config.max_tokens, **vars(shapes))


def count_parameters(file: Path) -> int:
    """Numbers in a safetensors file, from its header: 8 bytes of length (little endian), then JSON."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(stream.read(length))
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        needed = 8 + length + max((entry["data_offsets"][1] for entry in tensors), default=0)
        count = sum(math.prod(entry["shape"]) for entry in tensors)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelError(f"model.path: {file} is no safetensors file ({error}); download or convert it again") from None
    found = file.stat().st_size
    if found < needed:
        raise ModelError(f"model.path: {file} is cut off: {found} of {needed} bytes; download or convert it again")
    return count


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer of a model folder can render a conversation."""
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    if (folder / "additional_chat_templates").is_dir():
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and bool(read_json(settings).get("chat_template"))


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object of a model folder. Raises ModelError."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path: cannot read {file}: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"model.path: {file} must hold a JSON object, found {type(content).__name__}")
    return content


@dataclass(frozen=True)
class _Shapes:
    layers: int
    hidden_size: int
    intermediate_size: int
    key_value_width: int
    vocabulary_size: int

    def parameters(self, *, tied_embeddings: bool) -> int:
        """Of a Llama-type model without biases: attention, gated feed-forward, two norms a layer, embeddings."""
        attention = 2 * self.hidden_size * self.hidden_size + 2 * self.hidden_size * self.key_value_width
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = (1 if tied_embeddings else 2) * self.vocabulary_size * self.hidden_size
        return self.layers * layer + embeddings + self.hidden_size


def _whole_number(config: dict[str, Any], folder: Path, *names: str) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and value > 0:
            return value
    raise ModelError(f"model.path: {folder}/config.json lacks {names[0]}; expected a causal language model")
