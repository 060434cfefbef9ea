"""What a reward function is: how it is named, what it is given and what it may return.

A reward function takes one `ScoredText`, plus the configured options as keyword arguments, and returns a number or a
dict of named numbers; it may be a coroutine function. It runs in a child process (`worker.py`) that `pool.py` starts,
limits and kills. This module imports nothing heavy, because every child imports it.
"""

import ast
import difflib
import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from slipstream.errors import ConfigError, RewardError
from slipstream.rewards.rules import BUILTIN_REWARDS

RewardFunction = Callable[..., Any]
"""`reward(text: ScoredText, **options) -> float | dict[str, float]`, or a coroutine function of that form."""


@dataclass(frozen=True)
class ScoredText:
    """One response and all that is known of it, as text.

    `label` is the value of the label column, `fields` holds all columns of the row. `finish_reason` is stop, length,
    environment or aborted; `response_length` counts the tokens the policy chose.
    """

    prompt: str
    response: str
    label: Any
    fields: dict[str, Any]
    finish_reason: str
    response_length: int


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
    location, name = _split(spec)
    module = _load_file(spec, Path(location)) if location.endswith(".py") else _load_module(spec, location)
    found = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    function = getattr(module, name, None)
    if function is None:
        raise _no_such_function(spec, location, name, found)
    if not callable(function):
        raise ConfigError(f"reward.function {spec!r}: {name} in {location} is a {type(function).__name__}, no function")
    return function  # type: ignore[no-any-return]


def check_reward_spec(spec: str) -> None:
    """Raise ConfigError if `spec` names no function, as far as can be seen without running any code of the user.

    For dry runs and for checks before anything starts: the file is parsed, not imported. A module inside a package is
    looked up, which imports the packages around it.
    """
    location, name = _split(spec)
    path = _existing_file(spec, Path(location)) if location.endswith(".py") else _module_file(spec, location)
    if path is None:
        return  # built in, frozen or compiled: only the import will tell
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        raise ConfigError(f"reward.function {spec!r}: {path}, line {error.lineno}: {error.msg}") from error
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    # A function may also be bound by an assignment, an import or a condition: any name in the file might do.
    mentioned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | {
        (node.asname or node.name) for node in ast.walk(tree) if isinstance(node, ast.alias)
    }
    if name not in defined and name not in mentioned and "*" not in mentioned:
        raise _no_such_function(spec, location, name, [key for key in defined if not key.startswith("_")])


def check_options(function: RewardFunction, options: Mapping[str, Any]) -> None:
    """Raise ConfigError if the function cannot be called with a `ScoredText` and these options."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # some compiled callables have no signature to check
    try:
        signature.bind(object(), **options)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise ConfigError(
            f"reward.options do not fit the reward function: {name}{signature} is called with a ScoredText and "
            f"{', '.join(sorted(options)) or 'no options'}: {error}"
        ) from error


def check_reward_value(value: object) -> tuple[float, dict[str, float]]:
    """Return the reward and its named parts from what a function returned.

    A number is the reward: int, float, bool, or a scalar of numpy or torch. A dict of numbers gives named parts; the
    reward is the value of its key 'reward' if it has one, else the sum. Raises UnusableRewardError for everything else:
    nothing is ever turned into 0.
    """
    if not isinstance(value, Mapping):
        return _number(value), {}
    if not value:
        raise UnusableRewardError("returned an empty dict, expected at least one named number")
    parts: dict[str, float] = {}
    for name, part in value.items():
        try:
            parts[str(name)] = _number(part)
        except UnusableRewardError as error:
            raise UnusableRewardError(f"{error} for {name!r}") from error
    reward = parts.pop("reward") if "reward" in parts else _number(sum(parts.values()))
    return reward, parts


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


def _split(spec: str) -> tuple[str, str]:
    """Module or file, and name of the function, of a spec; built-in names are looked up."""
    spec_or_path = BUILTIN_REWARDS.get(spec, spec)
    location, separator, name = spec_or_path.rpartition(":")
    if separator and location and name.isidentifier():
        return location, name
    nearest = difflib.get_close_matches(spec, BUILTIN_REWARDS, n=1)
    raise ConfigError(
        f"reward.function {spec!r} is neither 'module:function' nor 'path/to/file.py:function' nor a built-in rule "
        f"({', '.join(sorted(BUILTIN_REWARDS))})" + (f"; did you mean {nearest[0]!r}?" if nearest else "")
    )


def _existing_file(spec: str, path: Path) -> Path:
    path = path.expanduser()
    if not path.is_file():
        raise ConfigError(f"reward.function {spec!r}: there is no file {path.absolute()}")
    return path


def _module_file(spec: str, name: str) -> Path | None:
    """Source file of a module, None if it has none; ConfigError if there is no such module."""
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None  # a package around it does not exist, or the name is not one ("..rewards")
    if found is None:
        raise _no_such_module(spec, name)
    return Path(found.origin) if found.origin is not None and found.origin.endswith(".py") else None


def _load_file(spec: str, path: Path) -> ModuleType:
    """Import a file under a name of its own, so that it can't shadow or be shadowed by an installed module."""
    path = _existing_file(spec, path).absolute()
    module_spec = importlib.util.spec_from_file_location(f"slipstream_reward_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"reward.function {spec!r}: {path} cannot be imported as Python source")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and pickle look a class's module up there
    sys.path.insert(0, str(path.parent))  # so that the file can import its neighbours, as a script could
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise _import_failed(spec, str(path), error) from error
    return module


def _load_module(spec: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise _no_such_module(spec, name) from error
        raise _import_failed(spec, name, error) from error
    except Exception as error:
        raise _import_failed(spec, name, error) from error


def _no_such_module(spec: str, name: str) -> ConfigError:
    return ConfigError(
        f"reward.function {spec!r}: there is no module {name!r}; it must be installed or lie in the working directory "
        f"{Path.cwd()}"
    )


def _no_such_function(spec: str, location: str, name: str, found: list[str]) -> ConfigError:
    nearest = difflib.get_close_matches(name, found, n=1)
    return ConfigError(
        f"reward.function {spec!r}: {location} has no function {name!r}; found {', '.join(found[:10]) or 'none'}"
        + (f"; did you mean {nearest[0]!r}?" if nearest else "")
    )


def _import_failed(spec: str, location: str, error: Exception) -> RewardError:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return RewardError(f"reward.function {spec!r}: importing {location} raised {type(error).__name__}: {error}{where}")


def _shorten(text: str, limit: int = 40) -> str:
    return text if len(text) <= limit else text[:limit] + "..."
