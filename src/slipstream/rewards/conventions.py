"""Reward functions written for other trainers, unchanged: told apart by their parameters, brought into our own form.

Four forms are known. Ours takes one `ScoredText`. The others have a parameter whose name nobody else uses:

- `completions` or `completion_ids`: TRL's `GRPOTrainer` (`prompts, completions, completion_ids, **columns` to a list of
  numbers or None);
- `queries`: OpenRLHF (`queries, prompts, labels` to a tensor, or to a dict with `rewards`, `scores`, `extra_logs`);
- `solution_str`: verl (`data_source, solution_str, ground_truth, extra_info` to a number, or to a dict with `score`).

Functions that take lists are called with lists of one, so that one bad response fails alone. What a trainer passes
beyond that (TRL's `trainer_state`, `log_metric`) is left out: nothing is made up. Options go before what would be
passed under the same name. Imports nothing heavy, because every child of the reward pool imports it.
"""

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from slipstream.errors import ConfigError
from slipstream.rewards.function import (
    RewardFunction,
    Score,
    ScoredText,
    UnusableRewardError,
)

KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
COLUMNS_OF_TRL = ("prompt", "completion", "completion_ids")
"""Columns that TRL does not pass on under their own names."""
FOREIGN_NAMES = (
    "prompt",
    "prompts",
    "labels",
    "data_source",
    "data_sources",
    "ground_truth",
    "ground_truths",
    "extra_info",
    "solution_strs",
)
"""First parameters of functions that were written for another trainer and lack what tells for which."""


@dataclass(frozen=True)
class Convention:
    """How the functions of one trainer are recognised, called and understood.

    `markers` are parameters of which they all have one, `always` what every call passes. With `takes_columns` the
    columns of the row are passed as well. `arguments` makes the keyword arguments of a call, `read` turns what it
    returned into what a function of ours would have.
    """

    trainer: str
    markers: tuple[str, ...]
    always: tuple[str, ...]
    takes_columns: bool
    arguments: Callable[[ScoredText], dict[str, Any]]
    read: Callable[[Any], Any]

    @property
    def form(self) -> str:
        """The call, as a message shows it."""
        return f"({', '.join(self.always)}{', **columns' if self.takes_columns else ''}) as in {self.trainer}"


def adapt(function: RewardFunction) -> RewardFunction:
    """Return a function in our own form that calls `function` in its own. Raises ConfigError as `recognise` does."""
    convention = recognise(function)
    if convention is None:
        return function
    names, takes_all = _accepted(function)
    required = _required(function)

    def call(text: ScoredText, **options: Any) -> Any:
        available = convention.arguments(text) | options
        arguments = {name: value for name, value in available.items() if takes_all or name in names}
        missing = [name for name in required if name not in arguments]
        if missing:
            raise TypeError(
                f"the reward function asks for {', '.join(missing)}, which is neither a column of the row "
                f"({', '.join(text.fields)}) nor one of reward.options"
            )
        value = function(**arguments)
        return _read_later(value, convention) if inspect.isawaitable(value) else convention.read(value)

    return call


def recognise(function: RewardFunction) -> Convention | None:
    """The convention a function follows; None for our own.

    Raises ConfigError if its parameters belong to several, or to another trainer without saying to which.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None  # some compiled callables have no signature to look at
    found = [convention for convention in CONVENTIONS if not parameters.keys().isdisjoint(convention.markers)]
    if len(found) == 1:
        return found[0]
    if found or _is_foreign(parameters):
        what = f"parameters of {' and '.join(each.trainer for each in found)}" if found else "none that tells its form"
        forms = "; ".join(["(text, **options) as in Slipstream", *(convention.form for convention in CONVENTIONS)])
        raise ConfigError(
            f"reward.function: {_name(function)}({', '.join(parameters)}) has {what}; expected one of {forms}"
        )
    return None


def _is_foreign(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Whether a function without a marker is none of ours: another trainer's first name, or nothing but keywords.

    `*args, **kwargs` alone, a decorator's without functools.wraps, hides what the function itself takes.
    """
    kinds = [parameter.kind for parameter in parameters.values()]
    takes_any_name = inspect.Parameter.VAR_KEYWORD in kinds
    takes_no_own = not any(kind in (*KEYWORDS, inspect.Parameter.POSITIONAL_ONLY) for kind in kinds)
    return next(iter(parameters), None) in FOREIGN_NAMES or (takes_any_name and takes_no_own)


def check_options(function: RewardFunction, options: Mapping[str, Any]) -> None:
    """Raise ConfigError if the function cannot be called, in the form it has, with these options."""
    convention = recognise(function)
    if convention is None:
        _check_own(function, options)
        return
    names, takes_all = _accepted(function)
    unknown = [name for name in options if not takes_all and name not in names]
    if unknown:
        raise ConfigError(
            f"reward.options do not fit the reward function: {_name(function)}({', '.join(sorted(names))}) has no "
            f"parameter {unknown[0]!r}"
        )
    missing = [name for name in _required(function) if name not in convention.always and name not in options]
    if convention.takes_columns:
        missing = [name for name in missing if name in ABSENT_OF_TRL]
    if missing:
        raise ConfigError(
            f"reward.function: {_name(function)} asks for {', '.join(missing)}, which Slipstream does not pass to "
            f"functions of the form {convention.form}; give it a default, or a value in reward.options"
        )


