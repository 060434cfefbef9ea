"""What does staleness cost, and what does correcting for it bring? Several bounds, with and without, several seeds.

    python benchmarks/staleness.py [--staleness 0 1 2 4 8] [--seeds 0 1 2 3 4] [--steps 40] [--output_dir FOLDER]

The task is that of `learning.py`. Rewards take no time and the learner is the bottleneck, so that nearly all tokens
are as stale as the bound lets them be. With correction the weight of a token is old / mu, at most 2
(docs/asynchronous.md); without, the bounds of the weight are 1 and 1, which makes every weight 1: stale tokens count
as if the newest policy had chosen them.

Reports, as means over the seeds: the reward of the first and the last steps, the steps and the seconds to a mean reward
of 0.8 (a run that did not get there counts as not reached), the KL of the policy that sampled from the one that trains
(`policy/mismatch_k3`), and the effective sample size of the weights as a share of the tokens
(`policy/correction_effective_share`). Writes pictures of the reward against samples and against time, and prints a
table to standard error and one JSON line last.
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

import numpy as np
from learning import make_start
from measured_run import AVERAGED_STEPS, THRESHOLD, MeasuredRun, measured_run, run_settings, write_picture
from rich.console import Console
from rich.table import Table

from slipstream.observe.charts import Chart, Curve

GROUPS_PER_STEP = 16
SAMPLES_PER_PROMPT = 8
LEARNING_RATE = 1e-3
UNCORRECTED = {"correction_low": 1.0, "correction_high": 1.0}


@dataclass(frozen=True)
class Result:
    """One run. Rewards are means of `AVERAGED_STEPS` steps; `rewards`, `ends` and `kl` have a value for each step.

    `effective_share` is None without correction, where all weights are 1.
    """

    max_staleness: int
    is_corrected: bool
    seed: int
    reward_after: float
    reached_step: int | None
    seconds: float | None
    staleness_mean: float
    effective_share: float | None
    rewards: list[float]
    ends: list[float]
    kl: list[float]


def main() -> int:
    """Run what is asked for and compare."""
    arguments = parse_arguments(sys.argv[1:])
    folder = Path(arguments.output_dir)
    results = []
    for seed in arguments.seeds:
        start = make_start(folder / f"start-{seed}", seed)
        for staleness in arguments.staleness:
            # Without staleness there is nothing to correct.
            for is_corrected in (True, False) if staleness else (True,):
                results.append(run(staleness, is_corrected, seed, start=start, folder=folder, steps=arguments.steps))
                print(json.dumps(asdict(results[-1])), file=sys.stderr)
    summary = [
        summarize(own)
        for staleness in arguments.staleness
        for is_corrected in (True, False)
        if (own := [each for each in results if (each.max_staleness, each.is_corrected) == (staleness, is_corrected)])
    ]
    show(summary)
    for is_corrected in (True, False):
        draw_curves(folder, results, is_corrected=is_corrected)
    line = {"benchmark": "staleness", "threshold": THRESHOLD, "summary": summary}
    print(json.dumps(line | {"results": [asdict(result) for result in results]}))
    return 0


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1, 2, 4, 8])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output_dir", default=f"runs/staleness-{time.strftime('%Y%m%d-%H%M%S')}")
    return parser.parse_args(argv)


def run(staleness: int, is_corrected: bool, seed: int, *, start: Path, folder: Path, steps: int) -> Result:
    """One run with this bound of staleness."""
    rollout = {
        "engine": "transformers",
        "groups_per_step": GROUPS_PER_STEP,
        "samples_per_prompt": SAMPLES_PER_PROMPT,
        "max_response_tokens": 6,
        "max_staleness": staleness,
    }
    output = folder / f"staleness-{staleness}-{'corrected' if is_corrected else 'uncorrected'}-{seed}"
    settings = run_settings(start, output, seed=seed, steps=steps, learning_rate=LEARNING_RATE, rollout=rollout)
    settings["algorithm"] = {} if is_corrected else UNCORRECTED
    return _result(staleness, is_corrected, seed, measured_run(settings))


def _result(staleness: int, is_corrected: bool, seed: int, measured: MeasuredRun) -> Result:
    step = measured.reached_step
    shares = measured.series("policy/correction_effective_share") if is_corrected else []
    return Result(
        max_staleness=staleness,
        is_corrected=is_corrected,
        seed=seed,
        reward_after=round(mean(measured.rewards[-AVERAGED_STEPS:]), 3),
        reached_step=step,
        seconds=None if step is None else round(measured.ends[step - 1], 1),
        staleness_mean=round(mean(measured.series("staleness/mean")), 2),
        effective_share=round(mean(shares), 4) if shares else None,
        rewards=[round(reward, 3) for reward in measured.rewards],
        ends=[round(end, 2) for end in measured.ends],
        kl=[float(f"{value:.3g}") for value in measured.series("policy/mismatch_k3")],
    )


def summarize(results: list[Result]) -> dict[str, Any]:
    """The runs of one bound, with or without correction: means over the seeds; of steps and seconds, if all got there.

    `kl_max` is the largest KL of a step of any seed.
    """
    steps = [result.reached_step for result in results if result.reached_step is not None]
    seconds = [result.seconds for result in results if result.seconds is not None]
    shares = [result.effective_share for result in results if result.effective_share is not None]
    have_all_reached = len(steps) == len(results)
    return {
        "max_staleness": results[0].max_staleness,
        "is_corrected": results[0].is_corrected,
        "seeds": len(results),
        "staleness_mean": round(mean(result.staleness_mean for result in results), 2),
        "reward_after": round(mean(result.reward_after for result in results), 3),
        "reward_after_worst": min(result.reward_after for result in results),
        "reached": len(steps),
        "steps_to_reward": round(mean(steps), 1) if have_all_reached else None,
        "seconds_to_reward": round(mean(seconds), 1) if have_all_reached else None,
        "kl_mean": float(f"{mean(mean(result.kl) for result in results):.3g}"),
        "kl_max": float(f"{max(max(result.kl) for result in results):.3g}"),
        "effective_share": round(mean(shares), 4) if shares else None,
    }


def show(summary: list[dict[str, Any]]) -> None:
    """A row for each bound of staleness, with and without correction."""
    columns = {
        "max_staleness": "bound",
        "staleness_mean": "mean",
        "reward_after": "reward",
        "reward_after_worst": "worst",
        "reached": "reached",
        "steps_to_reward": "steps",
        "seconds_to_reward": "seconds",
        "kl_mean": "KL",
        "kl_max": "largest",
        "effective_share": "ESS",
    }
    table = Table(title=f"{summary[0]['seeds']} seeds; steps and seconds are to a reward of {THRESHOLD}")
    for header in ("corrected", *columns.values()):
        table.add_column(header, justify="right")
    for row in summary:
        corrected = "-" if not row["max_staleness"] else "yes" if row["is_corrected"] else "no"
        table.add_row(corrected, *("-" if row[name] is None else f"{row[name]:g}" for name in columns))
    Console(stderr=True, width=110).print(table)


def draw_curves(folder: Path, results: list[Result], *, is_corrected: bool) -> None:
    """The mean over the seeds with a standard deviation around it, against samples and against time."""
    by_samples, by_seconds = [], []
    for staleness in sorted({result.max_staleness for result in results}):
        # The synchronous runs are in both pictures.
        own = [r for r in results if r.max_staleness == staleness and r.is_corrected == (is_corrected or not staleness)]
        if not own:
            continue
        label = f"staleness {staleness}" if staleness else "synchronous"
        samples = GROUPS_PER_STEP * SAMPLES_PER_PROMPT * np.arange(1, len(own[0].rewards) + 1)
        rewards = np.array([result.rewards for result in own])
        by_samples.append(_curve(label, samples, rewards))
        # Where all seeds have a reward.
        seconds = np.linspace(max(r.ends[0] for r in own), min(r.ends[-1] for r in own), len(samples))
        by_seconds.append(
            _curve(label, seconds, np.array([np.interp(seconds, result.ends, result.rewards) for result in own]))
        )
    name = "corrected" if is_corrected else "uncorrected"
    for axis, curves in (("samples", by_samples), ("seconds", by_seconds)):
        chart = Chart(f"{name} {axis}", curves, unit="reward", x_label=axis)
        write_picture(folder / f"{name}-by-{axis}.svg", chart)


def _curve(label: str, places: Any, rewards: Any) -> Curve:
    means, widths = rewards.mean(axis=0), rewards.std(axis=0)
    return Curve(label, list(zip(places.tolist(), means.tolist(), strict=True)), band=widths.tolist())


if __name__ == "__main__":
    sys.exit(main())
