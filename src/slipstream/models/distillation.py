"""Log-probs, entropy and the divergence from a teacher, without ever holding a [tokens, vocabulary] matrix.

As `log_probs.py`, with two heads: a chunk of the student's logits and the same rows of the teacher's exist at one time,
and the backward pass recomputes both. Gradients flow to the student only.

Models of one family often have more rows in the head than the tokenizer has tokens, and not the same number of them.
Rows that one of the two lacks belong to no token; the divergence is that of the distributions over the rows both have.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from slipstream.algorithms.divergence import Divergence, kl_divergence
from slipstream.models.log_probs import Transform, in_chunks, log_probs_and_entropy


@dataclass(frozen=True)
class TeacherStates:
    """What a teacher thinks at N loss tokens, and how the student is compared with it.

    hidden [N, H of the teacher] goes through the teacher's own head: weight [V of the teacher, H], bias, transform.
    `temperature` divides both models' logits before they are compared.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    transform: Transform
    divergence: Divergence
    temperature: float

    def logits(self, hidden: torch.Tensor, rows: int) -> torch.Tensor:
        """hidden [n, H] -> logits of the first `rows` rows of the head, [n, rows], float32 and without gradient."""
        with torch.no_grad():
            bias = None if self.bias is None else self.bias[:rows]
            return self.transform(functional.linear(hidden, self.weight[:rows], bias).float())


def compared_with_teacher(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    teacher: TeacherStates,
    *,
    bias: torch.Tensor | None = None,
    transform: Transform,
    temperature: float,
    chunk_tokens: int,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `token_log_probs` gives at `temperature`, and the divergence from the teacher; each float32 [N].

    hidden [N, H], weight [V, H], targets [N] int64 are the student's. The divergence has a gradient, at the teacher's
    own temperature. N may be 0.
    """
    common_rows = min(weight.shape[0], teacher.weight.shape[0])

    def compute(*rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        chunk, chunk_targets, teacher_chunk = rows
        logits = transform(functional.linear(chunk, weight, bias).float())
        log_probs, entropy = log_probs_and_entropy(logits / temperature, chunk_targets, entropy_gradient)
        divergence = kl_divergence(
            logits[:, :common_rows],
            teacher.logits(teacher_chunk, common_rows),
            divergence=teacher.divergence,
            temperature=teacher.temperature,
        )
        return log_probs, entropy, divergence

    has_gradient = hidden.requires_grad or weight.requires_grad
    log_probs, entropy, divergence = in_chunks(
        compute, (hidden, targets, teacher.hidden), chunk_tokens=chunk_tokens, has_gradient=has_gradient
    )
    return log_probs, entropy, divergence
