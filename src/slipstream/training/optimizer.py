"""Optimizers as the learner uses them: what learns how, the learning rate of a step, and taking or dropping the step.

All are PyTorch's own. Its fused AdamW is as fast on a CPU as DeepSpeed's, which is compiled at the first start, so that
one is what states in host memory are best updated with.
"""

import math
from typing import Any

import torch
from torch import nn

from slipstream.algorithms.schedule import learning_rate_factor
from slipstream.config.schema import TrainingConfig
from slipstream.models.value import VALUE_HEAD
from slipstream.training.tensor_shards import TensorGroup


def make_optimizer(module: nn.Module, training: TrainingConfig) -> torch.optim.Optimizer:
    """The optimizer of what learns in `module`, whose `model` is a Hugging Face model.

    Weight decay is on matrices only: not on biases, nor on the scales of normalisations.
    """
    if training.optimizer == "muon":
        return MuonWithAdamW(module, training)
    return _adamw([parameter for parameter in module.parameters() if parameter.requires_grad], training)


def _adamw(parameters: list[nn.Parameter], training: TrainingConfig) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    beta_1, beta_2 = training.betas
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=training.learning_rate,
        betas=(beta_1, beta_2),
        eps=training.epsilon,
        fused=True if training.optimizer == "fused_adamw" else None,
    )


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) for the matrices of the blocks.

    Embeddings, heads, scales, biases, and experts that are held as one tensor, are updated by AdamW. Updates of
    matrices are scaled to the size of AdamW's, by 0.2 sqrt(max(rows, columns)) (arXiv 2502.16982, section 2.2), so that
    both have the same learning rate and weight decay. Momentum and orthogonalisation are PyTorch's, whose iteration is
    computed in bfloat16. Needs whole parameters with whole gradients.
    """

    def __init__(self, module: nn.Module, training: TrainingConfig) -> None:
        matrices = hidden_matrices(module.get_submodule("model"))
        chosen = {id(parameter) for parameter in matrices}
        others = [p for p in module.parameters() if p.requires_grad and id(p) not in chosen]
        self._parts: dict[str, torch.optim.Optimizer] = {
            "muon": torch.optim.Muon(
                matrices,
                lr=training.learning_rate,
                weight_decay=training.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            ),
            "adamw": _adamw(others, training),
        }
        super().__init__([{"params": [*matrices, *others]}], {})
        self._share_groups()

    def _share_groups(self) -> None:
        # The groups are those of the parts: who sets a learning rate here sets it there.
        self.param_groups = [group for part in self._parts.values() for group in part.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters with their gradients. A closure is not supported."""
        if closure is not None:
            raise ValueError("MuonWithAdamW.step takes no closure")
        for part in self._parts.values():
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """The states of both parts by name."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        for name, part in self._parts.items():
            part.load_state_dict(state_dict[name])
        self._share_groups()


def hidden_matrices(model: Any) -> list[nn.Parameter]:
    """The matrices of a Hugging Face model that learn and are neither an embedding nor a head."""
    head = model.get_output_embeddings()
    outer = [module for module in model.modules() if isinstance(module, nn.Embedding) or module is head]
    excluded = {id(parameter) for module in outer for parameter in module.parameters()}
    return [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and parameter.dim() == 2
        and id(parameter) not in excluded
        and not name.startswith(f"{VALUE_HEAD}.")
    ]


def set_learning_rate(engine: Any, training: TrainingConfig, *, step: int, total_steps: int) -> float:
    """Give the DeepSpeed engine the learning rate of optimizer step `step`, counted from 0; returns it."""
    factor = learning_rate_factor(
        step,
        schedule=training.schedule,
        warmup_steps=training.warmup_steps,
        total_steps=total_steps,
        final_share=training.final_learning_rate_share,
    )
    for group in engine.optimizer.param_groups:
        group["lr"] = training.learning_rate * factor
    return training.learning_rate * factor


def take_step(engine: Any, zero_stage: int, tensor_group: TensorGroup | None = None) -> float:
    """Update the weights with the accumulated gradients, or drop these if they are not finite.

    `tensor_group`: the ranks that hold the pieces of the weights, None where they are whole.

    Returns the gradients' global norm before clipping; where it is not finite, nothing was updated.
    """
    if zero_stage > 0:
        # DeepSpeed looks at the norm itself, on all ranks alike, and drops the gradients of an invalid one. It then
        # reports infinity.
        engine.step()
        return float(engine.get_global_grad_norm())
    if tensor_group is None:
        gradients = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
    else:
        norm = tensor_group.gradient_norm(engine.module.parameters())
    if math.isfinite(norm):
        engine.step()
    else:
        engine.zero_grad()
    return norm
