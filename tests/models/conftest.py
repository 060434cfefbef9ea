"""Tiny random models of the families that docs/models.md tells of."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


@pytest.fixture(scope="session")
def make_model(families: ModuleType) -> Callable[..., PreTrainedModel]:
    """make_model(family, attention, **changes of the configuration): the same weights at every call."""

    def make(family: str, attention: str = "eager", **changes) -> PreTrainedModel:
        torch.manual_seed(11)
        config = AutoConfig.for_model(family, **(families.SIZES | families.FAMILIES[family].settings | changes))
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention)

    return make
