"""Weights through /dev/shm: what is sent arrives, in another process too, and nothing is left behind."""

import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from slipstream.errors import WeightSyncError
from slipstream.weights import shared_memory
from slipstream.weights.channel import open_receiver, open_sender
from slipstream.weights.checksum import tensor_checksum
from slipstream.weights.plan import ChannelAddress, WeightPlan, make_plan
from slipstream.weights.shared_memory import SharedMemorySender, segment_path

TENSORS = {
    "first": torch.randn(5, 3),
    "second": torch.randn(9).to(torch.bfloat16),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "large": torch.randn(400),
}


@pytest.fixture
def plan(tmp_path) -> WeightPlan:
    channel = ChannelAddress("shared_memory", f"test-{tmp_path.name}")
    shapes = [(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in TENSORS.items()]
    yield make_plan(shapes, 256, channel=channel)
    segment_path(channel.run_id).unlink(missing_ok=True)


def test_every_bucket_arrives_with_the_checksums_that_were_sent(plan):
    sender, receiver = open_sender(plan), None
    assert len(plan.buckets) > 1
    for bucket in plan.buckets:
        sent = sender.send(bucket, TENSORS)
        receiver = receiver or open_receiver(plan, 0)
        received = dict(receiver.receive(bucket))
        assert {name: tensor_checksum(tensor) for name, tensor in received.items()} == sent
        for name, tensor in received.items():
            assert tensor.dtype == TENSORS[name].dtype and torch.equal(tensor, TENSORS[name])
    receiver.close()
    sender.close()


def test_a_damaged_byte_shows_in_the_checksum(plan):
    sender = open_sender(plan)
    sent = sender.send(plan.buckets[0], TENSORS)
    with open(segment_path(plan.channel.run_id), "r+b") as file:
        file.seek(plan.buckets[0].tensors[0].offset + 1)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    received = dict(open_receiver(plan, 0).receive(plan.buckets[0]))
    assert tensor_checksum(received["first"]) != sent["first"]
    assert tensor_checksum(received["second"]) == sent["second"]


def test_a_reader_that_exits_leaves_the_segment_to_the_others(plan):
    sender = open_sender(plan)
    sent = sender.send(plan.buckets[0], TENSORS)
    program = (
        "import pickle, sys; from slipstream.weights.channel import open_receiver;"
        "from slipstream.weights.checksum import tensor_checksum;"
        "plan = pickle.loads(bytes.fromhex(sys.argv[1]));"
        "print({name: tensor_checksum(t) for name, t in open_receiver(plan, 0).receive(plan.buckets[0])})"
    )
    output = subprocess.run(
        [sys.executable, "-c", program, pickle.dumps(plan).hex()],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert output.stdout.strip() == str(sent) and "leaked" not in output.stderr
    here = open_receiver(plan, 1).receive(plan.buckets[0])
    assert {name: tensor_checksum(tensor) for name, tensor in here} == sent


def test_closing_removes_the_segment_and_keeps_what_readers_hold(plan):
    sender = open_sender(plan)
    sender.send(plan.buckets[0], TENSORS)
    receiver = open_receiver(plan, 0)
    held = dict(receiver.receive(plan.buckets[0]))
    sender.close()
    sender.close()
    assert not segment_path(plan.channel.run_id).exists()
    receiver.close()
    assert torch.equal(held["first"], TENSORS["first"])


def test_the_segment_of_a_killed_run_is_known_by_the_run_and_replaced_by_the_next_sender(plan):
    SharedMemorySender(plan)
    path = segment_path(plan.channel.run_id)
    assert path.name.startswith(f"slipstream-{plan.channel.run_id}-") and path.parent.name == "shm"
    sender = SharedMemorySender(plan)
    sender.send(plan.buckets[0], TENSORS)
    assert torch.equal(dict(open_receiver(plan, 0).receive(plan.buckets[0]))["first"], TENSORS["first"])


def test_reading_before_anything_was_sent_says_so(plan):
    with pytest.raises(WeightSyncError, match="no shared-memory segment"):
        open_receiver(plan, 0)


def test_a_segment_of_another_plan_is_refused(plan):
    open_sender(plan)
    with pytest.raises(WeightSyncError, match="the weight plan says"):
        open_receiver(replace(plan, buckets=plan.buckets[:1]), 0)


def test_a_tensor_that_changed_its_shape_or_type_is_named(plan):
    sender = open_sender(plan)
    for wrong in (torch.randn(3, 5), TENSORS["first"].double()):
        with pytest.raises(WeightSyncError, match="'first'"):
            sender.send(plan.buckets[0], {**TENSORS, "first": wrong})


def test_a_full_dev_shm_is_an_error_with_a_way_out_and_leaves_nothing(plan, monkeypatch):
    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_memory.os, "posix_fallocate", no_space)
    with pytest.raises(WeightSyncError, match=r"No space left on device.*weights.bucket_bytes"):
        open_sender(plan)
    assert not segment_path(plan.channel.run_id).exists()
