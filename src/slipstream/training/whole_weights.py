"""The weights of a learner as others know them: whole, by their Hugging Face names, however its ranks divide them.

Under ZeRO stage 3 a weight is partitioned over the ranks that average their gradients; with tensor parallelism it is in
pieces on others; with an adapter it is merged. Whoever needs weights, for a publish, an export or the reference, gets
some of them at a time, so that no rank ever holds the model a second time. All ranks must ask for the same ones.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from slipstream.models.lora import adapter_factors, merged_weights, named_weights
from slipstream.models.stored_weights import StoredWeight, model_tensors, stored_weights
from slipstream.training.tensor_shards import Shape, TensorShards
from slipstream.weights.channel import WeightSender, open_sender
from slipstream.weights.plan import ChannelAddress, WeightPlan, make_plan


class WholeWeights:
    """`model` inside a DeepSpeed engine; `shapes` of its weights by name, before anything was partitioned."""

    def __init__(
        self, model: Any, shapes: dict[str, Shape], *, is_partitioned: bool, shards: TensorShards | None
    ) -> None:
        """`is_partitioned`: under ZeRO stage 3. `shards`: which weights are in pieces, None for none."""
        self.model = model
        self.shapes = shapes
        self.is_partitioned = is_partitioned
        self._shards = shards

    def gathered(
        self, parameters: Sequence[torch.Tensor], *, changed_by: int | None = None
    ) -> AbstractContextManager[None]:
        """Within it parameters are whole but for tensor shards, as they always are but under ZeRO stage 3.

        `changed_by`: the rank whose values all have afterwards; None where nothing is changed.
        """
        if not self.is_partitioned:
            return nullcontext()
        import deepspeed

        found: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(
            list(parameters), modifier_rank=changed_by
        )
        return found

    @contextmanager
    def parameters(self, names: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
        """Parameters by name, for the time being."""
        parameters = named_weights(self.model)
        chosen = {name: parameters[name] for name in names}
        with self.gathered([*chosen.values(), *adapter_factors(self.model, names).values()]):
            found = {name: parameter.detach() for name, parameter in chosen.items()}
            if self._shards is not None:
                found = {name: self._shards.whole(name, piece) for name, piece in found.items()}
            yield merged_weights(self.model, found)

    @contextmanager
    def tensors(self, names: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
        """As `parameters`, of buffers as well, which every rank has whole."""
        buffers = dict(self.model.named_buffers())
        with self.parameters([name for name in names if name not in buffers]) as tensors:
            yield tensors | {name: buffers[name] for name in names if name in buffers}

    def each_parameter(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All parameters one after the other, each whole until the next one comes. All ranks must go through them."""
        for name in self.shapes:
            with self.parameters([name]) as tensors:
                yield name, tensors[name]


class WeightSource:
    """The sending side of a publish on one rank: what travels in which bucket, and rank 0 sends it."""

    def __init__(
        self,
        weights: WholeWeights,
        bucket_bytes: int,
        channel: ChannelAddress,
        *,
        listeners: dict[int, socket.socket],
    ) -> None:
        """Names and pieces are those of a model folder; a tied weight travels once. `listeners`: ours, by port.

        Raises WeightSyncError for a family that cannot be published.
        """
        self._weights = weights
        self._listeners = listeners
        tensors = model_tensors(weights.model)
        shapes = {name: weights.shapes.get(name, tuple(tensor.shape)) for name, tensor in tensors.items()}
        self._stored: dict[str, StoredWeight] = stored_weights(weights.model, shapes)
        self._sender: WeightSender | None = None
        self.plan: WeightPlan = make_plan(
            (
                (name, str(tensors[weight.source].dtype).removeprefix("torch."), weight.shape)
                for name, weight in self._stored.items()
            ),
            bucket_bytes,
            channel=channel,
        )

    def fill_bucket(self, index: int, *, sends: bool) -> dict[str, int]:
        """Put together bucket `index`; where this rank `sends` it, return the checksum of each tensor in it."""
        bucket = self.plan.buckets[index]
        pieces = {spec.name: self._stored[spec.name] for spec in bucket.tensors}
        with self._weights.tensors(sorted({piece.source for piece in pieces.values()})) as sources:
            if not sends:
                return {}
            tensors = {name: piece.view(sources[piece.source]) for name, piece in pieces.items()}
            if self._sender is None:
                self._sender = open_sender(self.plan, self._listeners.pop(self.plan.channel.port, None))
            return self._sender.send(bucket, tensors)

    def close(self) -> None:
        """Release the channel; safe at any time."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None
