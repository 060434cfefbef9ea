"""What the report draws of the engines of a run: who was idle, where the groups were, how old the tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.observe.bottleneck import IDLE_PREFIX
from slipstream.observe.charts import Chart, Curve

SHARE_PREFIX = "staleness/share/"
ROLLOUT_PREFIX = "idle/rollout_engine_"
QUEUES = (
    ("queue/groups_generating", "being generated"),
    ("queue/groups_scoring", "being scored"),
    ("queue/groups_ready", "ready"),
)
DRAWN_ENGINES = 6

Lines = Sequence[Mapping[str, Any]]


def engine_charts(lines: Lines) -> list[Chart]:
    """Idle shares, queues, the pause of each publish, and the share of tokens by the age of their version.

    Only those that there is something to see of: a synchronous run has no queues, and tokens of one version.
    """
    pause = [_curve(lines, "pause/publish_seconds", "engines stand still")]
    return [
        Chart("Idle engines", _idle_curves(lines), "share of the step"),
        Chart("Queues", _unless_zero([_curve(lines, name, label) for name, label in QUEUES]), "groups"),
        Chart("Publish pause", [curve for curve in pause if curve.points], "seconds"),
        Chart("Tokens by staleness", _staleness_curves(lines), "share of the tokens", stacked=True),
    ]


def _idle_curves(lines: Lines) -> list[Curve]:
    """One for each engine; where there are many rollout engines, their mean and the one that waited most."""
    names = _names(lines, IDLE_PREFIX)
    engines = [name for name in names if name.startswith(ROLLOUT_PREFIX)]
    if len(engines) <= DRAWN_ENGINES:
        return [_curve(lines, name, _label(name)) for name in names]
    curves = [_curve(lines, name, _label(name)) for name in names if name not in engines]
    measured = [(line["step"], [line[name] for name in engines if name in line]) for line in lines]
    shares = [(step, values) for step, values in measured if values]
    mean = [(step, sum(values) / len(values)) for step, values in shares]
    most = [(step, max(values)) for step, values in shares]
    return [*curves, Curve(f"{len(engines)} rollout engines, mean", mean), Curve("the one idle most", most)]


def _staleness_curves(lines: Lines) -> list[Curve]:
    names = sorted(_names(lines, SHARE_PREFIX), key=lambda name: int(name.removeprefix(SHARE_PREFIX)))
    if len(names) < 2:
        return []
    curves = []
    for name in names:
        age = int(name.removeprefix(SHARE_PREFIX))
        label = "the version that is trained" if age == 0 else f"{age} publish{'es' * (age > 1)} older"
        # A step without tokens of that age says nothing of it.
        points = [(line["step"], float(line.get(name, 0.0))) for line in lines if f"{SHARE_PREFIX}0" in line]
        curves.append(Curve(label, points))
    return curves


def _curve(lines: Lines, name: str, label: str) -> Curve:
    return Curve(label, [(line["step"], float(line[name])) for line in lines if name in line])


def _unless_zero(curves: list[Curve]) -> list[Curve]:
    return curves if any(value for curve in curves for _, value in curve.points) else []


def _names(lines: Lines, prefix: str) -> list[str]:
    return sorted({name for line in lines for name in line if name.startswith(prefix)})


def _label(name: str) -> str:
    return name.removeprefix(IDLE_PREFIX).replace("_", " ")
