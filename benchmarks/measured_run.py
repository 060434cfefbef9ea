"""One training run of a benchmark, measured: what each step brought, and when its weights were out.

The task is that of `learning.py`: which of two digits is the larger one? Used by the benchmarks of asynchronous
training, which differ in what a step waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from slipstream import RLConfig, train_rl
from slipstream.observe.charts import Chart, draw
from slipstream.observe.metrics import read_metrics
from slipstream.observe.timeline import read_timeline

THRESHOLD = 0.8
AVERAGED_STEPS = 5
# Follows the digit in the answers where generation is to take long; the reward looks at the digit alone.
LONG_TAIL = " is the larger one of the two digits."

FIRST_DIGIT = '''\
"""A reward that takes no time."""


def first_digit(text):
    return float(text.response.startswith(text.label))
'''


@dataclass(frozen=True)
class MeasuredRun:
    """`lines` are the metrics of each step; `ends` the seconds from the first prompt to the end of each publish."""

    lines: list[dict[str, Any]]
    ends: list[float]

    def series(self, name: str) -> list[float]:
        """A metric step by step; steps without it are left out."""
        return [line[name] for line in self.lines if name in line]

    @property
    def rewards(self) -> list[float]:
        """The mean reward of each step."""
        return self.series("reward/mean")

    @property
    def reached_step(self) -> int | None:
        """The first step at which the mean reward of the last `AVERAGED_STEPS` is at least `THRESHOLD`, or None."""
        steps = range(1, len(self.rewards) + 1)
        means = [mean(self.rewards[max(0, step - AVERAGED_STEPS) : step]) for step in steps]
        return next((step for step, value in zip(steps, means, strict=True) if value >= THRESHOLD), None)

    @property
    def step_seconds(self) -> float:
        """The mean over all steps."""
        return self.ends[-1] / len(self.ends)


def measured_run(settings: dict[str, Any]) -> MeasuredRun:
    """Train as `settings` say, and read what was recorded. Starting and stopping the engines is left out."""
    train_rl(RLConfig.model_validate(settings))
    output = Path(settings["output_dir"])
    events = [event for event in read_timeline(output / "timeline.json") if event.get("args", {}).get("step")]
    start = min(event["ts"] for event in events)
    published = {
        event["args"]["step"]: (event["ts"] + event["dur"] - start) / 1e6
        for event in events
        if event["name"] == "publish"
    }
    return MeasuredRun(read_metrics(output / "metrics.jsonl"), [published[step] for step in sorted(published)])


def run_settings(
    start: Path, output: Path, *, seed: int, steps: int, learning_rate: float, rollout: dict[str, Any]
) -> dict[str, Any]:
    """A run from the policy that `make_start` made. Engine and learner have one thread each, a core of their own."""
    (start / "first_digit.py").write_text(FIRST_DIGIT, encoding="utf-8")
    return {
        "seed": seed,
        "steps": steps,
        "output_dir": str(output),
        "model": {"path": str(start / "sft" / "export"), "dtype": "float32"},
        "data": {"source": str(start / "questions.jsonl"), "max_prompt_tokens": 32},
        "reward": {"function": f"{start.resolve() / 'first_digit.py'}:first_digit"},
        "rollout": {"kv_cache_bytes": 1 << 26, "threads": 1} | rollout,
        "training": {"learning_rate": learning_rate, "warmup_steps": 2, "zero_stage": 1, "threads": 1},
        "tracking": {"tensorboard": False},
    }


def slow_reward(folder: Path, *, seed: int, workers: int, scale: float, limit_s: float | None) -> dict[str, Any]:
    """The section `reward` for rewards that take their time; `folder` is made, for one run to count in."""
    folder.mkdir(parents=True)
    return {
        "function": f"{Path(__file__).with_name('slow_reward.py')}:slow_match",
        "options": {"folder": str(folder.resolve()), "seed": seed, "scale": scale, "limit_s": limit_s},
        "workers": workers,
        "timeout_s": 300,
    }


def middle(values: Sequence[float | int | None]) -> float | None:
    """The median; None if there is nothing, or one of the values is missing."""
    known = [value for value in values if value is not None]
    return median(known) if known and len(known) == len(values) else None


def ratio(one: float | None, other: float | None) -> float | None:
    """one / other, or None where one of them is missing."""
    return None if one is None or other is None else round(one / other, 2)


def write_picture(path: Path, chart: Chart) -> None:
    """The chart as a picture file (SVG) on a white ground: `draw` makes one for a page, in the page's colours."""
    svg = draw(chart).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" style="background:white" ', 1)
    path.write_text(svg + "\n", encoding="utf-8")
