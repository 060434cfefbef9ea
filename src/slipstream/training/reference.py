"""Frozen models beside the one that learns: the reference, and a teacher. Every rank holds the whole of them.

The reference is the policy as it was at the start, or when it was last refreshed; a checkpoint holds it only once it is
no longer the model on disk. A teacher is another model and never changes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as distributed
from safetensors.torch import load_file, save_file
from torch import nn

from slipstream.algorithms.divergence import Divergence
from slipstream.training.checkpoint import storage_errors

REFERENCE_FILE = "reference.safetensors"


@dataclass(frozen=True)
class TeacherSpec:
    """Which model teaches. `key` is the configuration key that `path` comes from, for messages.

    With a `divergence` every step also computes how far the student is from the teacher over the whole vocabulary, both
    at `temperature`; without one the teacher is only asked for log-probs.
    """

    path: str
    key: str
    divergence: Divergence | None = None
    temperature: float = 1.0


def frozen(module: nn.Module) -> nn.Module:
    """The module, in evaluation mode, learning nothing."""
    return module.requires_grad_(False).eval()


class ReferenceModel:
    """`module` computes; `load_module` gives the model to start from, on the device it is to run on."""

    def __init__(self, load_module: Callable[[], nn.Module]) -> None:
        self._load_module = load_module
        self.module = self._first_module()
        self._is_refreshed = False

    def _first_module(self) -> nn.Module:
        return frozen(self._load_module())

    def refresh(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take over weights, all of them, by the names they have in the Hugging Face model."""
        parameters = dict(self.module.get_submodule("model").named_parameters())
        for name, weight in weights:
            parameters[name].copy_(weight)
        self._is_refreshed = True

    def save(self, folder: Path) -> None:
        """Write the weights, from rank 0, if they were ever refreshed. Raises TrainingError if the disk is full."""
        if self._is_refreshed and distributed.get_rank() == 0:
            parameters = self.module.get_submodule("model").named_parameters()
            with storage_errors(folder, "the reference model"):
                save_file({name: parameter.contiguous() for name, parameter in parameters}, folder / REFERENCE_FILE)

    def load(self, folder: Path) -> None:
        """Become what was saved there: the model to start from, if nothing was."""
        file = folder / REFERENCE_FILE
        if file.is_file():
            self.refresh(load_file(file).items())
        elif self._is_refreshed:
            self.module = self._first_module()
            self._is_refreshed = False
