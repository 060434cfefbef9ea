"""The routers of models with experts: how evenly tokens are spread over them, as a loss and as a metric.

For one layer and one sequence of tokens, E experts and the K best of them for each token, the loss is
E * sum_i f_i * P_i: f_i is the number of tokens that expert i gets divided by that of all tokens, P_i the mean of its
probability (Switch Transformers, arXiv 2101.03961, equations 4-6, with K choices). It is K where all experts get the
same. Layers are averaged. Each sequence is balanced for itself (as in DeepSeek-V3, arXiv 2412.19437, section 2.1.2),
so that the loss does not depend on which sequences share a micro-batch or a rank, nor on which ranks share a sequence:
these tell each other what their routers said.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as functional
from transformers import PreTrainedModel

from slipstream.errors import ConfigError
from slipstream.models.attention import shared_row

COEFFICIENT = "router_aux_loss_coef"
"""Configuration key of the families of which Transformers knows a balancing loss."""


def has_routers(model: PreTrainedModel) -> bool:
    """Whether the model has experts that a loss can balance."""
    return getattr(model.config.get_text_config(), COEFFICIENT, None) is not None


def router_loss_coefficient(model: PreTrainedModel, configured: float | None) -> float:
    """The weight of the loss: as configured, else what the model's configuration says where it asks for the loss.

    Raises ConfigError for one above 0 where there is nothing to balance.
    """
    config = model.config.get_text_config()
    if not has_routers(model):
        if configured:
            raise ConfigError(
                f"model.router_loss_coefficient: found {configured:g}, but {type(model).__name__} has no experts that "
                "a loss can balance; remove the key"
            )
        return 0.0
    if configured is None:
        return float(getattr(config, COEFFICIENT)) if getattr(config, "output_router_logits", False) else 0.0
    return configured


def run_decoder(
    model: PreTrainedModel,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    predictors: torch.Tensor,
    *,
    balances: bool = False,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """tokens [T], positions [T], predictors [N] -> the last hidden states there [N, H], and metrics [N] of the routers.

    Of a model with routers these are `router_loss`, of each token's sequence, with a gradient if `balances`; and
    `router_largest_load`: tokens that the busiest expert gets, divided by what it would get of an even share.
    """
    watches = has_routers(model)
    output = model.get_decoder()(
        input_ids=tokens.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        attention_mask=None,
        use_cache=False,
        **({"output_router_logits": True} if watches else {}),
    )
    hidden: torch.Tensor = output.last_hidden_state[0].index_select(0, predictors)
    if not watches:
        return hidden, {}
    chosen: int = model.config.get_text_config().num_experts_per_tok
    shared = shared_row()
    with torch.set_grad_enabled(balances and torch.is_grad_enabled()):
        logits = torch.stack([logits.view(len(tokens), -1) for logits in output.router_logits], dim=1)
        if shared is not None:
            logits, positions = shared.gather_tokens(logits), shared.gather_tokens(positions)
            predictors = shared.places.to(predictors.device)[predictors]
        loss, load = balance(list(logits.unbind(1)), positions, chosen)
    sequence = ((positions == 0).cumsum(0) - 1).index_select(0, predictors)
    return hidden, {"router_loss": loss[sequence], "router_largest_load": load[sequence]}


def balance(
    router_logits: Sequence[torch.Tensor], positions: torch.Tensor, chosen: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Router logits [T, E] of each layer, positions [T] that start at 0 with every of S sequences -> [S], [S].

    The loss, and the largest load of an expert, which has no gradient; `chosen` experts compute each token.
    """
    sequence = (positions == 0).cumsum(0) - 1
    lengths = torch.bincount(sequence).unsqueeze(-1).float()
    losses, loads = [], []
    for logits in router_logits:
        experts = logits.shape[-1]
        probabilities = torch.softmax(logits.float(), dim=-1)
        choices = functional.one_hot(probabilities.topk(chosen, dim=-1).indices, experts).sum(1).float()
        zeros = probabilities.new_zeros(len(lengths), experts)
        shares = zeros.index_add(0, sequence, choices) / lengths
        means = zeros.index_add(0, sequence, probabilities) / lengths
        losses.append(experts * (shares * means).sum(-1))
        loads.append(shares.amax(-1) * experts / chosen)
    return torch.stack(losses).mean(0), torch.stack(loads).mean(0).detach()
