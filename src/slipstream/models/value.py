"""The critic as the learner runs it: packed tokens in, one value for each loss token out.

Wraps a Hugging Face sequence-classification model with one label: the decoder of a language model and a matrix with
one row (`score.weight`), which is also what a reward model is. The value that belongs to a loss token is that of the
state before the policy chose it, read at the position that predicts it.
"""

import torch
import torch.nn.functional as functional
from torch import nn
from transformers import PreTrainedModel

from slipstream.errors import ModelError
from slipstream.models.attention import packed_sequences

VALUE_HEAD = "score"
VALUE_HEAD_WEIGHT = f"{VALUE_HEAD}.weight"

# Tokens of the probe that compares this module with the model's own score, and what rounding may differ by.
PROBE_TOKENS = 8
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}


class ValueHead(nn.Module):
    """One number from each hidden state, computed in float32 whatever the type of the weights.

    It shares the weight of the model's own head and holds it as a parameter of its own, for ZeRO stage 3 to gather.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.weight = model.get_parameter(VALUE_HEAD_WEIGHT)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, H] -> values [N]."""
        return functional.linear(hidden.float(), self.weight.float()).squeeze(-1)


class ValueModule(nn.Module):
    """A sequence-classification model with one label that answers with a value per chosen position."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.head = ValueHead(model)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, predictors: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """tokens [T], positions [T], predictors [N], all int64 -> `values` [N], float32.

        Call it, and with activation checkpointing its backward pass, within `packed_sequences(lengths)`. N may be 0;
        the result is then empty and still part of the autograd graph, as collective operations need.
        """
        output = self.model.get_decoder()(
            input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), attention_mask=None, use_cache=False
        )
        return {"values": self.head(output.last_hidden_state[0].index_select(0, predictors))}


@torch.no_grad()
def verify_value_head(model: PreTrainedModel) -> None:
    """Compare the value of the last token of a probe with the model's own score of it.

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
        ours = module(tokens, positions, positions[-1:])["values"]
    difference = (own.float().flatten() - ours).abs().max().item()
    if not difference <= PROBE_TOLERANCE.get(module.head.weight.dtype, 0.05) * max(1.0, own.abs().max().item()):
        raise ModelError(
            f"{type(model).__name__} computes its score in a way Slipstream does not know: ours differs from it by "
            f"{difference:.3g}; this family cannot be a critic"
        )
