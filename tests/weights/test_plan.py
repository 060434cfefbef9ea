"""The weight plan: every tensor once, in order, aligned, within the size of a bucket."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import WeightSyncError
from slipstream.weights.plan import ALIGNMENT_BYTES, DTYPE_BYTES, ChannelAddress, make_plan, receiver_indices

CHANNEL = ChannelAddress("shared_memory", "test")
shapes = st.lists(
    st.tuples(st.sampled_from(["float32", "bfloat16", "int8"]), st.lists(st.integers(0, 12), max_size=3)), max_size=20
)


@given(shapes, st.integers(1, 4096))
def test_every_tensor_travels_once_in_order_aligned_and_apart(kinds, bucket_bytes):
    tensors = [(f"w{index}", dtype, tuple(shape)) for index, (dtype, shape) in enumerate(kinds)]
    plan = make_plan(tensors, bucket_bytes, channel=CHANNEL)
    assert [(t.name, t.dtype, t.shape) for bucket in plan.buckets for t in bucket.tensors] == tensors
    for bucket in plan.buckets:
        assert bucket.tensors, "no empty bucket is sent"
        assert bucket.bytes <= bucket_bytes or len(bucket.tensors) == 1
        end = 0
        for tensor in bucket.tensors:
            assert tensor.bytes == math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
            assert tensor.offset % ALIGNMENT_BYTES == 0 and tensor.offset >= end
            end = tensor.offset + tensor.bytes
        assert bucket.bytes <= plan.largest_bucket_bytes
    assert plan.total_bytes == sum(math.prod(shape) * DTYPE_BYTES[dtype] for _, dtype, shape in tensors)


def test_buckets_are_filled_before_a_new_one_is_opened():
    tensors = [(name, "float32", (16,)) for name in "abcde"]
    plan = make_plan(tensors, 128, channel=CHANNEL)
    assert [[t.name for t in bucket.tensors] for bucket in plan.buckets] == [["a", "b"], ["c", "d"], ["e"]]


def test_a_tensor_larger_than_a_bucket_gets_one_of_its_own():
    tensors = [("small", "float32", (4,)), ("huge", "float32", (1000,)), ("last", "float32", (4,))]
    plan = make_plan(tensors, 256, channel=CHANNEL)
    assert [[t.name for t in bucket.tensors] for bucket in plan.buckets] == [["small"], ["huge"], ["last"]]
    assert plan.largest_bucket_bytes == 4000


def test_a_name_given_twice_is_refused():
    with pytest.raises(WeightSyncError, match="'w' occurs twice"):
        make_plan([("w", "float32", (1,)), ("w", "float32", (1,))], 64, channel=CHANNEL)


def test_a_type_that_cannot_travel_is_refused():
    with pytest.raises(WeightSyncError, match="'w' has type complex64"):
        make_plan([("w", "complex64", (1,))], 64, channel=CHANNEL)


def test_only_gloo_needs_both_sides_at_once():
    assert not CHANNEL.needs_both_sides
    assert ChannelAddress("gloo", "test", port=1).needs_both_sides


def test_every_worker_of_every_engine_is_a_receiver_and_has_a_name() -> None:
    assert receiver_indices([0, 2], 1) == (0, 2)
    receivers = receiver_indices([0, 2], 2)
    assert receivers == (0, 1, 4, 5)
    channel = ChannelAddress("gloo", "run", receivers=receivers, workers_per_engine=2)
    assert channel.receiver_name(5) == "rollout engine 2, worker 1"
    assert ChannelAddress("gloo", "run", receivers=(0, 2)).receiver_name(2) == "rollout engine 2"
