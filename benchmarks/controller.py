"""What a trajectory costs the controller, with 16 to 1,024 rollout engines: is it the same?

    python benchmarks/controller.py [--engines 16 64 256 1024] [--trajectories 8192] [--max_staleness 1]

The controller is the real one: the loop of `slipstream rl`, with its stream, admission, ledger, timeline, metrics,
preparation of batches and publisher, and Ray's object store between it and the engines. The engines are simulated. Each
answers after a scripted delay with responses of `--tokens` token ids, log-probs and versions, scored at once; the
learner learns nothing. Several rollout engines live in one process, since a thousand processes do not fit on one
machine, but each has a face of its own: the controller sees as many engines, with a call of its own under way at each.

A step has one group for each engine, so the number of trajectories in flight grows with the engines. All sizes train on
the same number of trajectories. Each runs in a fresh process, so that memory is its own.

Prints a table to standard error and one JSON line last. `cpu_ms` is the time that the controller's process computed for
a trajectory, in all its threads, `memory_mb` its largest resident memory, `object_store_mb` the most that objects took
after a step. `growth` compares the most engines with the fewest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from slipstream.cluster.calls import PendingCall, RemoteEngine
from slipstream.cluster.restarts import EngineRestarts
from slipstream.cluster.session import ClusterSession, await_engines
from slipstream.config.loader import dump_config
from slipstream.config.schema import RLConfig
from slipstream.data.mixture import Mixture
from slipstream.data.trajectory import FloatArray, IntArray, Prompt, Sample, TrainingExample, Trajectory
from slipstream.observe.occupancy import Occupancy
from slipstream.observe.run_directory import RunDirectory
from slipstream.rewards.child import RewardResult
from slipstream.rollout.group_stream import Generators
from slipstream.rollout.messages import GroupRequest, ResponseResult, SamplingParameters
from slipstream.training.group import LearnerGroup
from slipstream.weights.plan import ChannelAddress, WeightPlan, make_plan
from slipstream.weights.publisher import WeightPublisher
from slipstream.workflows.batch import TrainingBatch
from slipstream.workflows.engines import RLEngines
from slipstream.workflows.held_out import RLData
from slipstream.workflows.rl import loop
from slipstream.workflows.rl_run import RLRun

SAMPLES_PER_PROMPT = 4
PROMPTS, PROMPT_TOKENS, VOCABULARY = 512, 24, 320
DELAY_S = (0.2, 1.0)


@dataclass(frozen=True)
class Result:
    """One size. Times and memory are those of the controller; `busy` is the share of the time in which it computed."""

    engines: int
    steps: int
    trajectories: int
    trajectories_per_s: float
    cpu_ms: float
    busy: float
    memory_mb: float
    object_store_mb: float
    issued: int
    trained: int
    pending: int


class SimulatedRolloutHost:
    """Many simulated rollout engines in one process, each called by its index."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._versions: dict[int, int] = {}

    async def start(self) -> None:
        """Nothing has to be loaded."""

    async def shutdown(self) -> None:
        """Nothing has to be stopped."""

    async def generate(
        self, index: int, requests: Sequence[GroupRequest], _sampling: SamplingParameters
    ) -> AsyncIterator[list[ResponseResult]]:
        """Each response after its delay. The versions of its tokens are those of its beginning and of its end."""
        began, first_version = time.monotonic(), self._versions.get(index, 0)
        responses = [(_delay(r.seed, sample), r, sample) for r in requests for sample in range(r.samples)]
        for delay, request, sample in sorted(responses, key=lambda response: response[0]):
            await asyncio.sleep(began + delay - time.monotonic())
            yield [ResponseResult(request.group_id, sample, self._sample(index, first_version, request.seed, delay))]

    async def begin_update(self, _index: int) -> None:
        """Nothing stands still: what is simulated takes no time."""

    async def load_bucket(self, _index: int, plan: WeightPlan, bucket: int) -> list[dict[str, int]]:
        """The checksums that the learner sends."""
        return [_checksums(plan, bucket)]

    async def finish_update(self, index: int, version: int) -> None:
        """Tokens from here on have that version."""
        self._versions[index] = version

    async def probe(self, _index: int, tokens: IntArray) -> FloatArray:
        """What the learner computes."""
        return np.zeros(len(tokens) - 1, np.float32)

    def _sample(self, index: int, first_version: int, seed: int, delay: float) -> Sample:
        versions = np.full(self._tokens, self._versions.get(index, 0), np.int64)
        versions[: self._tokens // 2] = first_version
        return Sample(
            tokens=np.random.default_rng(seed).integers(0, VOCABULARY, self._tokens),
            log_probs=np.full(self._tokens, -1.0, np.float32),
            versions=versions,
            finish_reason="stop",
            seconds=delay,
        )


class SimulatedReward:
    """Scores at once."""

    async def start(self) -> None:
        """Nothing has to be started."""

    async def shutdown(self) -> None:
        """Nothing has to be stopped."""

    async def score(self, trajectories: Sequence[Trajectory]) -> list[RewardResult]:
        """Every second sample of a group is right."""
        return [RewardResult(float(t.sample_index % 2), seconds=0.0) for t in trajectories]


class SimulatedLearner:
    """A learner rank that learns nothing, at once."""

    def __init__(self) -> None:
        self._plan: WeightPlan | None = None

    async def start(self) -> None:
        """Nothing has to be loaded."""

    async def shutdown(self) -> None:
        """Nothing has to be stopped."""

    async def weight_plan(self, bucket_bytes: int, channel: ChannelAddress) -> WeightPlan:
        """One weight."""
        self._plan = make_plan([("weight", "float32", (64,))], bucket_bytes, channel=channel)
        return self._plan

    async def fill_bucket(self, bucket: int) -> dict[str, int]:
        """The checksums of what would be sent."""
        assert self._plan is not None
        return _checksums(self._plan, bucket)

    async def probe(self, tokens: IntArray) -> FloatArray:
        """Log-probs that agree with the engines'."""
        return np.zeros(len(tokens) - 1, np.float32)

    async def update(self, micro_batches: Sequence[Sequence[TrainingExample]], _objective: object) -> dict[str, Any]:
        """Counts what it was given."""
        tokens = sum(int(example.loss_mask.sum()) for batch in micro_batches for example in batch)
        return {"skipped": 0, "tokens": tokens, "loss": 0.0}

    async def save(self, folder: str) -> None:
        """There is nothing to save."""
        Path(folder).mkdir()


def _delay(seed: int, sample: int) -> float:
    """Seconds after which a response ends."""
    return float(np.random.default_rng([seed, sample]).uniform(*DELAY_S))


def _checksums(plan: WeightPlan, bucket: int) -> dict[str, int]:
    return {tensor.name: tensor.bytes for tensor in plan.buckets[bucket].tensors}


@dataclass(eq=False)
class SimulatedEngine(RemoteEngine):
    """The face of one engine of a host: its calls carry its index."""

    index: int = 0

    def submit(self, method: str, *arguments: Any, **keywords: Any) -> PendingCall:
        """See `RemoteEngine.submit`."""
        return super().submit(method, self.index, *arguments, **keywords)

    def stream(self, method: str, *arguments: Any) -> PendingCall:
        """See `RemoteEngine.stream`."""
        return super().stream(method, self.index, *arguments)


class SimulatedRun(RLRun):
    """The run of `slipstream rl` on simulated engines. `object_store_bytes` is the most that was seen after a step."""

    def __init__(self, config: RLConfig, data: RLData, *, directory: RunDirectory, size: Size) -> None:
        super().__init__(config, data, directory=directory, reward=None)
        self.size = size
        self.object_store_bytes = 0.0

    def train(self, batch: TrainingBatch) -> dict[str, dict[str, Any]]:
        """See `RLRun.train`."""
        import ray

        metrics = super().train(batch)
        total, free = ray.cluster_resources(), ray.available_resources()
        used = total["object_store_memory"] - free.get("object_store_memory", 0.0)
        self.object_store_bytes = max(self.object_store_bytes, used)
        return metrics

    def _start_engines(self, session: ClusterSession) -> RLEngines:
        config, size = self.config, self.size
        hosts = [
            session.start_engine(f"host {number}", SimulatedRolloutHost, size.tokens, cpus=0.01)
            for number in range(min(size.hosts, size.engines))
        ]
        reward = session.start_engine("reward engine", SimulatedReward, cpus=0.01)
        rank = session.start_engine("learner rank 0", SimulatedLearner, cpus=0.01)
        await_engines(session.engines, deadline_s=config.cluster.start_timeout_s)
        engines: list[RemoteEngine] = []
        for index in range(size.engines):
            host = hosts[index % len(hosts)]
            engines.append(
                SimulatedEngine(
                    f"rollout engine {index}", host.handle, host.log_folder, pid=host.pid, node=host.node, index=index
                )
            )
        learner = LearnerGroup(
            [rank],
            tokens_per_micro_batch=config.training.tokens_per_micro_batch,
            call_timeout_s=config.cluster.call_timeout_s,
        )
        restarts = EngineRestarts(
            session, limit=0, start_timeout_s=config.cluster.start_timeout_s, timeline=self.records.timeline
        )
        publisher = WeightPublisher(
            learner,
            engines,
            open_channel=lambda receivers: ChannelAddress("shared_memory", session.run_id, receivers=tuple(receivers)),
            restarts=restarts,
            bucket_bytes=config.weights.bucket_bytes,
            verify=True,
            dtype="float32",
            vocabulary_size=VOCABULARY,
            call_timeout_s=config.cluster.call_timeout_s,
        )
        generators = Generators(
            engines=engines,
            reward_engine=reward,
            tokenizer=self._data.tokenizer,
            timeline=self.records.timeline,
            occupancy=Occupancy(),
            restarts=restarts,
            seed=config.seed,
            call_timeout_s=config.cluster.call_timeout_s,
        )
        return RLEngines(learner, None, generators, publisher)


@dataclass(frozen=True)
class Size:
    """How much is simulated."""

    engines: int
    steps: int
    tokens: int
    max_staleness: int
    hosts: int


def main() -> None:
    """Measure every size: one in this process, several in a process each."""
    arguments = parse_arguments(sys.argv[1:])
    if len(arguments.engines) == 1:
        results = [measure(make_size(arguments))]
    else:
        results = [in_fresh_process(engines, arguments) for engines in sorted(arguments.engines)]
    show(results)
    first, last = results[0], results[-1]
    growth = {name: round(getattr(last, name) / getattr(first, name), 2) for name in ("cpu_ms", "trajectories_per_s")}
    settings = {"tokens": arguments.tokens, "max_staleness": arguments.max_staleness}
    line = {"benchmark": "controller", **settings, "results": [asdict(result) for result in results], "growth": growth}
    print(json.dumps(line))


def make_size(arguments: argparse.Namespace) -> Size:
    """The one size that the command line asks for."""
    (engines,) = arguments.engines
    return Size(
        engines=engines,
        steps=max(1, arguments.trajectories // (engines * SAMPLES_PER_PROMPT)),
        tokens=arguments.tokens,
        max_staleness=arguments.max_staleness,
        hosts=arguments.hosts,
    )


def in_fresh_process(engines: int, arguments: argparse.Namespace) -> Result:
    """Have a process of its own measure one size."""
    options = vars(arguments) | {"engines": engines}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    run = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=True)
    line = json.loads(run.stdout.splitlines()[-1])
    return Result(**line["results"][0])


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", nargs="+", type=int, default=[16, 64, 256, 1024])
    parser.add_argument("--trajectories", type=int, default=8192, help="So many are trained on at every size.")
    parser.add_argument("--tokens", type=int, default=1000, help="Tokens of a response.")
    parser.add_argument("--max_staleness", type=int, default=1)
    parser.add_argument("--hosts", type=int, default=4, help="Processes that the simulated engines share.")
    return parser.parse_args(words)


def measure(size: Size) -> Result:
    """Train with simulated engines, in this process, which is the controller."""
    from slipstream.data.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(["What is the sum of these numbers, and which of them is the largest?"], VOCABULARY)
    generator = np.random.default_rng(0)
    prompts = [
        Prompt(row, generator.integers(0, VOCABULARY, PROMPT_TOKENS), text=f"prompt {row}", label=None, fields={})
        for row in range(PROMPTS)
    ]
    data = RLData(tokenizer, Mixture({"": prompts}, {"": 1.0}), {})
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(size, Path(folder) / "run")
        with (
            RunDirectory.create(config.output_dir, dump_config(config), "rl") as directory,
            SimulatedRun(config, data, directory=directory, size=size) as run,
        ):
            run.begin()
            return timed(run)


def make_config(size: Size, output: Path) -> RLConfig:
    """A run whose step has one group for each engine."""
    return RLConfig.model_validate(
        {
            "steps": size.steps,
            "output_dir": str(output),
            "model": {"path": "simulated"},
            "data": {"source": "simulated", "max_prompt_tokens": PROMPT_TOKENS},
            "reward": {"function": "exact_match"},
            "rollout": {
                "groups_per_step": size.engines,
                "samples_per_prompt": SAMPLES_PER_PROMPT,
                "max_response_tokens": size.tokens,
                "max_staleness": size.max_staleness,
            },
            "checkpoint": {"every_steps": 0},
            "tracking": {"tensorboard": False},
        }
    )


def timed(run: SimulatedRun) -> Result:
    """The loop, timed from its first prompt to its last record."""
    # Imports and first calls are left out.
    run.learner.update([[]], run.algorithm.objective)
    began, computed_before = time.monotonic(), time.process_time()
    loop(run)
    seconds, computed = time.monotonic() - began, time.process_time() - computed_before
    run.rollouts.check_ledger()
    balance = run.records.ledger.balance()
    trajectories = balance.trained * SAMPLES_PER_PROMPT
    return Result(
        engines=run.size.engines,
        steps=run.step,
        trajectories=trajectories,
        trajectories_per_s=round(trajectories / seconds, 1),
        cpu_ms=round(1000 * computed / trajectories, 2),
        busy=round(computed / seconds, 2),
        memory_mb=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        object_store_mb=round(run.object_store_bytes / (1 << 20), 1),
        issued=balance.issued,
        trained=balance.trained,
        pending=balance.pending,
    )


def show(results: Sequence[Result]) -> None:
    """Each size in a row."""
    table = Table(title="the controller with simulated engines")
    columns = ("engines", "steps", "trajectories_per_s", "cpu_ms", "busy", "memory_mb", "object_store_mb")
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for result in results:
        table.add_row(*(f"{getattr(result, column):g}" for column in columns))
    Console(stderr=True).print(table)


if __name__ == "__main__":
    main()
