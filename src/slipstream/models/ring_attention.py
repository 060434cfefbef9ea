"""Attention over a row that several ranks share: each has the queries of its tokens, keys and values go around.

At every step a rank computes what its queries see among the keys that are with it (`attention_block.py`), passes these
on to the next rank and takes those of the one before; after as many steps as there are ranks each query has met every
key (ring attention, arXiv 2310.01889). The parts are merged by their sums of exponentials as they come. The backward
pass sends keys and values around once more, with their gradients, which are back home after the last step. What travels
next is on its way while a step is computed.

What lies where, and who sees whom, is decided in `row_split.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from slipstream.models.attention_block import Scoring, block_backward, block_forward
from slipstream.models.row_layout import cut, joined
from slipstream.models.sequence_group import SequenceGroup, SharedRow

KEYS_TAG, GRADIENTS_TAG = 0, 2


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    shared: SharedRow,
    scoring: Scoring,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [heads, t, D], key and value [key heads, t, D] of this rank's t tokens -> [t, heads, D].

    `sinks` [heads] take part in every softmax and have no value. All ranks of the group must call it, forward and
    backward.
    """
    output: torch.Tensor = _RingAttention.apply(query, key, value, sinks, shared, scoring)
    return output.transpose(0, 1)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        shared: SharedRow,
        scoring: Scoring,
    ) -> torch.Tensor:
        split, group = shared.split, shared.group
        wide = torch.promote_types(query.dtype, torch.float32)
        output = query.new_zeros(*query.shape[:2], value.shape[-1], dtype=wide)
        sums = query.new_full(query.shape[:2], -torch.inf, dtype=wide)
        held = [key.contiguous(), value.contiguous()]
        for source, following in _sources(group):
            arriving = None
            if following is not None:
                arriving = group.pass_on(held, split.tokens(following), tag=KEYS_TAG)
            for block in split.blocks(group.rank, source, scoring.window):
                queries = cut(query, block.queries, block.count)
                keys, values = (cut(tensor, block.keys, block.count) for tensor in held)
                part, part_sums = block_forward(queries, keys, values, block, scoring)
                _add(output[:, block.queries], sums[:, block.queries], joined(part), joined(part_sums))
            if arriving is not None:
                held = arriving.wait()
        if sinks is not None:
            _add_sinks(output, sums, sinks)
        context.save_for_backward(query, key, value, sinks, output, sums)
        context.shared, context.scoring = shared, scoring
        return output.to(query.dtype)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks, output, sums = context.saved_tensors
        split, group, scoring, [gradient] = context.shared.split, context.shared.group, context.scoring, gradients
        query_gradient = torch.zeros_like(query, dtype=output.dtype)
        held = [key.contiguous(), value.contiguous()]
        found = [torch.zeros_like(tensor, dtype=output.dtype) for tensor in held]
        for source, following in _sources(group):
            arriving = None
            if following is not None:
                arriving = group.pass_on(held, split.tokens(following), tag=KEYS_TAG)
            for block in split.blocks(group.rank, source, scoring.window):
                own = [cut(tensor, block.queries, block.count) for tensor in (gradient, query, output, sums)]
                keys, values = (cut(tensor, block.keys, block.count) for tensor in held)
                parts = block_backward(own[0], own[1], keys, values, own[2], own[3], block, scoring)
                query_gradient[:, block.queries] += joined(parts[0])
                for whole, part in zip(found, parts[1:], strict=True):
                    whole[:, block.keys] += joined(part)
            # With the last step they come home.
            lengths = split.tokens(group.rank if following is None else following)
            if group.size > 1:
                found = group.pass_on(found, lengths, tag=GRADIENTS_TAG).wait()
            if arriving is not None:
                held = arriving.wait()
        sink_gradient = None
        if sinks is not None:
            delta = (gradient.to(output.dtype) * output).sum(-1)
            share = (sinks.to(sums.dtype).unsqueeze(-1) - sums).exp()
            sink_gradient = -(share * delta).sum(-1).to(sinks.dtype)
        results = [query_gradient.to(query.dtype), found[0].to(key.dtype), found[1].to(value.dtype)]
        return *results, sink_gradient, None, None


def _sources(group: SequenceGroup) -> list[tuple[int, int | None]]:
    """Whose keys are with this rank at each step, and whose come next, None at the last one."""
    sources = [(group.rank - step) % group.size for step in range(group.size)]
    return list(zip(sources, [*sources[1:], None], strict=True))


def _add(output: torch.Tensor, sums: torch.Tensor, part: torch.Tensor, part_sums: torch.Tensor) -> None:
    """Merge a part into `output` [heads, Q, D] and `sums` [heads, Q], in place."""
    together = torch.logaddexp(sums, part_sums)
    # A query that has seen no key so far has a sum of -inf, and no share.
    finite = together.clamp_min(torch.finfo(together.dtype).min)
    share, part_share = ((each - finite).exp().unsqueeze(-1) for each in (sums, part_sums))
    output.mul_(share).add_(part * part_share)
    sums.copy_(together)


def _add_sinks(output: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor) -> None:
    """Let the sinks [heads] take their share of the softmax, in place."""
    together = torch.logaddexp(sums, sinks.to(sums.dtype).unsqueeze(-1))
    output.mul_((sums - together).exp().unsqueeze(-1))
    sums.copy_(together)
