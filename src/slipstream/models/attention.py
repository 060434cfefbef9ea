"""Exact attention over packed rows: many sequences laid end to end, none of which sees another.

Registered with Transformers under `PACKED_ATTENTION`, and in its attention interface only: a model loaded with that
name builds no mask and hands its queries, keys and values to `packed_attention`, which takes the layout from the
context `packed_sequences(lengths)`. A causal block-diagonal mask is never materialised and no padding is computed.

Two kernels, chosen by models/hardware.py: PyTorch's scaled_dot_product_attention, sequence by sequence (runs of
neighbours of equal length in one batched call), and torch's variable-length FlashAttention on a GPU, which has not
been run. Left out and refused with an error: attention soft-capping, attention sinks, position biases, dropout and
bidirectional layers. Sliding windows are honoured.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as functional
from transformers import AttentionInterface

from slipstream.errors import ModelError
from slipstream.models.hardware import attention_kernel

PACKED_ATTENTION = "slipstream_packed"

# Arguments by which families of models change the scores. Ignoring one would silently compute another model.
UNSUPPORTED_ARGUMENTS = {
    "softcap": "soft-capping of attention scores",
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
}

# Lengths of the sequences in the row being computed. A module variable rather than a context variable: on a GPU,
# autograd recomputes checkpointed layers in a thread of its own, to which context variables do not reach.
_lengths: tuple[int, ...] | None = None


@contextmanager
def packed_sequences(lengths: Sequence[int]) -> Iterator[None]:
    """Within it, a row of sum(lengths) tokens is len(lengths) separate sequences.

    With activation checkpointing the backward pass runs attention again, so it must lie within the context as well.
    """
    global _lengths
    before = _lengths
    _lengths = tuple(lengths)
    try:
        yield
    finally:
        _lengths = before


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function Transformers calls. query [1, heads, T, D], key and value [1, key heads, T, D].

    Returns ([1, T, heads, D], None). Raises ModelError outside `packed_sequences`, for a row whose length is not the
    sum of the context's, and for variants of attention this function does not compute.
    """
    _refuse_unsupported(module, attention_mask, dropout, arguments)
    lengths = _lengths
    if lengths is None:
        raise ModelError("packed attention was called outside packed_sequences(lengths)")
    if query.shape[0] != 1 or query.shape[2] != sum(lengths) or key.shape[2] != query.shape[2]:
        raise ModelError(
            f"packed attention takes one row of {sum(lengths)} tokens (the lengths of packed_sequences), found "
            f"{query.shape[0]} rows of {query.shape[2]} queries and {key.shape[2]} keys"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    kernel = attention_kernel(query.device.type, str(query.dtype).removeprefix("torch."))
    compute = _varlen if kernel == "varlen" else _sdpa
    return compute(query[0], key[0], value[0], lengths, scale, sliding_window).unsqueeze(0), None


def _refuse_unsupported(
    module: torch.nn.Module, attention_mask: torch.Tensor | None, dropout: float, arguments: dict[str, Any]
) -> None:
    family = type(module).__name__
    for name, meaning in UNSUPPORTED_ARGUMENTS.items():
        if arguments.get(name) is not None:
            raise ModelError(f"{family} uses {meaning} ({name}), which packed attention does not compute")
    if dropout:
        raise ModelError(f"{family} asks for attention dropout {dropout}; packed attention has none, set it to 0")
    is_causal = arguments.get("is_causal")
    if is_causal is False or (is_causal is None and not getattr(module, "is_causal", True)):
        raise ModelError(f"{family} is not causal; packed attention computes causal language models only")
    if attention_mask is not None:
        raise ModelError(f"{family} was given an attention mask; packed attention takes the layout from its context")


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: tuple[int, ...],
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """query [heads, T, D] -> [T, heads, D]. Neighbours of equal length go through one call, as a view."""
    outputs = []
    start = 0
    for length, run in groupby(lengths):
        count = len(list(run))
        if length == 0:
            continue
        rows = slice(start, start + count * length)
        start = rows.stop
        # [heads, count * length, D] -> [count, heads, length, D]
        queries, keys, values = (
            tensor[:, rows].unflatten(1, (count, length)).transpose(0, 1) for tensor in (query, key, value)
        )
        mask = None
        if sliding_window is not None and length > sliding_window:
            ones = torch.ones(length, length, dtype=torch.bool, device=query.device)
            mask = ones.tril() & ones.triu(1 - sliding_window)
        output = functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=query.shape[0] != key.shape[0],
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: tuple[int, ...],
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """query [heads, T, D] -> [T, heads, D], by torch's variable-length FlashAttention. CUDA only, not run yet."""
    from torch.nn.attention.varlen import varlen_attn

    ends = torch.tensor((0, *lengths), device=query.device).cumsum(0).to(torch.int32)
    # A window of w keys is the token itself and w - 1 before it.
    window = (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
    output = varlen_attn(
        query.transpose(0, 1),
        key.transpose(0, 1),
        value.transpose(0, 1),
        ends,
        ends,
        max(lengths),
        max(lengths),
        scale=scale,
        window_size=window,
        enable_gqa=query.shape[0] != key.shape[0],
    )
    # With the log-sum-exp, which is not asked for, it would be a tuple.
    assert isinstance(output, torch.Tensor)
    return output


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
