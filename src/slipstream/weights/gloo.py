"""The gloo channel: buckets broadcast over TCP from rank 0 of the learner to engines on any machine.

A process group of its own on a TCPStore of its own: `torch.distributed`'s default group, which the learner trains
with and vLLM may use inside, is not touched. Both sides must be in the same call at the same time: opening an end
waits for all ends, and sending a bucket waits for all receivers.
"""

import socket
from collections.abc import Iterator, Mapping
from datetime import timedelta

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from slipstream.errors import WeightSyncError
from slipstream.weights.checksum import tensor_checksum
from slipstream.weights.plan import Bucket, ChannelAddress, TensorSpec, WeightPlan

SENDER_RANK = 0


class GlooSender:
    """The learner's end: rank 0, which also hosts the rendezvous."""

    def __init__(self, plan: WeightPlan, listener: socket.socket | None = None) -> None:
        """Waits for all receivers. `listener` is the socket at the channel's address; without one it is opened here.

        Raises WeightSyncError if one has not come before the channel's time-out."""
        self._channel = plan.channel
        self._group: ProcessGroupGloo | None = _open_group(plan.channel, SENDER_RANK, listener)
        self._buffer = torch.empty(plan.largest_bucket_bytes, dtype=torch.uint8)

    def send(self, bucket: Bucket, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Broadcast one bucket; returns the checksum of each tensor, taken from the tensor that was given.

        Raises WeightSyncError if a tensor does not have the type and shape the plan says, or if a receiver is gone.
        """
        checksums = {}
        for spec in bucket.tensors:
            tensor = tensors[spec.name].detach()
            if tuple(tensor.shape) != spec.shape or tensor.dtype != getattr(torch, spec.dtype):
                raise WeightSyncError(
                    f"weight {spec.name!r} is {tensor.dtype} {tuple(tensor.shape)}, but the weight plan says "
                    f"{spec.dtype} {spec.shape}; make a new plan after changing the model"
                )
            _view(self._buffer, spec).copy_(tensor)
            checksums[spec.name] = tensor_checksum(tensor)
        _broadcast(self._group, self._buffer[: bucket.bytes], self._channel)
        return checksums

    def close(self) -> None:
        """Leave the group; safe to call twice."""
        self._group = None


class GlooReceiver:
    """The end of a rollout engine's worker: its rank is its place among the channel's receivers, counted from 1."""

    def __init__(self, plan: WeightPlan, receiver_index: int) -> None:
        """Waits for the sender and the other receivers. Raises WeightSyncError if one does not come in time."""
        self._channel = plan.channel
        if receiver_index not in plan.channel.receivers:
            raise WeightSyncError(
                f"{plan.channel.receiver_name(receiver_index)} is no receiver of the weight channel of run "
                f"{plan.channel.run_id}: it was planned for {_receivers(plan.channel)}"
            )
        rank = plan.channel.receivers.index(receiver_index) + 1
        self._group: ProcessGroupGloo | None = _open_group(plan.channel, rank)
        self._buffer = torch.empty(plan.largest_bucket_bytes, dtype=torch.uint8)

    def receive(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """Wait for one bucket and yield its tensors, views of a buffer that the next bucket overwrites.

        Raises WeightSyncError if the sender does not send before the channel's time-out, or is gone.
        """
        _broadcast(self._group, self._buffer[: bucket.bytes], self._channel)
        for spec in bucket.tensors:
            yield spec.name, _view(self._buffer, spec)

    def close(self) -> None:
        """Leave the group; safe to call twice."""
        self._group = None


def _open_group(channel: ChannelAddress, rank: int, listener: socket.socket | None = None) -> ProcessGroupGloo:
    timeout = timedelta(seconds=channel.timeout_s)
    size = len(channel.receivers) + 1
    try:
        store = TCPStore(
            channel.host,
            channel.port,
            size,
            rank == SENDER_RANK,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's stubs
        options._timeout = timeout
        options._devices = [ProcessGroupGloo.create_device(hostname=_own_address(channel))]
        return ProcessGroupGloo(PrefixStore(f"slipstream-{channel.run_id}", store), rank, size, options)
    except RuntimeError as error:
        role = "the learner" if rank == SENDER_RANK else channel.receiver_name(channel.receivers[rank - 1])
        others = _receivers(channel) if rank == SENDER_RANK else "the learner"
        raise WeightSyncError(
            f"{role} waited up to {channel.timeout_s:.0f} s for {others} to open the weight channel at "
            f"{channel.host}:{channel.port} ({_first_line(error)})"
        ) from error


def _own_address(channel: ChannelAddress) -> str:
    """This machine's address on the way to the rendezvous: what the other ranks can connect to.

    Gloo's own choice is the host name's address, which in a container often resolves to nothing or to the wrong
    interface. Connecting a UDP socket sends nothing; it only asks the routing table.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect((channel.host, channel.port or 1))
        return str(route.getsockname()[0])


def _broadcast(group: ProcessGroupGloo | None, buffer: torch.Tensor, channel: ChannelAddress) -> None:
    if group is None:
        raise WeightSyncError(f"this end of the weight channel of run {channel.run_id} is closed")
    options = BroadcastOptions()
    options.rootRank = SENDER_RANK
    try:
        group.broadcast([buffer], options).wait()  # type: ignore[attr-defined]  # missing in torch's stubs
    except RuntimeError as error:
        raise WeightSyncError(
            f"a bucket of weights did not pass between the learner and {_receivers(channel)} within "
            f"{channel.timeout_s:.0f} s ({_first_line(error)}); one of them has died or is stuck"
        ) from error


def _view(buffer: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    return buffer[spec.offset : spec.offset + spec.bytes].view(getattr(torch, spec.dtype)).view(spec.shape)


def _receivers(channel: ChannelAddress) -> str:
    """Those whom the channel is for; of an engine all workers are."""
    width = channel.workers_per_engine
    engines = sorted({receiver // width for receiver in channel.receivers})
    text = f"rollout engine{'s' * (len(engines) > 1)} {', '.join(map(str, engines))}"
    return text if width == 1 else f"the {width} workers of {text}"


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
