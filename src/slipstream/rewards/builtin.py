"""The names of the built-in rewards. Nothing is imported to look one up."""

BUILTIN_REWARDS: dict[str, str] = {
    "code": "slipstream.rewards.code:code",
    "exact_match": "slipstream.rewards.rules:exact_match",
    "format": "slipstream.rewards.text:tag_format",
    "json_schema": "slipstream.rewards.text:json_schema",
    "judge": "slipstream.rewards.judge:judge",
    "length": "slipstream.rewards.text:length",
    "math": "slipstream.rewards.mathematics.verifier:math",
    "reasoning_gym": "slipstream.rewards.reasoning:reasoning_gym",
    "regular_expression": "slipstream.rewards.text:regular_expression",
}
"""Names that `reward.function` takes as they are, and where their functions are."""
