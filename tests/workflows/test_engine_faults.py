"""Engines that die or hang under a run: it names them, starts them anew, and goes on to the same end.

One that raises would raise again: that ends the run at once.
"""

import re
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 6
GROUPS_PER_STEP = 4

COMMAND_WITH_ANOTHER_ENGINE = """
import sys
from dataclasses import replace
from slipstream.cli import main
from slipstream.cluster.session import ClusterSession
from slipstream.rollout.transformers_engine import TransformersEngine

class Engine(TransformersEngine):
{methods}

start_engine = ClusterSession.start_engine

def start(session, name, engine_class, *arguments, **options):
    chosen = Engine if engine_class is TransformersEngine else engine_class
    return start_engine(session, name, chosen, *arguments, **options)

ClusterSession.start_engine = start
sys.exit(main({arguments}))
"""
SHORTER_CONTEXT = """
    async def generate(self, requests, sampling):
        self._spec = replace(self._spec, max_sequence_tokens=4)
        async for responses in super().generate(requests, sampling):
            yield responses
"""
BROKEN_SAMPLER = """
    def _generate_batch(self, *arguments):
        if self._version and self._spec.engine_index:
            raise RuntimeError("the sampler is broken")
        super()._generate_batch(*arguments)
"""


def restarts(bench: Any, output: str) -> float:
    return sum(line["faults/engine_restarts"] for line in bench.measured(output))


def assert_ended_well(process: Any) -> None:
    assert process.finish() == 0, process.stderr
    assert "Traceback" not in process.stderr
    assert process.survivors(limit_s=10) == []
    assert process.remains() == []


@pytest.mark.parametrize(
    ("victims", "names"), [(["ray::TransformersEngine", "ray::RewardEngine"], ["rollout engine 0", "reward engine"])]
)
def test_a_synchronous_run_that_loses_engines_gives_what_one_does_that_loses_none(
    bench: Any, finished_run: Any, victims: list[str], names: list[str]
) -> None:
    undisturbed, _ = finished_run
    process = bench.start("rl", "run", bench.evaluated_settings())
    for step, victim in enumerate(victims, start=1):
        bench.wait_for_step(process, "run", 2 * step - 1)
        process.find(victim).kill()
    process.look()
    assert_ended_well(process)
    for name in names:
        assert f"{name} is lost and started anew (time 1 of at most 3)" in process.stderr
        assert f"{name} is there again" in process.stderr
    assert restarts(bench, "run") == len(victims)
    assert bench.metrics("run") == undisturbed.metrics("run")
    assert bench.evaluations("run") == undisturbed.evaluations("run")
    assert bench.rollouts("run") == undisturbed.rollouts("run")


def test_a_killed_engine_core_of_vllm_changes_nothing_in_what_is_learned(bench: Any, finished_vllm_run: Any) -> None:
    undisturbed, _ = finished_vllm_run
    process = bench.start("rl", "run", bench.remembering_settings())
    bench.wait_for_step(process, "run", 2)
    process.find("EngineCore").kill()
    process.look()
    assert_ended_well(process)
    assert "rollout engine 0 is lost and started anew" in process.stderr
    assert "vLLM's EngineCore process has died" in process.stderr or "EngineCore encountered" in process.stderr
    assert bench.metrics("run") == undisturbed.metrics("run")
    assert bench.rollouts("run") == undisturbed.rollouts("run")


