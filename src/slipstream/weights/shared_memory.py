"""The shared-memory channel: one buffer in /dev/shm that the learner fills and the engines of this machine read.

A plain file in /dev/shm, mapped by both sides, rather than `multiprocessing.shared_memory`: that registers every
attached segment with a resource tracker which (before Python 3.13) unlinks it as soon as any reader exits. The sender
owns the file: it creates it, and `close` removes it. Its name starts with `slipstream-<run id>-`, so that whatever a
killed run left behind can be found and removed by name.

There is one bucket's worth of memory: the controller fills a bucket, lets all engines load it, then fills the next.
"""

import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from slipstream.errors import WeightSyncError
from slipstream.weights.checksum import tensor_checksum
from slipstream.weights.plan import Bucket, TensorSpec, WeightPlan

SHARED_MEMORY_FOLDER = Path("/dev/shm")


def segment_path(run_id: str) -> Path:
    """Where the weights of a run pass."""
    return SHARED_MEMORY_FOLDER / f"slipstream-{run_id}-weights"


class SharedMemorySender:
    """The learner's end: creates the buffer and writes buckets into it."""

    def __init__(self, plan: WeightPlan) -> None:
        """Raises WeightSyncError if /dev/shm has no room for the largest bucket."""
        self._path = segment_path(plan.channel.run_id)
        self._memory = _create(self._path, max(plan.largest_bucket_bytes, 1))

    def send(self, bucket: Bucket, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Write one bucket; returns the checksum of each tensor, taken from the tensor that was given.

        Raises WeightSyncError if a tensor does not have the type and shape the plan says.
        """
        checksums = {}
        for spec in bucket.tensors:
            tensor = tensors[spec.name].detach()
            if tuple(tensor.shape) != spec.shape or tensor.dtype != getattr(torch, spec.dtype):
                raise WeightSyncError(
                    f"weight {spec.name!r} is {tensor.dtype} {tuple(tensor.shape)}, but the weight plan says "
                    f"{spec.dtype} {spec.shape}; make a new plan after changing the model"
                )
            _view(self._memory, spec).copy_(tensor)
            checksums[spec.name] = tensor_checksum(tensor)
        return checksums

    def close(self) -> None:
        """Remove the segment. Readers that still map it keep their memory until they let go; safe to call twice."""
        self._path.unlink(missing_ok=True)


class SharedMemoryReceiver:
    """A rollout engine's end: reads buckets in place."""

    def __init__(self, plan: WeightPlan) -> None:
        """Raises WeightSyncError if the sender has not created the segment, or made it for another plan."""
        path = segment_path(plan.channel.run_id)
        size = max(plan.largest_bucket_bytes, 1)
        try:
            descriptor = os.open(path, os.O_RDWR)
        except FileNotFoundError as error:
            raise WeightSyncError(
                f"no shared-memory segment {path}: the learner must fill a bucket before an engine on the same "
                f"machine loads it; set weights.channel to gloo if they are on different machines"
            ) from error
        try:
            found = os.fstat(descriptor).st_size
            if found != size:
                raise WeightSyncError(f"shared-memory segment {path} has {found} bytes, the weight plan says {size}")
            self._memory: mmap.mmap | None = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)

    def receive(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor of the bucket as a view into the segment: valid until the next bucket is filled."""
        if self._memory is None:
            raise WeightSyncError("this shared-memory receiver is closed")
        for spec in bucket.tensors:
            yield spec.name, _view(self._memory, spec)

    def close(self) -> None:
        """Let go of the mapping; it disappears with the last view into it. The file belongs to the sender."""
        self._memory = None


def _create(path: Path, size: int) -> mmap.mmap:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # Allocated, not only sized: a full /dev/shm is an error here instead of a SIGBUS in the middle of a copy.
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise WeightSyncError(
            f"cannot allocate {size} bytes of shared memory at {path} ({error.strerror}); free {path.parent}, lower "
            f"weights.bucket_bytes, or set weights.channel to gloo"
        ) from error
    finally:
        os.close(descriptor)


def _view(memory: mmap.mmap, spec: TensorSpec) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    if spec.bytes == 0:
        return torch.empty(spec.shape, dtype=dtype)
    count = spec.bytes // dtype.itemsize
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=spec.offset).view(spec.shape)
