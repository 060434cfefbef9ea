"""The gloo channel carries the plan's buckets to every receiver, and says whom it waited for."""

import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream.errors import WeightSyncError
from slipstream.weights.channel import open_receiver, open_sender
from slipstream.weights.checksum import tensor_checksum
from slipstream.weights.plan import ChannelAddress, WeightPlan, make_plan

TENSORS = {
    "embedding.weight": torch.randn(40, 16),
    "layer.weight": torch.randn(16, 16).bfloat16(),
    "layer.bias": torch.randn(3),
    "scale": torch.tensor(2.5),
    "table": torch.arange(7),
}


def gloo_plan(*, receivers: int, timeout_s: float = 20.0) -> WeightPlan:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    channel = ChannelAddress("gloo", "test", receivers=tuple(range(receivers)), port=port, timeout_s=timeout_s)
    named = ((name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in TENSORS.items())
    return make_plan(named, 2600, channel=channel)


def send(plan: WeightPlan, tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    sender = open_sender(plan)
    checksums: dict[str, int] = {}
    for bucket in plan.buckets:
        checksums |= sender.send(bucket, tensors)
    sender.close()
    return checksums


def receive(plan: WeightPlan, index: int) -> dict[str, torch.Tensor]:
    receiver = open_receiver(plan, index)
    arrived: dict[str, torch.Tensor] = {}
    for bucket in plan.buckets:
        arrived |= {name: tensor.clone() for name, tensor in receiver.receive(bucket)}
    receiver.close()
    return arrived


def together(*calls: tuple[Callable[..., Any], ...]) -> list[Future[Any]]:
    """Run all calls at the same time, each end of the channel in a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [pool.submit(function, *arguments) for function, *arguments in calls]


@pytest.mark.parametrize("receivers", [1, 2])
def test_every_receiver_gets_every_tensor_bit_for_bit(receivers: int) -> None:
    plan = gloo_plan(receivers=receivers)
    assert len(plan.buckets) > 1
    sent, *arrived = together((send, plan, TENSORS), *((receive, plan, index) for index in range(receivers)))
    for one in arrived:
        assert {name: tensor_checksum(tensor) for name, tensor in one.result().items()} == sent.result()
        for name, tensor in one.result().items():
            assert tensor.dtype == TENSORS[name].dtype
            assert torch.equal(tensor, TENSORS[name])


def test_the_default_process_group_is_left_alone() -> None:
    before = torch.distributed.group.WORLD
    plan = gloo_plan(receivers=1)
    together((send, plan, TENSORS), (receive, plan, 0))
    assert torch.distributed.group.WORLD is before


def test_a_receiver_that_never_comes_is_named_after_the_time_out() -> None:
    with pytest.raises(WeightSyncError, match="the learner waited up to 1 s for rollout engine 0 "):
        open_sender(gloo_plan(receivers=1, timeout_s=1))


def test_a_sender_that_never_comes_is_named_after_the_time_out() -> None:
    with pytest.raises(WeightSyncError, match="rollout engine 0 waited up to 1 s for the learner"):
        open_receiver(gloo_plan(receivers=1, timeout_s=1), 0)


def test_a_sender_that_stops_sending_is_an_error_at_the_receiver() -> None:
    plan = gloo_plan(receivers=1, timeout_s=2)
    _, arrived = together((open_sender, plan), (receive, plan, 0))
    with pytest.raises(WeightSyncError, match="a bucket of weights did not pass"):
        arrived.result()


def test_a_tensor_of_another_shape_than_planned_is_refused() -> None:
    plan = gloo_plan(receivers=1, timeout_s=2)
    sent, _ = together((send, plan, TENSORS | {"embedding.weight": torch.zeros(41, 16)}), (receive, plan, 0))
    with pytest.raises(WeightSyncError, match=r"'embedding.weight' is torch.float32 \(41, 16\), but the weight plan"):
        sent.result()


def test_a_receiver_beyond_the_plan_is_refused() -> None:
    with pytest.raises(WeightSyncError, match=r"rollout engine 1 is no receiver .* planned for rollout engine 0"):
        open_receiver(gloo_plan(receivers=1), 1)


def test_workers_of_an_engine_are_named_with_it() -> None:
    plan = gloo_plan(receivers=2)
    plan = replace(plan, channel=replace(plan.channel, receivers=(2, 3), workers_per_engine=2))
    expected = "rollout engine 0, worker 1 is no receiver .* planned for the 2 workers of rollout engine 1$"
    with pytest.raises(WeightSyncError, match=expected):
        open_receiver(plan, 1)


def test_a_closed_end_says_so() -> None:
    plan = gloo_plan(receivers=1)
    opened, _ = together((open_sender, plan), (open_receiver, plan, 0))
    sender = opened.result()
    sender.close()
    sender.close()
    with pytest.raises(WeightSyncError, match="is closed"):
        sender.send(plan.buckets[0], TENSORS)
