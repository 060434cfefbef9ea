"""How ranks meet."""

import socket

import pytest
import torch.distributed as distributed

from slipstream.errors import TrainingError
from slipstream.training.process_group import free_port, host_address, import_deepspeed, join_process_group


def test_a_free_port_can_be_listened_on():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))


def test_the_address_of_the_host_is_one_it_answers_at():
    with socket.socket() as listener:
        listener.bind((host_address(), 0))


def test_a_process_joins_once_and_refuses_another_place():
    place = {"address": "127.0.0.1", "port": free_port(), "device": "cpu", "backend": "gloo", "timeout_s": 30.0}
    join_process_group(rank=0, world_size=1, **place)
    group = distributed.group.WORLD
    join_process_group(rank=0, world_size=1, **place)
    assert distributed.group.WORLD is group
    with pytest.raises(TrainingError, match="is rank 0 of 1 already and cannot become rank 1 of 2"):
        join_process_group(rank=1, world_size=2, **place)


def test_deepspeed_compiles_nothing_for_collectives():
    import_deepspeed("cpu")
    import deepspeed.ops

    assert deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] is False
