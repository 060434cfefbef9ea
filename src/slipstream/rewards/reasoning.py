"""The built-in reward of reasoning-gym tasks: the task's own scoring.

Apart from `rules.py` because it imports reasoning_gym, which takes seconds; a child process imports it while it
starts, before the time limit of the first call runs. Some tasks evaluate the answer they are given: the limits of the
child process are what bounds them.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

from slipstream.rewards.function import ScoredText

with warnings.catch_warnings():  # packages it imports have sloppy literals; not the user's concern
    warnings.simplefilter("ignore", SyntaxWarning)
    import reasoning_gym as gym


def reasoning_gym(text: ScoredText) -> float:
    """Return what the task that made the question gives for the response, from 0 to 1.

    The row must have the columns `question`, `answer` and `metadata` of a reasoning-gym entry; the task is
    `metadata["source_dataset"]`. White space around the answer is removed first, because some tasks refuse it.
    Raises ValueError if the row is no such entry.
    """
    missing = [name for name in ("question", "answer", "metadata") if name not in text.fields]
    if missing:
        raise ValueError(
            f"the row is no reasoning-gym entry: it lacks {', '.join(missing)}; found {', '.join(sorted(text.fields))}"
        )
    task = text.fields["metadata"].get("source_dataset")
    if task is None:
        raise ValueError("the row's metadata lacks source_dataset, the name of the reasoning-gym task")
    return float(_scorer(task)(text.response.strip(), text.fields))


@cache
def _scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    """The scoring method of a task; ValueError from reasoning_gym if there is no such task."""
    scorer: Callable[[str, dict[str, Any]], float] = gym.get_score_answer_fn(task)
    return scorer
