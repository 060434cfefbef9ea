"""How the ranks of the learner find each other."""

import logging
import os
import socket
import warnings
from datetime import timedelta
from types import ModuleType

from slipstream.errors import TrainingError


def free_port() -> int:
    """A TCP port nobody listens on at this moment, on the host that calls it: rank 0's."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def host_address() -> str:
    """The address under which other hosts reach this one, or the loopback address where there is no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing: it only chooses the interface that leads outside.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def join_process_group(
    *, rank: int, world_size: int, address: str, port: int, device: str, backend: str, timeout_s: float
) -> None:
    """Join the group of `world_size` ranks that meets at rank 0's `address` and `port`.

    `timeout_s` bounds the meeting and every collective operation after it. A process that has joined a group of this
    size before keeps it. Raises TrainingError if the others do not come, or if the process is in another group.
    """
    import torch.distributed as distributed

    if distributed.is_initialized():
        if distributed.get_world_size() != world_size or distributed.get_rank() != rank:
            raise TrainingError(
                f"this process is rank {distributed.get_rank()} of {distributed.get_world_size()} already and cannot "
                f"become rank {rank} of {world_size}; start a new process"
            )
        return
    # Each rank sees one device only, its first. DeepSpeed reads these variables whatever it is told otherwise.
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
    deepspeed = import_deepspeed(device)
    try:
        deepspeed.init_distributed(
            dist_backend=backend,
            auto_mpi_discovery=False,
            verbose=False,
            timeout=timedelta(seconds=timeout_s),
            rank=rank,
            world_size=world_size,
        )
    except (RuntimeError, ConnectionError) as error:
        raise TrainingError(
            f"learner rank {rank} waited {timeout_s:g} s for the other {world_size - 1} ranks at {address}:{port} and "
            f"did not meet them ({str(error).splitlines()[0]}); look for an error of theirs, or raise "
            f"cluster.start_timeout_s"
        ) from error


def import_deepspeed(device: str) -> ModuleType:
    """DeepSpeed, told which accelerator there is and kept from compiling C++ at the first start.

    The operation switched off speeds up collectives between ranks on one CPU host, at the price of a two-minute
    compilation whose lock file, if it is interrupted, hangs every later start.
    """
    os.environ.setdefault("DS_ACCELERATOR", device)
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed calls collectives by names that torch is about to retire, and torch says so at every call.
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
    return deepspeed
