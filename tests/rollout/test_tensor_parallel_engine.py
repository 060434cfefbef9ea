"""A vLLM engine of two workers that share the weights: what it computes, what it is given, and how it ends."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from slipstream.errors import EngineLostError, WeightSyncError
from slipstream.rollout.messages import GroupRequest, SamplingParameters
from slipstream.weights.channel import WeightSender, open_sender
from slipstream.weights.plan import ChannelAddress, WeightPlan, receiver_indices

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

PROGRAM = Path(__file__).parent / "engine_process.py"
TOLERANCE = 1e-4
ENGINE_INDEX = 1
# By then there are some tokens of each response, and far from all of them.
UNDER_WAY_S = 0.3
PROMPT = np.arange(3, 43, dtype=np.int64)
REQUESTS = [GroupRequest(f"0-{index}", PROMPT + index, 4, 100 * index) for index in range(3)]
# What the program asks its engine for.
PROGRAM_REQUESTS = [GroupRequest(f"0-{index}", np.arange(10, 30) + index, 4, 100 * index) for index in range(24)]


@pytest.fixture(scope="module")
def program(tied_model: Path) -> Iterator[subprocess.Popen[str]]:
    """Such an engine in a process of its own, which starts beside the one here."""
    command = [sys.executable, str(PROGRAM), str(tied_model), "2"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    if process.poll() is None:
        process.kill()
    process.wait()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the processes of the engine write to standard error."""
    return tmp_path_factory.mktemp("log") / "stderr"


@contextmanager
def standard_error_of_children(path: Path) -> Iterator[None]:
    """Processes that are started meanwhile write there."""
    before = os.dup(2)
    with path.open("w") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


