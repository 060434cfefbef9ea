"""Tokens per second and peak memory of an optimizer step, two ways at a time, in one run.

    python benchmarks/parallel.py [--comparisons packing prompts ring deepspeed] [--steps 3] [--hidden_size 256]

`packing`: sequences of 20 to 512 tokens end to end in one row, against a row for each, padded to the longest; both in a
plain PyTorch loop. `prompts`: groups whose prompt is computed once, against the same groups packed plainly, by the
learner; a shape is answers:prompt tokens:answer tokens. `ring`: one sequence of growing length, by one rank and by two
that share it, a thread each. `deepspeed`: the learner at every ZeRO stage on one rank, against the plain loop on the
same row, with the same optimizer.

A step is forward pass, backward pass and AdamW in float32 on a random Llama. Each way has processes of its own; the
first step is left out, and the fastest of the others counts. Memory is that of a process, in bytes: before the first
step, and the highest. Prints a table to standard error and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import torch
from rich.console import Console
from rich.table import Table
from shared_prompts import SHAPES, VOCABULARY, make_group, make_model, packed_pass, padded_pass

from slipstream.algorithms.objective import SupervisedObjective
from slipstream.config.schema import TrainingConfig
from slipstream.data.trajectory import TrainingExample
from slipstream.models.attention import PACKED_ATTENTION
from slipstream.training.learner import LearnerRank, LearnerSpec
from slipstream.training.optimizer import make_optimizer
from slipstream.training.process_group import open_listener
from slipstream.workflows.batch import with_token_mean_weights

DEADLINE_S = 1800
LOOPBACK = "127.0.0.1"
PACKED_LENGTHS = np.linspace(20, 512, 16).round().astype(int)


@dataclass(frozen=True)
class Way:
    """One way to compute a step. `attention` is that of a plain loop; None is the learner, with `training` as it says.

    A plain loop packs with our own attention, and pads with PyTorch's.
    """

    model: str
    examples: list[TrainingExample]
    training: TrainingConfig
    attention: str | None = None


@dataclass(frozen=True)
class Result:
    """Seconds of a step, tokens of all sequences per second, and bytes of the process that has the most."""

    seconds: float
    tokens_per_second: int
    memory_before: int
    memory_peak: int


def main() -> None:
    """Measure every comparison that is asked for."""
    arguments = parse_arguments(sys.argv[1:])
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(arguments, PACKED_ATTENTION).save_pretrained(folder)
        for name in arguments.comparisons:
            results[name] = COMPARISONS[name](folder, arguments)
            show(name, results[name])
    print(json.dumps({"benchmark": "parallel", "threads": arguments.threads, "results": results}, default=asdict))


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comparisons", nargs="+", choices=tuple(COMPARISONS), default=tuple(COMPARISONS))
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--lengths", nargs="+", type=int, default=(1024, 4096, 8192))
    parser.add_argument("--stages", nargs="+", type=int, default=(0, 1, 2, 3))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2, help="Of each process; those of `ring` have one.")
    return parser.parse_args(argv)


def packing(folder: str, arguments: argparse.Namespace) -> dict[str, dict[str, Result]]:
    """Packed against padded."""
    training = TrainingConfig(threads=arguments.threads)
    ways = {"packed": PACKED_ATTENTION, "padded": "sdpa"}
    examples = sequences(PACKED_LENGTHS)
    found = {way: measure(Way(folder, examples, training, attention), arguments) for way, attention in ways.items()}
    return {f"{PACKED_LENGTHS[0]}-{PACKED_LENGTHS[-1]}": found}


def prompts(folder: str, arguments: argparse.Namespace) -> dict[str, dict[str, Result]]:
    """Prompts once against plain packing."""
    training = TrainingConfig(threads=arguments.threads, zero_stage=1)
    found = {}
    for shape in arguments.shapes:
        answers, prompt, answer = map(int, shape.split(":"))
        plain = make_group(answers, prompt, answer)
        ways = {"shared": [replace(example, shared_tokens=prompt) for example in plain], "plain": plain}
        found[shape] = {way: measure(Way(folder, group, training), arguments) for way, group in ways.items()}
    return found


def ring(folder: str, arguments: argparse.Namespace) -> dict[str, dict[str, Result]]:
    """Two ranks that share a sequence against one."""
    found: dict[str, dict[str, Result]] = {}
    for length in arguments.lengths:
        found[str(length)] = {}
        for ranks in (1, 2):
            training = TrainingConfig(threads=1, zero_stage=1, sequence_parallel=ranks)
            way = Way(folder, sequences([length]), training)
            found[str(length)][f"{ranks} rank{'s' if ranks > 1 else ''}"] = measure(way, arguments)
    return found


def deepspeed(folder: str, arguments: argparse.Namespace) -> dict[str, dict[str, Result]]:
    """The learner on one rank against the plain loop."""
    examples, training = sequences(PACKED_LENGTHS), TrainingConfig(threads=arguments.threads)
    found = {"plain loop": measure(Way(folder, examples, training, PACKED_ATTENTION), arguments)}
    for stage in arguments.stages:
        way = Way(folder, examples, training.model_copy(update={"zero_stage": stage}))
        found[f"learner, stage {stage}"] = measure(way, arguments)
    return {"one rank": found}


COMPARISONS: dict[str, Callable[[str, argparse.Namespace], dict[str, dict[str, Result]]]] = {
    "packing": packing,
    "prompts": prompts,
    "ring": ring,
    "deepspeed": deepspeed,
}


def sequences(lengths: Sequence[int]) -> list[TrainingExample]:
    """Random ones, in which every token but the first is learned."""
    generator = np.random.default_rng(0)
    return [
        TrainingExample(str(number), generator.integers(1, VOCABULARY, length), np.arange(length) > 0)
        for number, length in enumerate(lengths)
    ]


def measure(way: Way, arguments: argparse.Namespace) -> Result:
    """Run the way in processes of its own, one for each rank."""
    with open_listener(LOOPBACK) as listener:
        meeting_point = (LOOPBACK, int(listener.getsockname()[1]))
    ranks = way.training.ranks
    with ProcessPoolExecutor(ranks, mp_context=multiprocessing.get_context("spawn")) as pool:
        calls = [pool.submit(measure_rank, way, rank, meeting_point, arguments) for rank in range(ranks)]
        results = [call.result(timeout=DEADLINE_S) for call in calls]
    return max(results, key=lambda result: result.memory_peak)


def measure_rank(way: Way, rank: int, meeting_point: tuple[str, int], arguments: argparse.Namespace) -> Result:
    """What one process does and finds."""
    torch.set_num_threads(way.training.threads or 1)
    step = plain_step(way, arguments) if way.attention else learner_step(way, rank, meeting_point)
    before = psutil.Process().memory_info().rss
    seconds = []
    for _ in range(1 + arguments.steps):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    fastest = min(seconds[1:])
    tokens = sum(len(example.tokens) for example in way.examples)
    return Result(round(fastest, 3), round(tokens / fastest), before, peak_memory())


def plain_step(way: Way, arguments: argparse.Namespace) -> Callable[[], object]:
    """A step of a loop in plain PyTorch."""
    model = make_model(arguments, str(way.attention))
    optimizer = make_optimizer(model, way.training)
    compute = packed_pass if way.attention == PACKED_ATTENTION else padded_pass

    def step() -> None:
        compute(model, way.examples)
        torch.nn.utils.clip_grad_norm_(model.parameters(), way.training.gradient_clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def learner_step(way: Way, rank: int, meeting_point: tuple[str, int]) -> Callable[[], object]:
    """A step of a learner's rank, which has all examples as one micro-batch."""
    spec = LearnerSpec(
        model_path=way.model,
        dtype="float32",
        training=way.training,
        temperature=1.0,
        total_optimizer_steps=1,
        load_reference=False,
        seed=0,
        rank=rank,
    )
    learner = LearnerRank(spec)
    learner.start(meeting_point)
    return partial(learner.update, [with_token_mean_weights(way.examples)], SupervisedObjective())


def peak_memory() -> int:
    """The highest resident memory of this process so far, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    [kibibytes] = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    return kibibytes << 10


def show(name: str, cases: dict[str, dict[str, Result]]) -> None:
    """A comparison as a table."""
    table = Table(title=name)
    for column in ("case", "way", "seconds", "tokens/s", "MiB before", "MiB at most"):
        table.add_column(column, justify="left" if column in ("case", "way") else "right")
    for case, ways in cases.items():
        for way, result in ways.items():
            memory = (f"{size / (1 << 20):.0f}" for size in (result.memory_before, result.memory_peak))
            table.add_row(case, way, f"{result.seconds:.2f}", str(result.tokens_per_second), *memory)
    Console(stderr=True).print(table)


if __name__ == "__main__":
    main()
