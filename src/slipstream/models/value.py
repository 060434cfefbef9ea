"""The critic as the learner runs it: packed tokens in, one value for each loss token out.

Wraps a Hugging Face sequence-classification model with one label: the decoder of a language model and a matrix with
one row (`score.weight`), which is also what a reward model is. The value that belongs to a loss token is that of the
state before the policy chose it, read at the position that predicts it. A process reward model is a
token-classification model with one label, whose head has a bias as well (`score.bias`).
"""

import torch
import torch.nn.functional as functional
from torch import nn
from transformers import PreTrainedModel

from slipstream.errors import ModelError
from slipstream.models.attention import packed_sequences
from slipstream.models.router import run_decoder

VALUE_HEAD = "score"
VALUE_HEAD_WEIGHT = f"{VALUE_HEAD}.weight"
VALUE_HEAD_BIAS = f"{VALUE_HEAD}.bias"

# Tokens of the probe that compares this module with the model's own score, and what rounding may differ by.
PROBE_TOKENS = 8
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}


class ValueHead(nn.Module):
    """One number from each hidden state, computed in float32 whatever the type of the weights.

    It shares weight and bias, if any, of the model's own head and holds them as parameters of its own, for ZeRO stage 3
    to gather.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.weight = model.get_parameter(VALUE_HEAD_WEIGHT)
        self.bias = dict(model.named_parameters()).get(VALUE_HEAD_BIAS)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, H] -> values [N]."""
        bias = None if self.bias is None else self.bias.float()
        return functional.linear(hidden.float(), self.weight.float(), bias).squeeze(-1)


class ValueModule(nn.Module):
    """A classification model with one label, of sequences or tokens, that answers with a value per chosen position."""

    def __init__(self, model: PreTrainedModel, *, router_loss_coefficient: float = 0.0) -> None:
        super().__init__()
        self.model = model
        self.head = ValueHead(model)
        self.router_loss_coefficient = router_loss_coefficient

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, predictors: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """tokens [T], positions [T], predictors [N], all int64 -> `values` [N], float32, and metrics of routers.

        Call it, and with activation checkpointing its backward pass, within `packed_sequences(lengths)`. N may be 0;
        the result is then empty and still part of the autograd graph, as collective operations need.
        """
        balances = self.router_loss_coefficient > 0
        hidden, routing = run_decoder(self.model, tokens, positions, predictors, balances=balances)
        return {"values": self.head(hidden)} | routing


@torch.no_grad()
def verify_value_head(model: PreTrainedModel) -> None:
    """Compare the values of a probe's tokens with the model's own scores: of the last, or of all if it scores them.

    Raises ModelError if they differ: the family then does something to its hidden states or scores that is not known
    here. A model whose attention is not computed here is refused by the way.
    """
    padding = model.config.get_text_config().pad_token_id
    # The model takes the last token that is no padding for the end.
    chosen = [token for token in range(1, PROBE_TOKENS + 2) if token != padding][:PROBE_TOKENS]
    module = ValueModule(model)
    tokens = torch.tensor(chosen, device=module.head.weight.device)
    positions = torch.arange(PROBE_TOKENS, device=tokens.device)
    with packed_sequences([PROBE_TOKENS]):
        own = model(
            input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), attention_mask=None, use_cache=False
        ).logits
        ours = module(tokens, positions, positions[-own.numel() :])["values"]
    difference = (own.float().flatten() - ours).abs().max().item()
    if not difference <= PROBE_TOLERANCE.get(module.head.weight.dtype, 0.05) * max(1.0, own.abs().max().item()):
        raise ModelError(
            f"{type(model).__name__} computes its score in a way Slipstream does not know: ours differs from it by "
            f"{difference:.3g}; this family can be neither critic nor reward model"
        )
