"""Sums and means over the tokens of each sequence of a micro-batch.

A sequence is never split over micro-batches, so they are exact. Used by losses and corrections that look at a whole
response; no gradient flows through them.
"""

import torch
from torch import Tensor


def sequence_sums(values: Tensor, sequence_index: Tensor) -> Tensor:
    """Give each token the sum of `values` over its sequence, detached. Shapes [N], [N] -> [N].

    `sequence_index` says which sequence a token belongs to; sequences may have any order and mix. Added up in float64:
    a response has thousands of tokens, and the order in which a GPU adds them must not show in float32.
    """
    if len(values) == 0:
        return values.detach()
    sums = torch.zeros(int(sequence_index.max()) + 1, dtype=torch.float64, device=values.device)
    sums.index_add_(0, sequence_index, values.detach().double())
    return sums[sequence_index].to(values.dtype)


def sequence_means(values: Tensor, sequence_index: Tensor) -> Tensor:
    """Give each token the mean of `values` over its sequence, detached. Shapes as in `sequence_sums`."""
    return sequence_sums(values, sequence_index) / sequence_sums(torch.ones_like(values), sequence_index)
