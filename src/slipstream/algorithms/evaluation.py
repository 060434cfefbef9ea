"""What n sampled answers per prompt say about a model: average accuracy, and the chance that one of k is right.

Pure counting. Which answer is right is decided by the caller.
"""

import math
from collections.abc import Sequence


def pass_at_k(outcomes: Sequence[Sequence[bool]], k: int) -> float:
    """Estimate the probability that at least one of k answers to a prompt is right, averaged over the prompts.

    Chen et al. (arXiv 2107.03374), equation 1: with n answers of which c are right, 1 - C(n - c, k) / C(n, k), which is
    the share of all choices of k among the n that hold a right one. Unbiased, unlike 1 - (1 - c / n)^k. Computed as a
    product of c factors, so that no binomial grows large.

    `outcomes[i][j]` says whether answer j to prompt i is right; prompts may have different numbers of answers. Raises
    ValueError for no prompts, k below 1, or a prompt with fewer than k answers.
    """
    if not outcomes:
        raise ValueError("pass@k needs at least one prompt, found none")
    if k < 1:
        raise ValueError(f"k must be at least 1, found {k}")
    for position, answers in enumerate(outcomes):
        if len(answers) < k:
            raise ValueError(
                f"pass@{k} needs at least {k} answers per prompt, found {len(answers)} for prompt {position}"
            )
    return math.fsum(_pass_at_k(len(answers), sum(map(bool, answers)), k) for answers in outcomes) / len(outcomes)


def average_at_k(outcomes: Sequence[Sequence[bool]]) -> float:
    """The share of all answers that are right (avg@k, where each prompt has k of them).

    `outcomes` is as in `pass_at_k`. Raises ValueError if there is no answer at all.
    """
    answers = [bool(outcome) for prompt in outcomes for outcome in prompt]
    if not answers:
        raise ValueError("the average needs at least one answer, found none")
    return sum(answers) / len(answers)


def _pass_at_k(answers: int, right: int, k: int) -> float:
    if answers - right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(answers - right + 1, answers + 1))
