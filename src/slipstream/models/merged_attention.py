"""Attention over a row in which answers share a prompt, on CPU, without a mask: two attentions, merged by their sums.

An answer's query sees the prompt, all of it, and its own answer up to itself. Softmax over both parts is the mean of
the softmax over each, weighted by their shares of the sum of exponentials: with o and s, output and log-sum-exp, of the
parts, s' = log(exp s1 + exp s2) and o' = o1 exp(s1 - s') + o2 exp(s2 - s') (FlashAttention, arXiv 2205.14135, section
3.1). The prompt's keys are used by the queries of all answers in one call and are never copied. The gradient of each
part follows from its own keys together with output and log-sum-exp of the whole, which is all a backward kernel reads
(FlashAttention-2, arXiv 2307.08691, algorithm 2); PyTorch offers no derivative of the log-sum-exp itself.

Calls the kernels behind scaled_dot_product_attention, since only they give the log-sum-exp. Leaves out sliding windows
and other devices, which `models/attention.py` computes with a mask.
"""

from typing import Any

import torch

from slipstream.models.row_layout import RowLayout, cut, joined

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def merged_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: RowLayout, scale: float
) -> torch.Tensor:
    """query [heads, T, D], key and value [key heads, T, D] -> [T, heads, D]."""
    output: torch.Tensor = _MergedAttention.apply(query, key, value, layout, scale)
    return output.transpose(0, 1)


class _MergedAttention(torch.autograd.Function):
    """[heads, T, D] -> [heads, T, D]."""

    @staticmethod
    def forward(
        context: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: RowLayout, scale: float
    ) -> torch.Tensor:
        output = torch.empty_like(query)
        sums = query.new_empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))
        for run in layout.runs:
            parts = [cut(tensor, run.rows, run.count) for tensor in (query, key, value)]
            own, own_sums = _forward(*parts, 0.0, True, scale=scale)
            output[:, run.rows] = joined(own)
            sums[:, run.rows] = joined(own_sums)
        for prompt, rows in layout.answers:
            parts = [cut(query, rows), cut(key, prompt), cut(value, prompt)]
            seen, seen_sums = (part[0] for part in _forward(*parts, 0.0, False, scale=scale))
            together = torch.logaddexp(sums[:, rows], seen_sums)
            own_share = (sums[:, rows] - together).exp().unsqueeze(-1)
            seen_share = (seen_sums - together).exp().unsqueeze(-1)
            output[:, rows] = (output[:, rows] * own_share + seen * seen_share).to(output.dtype)
            sums[:, rows] = together
        context.save_for_backward(query, key, value, output, sums)
        context.layout, context.scale = layout, scale
        return output

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, sums = context.saved_tensors
        layout, scale, [gradient] = context.layout, context.scale, gradients
        found = [torch.empty_like(tensor) for tensor in (query, key, value)]
        for run in layout.runs:
            parts = [cut(tensor, run.rows, run.count) for tensor in (gradient, query, key, value, output, sums)]
            for whole, part in zip(found, _backward(*parts, 0.0, True, scale=scale), strict=True):
                whole[:, run.rows] = joined(part)
        for prompt, rows in layout.answers:
            places = (rows, rows, prompt, prompt, rows, rows)
            tensors = (gradient, query, key, value, output, sums)
            parts = [cut(tensor, place) for tensor, place in zip(tensors, places, strict=True)]
            seen = _backward(*parts, 0.0, False, scale=scale)
            for whole, part, place in zip(found, seen, (rows, prompt, prompt), strict=True):
                whole[:, place] += part[0]
        return *found, None, None
