"""Why a response has no reward: a kind that can be counted and a message for people."""

from dataclasses import dataclass
from enum import StrEnum


class FailureKind(StrEnum):
    """What went wrong with a call for a reward. The values are names of metrics and stand in the ledger."""

    RAISED = "raised"
    """The function raised an exception, for lack of memory as well."""
    TIMED_OUT = "timed_out"
    """There was no answer within `reward.timeout_s`."""
    KILLED = "killed"
    """The process that ran the function ended."""
    RETURNED = "returned"
    """There was an answer, and it is no reward."""
    UNREACHABLE = "unreachable"
    """No connection to the service, or it ended while waiting for the answer."""
    REFUSED = "refused"
    """The service answered with an HTTP status other than 200."""


@dataclass(frozen=True)
class RewardFailure:
    """A call that gave no reward. The text of a failure is its message, which begins with the kind in words."""

    kind: FailureKind
    message: str

    def __str__(self) -> str:
        return self.message
