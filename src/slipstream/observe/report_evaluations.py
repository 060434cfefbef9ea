"""What the report shows of evaluations: a table of each held-out set, and curves over the steps they were made at.

Every mark of a curve carries the policy version that it belongs to. The page itself is `report.py`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.config.evaluation import FIRST_SET
from slipstream.observe.charts import Chart, Curve
from slipstream.observe.evaluations import Evaluation

Value = Callable[[Evaluation], float | None]


@dataclass(frozen=True)
class ResultsTable:
    """The results on one held-out set, before and after training.

    A row is a label, the value before (None in all rows of a set that was evaluated once), the value after, and the
    gain where it is one of accuracy.
    """

    title: str
    rows: list[tuple[str, str | None, str, float | None]]
    remark: str


def results_table(dataset: str, evaluations: Sequence[Evaluation]) -> ResultsTable:
    """The table of a held-out set, from its first and its last evaluation."""
    first, last = evaluations[0], evaluations[-1]
    several = len(evaluations) > 1
    accuracies: dict[str, Value] = {
        "sampled": lambda e: e.sampled_accuracy,
        "greedy": lambda e: e.greedy_accuracy,
        **{name: value_of for name, value_of in _pass_at(evaluations).items() if name != "pass@1"},
    }
    others: list[tuple[str, Value, Callable[[float], str]]] = [
        ("mean reward", lambda e: e.mean_reward, number_text),
        ("mean length", lambda e: e.mean_length, number_text),
        ("longest", lambda e: e.max_length, number_text),
        ("cut at the limit", lambda e: e.truncated_share, share_text),
        ("cut at the limit, greedy", lambda e: e.greedy_truncated_share, share_text),
        ("not scored", lambda e: e.unscored, number_text),
    ]
    rows: list[tuple[str, str | None, str, float | None]] = []
    for label, value_of in accuracies.items():
        before, after = value_of(first), value_of(last)
        gain = None if before is None or after is None or not several else after - before
        rows.append((label, _text(before, share_text) if several else None, _text(after, share_text), gain))
    for label, value_of, words in others:
        rows.append((label, _text(value_of(first), words) if several else None, _text(value_of(last), words), None))
    remark = f"{last.samples_per_prompt} sampled and one greedy answer to each prompt"
    if several:
        marks = [f"step {e.step} (policy version {e.policy_version})" for e in (first, last)]
        remark += f"; before: {marks[0]}, after: {marks[1]}"
    return ResultsTable(f"{_name(dataset)} accuracy, {number_text(last.prompts)} prompts", rows, remark)


def accuracy_charts(dataset: str, evaluations: Sequence[Evaluation]) -> list[Chart]:
    """Accuracies of a held-out set, and pass@k for more than one answer."""
    accuracies: dict[str, Value] = {"sampled": lambda e: e.sampled_accuracy, "greedy": lambda e: e.greedy_accuracy}
    pass_at = _pass_at(evaluations)
    return [
        _chart(dataset, "accuracy", evaluations, accuracies, percent=True),
        _chart(dataset, "pass@k", evaluations, pass_at if len(pass_at) > 1 else {}, percent=True),
    ]


def answer_charts(dataset: str, evaluations: Sequence[Evaluation]) -> list[Chart]:
    """Reward, length and truncation of the answers to a held-out set."""
    lengths: dict[str, Value] = {
        "mean": lambda e: e.mean_length,
        "longest": lambda e: e.max_length,
        "greedy": lambda e: e.greedy_mean_length,
    }
    truncated: dict[str, Value] = {
        "sampled": lambda e: e.truncated_share,
        "greedy": lambda e: e.greedy_truncated_share,
    }
    return [
        _chart(dataset, "reward", evaluations, {"mean": lambda e: e.mean_reward}),
        _chart(dataset, "response length", evaluations, lengths, unit="tokens"),
        _chart(dataset, "cut at the limit", evaluations, truncated, percent=True),
    ]


def share_text(value: float) -> str:
    """A share as percent."""
    return f"{value:.1%}" if math.isfinite(value) else "-"


def number_text(value: float) -> str:
    """A whole number in full, another one with four digits."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _chart(
    dataset: str, title: str, evaluations: Sequence[Evaluation], curves: Mapping[str, Value], **options: Any
) -> Chart:
    drawn = []
    for label, value_of in curves.items():
        values = [(evaluation.step, value_of(evaluation)) for evaluation in evaluations]
        drawn.append(Curve(label, [(step, value) for step, value in values if value is not None], markers=True))
    ticks = [(evaluation.step, f"{evaluation.step}\nv{evaluation.policy_version}") for evaluation in evaluations]
    return Chart(f"{_name(dataset)} {title}", drawn, ticks=ticks, x_label="step and policy version", **options)


def _pass_at(evaluations: Sequence[Evaluation]) -> dict[str, Value]:
    """pass@k for each k that there is any value of. pass@1 is the sampled accuracy."""

    def value_of(name: str) -> Value:
        return lambda evaluation: evaluation.pass_at_k.get(name)

    return {name: value_of(name) for evaluation in evaluations for name in evaluation.pass_at_k}


def _name(dataset: str) -> str:
    return "Held-out" if dataset == FIRST_SET else f"{dataset}:"


def _text(value: float | None, words: Callable[[float], str]) -> str:
    return "-" if value is None else words(value)
