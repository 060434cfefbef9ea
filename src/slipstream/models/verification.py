"""Whether a family of models computes on packed rows what it computes on each sequence alone: seen, not assumed.

There is no list of families. A model is run when it is loaded, once on a packed row of two short sequences and once on
each of them alone with the attention of Transformers' own, and refused if the two differ: as models do whose layers
carry a state from token to token, or whose attention does not go through Transformers' attention interface. What short
sequences cannot show is read from the configuration (kinds of layers) and from the calls (sliding windows).
"""

from typing import Any

import torch

from slipstream.errors import ModelError
from slipstream.models.attention import PACKED_ATTENTION, packed_sequences, recorded_windows

# Lengths of the probe's sequences, and what rounding may differ by, of the norm of what is compared.
PROBE_LENGTHS = (5, 8)
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2}

# Kinds of layers that are computed exactly at every length. Others, such as attention in chunks or a linear one, would
# be another model's.
KNOWN_LAYERS = ("full_attention", "sliding_attention")
# Configuration keys of attention that looks at a choice of the tokens, and at all of them only in short sequences.
SPARSE_ATTENTION_KEYS = ("index_topk",)

WHAT_WORKS = (
    "What works is any family whose layers have full or sliding-window attention and call Transformers' attention "
    "interface, such as Llama, Qwen, Mistral, Gemma, Phi, OLMo, Granite and GPT-OSS"
)


def require_known_layers(config: Any, path: str, key: str) -> None:
    """Raise ModelError for a configuration with layers that packed rows would silently change."""
    section = config.get_text_config()
    foreign = sorted(set(getattr(section, "layer_types", None) or ()) - set(KNOWN_LAYERS))
    foreign += [name for name in SPARSE_ATTENTION_KEYS if getattr(section, name, None)]
    if foreign:
        raise ModelError(
            f"{key}: {path!r} ({section.model_type}) has layers of the kind {', '.join(foreign)}, which cannot be "
            f"computed on packed rows. {WHAT_WORKS}"
        )


def require_divisible_rows(model: Any, path: str, key: str) -> None:
    """Raise ModelError for a model whose ranks cannot each compute a share of a row, as sequence parallelism wants.

    Attention is shared, and position embeddings take the positions they are given; but some of them also look for the
    largest position in the row, which each rank would find to be another one.
    """
    found = set()
    for module in model.modules():
        kinds = getattr(module, "rope_type", ())
        found |= {kinds} if isinstance(kinds, str) else set(kinds.values() if isinstance(kinds, dict) else kinds)
    dependent = sorted(kind for kind in found if "dynamic" in kind or kind == "longrope")
    if dependent:
        raise ModelError(
            f"{key}: {path!r} has position embeddings of the kind {', '.join(dependent)}, which depend on the longest "
            "sequence of a row and cannot be computed by ranks that share it; set training.sequence_parallel to 1"
        )


@torch.no_grad()
def verify_packing(model: Any, path: str, key: str) -> None:
    """Compare hidden states of a packed row with those of each sequence alone, by Transformers' eager attention.

    Raises ModelError if they differ, if the model cannot be run on a packed row at all, or if a sliding window of its
    configuration does not reach the attention.
    """
    family = type(model).__name__
    vocabulary = model.get_input_embeddings().weight.shape[0]
    device = model.get_input_embeddings().weight.device
    sequences = [torch.arange(1, length + 1, device=device).mul(7).remainder(vocabulary) for length in PROBE_LENGTHS]
    positions = [torch.arange(length, device=device) for length in PROBE_LENGTHS]
    try:
        with packed_sequences(PROBE_LENGTHS), recorded_windows() as windows:
            packed = _hidden_states(model, torch.cat(sequences), torch.cat(positions))
        model.set_attn_implementation("eager")
        try:
            alone = torch.cat([_hidden_states(model, *row) for row in zip(sequences, positions, strict=True)])
        finally:
            model.set_attn_implementation(PACKED_ATTENTION)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{key}: {path!r} ({family}) cannot be run on packed rows: {reason}. {WHAT_WORKS}") from error
    difference = ((packed - alone).norm() / alone.norm()).item()
    if not difference <= PROBE_TOLERANCE.get(model.dtype, 0.2):
        raise ModelError(
            f"{key}: {path!r} ({family}) computes something else on a packed row than on its sequences alone: hidden "
            f"states differ by {difference:.2g} of their norm. {WHAT_WORKS}"
        )
    _require_windows(model.config.get_text_config(), windows, family)


def _hidden_states(model: Any, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """tokens [T], positions [T] -> [T, H], float32."""
    output = model.get_decoder()(
        input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), attention_mask=None, use_cache=False
    )
    hidden: torch.Tensor = output.last_hidden_state[0].float()
    return hidden


def _require_windows(config: Any, found: list[int], family: str) -> None:
    """Raise ModelError unless attention was called with the window of the configuration in as many layers as have it.

    The probe is shorter than any real window, so that a window that is left out would not be seen in its numbers.
    """
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        expected = layer_types.count("sliding_attention")
    else:
        has_windows = window is not None and getattr(config, "use_sliding_window", True)
        expected = config.num_hidden_layers if has_windows else 0
    if found != [window] * expected:
        raise ModelError(
            f"{family} has a sliding window of {window} in {expected} layers of its configuration, but attention was "
            f"called with windows {sorted(set(found)) or 'none'} in {len(found)}; it cannot be trained on packed rows"
        )
