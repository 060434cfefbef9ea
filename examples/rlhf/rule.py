# examples/rlhf/rule.py
from slipstream.rewards.function import ScoredText

KIND = ("calm", "gentle", "kind", "patient", "polite", "warm")
UNKIND = ("cruel", "greedy", "grumpy", "lazy", "mean", "rude")


def kindness(text: ScoredText) -> float:
    """From -1 to 1: kind words minus unkind ones, of three; -1 for what does not describe the animal asked for."""
    if not text.response.startswith(f"{text.label} is "):
        return -1.0
    words = text.response.replace(",", " ").rstrip(".").split()
    return max(-1.0, min(1.0, (sum(word in KIND for word in words) - sum(word in UNKIND for word in words)) / 3))
