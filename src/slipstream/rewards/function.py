"""What a reward function is: how it is named, what it is given and what it may return.

A reward function takes one `ScoredText`, plus the configured options as keyword arguments, and returns a number, a
dict of named numbers or a `Score`; it may be a coroutine function. Functions written for other trainers are brought
into this form by `conventions.py`. It runs in a child process (`worker.py`) that `pool.py` starts, limits and kills.
This module imports nothing heavy, because every child imports it.
"""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from slipstream.data.turn import Turn
from slipstream.errors import ConfigError, RewardError
from slipstream.import_path import check_function, is_import_path, load_function
from slipstream.rewards.builtin import BUILTIN_REWARDS

KEY = "reward.function"

RewardFunction = Callable[..., Any]
"""`reward(text: ScoredText, **options) -> float | dict[str, float] | Score`, or a coroutine function of that form."""


@dataclass(frozen=True)
class ScoredText:
    """One response and all that is known of it, as text.

    `label` is the value of the label column, `fields` holds all columns of the row. `finish_reason` is stop, length,
    environment or aborted; `response_length` counts the tokens the policy chose, which `response_tokens` lists. `turns`
    is the whole trajectory: the messages of the prompt, then what policy and environment said in turn. `prompt` and
    `response` are the same as two texts. Where there is no trajectory behind it, turns and tokens are empty.
    """

    prompt: str
    response: str
    label: Any
    fields: dict[str, Any]
    finish_reason: str
    response_length: int
    turns: tuple[Turn, ...] = ()
    response_tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class Score:
    """What a response is worth: the reward, its named parts, and the answer that was read from the response.

    A reward function may return one. `answer` is for people: it is kept with the samples of a run and printed by
    `slipstream grade`; None where no answer was found or the notion does not apply.
    """

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    answer: str | None = None


class UnusableRewardError(Exception):
    """What a reward function returned is not a reward. The message reads 'returned ...'."""


def resolve_reward(spec: str | RewardFunction) -> RewardFunction:
    """Return the function that `spec` names: 'module:function', 'path/to/file.py:function', or a built-in rule.

    A callable is returned as it is. Relative paths start at the working directory. Runs the module's own code.
    Raises ConfigError if there is no such module, file or function, and RewardError with the module's own error if
    importing it fails.
    """
    if callable(spec):
        return spec
    return load_function(_import_path(spec), key=KEY, failure=RewardError)


def check_reward_spec(spec: str) -> None:
    """Raise ConfigError if `spec` names no function, as far as can be seen without running any code of the user."""
    check_function(_import_path(spec), key=KEY)


def check_reward_value(value: object) -> Score:
    """Return the checked score from what a function returned.

    A number is the reward: int, float, bool, or a scalar of numpy or torch. A dict of numbers gives named parts; the
    reward is the value of its key 'reward' if it has one, else the sum. A `Score` says all of it. Raises
    UnusableRewardError for everything else: nothing is ever turned into 0.
    """
    if isinstance(value, Score):
        answer = None if value.answer is None else str(value.answer)
        return Score(_number(value.reward), _numbers(value.parts), answer)
    if not isinstance(value, Mapping):
        return Score(_number(value))
    if not value:
        raise UnusableRewardError("returned an empty dict, expected at least one named number")
    parts = _numbers(value)
    reward = parts.pop("reward") if "reward" in parts else _number(sum(parts.values()))
    return Score(reward, parts)


def _numbers(values: Mapping[Any, object]) -> dict[str, float]:
    """The floats of a dict by the text of their names; UnusableRewardError names the one that is none."""
    parts: dict[str, float] = {}
    for name, part in values.items():
        try:
            parts[str(name)] = _number(part)
        except UnusableRewardError as error:
            raise UnusableRewardError(f"{error} for {name!r}") from error
    return parts


def _number(value: object) -> float:
    """The float of a number or 0-dimensional array; UnusableRewardError says what it is otherwise."""
    if value is None:
        raise UnusableRewardError("returned None, expected one number")
    if isinstance(value, str):
        raise UnusableRewardError(f"returned the string {_shorten(value)!r}, expected one number")
    shape = getattr(value, "shape", None)
    if shape is not None and tuple(shape):
        raise UnusableRewardError(f"returned an array of shape {tuple(shape)}, expected one number")
    if isinstance(value, list | tuple | set):
        raise UnusableRewardError(f"returned {len(value)} values, expected one number")
    scalar = value.item() if shape is not None and hasattr(value, "item") else value
    if not isinstance(scalar, Real):
        raise UnusableRewardError(f"returned a {type(value).__name__}, expected one number")
    try:
        number = float(scalar)
    except OverflowError as error:
        raise UnusableRewardError("returned a number too large for a float") from error
    if not math.isfinite(number):
        raise UnusableRewardError(f"returned {number}, expected a finite number")
    return number


def _import_path(spec: str) -> str:
    """The import path behind a spec; built-in names are looked up."""
    path = BUILTIN_REWARDS.get(spec, spec)
    if is_import_path(path):
        return path
    nearest = difflib.get_close_matches(spec, BUILTIN_REWARDS, n=1)
    raise ConfigError(
        f"{KEY} {spec!r} is neither 'module:function' nor 'path/to/file.py:function' nor a built-in rule "
        f"({', '.join(sorted(BUILTIN_REWARDS))})" + (f"; did you mean {nearest[0]!r}?" if nearest else "")
    )


def _shorten(text: str, limit: int = 40) -> str:
    return text if len(text) <= limit else text[:limit] + "..."
