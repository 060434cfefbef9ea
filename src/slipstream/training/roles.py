"""What the model of a learner is for, and what follows: how it is loaded and called, and which output it learns by.

A new kind of model that is trained is one more class here and one more name.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import nn

from slipstream.config.schema import TrainingConfig
from slipstream.models.loading import load_policy, load_value_model
from slipstream.models.policy import PolicyModule
from slipstream.models.value import ValueModule
from slipstream.training.batch import MicroBatch

RoleName = Literal["policy", "critic", "reward_model"]
Outputs = dict[str, torch.Tensor]


class LearnerRole(Protocol):
    """The face of a role. Modules have the Hugging Face model as `model` and answer with named tensors, each [N]."""

    output: str
    """Name of the output that depends on all parameters; the others are metrics."""

    def load(
        self, path: str, *, key: str, dtype: str, training: TrainingConfig, activation_checkpointing: bool
    ) -> nn.Module:
        """The module, on the CPU, in training mode. `key` is where `path` comes from. Raises ModelError."""
        ...

    def run(self, module: nn.Module, batch: MicroBatch, *, temperature: float, entropy_gradient: bool) -> Outputs:
        """Call the module, or the engine around it, on a micro-batch."""
        ...


class PolicyRole:
    """Answers with `log_probs` and `entropy` of the loss tokens."""

    output = "log_probs"

    def load(
        self, path: str, *, key: str, dtype: str, training: TrainingConfig, activation_checkpointing: bool
    ) -> PolicyModule:
        """A causal language model."""
        model = load_policy(path, dtype=dtype, activation_checkpointing=activation_checkpointing)
        return PolicyModule(model, chunk_tokens=training.logits_chunk_tokens)

    def run(self, module: nn.Module, batch: MicroBatch, *, temperature: float, entropy_gradient: bool) -> Outputs:
        """At the temperature of sampling."""
        outputs: Outputs = module(
            batch.tokens,
            batch.positions,
            batch.predictors,
            batch.targets,
            temperature,
            entropy_gradient=entropy_gradient,
        )
        return outputs


class CriticRole:
    """Answers with the `values` of the states in which the loss tokens were chosen."""

    output = "values"

    def load(
        self, path: str, *, key: str, dtype: str, training: TrainingConfig, activation_checkpointing: bool
    ) -> ValueModule:
        """A reward model, or a causal language model with a new head."""
        model = load_value_model(path, key=key, dtype=dtype, activation_checkpointing=activation_checkpointing)
        return ValueModule(model)

    def run(self, module: nn.Module, batch: MicroBatch, *, temperature: float, entropy_gradient: bool) -> Outputs:
        """A value has neither temperature nor entropy."""
        outputs: Outputs = module(batch.tokens, batch.positions, batch.predictors)
        return outputs


class RewardModelRole(CriticRole):
    """Answers with the `scores` of whole sequences: what a critic's value would be after the loss token, the last."""

    output = "scores"

    def run(self, module: nn.Module, batch: MicroBatch, *, temperature: float, entropy_gradient: bool) -> Outputs:
        """Read at the loss tokens themselves, not at the positions that predict them."""
        return {"scores": module(batch.tokens, batch.positions, batch.predictors + 1)["values"]}


ROLES: dict[RoleName, LearnerRole] = {
    "policy": PolicyRole(),
    "critic": CriticRole(),
    "reward_model": RewardModelRole(),
}
