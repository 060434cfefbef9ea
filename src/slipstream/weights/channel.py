"""The two ends every weight channel has, and how to open them from a plan."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from slipstream.weights.plan import Bucket, WeightPlan

if TYPE_CHECKING:
    import socket

    import torch


class WeightSender(Protocol):
    """Rank 0 of the learner."""

    def send(self, bucket: Bucket, tensors: Mapping[str, "torch.Tensor"]) -> dict[str, int]:
        """Send one bucket of the plan; returns the checksum of each tensor by name."""
        ...

    def close(self) -> None:
        """Release what the channel holds on this side."""
        ...


class WeightReceiver(Protocol):
    """A worker of a rollout engine."""

    def receive(self, bucket: Bucket) -> Iterator[tuple[str, "torch.Tensor"]]:
        """Yield (name, tensor) of one bucket; the tensors are valid until the next bucket is received."""
        ...

    def close(self) -> None:
        """Release what the channel holds on this side."""
        ...


def open_sender(plan: WeightPlan, listener: "socket.socket | None" = None) -> WeightSender:
    """The learner's end of the plan's channel; `listener` is the socket at its address, where it has one."""
    if plan.channel.kind == "gloo":
        from slipstream.weights.gloo import GlooSender

        return GlooSender(plan, listener)
    from slipstream.weights.shared_memory import SharedMemorySender

    return SharedMemorySender(plan)


def open_receiver(plan: WeightPlan, receiver_index: int) -> WeightReceiver:
    """The end of that receiver (see `ChannelAddress`) of the plan's channel."""
    if plan.channel.kind == "gloo":
        from slipstream.weights.gloo import GlooReceiver

        return GlooReceiver(plan, receiver_index)
    from slipstream.weights.shared_memory import SharedMemoryReceiver

    return SharedMemoryReceiver(plan)
