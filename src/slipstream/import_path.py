"""Functions of the user that a configuration names: 'module:function' or 'path/to/file.py:function'.

`check_function` says early whether there is such a function without running any code of the user, `load_function`
imports it, and an `ImportedFunction` is the function as a value that other processes can be sent. `key` is the
configuration key that named it, with which every error begins. What the function must take and return is the business
of whoever calls it. This module imports nothing heavy.
"""

import ast
import difflib
import functools
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from slipstream.errors import ConfigError, SlipstreamError, TrainingError


@dataclass(frozen=True)
class ImportedFunction:
    """A user's function by its import path; it is imported at the first call, once in each process.

    Relative paths and modules are looked for in `directory`, the one the user started in: a process elsewhere has
    another. Two are equal if key, spec and directory are.
    """

    key: str
    spec: str
    directory: str

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the function. Raises ConfigError if it cannot be imported, TrainingError for what it raises itself."""
        function = self.load()
        try:
            return function(*arguments, **keywords)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise TrainingError(
                f"{self.key} {self.spec!r} raised {type(error).__name__}: {error} ({frame.filename}, line "
                f"{frame.lineno})"
            ) from error

    def __str__(self) -> str:
        return self.spec

    def load(self) -> Callable[..., Any]:
        """Import the function now. Raises ConfigError."""
        return _load_once(self.spec, self.key, self.directory)


@functools.cache
def _load_once(spec: str, key: str, directory: str) -> Callable[..., Any]:
    if directory not in sys.path:
        sys.path.append(directory)
    return load_function(spec, key=key, directory=Path(directory))


def is_import_path(spec: str) -> bool:
    """Whether `spec` has the form of an import path; that there is such a function is another question."""
    location, separator, name = spec.rpartition(":")
    return bool(separator and location and name.isidentifier())


def load_function(
    spec: str, *, key: str, directory: Path | None = None, failure: type[SlipstreamError] = ConfigError
) -> Callable[..., Any]:
    """Import the function that `spec` names. Runs the module's own code; a file is run once in a process.

    Relative paths start at `directory`, by default the working directory. Raises ConfigError if there is no such
    module, file or function, and `failure` with the module's own error if importing it fails.
    """
    path = _ImportPath.parse(spec, key=key, directory=directory)
    try:
        module = path.import_module()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        message = f"importing {path.location} raised {type(error).__name__}: {error}{where}"
        raise failure(path.error_text(message)) from error
    function = getattr(module, path.name, None)
    if function is None:
        found = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise path.no_such_function(found)
    if not callable(function):
        kind = type(function).__name__
        raise ConfigError(path.error_text(f"{path.name} in {path.location} is a {kind}, no function"))
    return function  # type: ignore[no-any-return]


def check_function(spec: str, *, key: str, directory: Path | None = None) -> None:
    """Raise ConfigError if `spec` names no function, as far as can be seen without running any code of the user.

    For dry runs and for checks before anything starts: the file is parsed, not imported. A module inside a package is
    looked up, which imports the packages around it.
    """
    path = _ImportPath.parse(spec, key=key, directory=directory)
    file = path.source_file()
    if file is None:
        return  # built in, frozen or compiled: only the import will tell
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except SyntaxError as error:
        raise ConfigError(path.error_text(f"{file}, line {error.lineno}: {error.msg}")) from error
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    # A function may also be bound by an assignment, an import or a condition: any name in the file might do.
    mentioned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | {
        (node.asname or node.name) for node in ast.walk(tree) if isinstance(node, ast.alias)
    }
    if path.name not in defined and path.name not in mentioned and "*" not in mentioned:
        raise path.no_such_function([name for name in defined if not name.startswith("_")])


@dataclass(frozen=True)
class _ImportPath:
    """An import path taken apart: `location` is a module or a file, `name` the function in it."""

    spec: str
    key: str
    directory: Path
    location: str
    name: str

    @classmethod
    def parse(cls, spec: str, *, key: str, directory: Path | None) -> "_ImportPath":
        if not is_import_path(spec):
            raise ConfigError(f"{key} {spec!r} is neither 'module:function' nor 'path/to/file.py:function'")
        location, _, name = spec.rpartition(":")
        return cls(spec, key, Path.cwd() if directory is None else directory, location, name)

    def import_module(self) -> ModuleType:
        """The module or file, imported. Raises ConfigError if it is not there, and what its own code raises."""
        if self.location.endswith(".py"):
            return self._import_file()
        try:
            return importlib.import_module(self.location)
        except ModuleNotFoundError as error:
            if error.name is not None and (self.location == error.name or self.location.startswith(f"{error.name}.")):
                raise self._no_such_module() from error
            raise

    def _import_file(self) -> ModuleType:
        """Import a file under a name of its own, so that it can't shadow or be shadowed by an installed module."""
        file = self._existing_file()
        digest = hashlib.sha256(str(file).encode()).hexdigest()[:8]
        module_name = f"slipstream_import_{file.stem}_{digest}"
        if module_name in sys.modules:
            return sys.modules[module_name]
        module_spec = importlib.util.spec_from_file_location(module_name, file)
        if module_spec is None or module_spec.loader is None:
            raise ConfigError(self.error_text(f"{file} cannot be imported as Python source"))
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[module_name] = module  # dataclasses and pickle look a class's module up there
        if str(file.parent) not in sys.path:
            sys.path.insert(0, str(file.parent))  # so that the file can import its neighbours, as a script could
        try:
            module_spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
        return module

    def source_file(self) -> Path | None:
        """The file behind it, None for a module that has none; ConfigError if there is no such file or module."""
        if self.location.endswith(".py"):
            return self._existing_file()
        try:
            found = importlib.util.find_spec(self.location)
        except (ImportError, ValueError):
            found = None  # a package around it does not exist, or the name is not one ("..rewards")
        if found is None:
            raise self._no_such_module()
        return Path(found.origin) if found.origin is not None and found.origin.endswith(".py") else None

    def _existing_file(self) -> Path:
        file = (self.directory / Path(self.location).expanduser()).absolute()
        if not file.is_file():
            raise ConfigError(self.error_text(f"there is no file {file}"))
        return file

    def error_text(self, text: str) -> str:
        return f"{self.key} {self.spec!r}: {text}"

    def no_such_function(self, found: list[str]) -> ConfigError:
        nearest = difflib.get_close_matches(self.name, found, n=1)
        return ConfigError(
            self.error_text(
                f"{self.location} has no function {self.name!r}; found {', '.join(found[:10]) or 'none'}"
                + (f"; did you mean {nearest[0]!r}?" if nearest else "")
            )
        )

    def _no_such_module(self) -> ConfigError:
        return ConfigError(
            self.error_text(
                f"there is no module {self.location!r}; it must be installed or lie in the working directory "
                f"{self.directory}"
            )
        )
