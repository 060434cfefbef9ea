"""Admission control: how many prompts may be issued, so that nothing is ever too old to be trained on.

A group issued as number k (counted from 0, dropped groups not counted) is trained in step k // groups_per_step, which
makes version k // groups_per_step + 1. Sampled at version v, its staleness then is k // groups_per_step - v. Issuing
only while this is at most `max_staleness` bounds staleness before any work is done; dropping old samples afterwards
would favour short answers. With `max_staleness` 0 a batch is issued when the version it will be trained on exists:
the synchronous algorithm.

What is issued is generated over time, partly by later versions: those are newer, so the bound holds for every token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.data.trajectory import Group


@dataclass
class Admission:
    """Counts what was issued and what dropped out; says how many more groups may be issued now.

    `steps`: no more is issued than so many steps train on; None is for ever.
    """

    groups_per_step: int
    max_staleness: int
    steps: int | None = None
    issued: int = 0
    dropped: int = 0

    def open_places(self, version: int) -> int:
        """Groups that may be issued while the engines hold policy `version`."""
        steps = version + self.max_staleness + 1
        if self.steps is not None:
            steps = min(steps, self.steps)
        return max(0, self.groups_per_step * steps - (self.issued - self.dropped))


def staleness_metrics(groups: Sequence[Group], *, version: int, max_staleness: int) -> dict[str, float]:
    """Staleness of the tokens of a batch that version `version` trains on: mean, largest, and the share of each.

    `staleness/share/S` is the share of tokens that version `version - S` chose.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    staleness = version - np.concatenate([trajectory.versions[trajectory.loss_mask] for trajectory in trajectories])
    counts = np.bincount(staleness, minlength=max_staleness + 1)
    return {
        "staleness/mean": float(staleness.mean()),
        "staleness/max": float(staleness.max()),
    } | {f"staleness/share/{age}": float(count / len(staleness)) for age, count in enumerate(counts)}
