"""What does each of two choices bring: vLLM for generation, and running asynchronously? All four combinations.

    python benchmarks/ablation.py [--repeats 1] [--steps 40] [--staleness 2] [--latency_scale 0.25]

{transformers, vLLM} x {synchronous, asynchronous}, everything else equal. The task is that of `learning.py`, with
answers that are long enough for generation to count, and a reward with a long tail (`slow_reward.py`; at a scale of
0.25 the median is 0.05 s, the 99th percentile 1 s, the limit 2 s). All four wait for the same times, step by step.

Says of each combination the time of a step and where it went (as the loop saw it: in an asynchronous run `generate` is
what is left of waiting), and when it reached a mean reward of 0.8. Writes `reward.svg`, the reward against time, and
prints a table to standard error and one JSON line last; times count from the first prompt.
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
from measured_run import (
    LONG_TAIL,
    THRESHOLD,
    MeasuredRun,
    measured_run,
    middle,
    run_settings,
    slow_reward,
    write_picture,
)
from rich.console import Console
from rich.table import Table
from slow_reward import LIMIT_S

from slipstream.observe.charts import Chart, Curve

ENGINES = ("transformers", "vllm")
PHASES = ("generate", "prepare", "train", "publish")
GROUPS_PER_STEP = 8
SAMPLES_PER_PROMPT = 16
LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class Result:
    """One run: seconds of a step and of its phases, means over all steps; when the reward was reached, or None.

    `rewards` and `ends` are the mean reward of each step and the seconds at which its weights were out.
    """

    engine: str
    max_staleness: int
    repeat: int
    step_seconds: float
    phases: dict[str, float]
    reached_step: int | None
    seconds: float | None
    rewards: list[float]
    ends: list[float]

    @property
    def name(self) -> str:
        """The combination in words."""
        return f"{self.engine}, {'asynchronous' if self.max_staleness else 'synchronous'}"


def main() -> int:
    """Run all combinations and compare."""
    arguments = parse_arguments(sys.argv[1:])
    folder = Path(arguments.output_dir)
    results = []
    for repeat in range(arguments.repeats):
        start = make_start(folder / f"start-{repeat}", repeat, tail=LONG_TAIL)
        for engine in ENGINES:
            for staleness in (0, arguments.staleness):
                results.append(run(engine, staleness, repeat, start=start, folder=folder, arguments=arguments))
                print(json.dumps(asdict(results[-1])), file=sys.stderr)
    by_name = {name: [each for each in results if each.name == name] for name in dict.fromkeys(r.name for r in results)}
    show(by_name)
    curves = [Curve(name, list(zip(own[0].ends, own[0].rewards, strict=True))) for name, own in by_name.items()]
    write_picture(folder / "reward.svg", Chart("reward", curves, unit="reward", x_label="seconds"))
    print(json.dumps({"benchmark": "ablation", "threshold": THRESHOLD, "results": [asdict(each) for each in results]}))
    return 0


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--staleness", type=int, default=2, help="Bound of the asynchronous runs.")
    parser.add_argument("--latency_scale", type=float, default=0.25, help="Multiplies the times of the slow reward.")
    parser.add_argument("--reward_workers", type=int, default=64, help="Processes that score.")
    parser.add_argument("--output_dir", default=f"runs/ablation-{time.strftime('%Y%m%d-%H%M%S')}")
    return parser.parse_args(argv)


def run(
    engine: str, staleness: int, repeat: int, *, start: Path, folder: Path, arguments: argparse.Namespace
) -> Result:
    """One run of a combination."""
    rollout = {
        "engine": engine,
        "groups_per_step": GROUPS_PER_STEP,
        "samples_per_prompt": SAMPLES_PER_PROMPT,
        "max_response_tokens": 64,
        "max_staleness": staleness,
    }
    settings = run_settings(
        start,
        folder / f"{engine}-{staleness}-{repeat}",
        seed=repeat,
        steps=arguments.steps,
        learning_rate=LEARNING_RATE,
        rollout=rollout,
    )
    settings["reward"] = slow_reward(
        folder / f"counts-{engine}-{staleness}-{repeat}",
        seed=repeat,
        workers=arguments.reward_workers,
        scale=arguments.latency_scale,
        limit_s=LIMIT_S,
    )
    return _result(engine, staleness, repeat, measured_run(settings))


def _result(engine: str, staleness: int, repeat: int, measured: MeasuredRun) -> Result:
    step = measured.reached_step
    return Result(
        engine=engine,
        max_staleness=staleness,
        repeat=repeat,
        step_seconds=round(measured.step_seconds, 2),
        phases={phase: round(mean(measured.series(f"time/{phase}")), 2) for phase in PHASES},
        reached_step=step,
        seconds=None if step is None else round(measured.ends[step - 1], 1),
        rewards=[round(reward, 3) for reward in measured.rewards],
        ends=[round(end, 2) for end in measured.ends],
    )


def show(by_name: dict[str, list[Result]]) -> None:
    """Each combination with its medians over the repeats."""
    table = Table(title=f"seconds of a step, and to a reward of {THRESHOLD}; medians")
    for column in ("", "a step", *PHASES, "to the reward", "steps to it"):
        table.add_column(column, justify="right" if column else "left")
    for name, own in by_name.items():
        values: list[Any] = [
            middle([result.step_seconds for result in own]),
            *(middle([result.phases[phase] for result in own]) for phase in PHASES),
            middle([result.seconds for result in own]),
            middle([result.reached_step for result in own]),
        ]
        table.add_row(name, *("-" if value is None else f"{value:g}" for value in values))
    Console(stderr=True).print(table)


if __name__ == "__main__":
    sys.exit(main())
