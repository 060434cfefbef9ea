"""An exponential moving average of the weights that learn, for export: average = d average + (1 - d) weights.

It starts as the weights of the start and takes in the weights after every optimizer step that was not skipped. Each
rank keeps a piece of each tensor in float32, of equal size on all ranks: the one that ZeRO stage 3 gives it, at other
stages the one of the same place, so that nothing needs to be sent for an update. The weights that learn never see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from slipstream.errors import RunDirectoryError
from slipstream.training.checkpoint import storage_errors
from slipstream.training.whole_weights import WholeWeights


class WeightAverage:
    """The average of what learns in `model`, whose weights every rank has whole, or ZeRO stage 3 in pieces.

    All ranks must call each method together.
    """

    def __init__(self, model: nn.Module, decay: float, weights: WholeWeights) -> None:
        self._decay = decay
        self._weights = weights
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._pieces = {name: self._own(p).float().clone() for name, p in self._parameters.items()}

    def _own(self, parameter: Any) -> torch.Tensor:
        """This rank's piece of the weights as they are: [ceil(numbers / ranks)]."""
        if self._weights.is_partitioned:
            return parameter.ds_tensor.detach()
        return piece_of(parameter.detach(), distributed.get_rank(), distributed.get_world_size())

    def update(self) -> None:
        """Take in the weights as they are now."""
        for name, parameter in self._parameters.items():
            self._pieces[name].lerp_(self._own(parameter).float(), 1 - self._decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it the model has the average for weights; afterwards, to the last bit, those it had before."""
        live = {name: self._own(parameter).clone() for name, parameter in self._parameters.items()}
        self._write(self._pieces)
        try:
            yield
        finally:
            self._write(live)

    @torch.no_grad()
    def _write(self, pieces: dict[str, torch.Tensor]) -> None:
        for name, parameter in self._parameters.items():
            with self._weights.gathered([parameter], changed_by=0):
                own = pieces[name].to(parameter.device, parameter.dtype)
                parts = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
                distributed.all_gather(parts, own)
                parameter.copy_(torch.cat(parts)[: parameter.numel()].view(parameter.shape))

    def save(self, folder: Path) -> None:
        """Write this rank's pieces. Raises TrainingError if the disk is full."""
        pieces = {name: piece.cpu() for name, piece in self._pieces.items()}
        with storage_errors(folder, "the average of the weights"):
            save_file(pieces, folder / _file_name(distributed.get_rank()))

    def load(self, folder: Path) -> None:
        """Become what was saved there, by however many ranks. Raises RunDirectoryError if nothing was."""
        files = sorted(folder.glob(_file_name("*")), key=lambda file: int(file.stem.rpartition("_")[2]))
        if not files:
            raise RunDirectoryError(
                f"the checkpoint in {folder} has no average of the weights: it was written without training.ema_decay; "
                "resume with the configuration it was written with"
            )
        rank, ranks = distributed.get_rank(), distributed.get_world_size()
        readers = [safe_open(file, framework="pt") for file in files]
        for name, piece in self._pieces.items():
            if len(files) == ranks:
                piece.copy_(readers[rank].get_tensor(name))
            else:
                whole = torch.cat([reader.get_tensor(name) for reader in readers])
                numbers = self._numbers(name)
                piece.copy_(piece_of(whole[:numbers], rank, ranks))

    def _numbers(self, name: str) -> int:
        parameter: Any = self._parameters[name]
        return int(parameter.ds_numel if self._weights.is_partitioned else parameter.numel())


def piece_of(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """One of `ranks` pieces of equal size of a tensor laid flat, the last ones filled up with zeros."""
    flat = tensor.reshape(-1)
    size = -(-flat.numel() // ranks)
    own = flat[rank * size : (rank + 1) * size]
    return own if own.numel() == size else functional.pad(own, (0, size - own.numel()))


def _file_name(rank: int | str) -> str:
    return f"average_rank_{rank}.safetensors"
