"""The built-in reward of reasoning-gym tasks: the task's own scoring.

Apart from `rules.py` because it imports reasoning_gym, which takes seconds; a child process imports it while it
starts, before the time limit of the first call runs.

Nine of the tasks evaluate the answer they are given, by `eval` or by sympy's `parse_expr`, which is `eval` in the end.
In their modules those names are replaced by readers that evaluate nothing, before any answer is scored; the rest of
their scoring stays. Some tasks compute for long on some answers: the limits of the child process bound that.
"""

import ast
import importlib
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

from slipstream.observe.logs import get_logger
from slipstream.rewards.formulas import (
    LARGEST_EXPONENT,
    LARGEST_POWER_BITS,
    Algebra,
    exact_number,
    read_formula,
)
from slipstream.rewards.function import ScoredText
from slipstream.rewards.worker import describe

with warnings.catch_warnings():  # packages it imports have sloppy literals; not the user's concern
    warnings.simplefilter("ignore", SyntaxWarning)
    import reasoning_gym as gym
    import sympy  # type: ignore[import-untyped]

logger = get_logger("reward")

LONGEST_LITERAL = 10_000
"""Characters of an answer that is read as a Python literal."""

SYMBOLIC_FUNCTIONS = (
    *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan"),
    *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "exp", "log", "ln", "sqrt", "Abs", "erf"),
)
SYMBOLIC_CONSTANTS = {"E": sympy.E, "pi": sympy.pi}


def reasoning_gym(text: ScoredText) -> float:
    """Return what the task that made the question gives for the response, from 0 to 1.

    The row must have the columns `question`, `answer` and `metadata` of a reasoning-gym entry; the task is
    `metadata["source_dataset"]`. White space around the answer is removed first, because some tasks refuse it. Where a
    task's scoring raises on the response, but not on the right answer, the response is one that the task cannot read,
    and gets 0; what was raised is logged, once for each task and kind of exception. Raises ValueError if the row is no
    such entry, and what the scoring raises on the right answer too.
    """
    missing = [name for name in ("question", "answer", "metadata") if name not in text.fields]
    if missing:
        raise ValueError(
            f"the row is no reasoning-gym entry: it lacks {', '.join(missing)}; found {', '.join(sorted(text.fields))}"
        )
    task = text.fields["metadata"].get("source_dataset")
    if task is None:
        raise ValueError("the row's metadata lacks source_dataset, the name of the reasoning-gym task")
    scorer = _scorer(task)
    try:
        return float(scorer(text.response.strip(), text.fields))
    except MemoryError:
        raise  # a limit, and nothing about the answer
    except Exception as error:
        scorer(text.fields["answer"], text.fields)  # raises as well if it is the row that cannot be scored
        _report_unreadable(task, error)
        return 0.0


_reported: set[tuple[str, type[Exception]]] = set()


def _report_unreadable(task: str, error: Exception) -> None:
    """Log why a task could not read an answer: an early policy writes many such answers, so each kind once."""
    kind = (task, type(error))
    if kind not in _reported:
        _reported.add(kind)
        logger.warning("an answer that its task cannot read gets 0; not said again", task=task, reason=describe(error))


@cache
def _scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    """The scoring method of a task, made harmless; ValueError from reasoning_gym if there is no such task."""
    scorer: Callable[[str, dict[str, Any]], float] = gym.get_score_answer_fn(task)
    if task in REPLACED:
        module, name, reader = REPLACED[task]
        setattr(importlib.import_module(f"reasoning_gym.{module}"), name, reader)
    return scorer


def read_literal(text: str) -> Any:
    """Return the value of a Python literal: lists, texts, numbers. Raises ValueError or SyntaxError for all else."""
    if len(text) > LONGEST_LITERAL:
        raise ValueError(f"a literal of {len(text)} characters, more than {LONGEST_LITERAL}")
    return ast.literal_eval(text.strip())


def read_symbolic(text: str, local_dict: Mapping[str, Any] | None = None) -> Any:
    """Return the sympy expression that a formula stands for, built call by call. Names are symbols.

    `local_dict` gives the meaning of some names, as it does for the function that this one replaces.
    """
    known = {**SYMBOLIC_CONSTANTS, **(local_dict or {})}
    algebra = Algebra(
        number=lambda numeral: sympy.Float(numeral) if "." in numeral else sympy.Integer(int(numeral)),
        name=lambda name: known[name] if name in known else sympy.Symbol(name),
        power=_symbolic_power,
        functions={name: getattr(sympy, name) for name in SYMBOLIC_FUNCTIONS},
    )
    return read_formula(text, algebra)


def _symbolic_power(base: Any, exponent: Any) -> Any:
    """A power, unless computing it would take long: sympy computes those of numbers at once."""
    if exponent.is_number and (not exponent.is_Rational or abs(exponent) > LARGEST_EXPONENT):
        raise ValueError("an exponent that is too large")
    if base.is_Rational and exponent.is_Rational:
        bits = max(int(base.p).bit_length(), int(base.q).bit_length())
        if bits * abs(exponent) > LARGEST_POWER_BITS:
            raise ValueError("a power that is too large")
    return base**exponent


class _HarmlessSympy(SimpleNamespace):
    """The module sympy, but for the function that evaluates."""

    parse_expr = staticmethod(read_symbolic)

    def __getattr__(self, name: str) -> Any:
        return getattr(sympy, name)


REPLACED: dict[str, tuple[str, str, Any]] = {
    "string_insertion": ("algorithmic.string_insertion", "eval", read_literal),
    "spiral_matrix": ("algorithmic.spiral_matrix", "eval", read_literal),
    "binary_matrix": ("algorithmic.binary_matrix", "eval", read_literal),
    "n_queens": ("games.n_queens", "eval", read_literal),
    "countdown": ("games.countdown", "parse_expr", exact_number),
    "puzzle24": ("games.puzzle24", "parse_expr", exact_number),
    "simple_integration": ("algebra.simple_integration", "sympy", _HarmlessSympy()),
    "intermediate_integration": ("algebra.intermediate_integration", "sympy", _HarmlessSympy()),
    "polynomial_multiplication": ("algebra.polynomial_multiplication", "sp", _HarmlessSympy()),
}
"""For each task that evaluates answers, of reasoning-gym 0.1.25: the module, the name in it, and what it is now."""