@pytest.fixture(scope="module")
def started(
    program: Any, run: Any, make_spec: Any, tied_model: Path, log: Path
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The engine and what its start says; the last test kills a worker of it."""
    from slipstream.rollout.vllm_engine import VLLMEngine, vllm_environment

    spec = make_spec(tied_model, tensor_parallel=2, engine_index=ENGINE_INDEX, recompute_cache_on_update=True)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in vllm_environment(spec).items():
            patch.setenv(name, value)
        engine = VLLMEngine(spec)
        with standard_error_of_children(log):
            facts = run(engine.start())
        yield engine, facts
        run(engine.shutdown())


@pytest.fixture
def engine(started: tuple[Any, dict[str, Any]]) -> Any:
    return started[0]


@pytest.fixture
def facts(started: tuple[Any, dict[str, Any]]) -> dict[str, Any]:
    return started[1]


def for_two_workers(plan: WeightPlan) -> WeightPlan:
    receivers = receiver_indices([ENGINE_INDEX], 2)
    return replace(plan, channel=replace(plan.channel, receivers=receivers, workers_per_engine=2))


async def publish(engine: Any, model: Any, plan: WeightPlan, *, version: int) -> None:
    """Publish as the controller does; every worker gets what is sent."""
    weights = dict(model.named_parameters())
    sender: WeightSender | None = None
    await engine.begin_update()
    try:
        for index, bucket in enumerate(plan.buckets):
            if plan.channel.needs_both_sides:
                loading = asyncio.ensure_future(engine.load_bucket(plan, index))
                sender = sender or await asyncio.to_thread(open_sender, plan)
                sent = await asyncio.to_thread(sender.send, bucket, weights)
                arrived = await loading
            else:
                sender = sender or open_sender(plan)
                sent = sender.send(bucket, weights)
                arrived = await engine.load_bucket(plan, index)
            assert arrived == [sent, sent]
    finally:
        if sender is not None:
            sender.close()
    await engine.finish_update(version)


def all_gone(pids: Sequence[int], timeout_s: float) -> bool:
    """Whether none of the processes runs any more, at the latest after so long."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        statuses = [psutil.Process(pid).status() for pid in pids if psutil.pid_exists(pid)]
        if all(status == psutil.STATUS_ZOMBIE for status in statuses):
            return True
        time.sleep(0.1)
    return False


def test_the_workers_are_two_processes_below_the_engine_core_and_listen_on_the_loopback_address_alone(
    facts: dict[str, Any],
) -> None:
    workers = [psutil.Process(pid) for pid in facts["workers"]]
    [core] = set(facts["core_processes"]) - set(facts["workers"])
    assert len(workers) == 2 and {worker.ppid() for worker in workers} == {core}
    assert psutil.Process(core).ppid() == os.getpid()
    listening = [
        connection.laddr.ip
        for process in (psutil.Process(core), *workers)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening and set(listening) == {"127.0.0.1"}


def test_log_probs_are_those_of_a_forward_pass_and_repeat_bit_for_bit(
    engine: Any, run: Any, collect: Any, tied_model: Path, load_reference: Any, reference_log_probs: Any
) -> None:
    model = load_reference(tied_model)
    np.testing.assert_allclose(run(engine.probe(PROMPT)), reference_log_probs(model, PROMPT), atol=TOLERANCE)
    first, second = (collect(engine, REQUESTS, SamplingParameters(1.0, 12)) for _ in range(2))
    for request in REQUESTS:
        for sample, again in zip(first[request.group_id].samples, second[request.group_id].samples, strict=True):
            expected = reference_log_probs(model, np.concatenate([request.prompt_tokens, sample.tokens]))
            np.testing.assert_allclose(sample.log_probs, expected[len(PROMPT) - 1 :], atol=TOLERANCE)
            assert sample.tokens.tolist() == again.tokens.tolist()
            assert sample.log_probs.tolist() == again.log_probs.tolist()


def test_both_workers_take_every_weight_through_either_channel(
    engine: Any,
    run: Any,
    collect: Any,
    tied_model: Path,
    load_reference: Any,
    reference_log_probs: Any,
    changed: Any,
    shared_memory_plan: Any,
    gloo_plan: Any,
) -> None:
    for version, make_plan in enumerate((shared_memory_plan, gloo_plan, shared_memory_plan), start=1):
        model = changed(load_reference(tied_model), version)
        before = run(engine.probe(PROMPT))
        plan = for_two_workers(make_plan(model))
        assert len(plan.buckets) > 3
        run(publish(engine, model, plan, version=version))
        expected = reference_log_probs(model, PROMPT)
        np.testing.assert_allclose(run(engine.probe(PROMPT)), expected, atol=TOLERANCE)
        assert np.abs(before - expected).max() > 0.1
        for sample in collect(engine, REQUESTS[:1], SamplingParameters(1.0, 10))["0-0"].samples:
            whole = reference_log_probs(model, np.concatenate([PROMPT, sample.tokens]))
            np.testing.assert_allclose(sample.log_probs, whole[len(PROMPT) - 1 :], atol=TOLERANCE)
            assert (sample.versions == version).all()


def test_responses_under_way_go_on_with_the_new_weights_and_each_token_has_its_version(
    engine: Any,
    run: Any,
    tied_model: Path,
    load_reference: Any,
    reference_log_probs: Any,
    changed: Any,
    shared_memory_plan: Any,
) -> None:
    old, new = load_reference(tied_model), changed(load_reference(tied_model), 1)
    run(publish(engine, old, for_two_workers(shared_memory_plan(old)), version=5))

    async def generate_with_update() -> list[Any]:
        async def generate() -> list[Any]:
            answers = engine.generate(REQUESTS, SamplingParameters(1.0, 100))
            return [result async for results in answers for result in results]

        generating = asyncio.ensure_future(generate())
        await asyncio.sleep(UNDER_WAY_S)
        await publish(engine, new, for_two_workers(shared_memory_plan(new)), version=6)
        return await generating

    results = run(generate_with_update())
    assert len(results) == 12
    assert any(set(result.sample.versions.tolist()) == {5, 6} for result in results), "nothing was under way"
    prompts = {request.group_id: request.prompt_tokens for request in REQUESTS}
    for result in results:
        sample, prompt = result.sample, prompts[result.group_id]
        for version, model in ((5, old), (6, new)):
            chosen = sample.versions == version
            expected = reference_log_probs(model, np.concatenate([prompt, sample.tokens]))[len(prompt) - 1 :]
            np.testing.assert_allclose(sample.log_probs[chosen], expected[chosen], atol=TOLERANCE)


def test_a_worker_that_fails_is_named_and_the_next_update_is_not_confused_by_what_the_other_answered(
    engine: Any, run: Any, tied_model: Path, load_reference: Any, gloo_plan: Any, shared_memory_plan: Any
) -> None:
    model = load_reference(tied_model)
    first_worker, second_worker = receiver_indices([ENGINE_INDEX], 2)
    assert (first_worker, second_worker) == (2, 3)
    channel: ChannelAddress = gloo_plan(model).channel
    plan = replace(
        shared_memory_plan(model), channel=replace(channel, receivers=(second_worker,), workers_per_engine=2)
    )

    async def update_of_one_worker() -> None:
        await engine.begin_update()
        opening = asyncio.ensure_future(asyncio.to_thread(open_sender, plan))
        try:
            await engine.load_bucket(plan, 0)
        finally:
            (await opening).close()

    with pytest.raises(WeightSyncError, match=r"engine 1 \(vllm\), worker 0 failed .* worker 0 is no receiver"):
        run(update_of_one_worker())
    run(publish(engine, model, for_two_workers(shared_memory_plan(model)), version=7))


def test_kill_9_of_an_engine_takes_its_engine_core_and_workers_along_and_its_start_was_the_same_bit_for_bit(
    program: subprocess.Popen[str], engine: Any, run: Any, collect: Any, tied_model: Path, load_reference: Any,
    shared_memory_plan: Any,
) -> None:  # fmt: skip
    assert program.stdout is not None
    answer = json.loads(next(line for line in program.stdout if line.startswith("{")))
    model = load_reference(tied_model)
    run(publish(engine, model, for_two_workers(shared_memory_plan(model)), version=8))
    for group_id, result in collect(engine, PROGRAM_REQUESTS, SamplingParameters(1.0, 12)).items():
        for index, sample in enumerate(result.samples):
            assert [sample.tokens.tolist(), sample.log_probs.tolist()] == answer["samples"][f"{group_id}/{index}"]
    children = [child.pid for child in psutil.Process(program.pid).children(recursive=True)]
    assert len(answer["facts"]["core_processes"]) == 3 and set(answer["facts"]["core_processes"]) <= set(children)
    program.kill()
    assert all_gone(children, 20)
    assert not any(Path(path).exists() for path in answer["facts"]["shared_memory"])


def test_a_killed_worker_is_the_loss_of_its_engine_and_leaves_nothing(
    engine: Any, facts: dict[str, Any], run: Any, log: Path
) -> None:
    async def generate_and_kill() -> list[Any]:
        async def generate() -> list[Any]:
            answers = engine.generate(REQUESTS, SamplingParameters(1.0, 100))
            return [result async for results in answers for result in results]

        generating = asyncio.ensure_future(generate())
        await asyncio.sleep(UNDER_WAY_S)
        os.kill(facts["workers"][1], signal.SIGKILL)
        return await generating

    began = time.monotonic()
    with pytest.raises(EngineLostError, match=r"^rollout engine 1 \(vllm\) failed .* or a worker of it, has died"):
        run(generate_and_kill())
    assert time.monotonic() - began < 10
    assert f"worker 1 (process {facts['workers'][1]}) died: exit code -9" in log.read_text()
    assert all_gone(facts["core_processes"], 10)
    with pytest.raises(EngineLostError):
        run(engine.probe(PROMPT))
    assert facts["shared_memory"]
    run(engine.shutdown())
    assert not any(Path(path).exists() for path in facts["shared_memory"])
