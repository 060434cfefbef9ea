"""Attention of some queries to some of the keys they see, with what it takes to add the others later.

Softmax over keys that come in parts is the mean of the softmax over each part, weighted by their shares of the sum of
exponentials (see merged_attention.py). So a block gives its output and the logarithm of its sum of exponentials, the
"sums"; and its gradients follow from those of the whole: from its output, its sums, and `delta`, the sum over a query's
output times its gradient (FlashAttention-2, arXiv 2307.08691, algorithm 2).

Two kernels. That behind PyTorch's attention on CPU, and FlashAttention on a GPU with 16-bit weights, which has not been
run, compute blocks in which all or all earlier keys are seen. Everything else - windows, capped scores, other types and
devices - is computed in the open, some queries at a time, in float32 or better.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from slipstream.models.hardware import attention_kernel
from slipstream.models.row_layout import cut, joined
from slipstream.models.row_split import Block

# Scores that exist at one time where they are computed in the open: 64 MiB in float32.
SCORES_AT_A_TIME = 1 << 24

_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Scoring:
    """How scores are made of queries and keys: scaled, then capped; beyond a window they are not looked at."""

    scale: float
    window: int | None
    softcap: float | None


def block_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: Block, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [count, heads, Q, D], key and value [count, key heads, K, D] -> output [count, heads, Q, D], sums [..., Q].

    The sums are in float32 or better, -inf for queries that see no key.
    """
    kernel = _fast_kernel(query, value, block, scoring)
    is_causal = not block.sees_all(scoring.window)
    if kernel == "cpu":
        output, sums = _cpu_forward(query, key, value, 0.0, is_causal, scale=scoring.scale)
        return output, sums
    if kernel == "gpu":
        return _flash_forward(query, key, value, is_causal, scoring.scale)
    outputs, all_sums = [], []
    wide = [tensor.to(_wide(query.dtype)) for tensor in (key.unsqueeze(2), value.unsqueeze(2))]
    for rows in _some_queries(query, key):
        scores, _ = _scores(_grouped(query, key)[..., rows, :], wide[0], block, rows, scoring)
        sums = torch.logsumexp(scores, dim=-1)
        shares = torch.exp(scores - _finite(sums).unsqueeze(-1))
        outputs.append((shares @ wide[1]).flatten(1, 2))
        all_sums.append(sums.flatten(1, 2))
    return torch.cat(outputs, dim=2), torch.cat(all_sums, dim=2)


def block_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    sums: torch.Tensor,
    block: Block,
    scoring: Scoring,
) -> Gradients:
    """The gradients of query, key and value, in their shapes. `output`, its `gradient` and `sums` are of the whole."""
    kernel = _fast_kernel(query, value, block, scoring)
    is_causal = not block.sees_all(scoring.window)
    found: Gradients
    if kernel == "cpu":
        narrow = (gradient.to(query.dtype), query, key, value, output.to(query.dtype))
        found = _cpu_backward(*narrow, sums, 0.0, is_causal, scale=scoring.scale)
        return found
    if kernel == "gpu":
        return _flash_backward(gradient, query, key, value, output, sums, is_causal, scoring.scale)
    return _open_backward(gradient, query, key, value, output, sums, block, scoring)


def _flash_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `block_forward`, by FlashAttention for sequences of any length, of which the stretches are some of one."""
    parts = [_in_a_row(tensor) for tensor in (query, key, value)]
    output, sums, *_ = torch.ops.aten._flash_attention_forward(
        *parts, *_ends(query, key), 0.0, is_causal, False, scale=scale
    )
    count = query.shape[0]
    return cut(output.transpose(0, 1), slice(None), count), cut(sums, slice(None), count)


def _flash_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    sums: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> Gradients:
    narrow = (gradient.to(query.dtype), query, key, value, output.to(query.dtype))
    # The state of the random numbers belongs to dropout, of which there is none.
    state, unused = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
    results = torch.ops.aten._flash_attention_backward(
        *(_in_a_row(tensor) for tensor in narrow),
        joined(sums).contiguous(),
        *_ends(query, key),
        0.0,
        is_causal,
        state,
        unused,
        scale=scale,
    )
    count = query.shape[0]
    query_gradient, key_gradient, value_gradient = (
        cut(result.transpose(0, 1), slice(None), count) for result in results
    )
    return query_gradient, key_gradient, value_gradient


def _in_a_row(tensor: torch.Tensor) -> torch.Tensor:
    """[count, heads, Q, D] -> [count * Q, heads, D]."""
    return joined(tensor).transpose(0, 1).contiguous()


def _ends(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Where the stretches of queries and keys begin and end, int32 [count + 1] each, and how long they are."""
    count, query_length, key_length = query.shape[0], query.shape[2], key.shape[2]
    numbers = torch.arange(count + 1, dtype=torch.int32, device=query.device)
    return numbers * query_length, numbers * key_length, query_length, key_length


