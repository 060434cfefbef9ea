# examples/first_run/reward.py
from slipstream import ScoredText


def right_and_short(text: ScoredText, *, longest: int = 8) -> dict[str, float]:
    words = text.response.split()
    return {
        "right": 1.0 if words and words[-1].rstrip(".") == text.label else 0.0,
        "short": 0.1 if text.response_length <= longest else 0.0,
    }
