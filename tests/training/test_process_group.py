"""How ranks meet."""

import socket

import pytest
import torch.distributed as distributed

from slipstream.errors import TrainingError
from slipstream.training.process_group import import_deepspeed, join_process_group, open_listener


def test_a_listener_has_a_port_that_nobody_else_can_take_and_listens_at_its_address_only():
    with open_listener("127.0.0.1") as listener:
        address, port = listener.getsockname()
        assert address == "127.0.0.1"
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((address, port))


def test_a_process_joins_once_and_refuses_another_place():
    listener = open_listener("127.0.0.1")
    place = {"meeting_point": listener.getsockname(), "device": "cpu", "backend": "gloo", "timeout_s": 30.0}
    join_process_group(rank=0, world_size=1, listener=listener, **place)
    group = distributed.group.WORLD
    join_process_group(rank=0, world_size=1, **place)
    assert distributed.group.WORLD is group
    with pytest.raises(TrainingError, match="is rank 0 of 1 already and cannot become rank 1 of 2"):
        join_process_group(rank=1, world_size=2, **place)


def test_deepspeed_compiles_nothing_for_collectives():
    import_deepspeed("cpu")
    import deepspeed.ops

    assert deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] is False
