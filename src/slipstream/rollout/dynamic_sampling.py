"""Dynamic sampling: what it is given, what it counts, and when it gives up.

DAPO (arXiv 2503.14476), section 3.2, equation 11: a batch holds only groups with some right and some wrong answers,
since the others have no advantage and no gradient. The rollout stream replaces those by fresh prompts; here is the
account it keeps meanwhile. Which groups have signal is decided in `algorithms/filters.py`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from slipstream.errors import TrainingError

SHOWN_REWARDS = 3


@dataclass(frozen=True)
class DynamicSampling:
    """Replace groups without signal, until a step has issued `limit` times its number of groups."""

    limit: int


@dataclass
class TakeCounts:
    """What one `take` issued and what it dropped. Every dropped group was replaced by another.

    `filtered_rewards` has one entry for each group without signal: the reward that all of its answers have.
    """

    issued: int = 0
    failed: int = 0
    filtered_rewards: list[float] = field(default_factory=list)

    @property
    def filtered(self) -> int:
        """Groups left out because they had no signal."""
        return len(self.filtered_rewards)

    @property
    def filtered_reward_mean(self) -> float | None:
        """Mean reward of the answers that were left out: groups are equally large. None if none was."""
        return float(np.mean(self.filtered_rewards)) if self.filtered_rewards else None

    @property
    def dropped(self) -> int:
        """Groups that had to be replaced, for either reason."""
        return self.failed + self.filtered


def no_signal(reward: float) -> str:
    """The reason in the ledger for a group whose answers all have this reward."""
    return f"no signal: all rewards are {_shown(reward)}"


def exhausted(counts: TakeCounts, *, with_signal: int, needed: int, limit: int) -> TrainingError:
    """The error for a step that has issued all the groups it may and still lacks some."""
    failed = f"; the reward failed for {counts.failed}" if counts.failed else ""
    return TrainingError(
        f"dynamic sampling issued {with_signal + counts.dropped} groups for one step, all that "
        f"algorithm.dynamic_sampling_limit {limit} allows: {with_signal} of them had signal, {needed} are needed; "
        f"{counts.filtered} were constant ({_by_reward(counts.filtered_rewards)}){failed}. The data has no more signal "
        "for this policy: use easier prompts where all rewards are low and harder ones where all are high, raise "
        "rollout.samples_per_prompt or algorithm.dynamic_sampling_limit, or set algorithm.dynamic_sampling to false"
    )


def _by_reward(rewards: Sequence[float]) -> str:
    """For example "61 all 0, 12 all 1"; of many different rewards the lowest, the highest, and how many between."""
    # By what is shown, so that float noise does not make two rewards of one.
    counts = list(Counter(_shown(reward) for reward in sorted(rewards)).items())
    if len(counts) > SHOWN_REWARDS:
        between = sum(count for _, count in counts[1:-1])
        rest = f", {between} at {len(counts) - 2} rewards between them"
        counts = [counts[0], counts[-1]]
    else:
        rest = ""
    return (", ".join(f"{count} all {reward}" for reward, count in counts) or "none") + rest


def _shown(reward: float) -> str:
    # Adding 0 turns -0.0 into 0.0.
    return f"{reward + 0.0:g}"
