"""How often one policy's answers are better than another's, under the reward that scored both.

Reads the answers that `slipstream generate` writes.
"""

from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from slipstream.errors import RewardError
from slipstream.observe.files import json_line_records


def rewards_by_prompt(answers_file: Path) -> dict[str, list[float]]:
    """The rewards of the answers to each prompt that were scored; prompts are known by source and row."""
    return {
        f"{record.get('source', '')}:{record['row']}": [
            sample["reward"] for sample in record["samples"] if sample["reward"] is not None
        ]
        for _, record in json_line_records(answers_file)
    }


def win_rate(rewards: Mapping[str, list[float]], others: Mapping[str, list[float]]) -> float:
    """How likely an answer is to have a higher reward than the other policy's answer to the same prompt.

    Every answer is compared with every answer of the other policy; equal rewards count as half a win; all prompts count
    the same, those without a scored answer of both policies do not. Raises RewardError if there is no other prompt.
    """
    rates = [
        sum(_outcome(one, other) for one, other in product(rewards[prompt], others[prompt]))
        / (len(rewards[prompt]) * len(others[prompt]))
        for prompt in rewards.keys() & others.keys()
        if rewards[prompt] and others[prompt]
    ]
    if not rates:
        raise RewardError("no prompt has scored answers of both policies: there is nothing to compare")
    return sum(rates) / len(rates)


def compare(answers_files: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """The mean reward of each policy, and of all but the first their win rate against it."""
    found = {name: rewards_by_prompt(file) for name, file in answers_files.items()}
    first = next(iter(found))
    return {
        name: {"mean_reward": _mean(reward for own in rewards.values() for reward in own)}
        | ({} if name == first else {"win_rate": win_rate(rewards, found[first])})
        for name, rewards in found.items()
    }


def _outcome(one: float, other: float) -> float:
    return 0.5 if one == other else float(one > other)


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None
