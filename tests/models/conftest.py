"""Tiny random models of the families that docs/models.md tells of, and how large the tensors of a computation get."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


@pytest.fixture(scope="session")
def make_model(families: ModuleType) -> Callable[..., PreTrainedModel]:
    """make_model(family, attention, **changes of the configuration): the same weights at every call."""

    def make(family: str, attention: str = "eager", **changes) -> PreTrainedModel:
        torch.manual_seed(11)
        config = AutoConfig.for_model(family, **(families.SIZES | families.FAMILIES[family].settings | changes))
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention)

    return make


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor any operation made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.fixture
def largest_tensor() -> type[LargestTensor]:
    """`with largest_tensor() as largest`: `largest.elements` of what is computed within."""
    return LargestTensor
