"""How the ranks of the learner find each other."""

import logging
import os
import socket
import warnings
from datetime import timedelta
from types import ModuleType

from slipstream.errors import TrainingError


def open_listener(address: str) -> socket.socket:
    """A socket that listens at `address` on a port of the system's choice.

    Whoever is told the port finds it taken by us from the first moment on: a port that is looked up, let go and taken
    again later may be somebody else's by then. It listens at that address only, and not on every interface.
    """
    listener = socket.socket()
    listener.bind((address, 0))
    listener.listen()
    return listener


def join_process_group(
    *,
    rank: int,
    world_size: int,
    meeting_point: tuple[str, int],
    device: str,
    backend: str,
    timeout_s: float,
    listener: socket.socket | None = None,
) -> None:
    """Join the group of `world_size` ranks that meets at rank 0's `meeting_point`, an address and a port.

    `listener` is rank 0's socket there; without it rank 0 opens the port itself. `timeout_s` bounds the meeting and
    every collective operation after it. A process that has joined a group of this size before keeps it.

    Raises TrainingError if the others do not come, or if the process is in another group.
    """
    import torch.distributed as distributed

    if distributed.is_initialized():
        if distributed.get_world_size() != world_size or distributed.get_rank() != rank:
            raise TrainingError(
                f"this process is rank {distributed.get_rank()} of {distributed.get_world_size()} already and cannot "
                f"become rank {rank} of {world_size}; start a new process"
            )
        return
    address, port = meeting_point
    # Each rank sees one device only, its first. DeepSpeed reads these variables whatever it is told otherwise.
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
    deepspeed = import_deepspeed(device)
    timeout = timedelta(seconds=timeout_s)
    try:
        store = distributed.TCPStore(
            address,
            port,
            world_size,
            is_master=rank == 0,
            timeout=timeout,
            master_listen_fd=None if listener is None else listener.detach(),
        )
        distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        # Finds the group there already and uses it.
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False, timeout=timeout)
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
