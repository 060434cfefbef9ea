"""Weights under the names and in the pieces they have in a model folder, which is what other programs know them by.

Transformers keeps some weights in another form than they are stored in: the experts of a layer as one tensor, say. A
folder it writes has the stored form, and so has what a rollout engine is sent. Each stored weight is a view of one
weight of the model, so that neither side copies: the learner reads through it, the Transformers engine writes.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from slipstream.errors import WeightSyncError
from slipstream.models.lora import named_weights


@dataclass(frozen=True)
class StoredWeight:
    """Where a stored weight lies in the model's weight `source`, counted in elements: a strided view of it."""

    source: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def view(self, source: torch.Tensor) -> torch.Tensor:
        """The stored weight in the whole weight of the model, which must be contiguous."""
        return source.view(-1).as_strided(self.shape, self.stride, source.storage_offset() + self.offset)


def model_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Parameters, a tied one once, and the buffers that a model folder holds, by the names the model has for them."""
    parameters: dict[str, torch.Tensor] = dict(named_weights(model))
    stored = model.state_dict(keep_vars=True)
    return parameters | {name: buffer for name, buffer in model.named_buffers() if name in stored}


def stored_weights(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StoredWeight]:
    """Stored name -> where it lies, for weights of the model given by name and whole shape.

    Raises WeightSyncError for a family that stores something that is no part of one weight of the model.
    """
    whole = _convert(model, {name: _placeholder(shape) for name, shape in shapes.items()})
    layouts: dict[tuple[str, tuple[int, ...]], list[StoredWeight]] = {}
    found: dict[str, StoredWeight] = {}
    for name, shape in shapes.items():
        placeholder = _placeholder(shape)
        converted = _convert(model, {name: placeholder})
        if len(converted) == 1 and next(iter(converted.values())) is placeholder:
            found[next(iter(converted))] = StoredWeight(name, tuple(shape), placeholder.stride(), 0)
            continue
        # Layers are alike: where the pieces lie is found out for the first of them.
        kind = (re.sub(r"\d+", "", name), tuple(shape))
        if kind not in layouts:
            layouts[kind] = list(_layout(model, name, shape))
        for stored_name, layout in zip(converted, layouts[kind], strict=True):
            found[stored_name] = StoredWeight(name, layout.shape, layout.stride, layout.offset)
    if {name: weight.shape for name, weight in found.items()} != {name: tuple(t.shape) for name, t in whole.items()}:
        raise _no_view(model, min(found.keys() ^ whole.keys(), default="a weight"))
    return found


def _convert(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    converted: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(tensors))
    return converted


def _placeholder(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(tuple(shape), device="meta")


def _layout(model: Any, name: str, shape: tuple[int, ...]) -> Iterator[StoredWeight]:
    """What the conversion makes of a weight whose elements are their own places in it."""
    places = torch.arange(torch.Size(shape).numel()).view(tuple(shape))
    for stored_name, piece in _convert(model, {name: places}).items():
        offset = int(piece.flatten()[0])
        stride = tuple(
            int(piece.select(axis, 1).flatten()[0]) - offset if length > 1 else 1
            for axis, length in enumerate(piece.shape)
        )
        weight = StoredWeight(name, tuple(piece.shape), stride, offset)
        last = offset + sum((length - 1) * step for length, step in zip(weight.shape, stride, strict=True))
        if last >= places.numel() or not torch.equal(weight.view(places), piece):
            raise _no_view(model, stored_name)
        yield weight


def _no_view(model: Any, name: str) -> WeightSyncError:
    return WeightSyncError(
        f"{type(model).__name__} stores {name!r} in a form that is no part of one weight of the model, so it cannot be "
        "published to a rollout engine; train it with sft, preference or reward-model"
    )
