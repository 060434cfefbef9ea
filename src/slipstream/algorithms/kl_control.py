"""The coefficient of the KL to the reference over the course of a run.

A control lives as long as the run: it is asked for `coefficient` before a step and told afterwards what was measured.
Where the KL enters (loss or reward) and how it is estimated are elsewhere.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

KLControlName = Literal["fixed", "adaptive", "linear"]

LARGEST_ERROR = 0.2
"""Bound of the relative error that adaptive control reacts to, from the paper."""

LARGEST_DECREASE = 0.5
"""The smallest factor of one update of adaptive control."""


@dataclass
class KLControl:
    """Fixed control: `coefficient` is that of the next step, and the same throughout."""

    coefficient: float

    def update(self, measured_kl: float, *, trajectories: int, step: int) -> None:
        """Choose the coefficient for step `step`, counted from 0: as many steps are done.

        `measured_kl` is the mean KL per policy token of the step that ended, of either sign (k1 has both), and
        `trajectories` the number it was measured on.
        """

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps; plain JSON."""
        return {"coefficient": self.coefficient}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from what `state` returned."""
        self.coefficient = float(state["coefficient"])


@dataclass
class AdaptiveKLControl(KLControl):
    """Steers the coefficient so that the measured KL becomes `target`, in nats per policy token.

    Ziegler et al. (arXiv 1909.08593), section 2.2: error = clip(KL / target - 1, -0.2, 0.2), and
    coefficient *= 1 + error * trajectories / horizon. A batch of several horizons could make that factor negative, and
    a coefficient of 0 would stay 0, so the factor is at least `LARGEST_DECREASE`. A KL that is not finite measures
    nothing (the learner reports such a step and skips it): the coefficient stays.
    """

    target: float
    horizon: int

    def update(self, measured_kl: float, *, trajectories: int, step: int) -> None:
        """See `KLControl.update`."""
        if math.isfinite(measured_kl):
            error = min(max(measured_kl / self.target - 1.0, -LARGEST_ERROR), LARGEST_ERROR)
            self.coefficient *= max(1.0 + error * trajectories / self.horizon, LARGEST_DECREASE)


@dataclass
class LinearKLControl(KLControl):
    """A straight line from the first coefficient, at step 0, to `final_coefficient` at the last step of `total_steps`.

    Beyond that it stays at `final_coefficient`. A run of one step keeps the first.
    """

    final_coefficient: float
    total_steps: int

    def __post_init__(self) -> None:
        self._first_coefficient = self.coefficient

    def update(self, measured_kl: float, *, trajectories: int, step: int) -> None:
        """See `KLControl.update`; only the step counts."""
        if self.total_steps > 1:
            progress = min(step / (self.total_steps - 1), 1.0)
            self.coefficient = (1.0 - progress) * self._first_coefficient + progress * self.final_coefficient


def make_kl_control(
    name: KLControlName,
    *,
    coefficient: float,
    target: float,
    horizon: int,
    final_coefficient: float,
    total_steps: int,
) -> KLControl:
    """Return the control of that name, starting at `coefficient`. Raises ValueError for another name."""
    match name:
        case "fixed":
            return KLControl(coefficient)
        case "adaptive":
            return AdaptiveKLControl(coefficient, target, horizon)
        case "linear":
            return LinearKLControl(coefficient, final_coefficient, total_steps)
    raise ValueError(f"KL control must be fixed, adaptive or linear, found {name!r}")