def test_a_run_whose_learner_and_engine_divide_their_weights_goes_on_after_a_killed_worker(
    bench: Any, request: pytest.FixtureRequest
) -> None:
    """Each half by itself is tested elsewhere (test_layouts.py, test_tensor_parallel_engine.py)."""
    if not request.config.getoption("--every-layout"):
        pytest.skip("runs with --every-layout")
    changes = {"rollout.engine": "vllm", "rollout.tensor_parallel": 2, "training.tensor_parallel": 2}
    process = bench.start("rl", "run", bench.rl_settings(steps=3) | changes)
    bench.wait_for_step(process, "run", 1)
    process.look()
    process.find("VLLM::Worker_TP1").kill()
    assert_ended_well(process)
    assert "rollout engine 0 is lost and started anew" in process.stderr
    assert "or a worker of it, has died" in process.stderr
    logs = "".join(path.read_text() for path in (bench.folder / "run" / "logs").glob("*.err"))
    assert re.search(r"worker 1 \(process \d+\) died: exit code -9", logs)
    assert restarts(bench, "run") == 1
    metrics = bench.measured("run")
    assert len(metrics) == 3
    assert all(line["weights/probe_difference"] <= 1e-4 for line in metrics)


def test_an_asynchronous_run_goes_on_while_engines_that_died_or_hang_are_started_anew(bench: Any) -> None:
    settings = bench.rl_settings(
        rollout__engines=2, rollout__max_staleness=2, reward__options__pause_s=0.1, cluster__call_timeout_s=30
    )
    process = bench.start("rl", "run", settings)
    bench.wait_for_step(process, "run", 1)
    engines = [p for p in process.look() if "ray::TransformersEngine" in " ".join(p.cmdline())]
    assert len(engines) == 2
    engines[0].kill()
    process.find("ray::RewardEngine").kill()
    engines[1].suspend()
    assert_ended_well(process)
    assert not any(psutil.pid_exists(engine.pid) for engine in engines)
    # Whoever asked it: the stream for answers, or the publisher to take weights.
    assert re.search(r"(nothing arrived|no answer) within 30 s from rollout engine", process.stderr)
    assert restarts(bench, "run") == 3
    bench.assert_each_trained_once("run", steps=STEPS, groups_per_step=GROUPS_PER_STEP)
    assert max(line["staleness/max"] for line in bench.measured("run")) <= 2


def test_a_gloo_channel_is_opened_anew_for_those_that_are_there(bench: Any) -> None:
    """Its ends belong together: one that is gone makes it useless for all, and one that comes later is not in it."""
    settings = bench.rl_settings(rollout__engines=2, rollout__max_staleness=1, weights__channel="gloo")
    process = bench.start("rl", "run", settings)
    bench.wait_for_step(process, "run", 1)
    process.find("ray::TransformersEngine").kill()
    process.look()
    assert_ended_well(process)
    assert restarts(bench, "run") == 1
    bench.assert_each_trained_once("run", steps=STEPS, groups_per_step=GROUPS_PER_STEP)


@pytest.mark.parametrize(
    ("methods", "max_staleness", "message"),
    [
        (SHORTER_CONTEXT, 0, r"error: rollout engine [01], group 0-\d+: the prompt has \d+ tokens; expected 1 to 3.*"),
        (BROKEN_SAMPLER, 1, r"error: rollout engine 1 \(transformers\) failed \(generating\): the sampler is broken"),
    ],
    ids=["prompt too long", "raises between steps"],
)
def test_an_engine_that_raises_ends_the_run_at_once_and_says_for_what(
    bench: Any, methods: str, max_staleness: int, message: str
) -> None:
    settings = bench.rl_settings(
        steps=500,
        rollout__engines=2,
        rollout__max_staleness=max_staleness,
        weights__verify=False,  # its probe would be too long as well
        output_dir="run",
    )
    arguments = ["rl", *(f"--{key}={value}" for key, value in settings.items())]
    process = bench.script(COMMAND_WITH_ANOTHER_ENGINE.format(methods=methods, arguments=arguments))
    if max_staleness:
        bench.wait_for_step(process, "run", 1)
    else:
        ledger = bench.folder / "run/ledger.jsonl"
        bench.wait_until(process, lambda: ledger.exists() and ledger.stat().st_size > 0, "prompt")
    process.look()
    assert process.finish(limit_s=30) == 1
    errors = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and re.fullmatch(message, errors[0]), process.stderr
    assert "Traceback" not in process.stderr
    assert process.survivors(limit_s=10) == []
