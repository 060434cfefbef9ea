"""Which trajectories and groups have something to teach.

Used where a batch is filled (groups without a signal may be replaced), where advantages are computed (such groups get
exactly 0) and where responses that were cut off are penalised or left out. Plain numbers, no tensors: the rollout side
asks too.
"""

import math
from collections.abc import Sequence

CONSTANT_TOLERANCE = 1e-6
"""Rewards that differ by at most this, relative to max(1, largest magnitude), count as the same."""


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a group, any number of them, differ by more than float noise.

    The condition of dynamic sampling, DAPO (arXiv 2503.14476), section 3.2, for rewards of any kind. False for a group
    of one or none: nothing is compared. Raises ValueError for a reward that is not finite.
    """
    if not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"rewards of a group must be finite, found {list(rewards)}")
    if len(rewards) < 2:
        return False
    lowest, highest = min(rewards), max(rewards)
    return highest - lowest > CONSTANT_TOLERANCE * max(1.0, abs(lowest), abs(highest))


def is_truncated(finish_reason: str) -> bool:
    """Whether a response was cut at the limit of tokens, so that its reward says little about it.

    Overlong filtering, DAPO (arXiv 2503.14476), section 3.4, leaves such responses out of the loss. A response that
    the environment ended, or that was aborted, was not cut.
    """
    return finish_reason == "length"