def _open_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    sums: torch.Tensor,
    block: Block,
    scoring: Scoring,
) -> Gradients:
    wide = _wide(query.dtype)
    keys, values = key.unsqueeze(2).to(wide), value.unsqueeze(2).to(wide)
    delta = (gradient.to(wide) * output.to(wide)).sum(-1)
    grouped_query, grouped_gradient = _grouped(query, key).to(wide), _grouped(gradient, key).to(wide)
    grouped_sums, grouped_delta = (_grouped(tensor.unsqueeze(-1), key) for tensor in (sums, delta))
    query_gradients = []
    key_gradient, value_gradient = key.new_zeros(key.shape, dtype=wide), value.new_zeros(value.shape, dtype=wide)
    for rows in _some_queries(query, key):
        queries, gradients = grouped_query[..., rows, :], grouped_gradient[..., rows, :]
        scores, slope = _scores(queries, keys, block, rows, scoring)
        shares = torch.exp(scores - _finite(grouped_sums[..., rows, :]))
        value_gradient += (shares.transpose(-1, -2) @ gradients).sum(2)
        of_scores = shares * (gradients @ values.transpose(-1, -2) - grouped_delta[..., rows, :]) * slope
        query_gradients.append((of_scores @ keys).flatten(1, 2))
        key_gradient += (of_scores.transpose(-1, -2) @ queries).sum(2)
    return torch.cat(query_gradients, dim=2), key_gradient, value_gradient


def _fast_kernel(query: torch.Tensor, value: torch.Tensor, block: Block, scoring: Scoring) -> str | None:
    """Which of the kernels that are not ours computes a block, if any does."""
    has_form = block.sees_all(scoring.window) or block.is_causal(scoring.window)
    if not has_form or scoring.softcap is not None or query.shape[-1] != value.shape[-1]:
        return None
    device = query.device.type
    if device == "cpu":
        return "cpu"
    return "gpu" if attention_kernel(device, str(query.dtype).removeprefix("torch.")) == "varlen" else None


def _scores(
    queries: torch.Tensor, keys: torch.Tensor, block: Block, rows: slice, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Scores [count, key heads, sharing heads, Q, K], -inf where a query does not look, and their slope.

    The slope is the derivative of a score by the product of query and key.
    """
    scores = queries.to(keys.dtype) @ keys.transpose(-1, -2) * scoring.scale
    slope: torch.Tensor | float = scoring.scale
    if scoring.softcap is not None:
        bent = torch.tanh(scores / scoring.softcap)
        scores, slope = scoring.softcap * bent, scoring.scale * (1 - bent.square())
    if not block.sees_all(scoring.window):
        places = torch.arange(block.query_length, device=keys.device)[rows] + block.offset
        distance = places.unsqueeze(-1) - torch.arange(block.key_length, device=keys.device)
        is_seen = distance >= 0
        if scoring.window is not None:
            is_seen &= distance < scoring.window
        scores = scores.masked_fill(~is_seen, -torch.inf)
    return scores, slope


def _some_queries(query: torch.Tensor, key: torch.Tensor) -> Iterator[slice]:
    """Parts of the queries of [count, heads, Q, D] whose scores may exist together."""
    count, heads, length, _ = query.shape
    rows = max(1, SCORES_AT_A_TIME // (count * heads * key.shape[2]))
    for first in range(0, length, rows):
        yield slice(first, min(first + rows, length))


def _grouped(tensor: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[count, heads, Q, ...] -> [count, key heads, sharing heads, Q, ...]: heads that share keys stand side by side."""
    return tensor.unflatten(1, (key.shape[1], -1))


def _finite(sums: torch.Tensor) -> torch.Tensor:
    """Sums that can be subtracted from -inf: queries that see no key here have no share of it either."""
    return sums.clamp_min(torch.finfo(sums.dtype).min)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
