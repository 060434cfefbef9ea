"""The weight plan: which tensor travels in which bucket, at which offset, through which channel.

The learner makes it once, the controller hands it to every rollout engine, and each publish executes it bucket by
bucket: rank 0 of the learner fills a bucket, the engines load it. Names are those of the Hugging Face model. A tied
weight has one entry. This module does no I/O and imports nothing heavy, so that the controller can hold a plan.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from slipstream.errors import WeightSyncError

# Offsets are multiples of a cache line: every type is aligned, and a copy never shares a line with its neighbour.
ALIGNMENT_BYTES = 64

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

ChannelKind = Literal["shared_memory", "gloo"]


@dataclass(frozen=True)
class ChannelAddress:
    """Where the buckets pass. The controller makes it; both sides open their end from it.

    `run_id` names what belongs to this run (the shared-memory segment is `/dev/shm/slipstream-<run_id>-weights`).
    `host` and `port` are the rendezvous of a gloo channel: the sender is its rank 0, the k-th of the `receivers` its
    rank k + 1. Every worker of a rollout engine is a receiver: worker w of engine e has the index
    e * `workers_per_engine` + w.
    """

    kind: ChannelKind
    run_id: str
    receivers: tuple[int, ...] = (0,)
    host: str = "127.0.0.1"
    port: int = 0
    timeout_s: float = 300.0
    workers_per_engine: int = 1

    @property
    def needs_both_sides(self) -> bool:
        """True if filling a bucket waits for the engines that load it: the controller must call both at once.

        False for shared memory, where a bucket must be full before it is loaded and loaded before the next is filled.
        """
        return self.kind == "gloo"

    def receiver_name(self, receiver: int) -> str:
        """The receiver of an index as people know it: 'rollout engine 1', or 'rollout engine 1, worker 0'."""
        return receiver_name(f"rollout engine {receiver // self.workers_per_engine}", receiver, self.workers_per_engine)


def receiver_indices(engines: Iterable[int], workers_per_engine: int) -> tuple[int, ...]:
    """Indices of all workers of the engines of these indices: the `receivers` of a channel to them."""
    return tuple(engine * workers_per_engine + worker for engine in engines for worker in range(workers_per_engine))


def receiver_name(engine_name: str, receiver: int, workers_per_engine: int) -> str:
    """An engine's name, and after it which of its workers, where it has several."""
    return engine_name if workers_per_engine == 1 else f"{engine_name}, worker {receiver % workers_per_engine}"


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: its Hugging Face name, its type as torch spells it ("float32") and its place in the bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel together."""

    tensors: tuple[TensorSpec, ...]

    @property
    def bytes(self) -> int:
        """Bytes from the start of the first tensor to the end of the last one, padding included."""
        return max((tensor.offset + tensor.bytes for tensor in self.tensors), default=0)


@dataclass(frozen=True)
class WeightPlan:
    """All weights of a policy, cut into buckets, and the channel they pass through."""

    buckets: tuple[Bucket, ...]
    channel: ChannelAddress

    @property
    def largest_bucket_bytes(self) -> int:
        """Size of the buffer that every bucket fits into."""
        return max((bucket.bytes for bucket in self.buckets), default=0)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(tensor.bytes for bucket in self.buckets for tensor in bucket.tensors)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names in the order they travel."""
        return tuple(tensor.name for bucket in self.buckets for tensor in bucket.tensors)


def make_plan(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], bucket_bytes: int, *, channel: ChannelAddress
) -> WeightPlan:
    """Cut tensors, given as (name, dtype, shape) in the order they are to travel, into buckets.

    No bucket exceeds `bucket_bytes`, except that a single tensor larger than that gets a bucket of its own. Raises
    WeightSyncError for a name given twice or a type that cannot travel.
    """
    buckets: list[Bucket] = []
    current: list[TensorSpec] = []
    end = 0
    seen: set[str] = set()
    for name, dtype, shape in tensors:
        if name in seen:
            raise WeightSyncError(f"weight {name!r} occurs twice in the weight plan")
        seen.add(name)
        if dtype not in DTYPE_BYTES:
            raise WeightSyncError(
                f"weight {name!r} has type {dtype}, which cannot be sent; expected one of {', '.join(DTYPE_BYTES)}"
            )
        size = math.prod(shape) * DTYPE_BYTES[dtype]
        offset = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if current and offset + size > bucket_bytes:
            buckets.append(Bucket(tuple(current)))
            current, offset = [], 0
        current.append(TensorSpec(name=name, dtype=dtype, shape=tuple(shape), offset=offset, bytes=size))
        end = offset + size
    if current:
        buckets.append(Bucket(tuple(current)))
    return WeightPlan(tuple(buckets), channel)
