"""The built-in rule that compares a response with its label as they are."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.rewards.function import ScoredText


def exact_match(text: "ScoredText") -> float:
    """Return 1.0 if the response equals the label but for white space around it, else 0.0.

    Raises ValueError if there is no label.
    """
    if text.label is None or not str(text.label).strip():
        raise ValueError(f"the label must be a text to compare with, found {text.label!r}")
    return 1.0 if text.response.strip() == str(text.label).strip() else 0.0
