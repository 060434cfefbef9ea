"""How far a student's distribution of the next token is from its teacher's, over the whole vocabulary.

Used where both models' logits are there (`models/distillation.py`); `kl.py` has the estimates from single sampled
tokens. Functions on logits, nothing else.
"""

from typing import Literal

import torch
from torch import Tensor

Divergence = Literal["forward", "reverse"]

# Any log-prob this low or lower has the probability 0 in floating point.
NO_PROBABILITY = -1e3


def kl_divergence(
    student_logits: Tensor, teacher_logits: Tensor, *, divergence: Divergence, temperature: float
) -> Tensor:
    """The KL divergence at each of N positions, never negative but for rounding. [N, V], [N, V] -> [N], float32.

    With p = softmax(logits / temperature) of each model, as in equation 1 of Hinton et al. (arXiv 1503.02531):

    - forward: KL(teacher || student) = sum of p_teacher (log p_teacher - log p_student); its gradient is that of the
      cross-entropy to the teacher's distribution, and the student learns to cover all of it;
    - reverse: KL(student || teacher), equation 1 of MiniLLM (arXiv 2306.08543) at one token; the student learns to
      stay where the teacher is sure. GKD (arXiv 2306.13649) has both.

    Where one model has no probability at all and the other has, the divergence is large instead of infinite. Raises
    ValueError for another divergence, and for logits of different shapes.
    """
    if student_logits.shape != teacher_logits.shape:
        raise ValueError(
            f"student and teacher need logits of one shape, found {list(student_logits.shape)} and "
            f"{list(teacher_logits.shape)}"
        )
    student = torch.log_softmax(student_logits.float() / temperature, dim=-1)
    teacher = torch.log_softmax(teacher_logits.float() / temperature, dim=-1)
    match divergence:
        case "forward":
            return _kl(teacher, student)
        case "reverse":
            return _kl(student, teacher)
    raise ValueError(f"the divergence must be forward or reverse, found {divergence!r}")


def _kl(first: Tensor, second: Tensor) -> Tensor:
    """KL(first || second) of log-probs [N, V] -> [N]. A log-prob of -inf counts 0 in value and gradient."""
    return (first.exp() * (first.clamp_min(NO_PROBABILITY) - second.clamp_min(NO_PROBABILITY))).sum(-1)
