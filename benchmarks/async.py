"""How much sooner does an asynchronous run reach a reward? Synchronous against several bounds of staleness.

    python benchmarks/async.py [--workloads latency generation] [--staleness 0 1 2 4] [--repeats 3] [--limit_s 8]

The task is that of `learning.py`: which of two digits is the larger one? There are two workloads.

`latency`: answers are short, and scoring them takes its time (`slow_reward.py`): for every answer a log-normal wait
with median 0.2 s and 99th percentile 4 s. What is waited for answers within 8 s, at the latest by giving up;
`--limit_s none` lets it take for ever. There are more processes that score than answers in a step, so that hardly any
answer waits for another. A synchronous step waits for the slowest of its 256 answers. All runs of a repeat wait for the
same times, step by step.

`generation`: answers are long, and scoring takes no time. Generating is the bottleneck; the engine has a core of its
own and the learner another one, so that what is gained is what overlap alone gives on a machine with two cores.

A run counts from its first prompt to the publish of the step at which the mean reward of the last five steps has
reached 0.8; starting and stopping the engines is left out. All runs of a workload train on batches of the same size, so
steps are samples.

Prints a table to standard error and one JSON line last, with medians over the repeats; the exit code is 1 if a run did
not reach the reward.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from learning import make_start
from measured_run import LONG_TAIL, THRESHOLD, MeasuredRun, measured_run, middle, ratio, run_settings, slow_reward
from rich.console import Console
from rich.table import Table
from slow_reward import LIMIT_S


@dataclass(frozen=True)
class Workload:
    """What the runs of one table have in common. `tail` follows the digit in every answer."""

    groups_per_step: int
    samples_per_prompt: int
    max_response_tokens: int
    learning_rate: float
    is_scored_slowly: bool
    tail: str = ""


WORKLOADS = {
    "latency": Workload(16, 16, 6, learning_rate=2e-4, is_scored_slowly=True),
    "generation": Workload(8, 16, 64, learning_rate=3e-4, is_scored_slowly=False, tail=LONG_TAIL),
}


@dataclass(frozen=True)
class Result:
    """One run. `reached_step` and what follows it are None if the reward was not reached; `idle` are means of shares.

    `trained_samples` and `seconds` are up to the publish of that step, `step_seconds` is the mean of all steps.
    """

    workload: str
    max_staleness: int
    repeat: int
    reached_step: int | None
    trained_samples: int | None
    seconds: float | None
    step_seconds: float
    staleness_mean: float
    effective_share: float | None
    idle: dict[str, float]


def main() -> int:
    """Run what is asked for and compare."""
    arguments = parse_arguments(sys.argv[1:])
    folder = Path(arguments.output_dir)
    results = []
    for name in arguments.workloads:
        for repeat in range(arguments.repeats):
            start = make_start(folder / f"{name}-start-{repeat}", repeat, tail=WORKLOADS[name].tail)
            for staleness in arguments.staleness:
                results.append(run(name, staleness, repeat, start=start, folder=folder, arguments=arguments))
                print(json.dumps(asdict(results[-1])), file=sys.stderr)
    medians = {
        name: {bound: _medians([each for each in results if each.workload == name], bound) for bound in bounds}
        for name, bounds in dict.fromkeys(arguments.workloads, arguments.staleness).items()
    }
    show(medians)
    reached = all(result.seconds is not None for result in results)
    line = {
        "benchmark": "async",
        "engine": arguments.engine,
        "threshold": THRESHOLD,
        "limit_s": arguments.limit_s,
        "results": [asdict(result) for result in results],
        "medians": medians,
        "reached": reached,
    }
    print(json.dumps(line))
    return 0 if reached else 1


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=tuple(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1, 2, 4])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--limit_s", type=limit, default=LIMIT_S, help="No reward takes longer; none for no limit.")
    parser.add_argument("--latency_scale", type=float, default=1.0, help="Multiplies the times of the slow reward.")
    parser.add_argument("--reward_workers", type=int, default=288, help="Processes that score, of the slow reward.")
    parser.add_argument("--output_dir", default=f"runs/async-{time.strftime('%Y%m%d-%H%M%S')}")
    return parser.parse_args(argv)


def limit(text: str) -> float | None:
    """The value of `--limit_s`."""
    return None if text == "none" else float(text)


def run(name: str, staleness: int, repeat: int, *, start: Path, folder: Path, arguments: argparse.Namespace) -> Result:
    """One run of a workload with this bound of staleness."""
    workload = WORKLOADS[name]
    rollout = {
        "engine": arguments.engine,
        "groups_per_step": workload.groups_per_step,
        "samples_per_prompt": workload.samples_per_prompt,
        "max_response_tokens": workload.max_response_tokens,
        "max_staleness": staleness,
    }
    output = folder / f"{name}-{staleness}-{repeat}"
    settings = run_settings(
        start,
        output,
        seed=repeat,
        steps=arguments.steps,
        learning_rate=workload.learning_rate,
        rollout=rollout,
    )
    if workload.is_scored_slowly:
        settings["reward"] = slow_reward(
            folder / f"counts-{staleness}-{repeat}",
            seed=repeat,
            workers=arguments.reward_workers,
            scale=arguments.latency_scale,
            limit_s=arguments.limit_s,
        )
    return _result(name, staleness, repeat, measured_run(settings))


def _result(name: str, staleness: int, repeat: int, measured: MeasuredRun) -> Result:
    workload, step = WORKLOADS[name], measured.reached_step
    shares = measured.series("policy/correction_effective_share")
    idle = [metric for metric in measured.lines[0] if metric.startswith("idle/")]
    return Result(
        workload=name,
        max_staleness=staleness,
        repeat=repeat,
        reached_step=step,
        trained_samples=None if step is None else step * workload.groups_per_step * workload.samples_per_prompt,
        seconds=None if step is None else round(measured.ends[step - 1], 1),
        step_seconds=round(measured.step_seconds, 2),
        staleness_mean=round(mean(measured.series("staleness/mean")), 2),
        effective_share=round(mean(shares), 4) if shares else None,
        idle={metric.removeprefix("idle/"): round(mean(measured.series(metric)), 2) for metric in idle},
    )


def _medians(results: list[Result], staleness: int) -> dict[str, float | None]:
    """Over the repeats; `speedup` and `samples_ratio` against the synchronous runs, where there are such."""
    own = _middles([result for result in results if result.max_staleness == staleness])
    synchronous = _middles([result for result in results if result.max_staleness == 0])
    return own | {
        "speedup": ratio(synchronous["seconds"], own["seconds"]),
        "samples_ratio": ratio(own["trained_samples"], synchronous["trained_samples"]),
        "step_speedup": ratio(synchronous["step_seconds"], own["step_seconds"]),
    }


def _middles(results: list[Result]) -> dict[str, float | None]:
    names = ("seconds", "trained_samples", "step_seconds")
    return {name: middle([getattr(result, name) for result in results]) for name in names}


def show(medians: dict[str, dict[int, dict[str, Any]]]) -> None:
    """Each workload and bound of staleness with its medians."""
    columns = ("seconds", "speedup", "trained_samples", "samples_ratio", "step_seconds", "step_speedup")
    for name, bounds in medians.items():
        table = Table(title=f"{name}: wall time to a reward of {THRESHOLD}, medians")
        for column in ("max_staleness", *columns):
            table.add_column(column.replace("_", " "), justify="right")
        for bound, values in bounds.items():
            table.add_row(str(bound), *("-" if values[name] is None else f"{values[name]:g}" for name in columns))
        Console(stderr=True).print(table)


if __name__ == "__main__":
    sys.exit(main())
