"""Admission control: how many prompts may be issued, so that nothing is ever too old to be trained on.

A group issued as number k (counted from 0, dropped groups not counted) is trained in step k // groups_per_step, which
makes version k // groups_per_step + 1. Sampled at version v, its staleness then is k // groups_per_step - v. Issuing
only while this is at most `max_staleness` bounds staleness before any work is done; dropping old samples afterwards
would favour short answers. With `max_staleness` 0 a batch is issued when the version it will be trained on exists:
the synchronous algorithm.
"""

from dataclasses import dataclass


@dataclass
class Admission:
    """Counts what was issued and what dropped out; says how many more groups may be issued now."""

    groups_per_step: int
    max_staleness: int
    issued: int = 0
    dropped: int = 0

    def open_places(self, version: int) -> int:
        """Groups that may be issued while the engines hold policy `version`."""
        limit = self.groups_per_step * (version + self.max_staleness + 1)
        return max(0, limit - (self.issued - self.dropped))
