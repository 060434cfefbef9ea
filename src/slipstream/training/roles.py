"""What the model of a learner is for, and what follows: how it is loaded and called, and which output it learns by.

A new kind of model that is trained is one more class here and one more name.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import nn

from slipstream.config.schema import TrainingConfig
from slipstream.models.loading import load_policy, load_process_reward_model, load_value_model
from slipstream.models.policy import PolicyModule
from slipstream.models.value import ValueModule
from slipstream.training.batch import ModelInput

RoleName = Literal["policy", "critic", "reward_model", "process_reward_model"]
Outputs = dict[str, torch.Tensor]


class LearnerRole(Protocol):
    """The face of a role. Modules have the Hugging Face model as `model` and answer with named tensors, each [N]."""

    output: str
    """Name of the output that depends on all parameters; the others are metrics."""

    reads: Literal["predictors", "places"]
    """Where the model is read: at the tokens that predict the loss tokens, or at these themselves."""

    def load(
        self, path: str, *, key: str, dtype: str, training: TrainingConfig, activation_checkpointing: bool
    ) -> nn.Module:
        """The module, on the CPU, in training mode. `key` is where `path` comes from. Raises ModelError."""
        ...

    def run(self, module: nn.Module, inputs: ModelInput, *, temperature: float, entropy_gradient: bool) -> Outputs:
        """Call the module, or the engine around it, on this rank's share of a micro-batch."""
        ...


class PolicyRole:
    """Answers with `log_probs` and `entropy` of the loss tokens, and with the `divergence` from a teacher."""

    output = "log_probs"
    reads: Literal["predictors", "places"] = "predictors"

    def load(
        self, path: str, *, key: str, dtype: str, training: TrainingConfig, activation_checkpointing: bool
    ) -> PolicyModule:
        """A causal language model."""
        model = load_policy(path, key=key, dtype=dtype, activation_checkpointing=activation_checkpointing)
        return PolicyModule(model, chunk_tokens=training.logits_chunk_tokens)

    def run(self, module: nn.Module, inputs: ModelInput, *, temperature: float, entropy_gradient: bool) -> Outputs:
        """At the temperature of sampling."""
        outputs: Outputs = module(
            inputs.tokens,
            inputs.positions,
            inputs.places,
            inputs.targets,
            temperature,
            entropy_gradient=entropy_gradient,
            teacher=inputs.teacher,
        )
        return outputs


class CriticRole:
    """Answers with the `values` of the states in which the loss tokens were chosen."""

    output = "values"
    reads: Literal["predictors", "places"] = "predictors"

    def load(
        self, path: str, *, key: str, dtype: str, training: TrainingConfig, activation_checkpointing: bool
    ) -> ValueModule:
        """A reward model, or a causal language model with a new head."""
        model = load_value_model(path, key=key, dtype=dtype, activation_checkpointing=activation_checkpointing)
        return ValueModule(model)

    def run(self, module: nn.Module, inputs: ModelInput, *, temperature: float, entropy_gradient: bool) -> Outputs:
        """A value has neither temperature nor entropy."""
        outputs: Outputs = module(inputs.tokens, inputs.positions, inputs.places)
        return outputs


class RewardModelRole(CriticRole):
    """Answers with the `scores` of whole sequences: what a critic's value would be after the loss token, the last."""

    output = "scores"
    reads: Literal["predictors", "places"] = "places"

    def run(self, module: nn.Module, inputs: ModelInput, *, temperature: float, entropy_gradient: bool) -> Outputs:
        """What a critic calls values."""
        outputs: Outputs = module(inputs.tokens, inputs.positions, inputs.places)
        return {"scores" if name == "values" else name: values for name, values in outputs.items()}


class ProcessRewardModelRole(RewardModelRole):
    """Answers with the `scores` of steps, as logits, read after the last token of each."""

    def load(
        self, path: str, *, key: str, dtype: str, training: TrainingConfig, activation_checkpointing: bool
    ) -> ValueModule:
        """A process reward model, or a causal language model with a new head."""
        model = load_process_reward_model(path, key=key, dtype=dtype, activation_checkpointing=activation_checkpointing)
        return ValueModule(model)


ROLES: dict[RoleName, LearnerRole] = {
    "policy": PolicyRole(),
    "critic": CriticRole(),
    "reward_model": RewardModelRole(),
    "process_reward_model": ProcessRewardModelRole(),
}


def sum_of_all(outputs: Outputs) -> torch.Tensor:
    """A scalar that depends on every output that has a gradient, as the loss does.

    Under ZeRO stage 3 each of them that takes part in the backward pass is an event by which DeepSpeed decides what to
    gather next, so it must be the same ones on every rank.
    """
    sums = [values.sum() for values in outputs.values() if values.requires_grad or not torch.is_grad_enabled()]
    return torch.stack(sums).sum()
