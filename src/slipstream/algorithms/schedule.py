"""The learning rate over the course of training, as a factor of its peak.

A pure function of the step, so that a resumed run needs no state to go on where it stopped.
"""

import math
from typing import Literal

ScheduleName = Literal["constant", "linear", "cosine"]


def learning_rate_factor(
    step: int, *, schedule: ScheduleName, warmup_steps: int, total_steps: int, final_share: float
) -> float:
    """Return the factor of the peak learning rate for one optimizer step, counted from 0.

    Warm-up: step k of W has the factor (k + 1) / W. It starts above 0, so that the first update is not wasted, and
    step W - 1 reaches the peak. Without warm-up step 0 has the peak. From the peak on:

    - constant: 1;
    - linear: a straight line to `final_share`;
    - cosine: half a cosine wave to `final_share` (SGDR, arXiv 1608.03983, equation 5, without restarts).

    The last step, `total_steps - 1`, has exactly `final_share` under linear and cosine, and so has any step after it.
    Where the peak itself falls on the last step (warm-up over all steps, or one step in all) there is no room to fall:
    that step keeps the factor 1. Raises ValueError for a negative step or another schedule.
    """
    if step < 0:
        raise ValueError(f"step must not be negative, found {step}")
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    peak_step = max(warmup_steps - 1, 0)
    steps_to_fall = total_steps - 1 - peak_step
    if schedule == "constant" or steps_to_fall <= 0:
        return 1.0
    progress = min((step - peak_step) / steps_to_fall, 1.0)
    match schedule:
        case "linear":
            share_of_fall_left = 1.0 - progress
        case "cosine":
            share_of_fall_left = 0.5 * (1.0 + math.cos(math.pi * progress))
        case _:
            raise ValueError(f"schedule must be constant, linear or cosine, found {schedule!r}")
    return final_share + (1.0 - final_share) * share_of_fall_left