def _check_own(function: RewardFunction, options: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(object(), **options)
    except TypeError as error:
        raise ConfigError(
            f"reward.options do not fit the reward function: {_name(function)}{signature} is called with a ScoredText "
            f"and {', '.join(sorted(options)) or 'no options'}: {error}"
        ) from error


def _accepted(function: RewardFunction) -> tuple[set[str], bool]:
    """The parameters that can be passed by name, and whether all others can too."""
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    return {parameter.name for parameter in parameters if parameter.kind in KEYWORDS}, takes_all


def _required(function: RewardFunction) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.kind in KEYWORDS and each.default is inspect.Parameter.empty]


def _name(function: RewardFunction) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


async def _read_later(value: Awaitable[Any], convention: Convention) -> Any:
    return convention.read(await value)


# ---------------------------------------------------------------- TRL
# GRPOTrainer._calculate_rewards in trl/trainer/grpo_trainer.py: all columns but three, each as a list.

ABSENT_OF_TRL = ("trainer_state", "log_extra", "log_metric", "environments")
"""What TRL passes and no column can be."""


def _trl_arguments(text: ScoredText) -> dict[str, Any]:
    """The row's own `prompt` where it has one; an answer to messages is a list of messages, to a text a text."""
    prompt = text.fields.get("prompt")
    is_conversation = isinstance(prompt, list)
    columns = {name: [value] for name, value in text.fields.items() if name not in COLUMNS_OF_TRL}
    return columns | {
        "prompts": [prompt if is_conversation or isinstance(prompt, str) else text.prompt],
        "completions": [[{"role": "assistant", "content": text.response}] if is_conversation else text.response],
        "completion_ids": [list(text.response_tokens)],
    }


# ---------------------------------------------------------------- OpenRLHF
# The function that `--remote_rm_url FILE.py` names: openrlhf/trainer and examples/python/reward_func.py.


def _openrlhf_arguments(text: ScoredText) -> dict[str, Any]:
    return {"queries": [text.prompt + text.response], "prompts": [text.prompt], "labels": [text.label]}


def _openrlhf_reward(value: Any) -> Any:
    """`scores` and `extra_logs` are named parts beside the reward, those of them that are finite numbers."""
    if not isinstance(value, Mapping):
        return _only(value)
    if "rewards" not in value:
        raise UnusableRewardError(f"returned a dict with {', '.join(map(str, value)) or 'nothing'}, expected 'rewards'")
    parts = {name: part for name, part in value.items() if name == "scores"} | dict(value.get("extra_logs") or {})
    numbers = {name: _only(part) for name, part in parts.items() if _is_part(_bare(part))}
    return numbers | {"reward": _only(value["rewards"])}


# ---------------------------------------------------------------- verl
# NaiveRewardManager in verl/workers/reward_manager/naive.py, and `custom_reward_function`.


def _verl_arguments(text: ScoredText) -> dict[str, Any]:
    """A label that is the column `reward_model` of verl's data holds the ground truth in a field of that name."""
    label = text.label
    return {
        "data_source": text.fields.get("data_source", ""),
        "solution_str": text.response,
        "ground_truth": label["ground_truth"] if isinstance(label, Mapping) and "ground_truth" in label else label,
        # NaiveRewardManager always sets the two; there are no scores of turns here.
        "extra_info": {
            **(text.fields.get("extra_info") or {}),
            "num_turns": len(text.turns),
            "rollout_reward_scores": {},
        },
    }


def _verl_reward(value: Any) -> Any:
    """Other finite numbers are named parts beside the score, `pred` is the answer, the rest is for verl's logs only."""
    if not isinstance(value, Mapping):
        return _bare(value)
    if "score" not in value:
        raise UnusableRewardError(f"returned a dict with {', '.join(map(str, value)) or 'nothing'}, expected 'score'")
    others = {name: _bare(part) for name, part in value.items() if name not in ("score", "pred")}
    parts = {name: part for name, part in others.items() if _is_part(part)}
    if "pred" not in value:
        return parts | {"reward": _bare(value["score"])}
    return Score(_bare(value["score"]), parts, value["pred"])


# ---------------------------------------------------------------- what they return


def _only(value: Any) -> Any:
    """The value for the one response that was asked for: the item of a list or array of one, or a bare number."""
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, list | tuple):
        return values
    if len(values) != 1:
        raise UnusableRewardError(f"returned {len(values)} values for one response, expected a list of one")
    return _bare(values[0])


def _bare(value: Any) -> Any:
    """The number in an array, or in lists around it, of exactly one element; anything else as it is."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    while isinstance(value, list | tuple) and len(value) == 1:
        (value,) = (value[0].tolist() if hasattr(value[0], "tolist") else value[0],)
    return value


def _is_part(value: Any) -> bool:
    """Whether a value beside the reward can be recorded: a finite number."""
    return isinstance(value, Real) and math.isfinite(value)


CONVENTIONS = (
    Convention(
        "TRL",
        ("completions", "completion_ids"),
        ("prompts", "completions", "completion_ids"),
        True,
        _trl_arguments,
        _only,
    ),
    Convention(
        "OpenRLHF", ("queries",), ("queries", "prompts", "labels"), False, _openrlhf_arguments, _openrlhf_reward
    ),
    Convention(
        "verl",
        ("solution_str",),
        ("data_source", "solution_str", "ground_truth", "extra_info"),
        False,
        _verl_arguments,
        _verl_reward,
    ),
)
