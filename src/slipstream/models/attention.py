"""Exact attention over packed rows: many sequences laid end to end, none of which sees another.

Registered with Transformers under `PACKED_ATTENTION`, and in its attention interface only: a model loaded with that
name builds no mask and hands its queries, keys and values to `packed_attention`, which takes the layout from the
context `packed_sequences(lengths)`. A causal block-diagonal mask is never materialised and no padding is computed.
A prompt that several sequences share may lie in the row once: then their segments see it before themselves. Several
ranks may share a row: each has some of its tokens, and models/ring_attention.py computes.

Two kernels, chosen by models/hardware.py: PyTorch's scaled_dot_product_attention, sequence by sequence (runs of
neighbours of equal length in one batched call; with shared prompts models/merged_attention.py, or a copy of the
prompt's keys where that does not compute it), and torch's variable-length FlashAttention on a GPU, which has not been
run. Neither caps scores (Gemma 2) nor knows sinks (GPT-OSS): there the scores are computed in the open, some queries at
a time, and again in the backward pass. Sliding windows are honoured. Left out and refused with an error: position
biases, dropout and bidirectional layers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from slipstream.errors import ModelError
from slipstream.models.attention_block import Scoring
from slipstream.models.hardware import attention_kernel
from slipstream.models.merged_attention import merged_attention
from slipstream.models.ring_attention import ring_attention
from slipstream.models.row_layout import RowLayout, Run
from slipstream.models.row_split import RowSplit
from slipstream.models.sequence_group import SequenceGroup, SharedRow

PACKED_ATTENTION = "slipstream_packed"

# Arguments by which families of models change the scores. Ignoring one would silently compute another model.
UNSUPPORTED_ARGUMENTS = {"position_bias": "a position bias"}

# Attention scores that exist at one time where they are computed in the open: 64 MiB in float32.
SCORES_AT_A_TIME = 1 << 24

# How the row being computed is laid out. A module variable rather than a context variable: on a GPU,
# autograd recomputes checkpointed layers in a thread of its own, to which context variables do not reach.
_layout: RowLayout | None = None
_shared: SharedRow | None = None
_windows: list[int] | None = None


@contextmanager
def packed_sequences(
    lengths: Sequence[int], prompts: Sequence[int | None] | None = None, group: SequenceGroup | None = None
) -> Iterator[None]:
    """Within it, a row of sum(lengths) tokens is len(lengths) segments, which do not see each other.

    Except that segment i sees all of segment `prompts[i]`, if that is not None: what it continues. Positions are the
    caller's. With activation checkpointing the backward pass runs attention again, so it must lie within the context
    as well; so it must where a `group` of ranks shares the row, each of which has the tokens that `shared_row()` says.
    Raises ModelError where a segment continues one that is not in the row before it or continues another.
    """
    global _layout, _shared
    before = _layout, _shared
    _layout = RowLayout(lengths, prompts)
    _shared = None if group is None else SharedRow(RowSplit(_layout, group.size), group)
    try:
        yield
    finally:
        _layout, _shared = before


def shared_row() -> SharedRow | None:
    """The row of the context, if several ranks share it."""
    return _shared


@contextmanager
def recorded_windows() -> Iterator[list[int]]:
    """Within it, the sliding window of each call that has one is added to the list."""
    global _windows
    windows: list[int] = []
    _windows = windows
    try:
        yield windows
    finally:
        _windows = None


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function Transformers calls. query [1, heads, T, D], key and value [1, key heads, T, D].

    Returns ([1, T, heads, D], None). Raises ModelError outside `packed_sequences`, for a row whose length is not the
    sum of the context's, and for variants of attention this function does not compute.
    """
    _refuse_unsupported(module, attention_mask, dropout, arguments)
    layout, shared = _layout, _shared
    if layout is None:
        raise ModelError("packed attention was called outside packed_sequences(lengths)")
    tokens = layout.tokens if shared is None else shared.tokens
    if query.shape[0] != 1 or query.shape[2] != tokens or key.shape[2] != query.shape[2]:
        raise ModelError(
            f"packed attention takes one row of {tokens} tokens (the lengths of packed_sequences), found "
            f"{query.shape[0]} rows of {query.shape[2]} queries and {key.shape[2]} keys"
        )
    if _windows is not None and sliding_window is not None:
        _windows.append(sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = None if sliding_window is None or sliding_window >= layout.longest else sliding_window
    if shared is not None:
        scoring = Scoring(scale, window, softcap)
        output = ring_attention(query[0], key[0], value[0], shared=shared, scoring=scoring, sinks=s_aux)
    elif softcap is not None or s_aux is not None:
        output = _in_the_open(query[0], key[0], value[0], layout, scale, window, softcap, s_aux)
    elif attention_kernel(query.device.type, str(query.dtype).removeprefix("torch.")) == "varlen":
        output = _varlen(query[0], key[0], value[0], layout, scale, window)
    elif layout.answers and window is None and query.device.type == "cpu" and query.shape[-1] == value.shape[-1]:
        output = merged_attention(query[0], key[0], value[0], layout, scale)
    else:
        output = _sdpa(query[0], key[0], value[0], layout, scale, window)
    return output.unsqueeze(0), None


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
    layout: RowLayout,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """query [heads, T, D] -> [T, heads, D]. Neighbours of equal length go through one call, as a view."""
    outputs = []
    for run in layout.runs:
        needs_mask = run.prompt is not None or (window is not None and run.length > window)
        output = functional.scaled_dot_product_attention(
            _own(query, run),
            _seen(key, run),
            _seen(value, run),
            attn_mask=layout.mask(run, window, query) if needs_mask else None,
            is_causal=not needs_mask,
            scale=scale,
            enable_gqa=query.shape[0] != key.shape[0],
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


def _own(tensor: torch.Tensor, run: Run) -> torch.Tensor:
    """[heads, T, D] -> [count, heads, length, D], a view."""
    return tensor[:, run.rows].unflatten(1, (run.count, run.length)).transpose(0, 1)


def _seen(tensor: torch.Tensor, run: Run) -> torch.Tensor:
    """[heads, T, D] -> [count, heads, prompt length + length, D]: what a run's tokens can see."""
    if run.prompt is None:
        return _own(tensor, run)
    prompt = tensor[:, run.prompt].unsqueeze(0).expand(run.count, -1, -1, -1)
    return torch.cat([prompt, _own(tensor, run)], dim=2)


def _in_the_open(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: RowLayout,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """query [heads, T, D] -> [T, heads, D], with scores that can be capped and a softmax that can have sinks."""
    needs_gradient = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    outputs = []
    for run in layout.runs:
        queries, keys, values = _own(query, run), _seen(key, run), _seen(value, run)
        before, length = run.prompt_length, run.length
        rows = max(1, SCORES_AT_A_TIME // (queries.shape[0] * queries.shape[1] * (before + length)))
        parts = []
        for first in range(0, length, rows):
            last = min(first + rows, length)
            oldest = 0 if sliding_window is None else max(0, before + first + 1 - sliding_window)
            seen = slice(oldest, before + last)
            attend = partial(
                _attend,
                offset=before + first - seen.start,
                scale=scale,
                sliding_window=sliding_window,
                softcap=softcap,
                sinks=sinks,
            )
            arguments = (queries[:, :, first:last], keys[:, :, seen], values[:, :, seen])
            parts.append(checkpoint(attend, *arguments, use_reentrant=False) if needs_gradient else attend(*arguments))
        outputs.append(torch.cat(parts, dim=2).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    offset: int,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """query [count, heads, Q, D], key and value [count, key heads, K, D] -> [count, heads, Q, D].

    Query 0 stands beside key `offset`. The softmax is in float32 whatever the type of the weights.
    """
    count, heads, rows, _ = query.shape
    key_heads, columns = key.shape[1:3]
    # Query heads that share a key head stand side by side: [count, key heads, sharing heads, Q, K].
    grouped = query.unflatten(1, (key_heads, heads // key_heads))
    scores = grouped @ key.unsqueeze(2).transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    ones = torch.ones(rows, columns, dtype=torch.bool, device=query.device)
    is_seen = ones.tril(offset)
    if sliding_window is not None:
        is_seen &= ones.triu(offset + 1 - sliding_window)
    scores = scores.float().masked_fill(~is_seen, -torch.inf)
    if sinks is not None:
        sink = sinks.float().view(1, key_heads, -1, 1, 1).expand(count, -1, -1, rows, 1)
        scores = torch.cat([scores, sink], dim=-1)
    shares = torch.softmax(scores, dim=-1)[..., :columns].to(value.dtype)
    return (shares @ value.unsqueeze(2)).flatten(1, 2)


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: RowLayout,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """query [heads, T, D] -> [T, heads, D], by torch's variable-length FlashAttention. CUDA only, not run yet.

    Where there are more keys than queries, the kernel aligns the last key with the last query: prompts come first.
    """
    from torch.nn.attention.varlen import varlen_attn

    lengths = [run.length for run in layout.runs for _ in range(run.count)]
    seen = [run.prompt_length + run.length for run in layout.runs for _ in range(run.count)]
    ends, seen_ends = (
        torch.tensor((0, *sizes), device=query.device).cumsum(0).to(torch.int32) for sizes in (lengths, seen)
    )
    if layout.answers:
        key, value = (torch.cat([_seen(t, r).transpose(1, 2).flatten(0, 1) for r in layout.runs]) for t in (key, value))
    else:
        key, value = key.transpose(0, 1), value.transpose(0, 1)
    output = varlen_attn(
        query.transpose(0, 1),
        key,
        value,
        ends,
        seen_ends,
        max(lengths),
        max(seen),
        scale=scale,
        # A window of w keys is the token itself and w - 1 before it.
        window_size=(-1, 0) if window is None else (window - 1, 0),
        enable_gqa=query.shape[0] != value.shape[1],
    )
    # With the log-sum-exp, which is not asked for, it would be a tuple.
    assert isinstance(output, torch.Tensor)
    return output


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
