"""`scores.jsonl`: what a reward model made of the rows it was measured on at the end, one line a score.

By rows to look for those it gets wrong, and by groups (better and worse answers, or right and wrong steps) for the
histograms of the report.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import RunDirectoryError
from slipstream.observe.charts import Histogram
from slipstream.observe.files import read_json_lines, to_json, write_text_atomically

GROUPS = {"chosen": "better answers", "rejected": "worse answers", "true": "right steps", "false": "wrong steps"}
"""What the groups are called in a chart, in the order in which they are drawn."""


@dataclass(frozen=True)
class ScoredItem:
    """One score. `item` names the row as in the log, `group` is a key of `GROUPS`, `step` the number of the step in its
    answer, counted from 0, where steps were scored."""

    item: str
    group: str
    score: float
    step: int | None = None


def write_scores(path: Path, scores: Iterable[ScoredItem]) -> None:
    """Replace the file. A score that is not finite is written as null. Raises TrainingError if the disk is full."""
    write_text_atomically(path, "".join(to_json(_as_json(scored)) + "\n" for scored in scores))


def score_histogram(path: Path) -> Histogram | None:
    """The scores of each group in the file; None where there is none or nothing in it.

    Raises RunDirectoryError for a file that cannot be read.
    """
    groups: dict[str, list[float]] = {name: [] for name in GROUPS}
    for record in read_json_lines(path):
        group, score = record.get("group"), record.get("score")
        if group not in groups or not isinstance(score, int | float | None):
            raise RunDirectoryError(
                f"{path} holds {record!r}, expected a score and its group, one of {', '.join(GROUPS)}"
            )
        if score is not None:
            groups[group].append(float(score))
    shown = {GROUPS[name]: scores for name, scores in groups.items() if scores}
    return Histogram("Scores at the end", shown) if shown else None


def _as_json(scored: ScoredItem) -> dict[str, object]:
    step = {} if scored.step is None else {"step": scored.step}
    score = scored.score if math.isfinite(scored.score) else None
    return {"item": scored.item, **step, "group": scored.group, "score": score}
