"""After a publish an engine computes with the new weights and with nothing of the old ones, on either engine."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.errors import WeightSyncError
from slipstream.rollout.messages import GroupRequest, SamplingParameters
from slipstream.weights.gloo import GlooSender
from slipstream.weights.shared_memory import SharedMemorySender, segment_path

TOLERANCE = 1e-4
PROBE = np.arange(3, 83, dtype=np.int64)


@pytest.fixture(params=["transformers", pytest.param("vllm", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[True, False], ids=["tied head", "own head"])
def tied(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def folder(tied: bool, tied_model: Path, untied_model: Path) -> Path:
    return tied_model if tied else untied_model


@pytest.fixture
def engine(engines: Any, kind: str, tied: bool) -> Any:
    return engines(kind, tied)


@pytest.fixture(autouse=True)
def original_weights_afterwards(
    engine: Any, folder: Path, run: Any, load_reference: Any, shared_memory_plan: Any
) -> Iterator[None]:
    yield
    publish(run, engine, load_reference(folder), shared_memory_plan, version=0)


def publish(run: Any, engine: Any, model: Any, make_plan: Any, *, version: int, damage: bool = False) -> list[Any]:
    """Publish as the controller does; returns (sent, arrived) checksums of each bucket."""
    plan = make_plan(model)
    sender = SharedMemorySender(plan)
    compared = []

    async def update() -> None:
        await engine.begin_update()
        for index, bucket in enumerate(plan.buckets):
            sent = sender.send(bucket, dict(model.named_parameters()))
            if damage and index == 1:
                with segment_path(plan.channel.run_id).open("r+b") as segment:
                    segment.seek(bucket.tensors[0].offset + 5)
                    byte = segment.read(1)[0]
                    segment.seek(bucket.tensors[0].offset + 5)
                    segment.write(bytes([byte ^ 1]))
            [arrived] = await engine.load_bucket(plan, index)
            compared.append((sent, arrived))
        await engine.finish_update(version)

    try:
        run(update())
    finally:
        sender.close()
    assert len(plan.buckets) > 3
    return compared


def test_a_probe_gives_what_a_forward_pass_gives(
    engine: Any, folder: Path, run: Any, load_reference: Any, reference_log_probs: Any
) -> None:
    for _ in range(2):  # The second time its keys and values could come from a cache.
        found = run(engine.probe(PROBE))
        np.testing.assert_allclose(found, reference_log_probs(load_reference(folder), PROBE), atol=TOLERANCE)


def test_after_a_publish_the_probe_is_the_new_models_and_differs_from_before(
    engine: Any,
    folder: Path,
    run: Any,
    load_reference: Any,
    reference_log_probs: Any,
    changed: Any,
    shared_memory_plan: Any,
) -> None:
    before = run(engine.probe(PROBE))
    for version in (1, 2):
        model = changed(load_reference(folder), version)
        for sent, arrived in publish(run, engine, model, shared_memory_plan, version=version):
            assert arrived == sent
        after = run(engine.probe(PROBE))
        np.testing.assert_allclose(after, reference_log_probs(model, PROBE), atol=TOLERANCE)
        assert np.abs(after - before).max() > 0.1
        assert run(engine.statistics()).policy_version == version
        before = after


def test_responses_after_a_publish_use_no_prefix_cached_with_the_old_weights(
    engine: Any,
    folder: Path,
    run: Any,
    collect: Any,
    load_reference: Any,
    reference_log_probs: Any,
    changed: Any,
    shared_memory_plan: Any,
) -> None:
    model = load_reference(folder)
    requests = [GroupRequest(f"0-{index}", PROBE, 4, 10 * index) for index in range(3)]
    for version in (0, 1):
        if version:
            publish(run, engine, changed(model, 1), shared_memory_plan, version=version)
        for result in collect(engine, requests, SamplingParameters(1.0, 10)).values():
            for sample in result.samples:
                whole = np.concatenate([PROBE, sample.tokens])
                expected = reference_log_probs(model, whole)[len(PROBE) - 1 :]
                np.testing.assert_allclose(sample.log_probs, expected, atol=TOLERANCE)
                assert (sample.versions == version).all()


def test_weights_may_also_come_through_gloo(
    engine: Any, folder: Path, run: Any, load_reference: Any, reference_log_probs: Any, changed: Any, gloo_plan: Any
) -> None:
    model = changed(load_reference(folder), 5)
    plan = gloo_plan(model)

    async def update() -> None:
        await engine.begin_update()
        sender = None
        for index, bucket in enumerate(plan.buckets):
            loading = asyncio.ensure_future(engine.load_bucket(plan, index))
            sender = sender or await asyncio.to_thread(GlooSender, plan)
            sent = await asyncio.to_thread(sender.send, bucket, dict(model.named_parameters()))
            assert await loading == [sent]
        await engine.finish_update(5)

    run(update())
    np.testing.assert_allclose(run(engine.probe(PROBE)), reference_log_probs(model, PROBE), atol=TOLERANCE)


def test_one_damaged_bit_shows_in_the_checksum_of_its_tensor_alone(
    engine: Any, folder: Path, run: Any, load_reference: Any, shared_memory_plan: Any
) -> None:
    compared = publish(run, engine, load_reference(folder), shared_memory_plan, version=1, damage=True)
    differing = [
        (bucket, name) for bucket, (sent, got) in enumerate(compared) for name in sent if sent[name] != got[name]
    ]
    assert differing == [(1, next(iter(compared[1][0])))]


def test_an_update_with_a_bucket_left_out_is_refused(
    engine: Any, folder: Path, run: Any, load_reference: Any, shared_memory_plan: Any
) -> None:
    model = load_reference(folder)
    plan = shared_memory_plan(model)
    sender = SharedMemorySender(plan)
    sender.send(plan.buckets[0], dict(model.named_parameters()))
    run(engine.begin_update())
    run(engine.load_bucket(plan, 0))
    with pytest.raises(WeightSyncError, match=r"buckets \[1, .*were not loaded"):
        run(engine.finish_update(1))
    sender.close()
    with pytest.raises(WeightSyncError, match="were not loaded"):
        run(engine.probe(PROBE))


def test_a_missing_segment_is_an_error_and_no_hang(
    engine: Any, folder: Path, run: Any, load_reference: Any, shared_memory_plan: Any
) -> None:
    run(engine.begin_update())
    with pytest.raises(WeightSyncError, match=r"bucket 0 .* no shared-memory segment"):
        run(engine.load_bucket(shared_memory_plan(load_reference(folder)), 0))
