"""How the losses of single tokens become the loss of an optimizer step.

An aggregation is a weight per token, fixed for the whole optimizer step before it is cut into micro-batches and ranks:
loss of the step = sum over all tokens of weight * loss. The sum has the same value however it is cut, which an average
of averages has not. Weights are plain numbers, so the learner knows nothing of how they came about.
"""

from collections.abc import Sequence
from typing import Literal

Aggregation = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_length"]


def aggregation_weights(
    loss_token_counts: Sequence[int],
    *,
    aggregation: Aggregation,
    constant_length: int | None = None,
    step_sequences: int | None = None,
) -> list[float]:
    """Return, for each sequence of an optimizer step, the weight of each of its loss tokens.

    `loss_token_counts` holds the number of loss tokens of each sequence, over all ranks. With S the number of
    sequences that have any:

    - token_mean: 1 / (loss tokens of all sequences), so that every token of the step counts the same, as in DAPO
      (arXiv 2503.14476), equation 8;
    - sequence_mean_token_mean: 1 / (S * tokens of the sequence), so that every sequence counts the same, as in
      DeepSeekMath (arXiv 2402.03300), equation 3;
    - sequence_mean_token_sum: 1 / S, so that the loss of a sequence is the sum over its tokens: a response is one
      action, and its log-prob the sum of theirs;
    - constant_length: 1 / (S * `constant_length`), as in Dr. GRPO (arXiv 2503.20783): no sequence counts more or less
      per token for being long, in this step or in another.

    A sequence that was filtered out counts 0 and leaves numerator and denominator alike. If nothing is left, all
    weights are 0 and so is the loss.

    `step_sequences` is S where some sequences of the step only are given: their weights are those they have in the
    whole. The divisor of token_mean is not known before all its sequences are.

    Raises ValueError for a negative count, another aggregation, a constant length that is needed and not given, or
    `step_sequences` with token_mean.
    """
    if any(count < 0 for count in loss_token_counts):
        raise ValueError(f"loss token counts must not be negative, found {min(loss_token_counts)}")
    sequences = sum(count > 0 for count in loss_token_counts)
    if not sequences:
        return [0.0] * len(loss_token_counts)
    if step_sequences is not None:
        if aggregation == "token_mean":
            raise ValueError("the weights of token_mean need the tokens of the whole step")
        sequences = step_sequences
    match aggregation:
        case "token_mean":
            divisors = [sum(loss_token_counts)] * len(loss_token_counts)
        case "sequence_mean_token_mean":
            divisors = [sequences * count for count in loss_token_counts]
        case "sequence_mean_token_sum":
            divisors = [sequences] * len(loss_token_counts)
        case "constant_length":
            if constant_length is None or constant_length < 1:
                raise ValueError(f"constant_length needs a divisor of at least 1, found {constant_length}")
            divisors = [sequences * constant_length] * len(loss_token_counts)
        case _:
            raise ValueError(f"unknown aggregation {aggregation!r}")
    return [1.0 / divisor if count else 0.0 for count, divisor in zip(loss_token_counts, divisors, strict=True)]
