"""The policy as the learner runs it: packed tokens in, log-probs of the loss tokens out.

Wraps a Hugging Face causal language model. Its decoder computes hidden states for the whole packed row; only those
that predict a loss token go on to the head, in chunks (models/log_probs.py), beside those of a teacher where there is
one (models/distillation.py).
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from slipstream.algorithms.divergence import Divergence
from slipstream.models.distillation import TeacherStates, compared_with_teacher
from slipstream.models.log_probs import logits_transform, token_log_probs
from slipstream.models.router import run_decoder


class LogProbHead(nn.Module):
    """The language-model head, ending in log-probs instead of logits.

    It shares the weight of the model's own head and holds it as a parameter of its own, so that ZeRO stage 3 gathers
    it once per forward and once per backward pass: the number of chunks may then differ between ranks, which gathers
    inside the chunks would turn into a hang.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        head = model.get_output_embeddings()
        self.weight = head.weight
        self.bias = getattr(head, "bias", None)
        self.transform = logits_transform(model.config)

    def forward(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        *,
        temperature: float,
        chunk_tokens: int,
        entropy_gradient: bool,
        teacher: TeacherStates | None = None,
    ) -> dict[str, torch.Tensor]:
        """hidden [N, H], targets [N] -> `log_probs`, `entropy` and, with a teacher, `divergence`; [N] each."""
        options: dict[str, Any] = {
            "bias": self.bias,
            "transform": self.transform,
            "temperature": temperature,
            "chunk_tokens": chunk_tokens,
            "entropy_gradient": entropy_gradient,
        }
        if teacher is None:
            log_probs, entropy = token_log_probs(hidden, self.weight, targets, **options)
            return {"log_probs": log_probs, "entropy": entropy}
        log_probs, entropy, divergence = compared_with_teacher(hidden, self.weight, targets, teacher, **options)
        return {"log_probs": log_probs, "entropy": entropy, "divergence": divergence}


class PolicyModule(nn.Module):
    """A causal language model that answers with log-probs and entropies of chosen tokens."""

    def __init__(self, model: PreTrainedModel, *, chunk_tokens: int, router_loss_coefficient: float = 0.0) -> None:
        """`chunk_tokens`: rows of [tokens, vocabulary] that exist at one time."""
        super().__init__()
        self.model = model
        self.head = LogProbHead(model)
        self.router_loss_coefficient = router_loss_coefficient
        self._chunk_tokens = chunk_tokens

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        predictors: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        *,
        entropy_gradient: bool = False,
        teacher: TeacherStates | None = None,
    ) -> dict[str, torch.Tensor]:
        """tokens [T], positions [T], predictors [N], targets [N], all int64 -> `log_probs`, `entropy` [N], float32.

        With a `teacher`, whose hidden states are those at the same predictors, also `divergence` [N]. Call it, and with
        activation checkpointing its backward pass, within `packed_sequences(lengths)`. N may be 0; the result is then
        empty and still part of the autograd graph, as collective operations need. The entropy has a gradient only if
        `entropy_gradient`. A model with experts also answers with the metrics of its routers (models/router.py).
        """
        balances = self.router_loss_coefficient > 0
        hidden, routing = run_decoder(self.model, tokens, positions, predictors, balances=balances)
        outputs: dict[str, torch.Tensor] = self.head(
            hidden,
            targets,
            temperature=temperature,
            chunk_tokens=self._chunk_tokens,
            entropy_gradient=entropy_gradient,
            teacher=teacher,
        )
        return outputs | routing

    @torch.no_grad()
    def as_teacher(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        predictors: torch.Tensor,
        *,
        divergence: Divergence,
        temperature: float,
    ) -> TeacherStates:
        """What this model teaches another one at the loss tokens. Call it within `packed_sequences(lengths)`."""
        hidden, _ = run_decoder(self.model, tokens, positions, predictors)
        head = self.head
        return TeacherStates(hidden, head.weight, head.bias, head.transform, divergence, temperature)
