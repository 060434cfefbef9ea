"""The policy as the learner runs it: packed tokens in, log-probs of the loss tokens out.

Wraps a Hugging Face causal language model. Its decoder computes hidden states for the whole packed row; only those
that predict a loss token go on to the head, in chunks (models/log_probs.py).
"""

import torch
from torch import nn
from transformers import PreTrainedModel

from slipstream.models.log_probs import logits_transform, token_log_probs


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
        self._transform = logits_transform(model.config)

    def forward(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        *,
        temperature: float,
        chunk_tokens: int,
        entropy_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [N, H], targets [N] -> log-probs [N], entropy [N]."""
        return token_log_probs(
            hidden,
            self.weight,
            targets,
            bias=self.bias,
            transform=self._transform,
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            entropy_gradient=entropy_gradient,
        )


class PolicyModule(nn.Module):
    """A causal language model that answers with log-probs and entropies of chosen tokens."""

    def __init__(self, model: PreTrainedModel, *, chunk_tokens: int) -> None:
        """`chunk_tokens`: rows of [tokens, vocabulary] that exist at one time."""
        super().__init__()
        self.model = model
        self.head = LogProbHead(model)
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
    ) -> dict[str, torch.Tensor]:
        """tokens [T], positions [T], predictors [N], targets [N], all int64 -> `log_probs`, `entropy` [N], float32.

        Call it, and with activation checkpointing its backward pass, within `packed_sequences(lengths)`. N may be 0;
        the result is then empty and still part of the autograd graph, as collective operations need. The entropy has
        a gradient only if `entropy_gradient`.
        """
        output = self.model.get_decoder()(
            input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), attention_mask=None, use_cache=False
        )
        hidden = output.last_hidden_state[0].index_select(0, predictors)
        log_probs, entropy = self.head(
            hidden,
            targets,
            temperature=temperature,
            chunk_tokens=self._chunk_tokens,
            entropy_gradient=entropy_gradient,
        )
        return {"log_probs": log_probs, "entropy": entropy}
