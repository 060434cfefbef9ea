"""AdamW as the learner uses it: what decays, the learning rate of a step, and taking or dropping the step."""

import math
from typing import Any

import torch
from torch import nn

from slipstream.algorithms.schedule import learning_rate_factor
from slipstream.config.schema import TrainingConfig
from slipstream.training.tensor_shards import TensorGroup


def make_optimizer(module: nn.Module, training: TrainingConfig) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only: not on biases, nor on the scales of normalisations."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
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
    )


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
