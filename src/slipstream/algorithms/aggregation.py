"""How the losses of single tokens become the loss of an optimizer step.

An aggregation is a weight per token, fixed for the whole optimizer step before it is cut into micro-batches and ranks:
loss of the step = sum over all tokens of weight * loss. The sum has the same value however it is cut, which an average
of averages has not. Weights are plain numbers, so the learner knows nothing of how they came about.
"""

from collections.abc import Sequence


def token_mean_weights(loss_token_counts: Sequence[int]) -> list[float]:
    """Return, for each sequence of an optimizer step, the weight of each of its loss tokens.

    Every loss token of the step counts the same: 1 / (loss tokens of all sequences of all ranks), as in DAPO
    (arXiv 2503.14476), equation 8. `loss_token_counts` holds the number of loss tokens of each sequence; a sequence
    that was filtered out counts 0 and leaves numerator and denominator alike. If nothing is left, all weights are 0
    and so is the loss. Raises ValueError for a negative count.
    """
    if any(count < 0 for count in loss_token_counts):
        raise ValueError(f"loss token counts must not be negative, found {min(loss_token_counts)}")
    total = sum(loss_token_counts)
    weight = 1.0 / total if total else 0.0
    return [weight] * len(loss_token_counts)
