"""Names of evaluation: of the held-out sets, and of the metrics by which a policy can be the best.

Pure functions that the schema checks with and the evaluation computes by, so that the two cannot differ.
"""

import re
from collections.abc import Iterable, Sequence

from slipstream.config.presets import did_you_mean

FIRST_SET = "held-out"
"""Name of the set that `evaluation.data` describes. The names of further sets are the keys of their mapping."""

RISING_METRICS = ("sampled_accuracy", "greedy_accuracy", "mean_reward")
"""Metrics of an evaluation, besides pass@k, of which more is better."""


def pass_at_sizes(samples_per_prompt: int) -> list[int]:
    """The k for which pass@k is reported: 1, 2, 4, ... up to the number of sampled answers."""
    return [1 << power for power in range(samples_per_prompt.bit_length())]


def pass_at_name(k: int) -> str:
    """What pass@k is called in records, trackers and configuration."""
    return f"pass@{k}"


def qualified(dataset: str, metric: str) -> str:
    """A metric of a held-out set: bare for the first set, behind the set's name for the others."""
    return metric if dataset == FIRST_SET else f"{dataset}/{metric}"


def best_metrics(further_sets: Iterable[str], samples_per_prompt: int) -> list[str]:
    """Every metric that `checkpoint.best_metric` may name."""
    metrics = [*RISING_METRICS, *map(pass_at_name, pass_at_sizes(samples_per_prompt))]
    return [qualified(dataset, metric) for dataset in (FIRST_SET, *further_sets) for metric in metrics]


def require_best_metric(metric: str, known: Sequence[str]) -> None:
    """Raise ValueError where no evaluation gives a metric of that name."""
    if metric not in known:
        raise ValueError(
            f"checkpoint.best_metric must be one of {', '.join(known)} (pass@K up to evaluation.samples_per_prompt), "
            f"found {metric!r}{did_you_mean(metric, known)}"
        )


def require_set_names(names: Iterable[str]) -> None:
    """Raise ValueError for a name of a further held-out set that could not be told apart in keys and metrics."""
    for name in names:
        if name == FIRST_SET:
            raise ValueError(f"other_data must not hold a set named {FIRST_SET!r}: evaluation.data is called that")
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise ValueError(
                f"other_data must name its sets with letters, digits, '-' and '_' (names become part of keys and "
                f"metrics), found {name!r}"
            )
