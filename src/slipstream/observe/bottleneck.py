"""Which engine a run waited for, in words: from the share of the time in which each had nothing to do."""

from collections.abc import Mapping, Sequence
from typing import Any

IDLE_PREFIX = "idle/"
NAMED_ENGINES = 6


def bottleneck_text(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """Name the engine that was busy for the largest share of the steps in `lines` of metrics, and compare the others.

    None where no step says who was idle.
    """
    measured = [line for line in lines if line.get("time/step")]
    names = sorted({name for line in measured for name in line if name.startswith(IDLE_PREFIX)})
    if not names:
        return None
    seconds = sum(line["time/step"] for line in measured)
    busy = {
        name.removeprefix(IDLE_PREFIX).replace("_", " "): sum(
            line["time/step"] * (1 - line.get(name, 1.0)) for line in measured
        )
        / seconds
        for name in names
    }
    first, *others = sorted(busy, key=lambda name: -busy[name])
    text = f"The {first} was the bottleneck: busy {busy[first]:.0%} of the time"
    if not others:
        return text + "."
    compared = ", ".join(f"the {name} {busy[name]:.0%}" for name in others[:NAMED_ENGINES])
    if len(others) > NAMED_ENGINES:
        idlest = busy[others[-1]]
        compared += f", and {len(others) - NAMED_ENGINES} more down to {idlest:.0%}"
    lead = 100 * (busy[first] - busy[others[0]])
    return f"{text}, {lead:.0f} points more than the next ({compared})."
