"""New weights come while responses are under way: these go on, and every token knows the version that chose it."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.errors import WeightSyncError
from slipstream.rollout.messages import GroupRequest, SamplingParameters
from slipstream.weights.shared_memory import SharedMemorySender

TOLERANCE = 1e-4
PROMPT = np.arange(3, 43, dtype=np.int64)
SAMPLING = SamplingParameters(1.0, 100)
PAUSE_S = 0.03
REQUESTS = [GroupRequest(f"0-{index}", PROMPT + index, 4, 100 * index) for index in range(3)]


@pytest.fixture(params=["transformers", pytest.param("vllm", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[False, True], ids=["cache kept", "cache recomputed"])
def recomputes(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def engine(engines: Any, kind: str, recomputes: bool) -> Iterator[Any]:
    """The engine of the session, which looks at this part of its specification at each update."""
    engine = engines(kind, False)
    before = engine._spec
    engine._spec = replace(before, recompute_cache_on_update=recomputes)
    yield engine
    engine._spec = before


@pytest.fixture
def models(engine: Any, run: Any, untied_model: Path, load_reference: Any, changed: Any, make_update: Any) -> Any:
    """The model of each version; the engine has version 0 before and after."""
    original = load_reference(untied_model)
    run(make_update(engine, original, 0))
    yield [original, changed(load_reference(untied_model), 1), changed(load_reference(untied_model), 2)]
    run(make_update(engine, original, 0))


@pytest.fixture
def make_update(shared_memory_plan: Any) -> Any:
    async def update(engine: Any, model: Any, version: int) -> None:
        plan = shared_memory_plan(model)
        sender = SharedMemorySender(plan)
        try:
            await engine.begin_update()
            for index, bucket in enumerate(plan.buckets):
                sender.send(bucket, dict(model.named_parameters()))
                await engine.load_bucket(plan, index)
            await engine.finish_update(version)
        finally:
            sender.close()

    return update


def generate_with_updates(run: Any, engine: Any, make_update: Any, models: Any) -> list[Any]:
    """All responses to `REQUESTS`; the second and third version come while they are generated."""

    async def both() -> list[Any]:
        async def generate() -> list[Any]:
            return [result async for results in engine.generate(REQUESTS, SAMPLING) for result in results]

        generating = asyncio.ensure_future(generate())
        for version, model in enumerate(models[1:], start=1):
            await asyncio.sleep(PAUSE_S)
            await make_update(engine, model, version)
        return await generating

    return run(both())


def crossing(results: list[Any]) -> list[Any]:
    return [result for result in results if len(set(result.sample.versions.tolist())) > 1]


def test_each_token_has_the_version_that_chose_it(
    engine: Any, run: Any, models: Any, make_update: Any, recomputes: bool, reference_log_probs: Any
) -> None:
    results = generate_with_updates(run, engine, make_update, models)
    assert len(results) == 12
    assert crossing(results), "no response was under way during an update"
    prompts = {request.group_id: request.prompt_tokens for request in REQUESTS}
    for result in results:
        sample, prompt = result.sample, prompts[result.group_id]
        assert (np.diff(sample.versions) >= 0).all()
        whole = np.concatenate([prompt, sample.tokens])
        by_version = [reference_log_probs(model, whole)[len(prompt) - 1 :] for model in models]
        # Up to the first update, and where the cache is computed anew in all of it, a plain forward pass agrees.
        for version, expected in enumerate(by_version):
            chosen = sample.versions == version
            if recomputes or version == sample.versions[0]:
                np.testing.assert_allclose(sample.log_probs[chosen], expected[chosen], atol=TOLERANCE)
            elif chosen.sum() > 3:
                difference = np.abs(sample.log_probs[chosen] - expected[chosen])
                assert difference.max() > TOLERANCE, "keys and values of the older weights were kept"


def test_new_prompts_take_nothing_cached_by_responses_that_began_earlier(
    engine: Any, run: Any, models: Any, make_update: Any, reference_log_probs: Any
) -> None:
    """The same prompt again, right after the update, while the first response to it is still under way."""

    async def both() -> tuple[list[Any], list[Any]]:
        async def generate(sampling: SamplingParameters) -> list[Any]:
            return [result async for results in engine.generate(REQUESTS, sampling) for result in results]

        first = asyncio.ensure_future(generate(SAMPLING))
        await asyncio.sleep(PAUSE_S)
        await make_update(engine, models[1], 1)
        second = await generate(replace(SAMPLING, max_response_tokens=10))
        return await first, second

    first, second = run(both())
    assert crossing(first)
    prompts = {request.group_id: request.prompt_tokens for request in REQUESTS}
    for result in second:
        assert set(result.sample.versions.tolist()) == {1}
        prompt = prompts[result.group_id]
        expected = reference_log_probs(models[1], np.concatenate([prompt, result.sample.tokens]))[len(prompt) - 1 :]
        np.testing.assert_allclose(result.sample.log_probs, expected, atol=TOLERANCE)


def test_a_probe_is_answered_while_responses_are_under_way(
    engine: Any, run: Any, models: Any, make_update: Any, reference_log_probs: Any
) -> None:
    async def both() -> tuple[list[Any], Any, int]:
        async def generate() -> list[Any]:
            return [result async for results in engine.generate(REQUESTS, SAMPLING) for result in results]

        generating = asyncio.ensure_future(generate())
        await asyncio.sleep(PAUSE_S)
        await make_update(engine, models[1], 1)
        probed = await engine.probe(PROMPT)
        was_under_way = not generating.done()
        return await generating, probed, was_under_way

    results, probed, was_under_way = run(both())
    assert len(results) == 12 and was_under_way
    np.testing.assert_allclose(probed, reference_log_probs(models[1], PROMPT), atol=TOLERANCE)


def test_responses_come_one_by_one_as_they_end(engine: Any, run: Any, models: Any) -> None:
    async def generate() -> list[Any]:
        return [result async for results in engine.generate(REQUESTS, SAMPLING) for result in results]

    results = run(generate())
    lengths = [len(result.sample.tokens) for result in results]
    assert lengths == sorted(lengths) and len(set(lengths)) > 1
    groups = [result.group_id for result in results]
    assert groups != sorted(groups), "they do not wait for their group"


def test_what_is_under_way_ends_with_an_update_that_failed(
    engines: Any, run: Any, untied_model: Path, load_reference: Any, make_update: Any, shared_memory_plan: Any
) -> None:
    engine, model = engines("transformers", False), load_reference(untied_model)

    async def both() -> None:
        async def generate() -> list[Any]:
            return [result async for results in engine.generate(REQUESTS, SAMPLING) for result in results]

        generating = asyncio.ensure_future(generate())
        await asyncio.sleep(PAUSE_S)
        await engine.begin_update()
        with pytest.raises(WeightSyncError, match="no shared-memory segment"):
            await engine.load_bucket(shared_memory_plan(model), 0)
        with pytest.raises(WeightSyncError, match="no shared-memory segment"):
            await generating
        await make_update(engine, model, 0)
        assert len(await generate()) == 12, "after an update that succeeds it is as before"

    run(both())
