"""Functions of the user by their import path: checked early, imported late, sent to other processes by name.

That each wrong name is an error which says what there is, is tested for `reward.function` in rewards/test_function.py.
"""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.errors import ConfigError, TrainingError
from slipstream.import_path import ImportedFunction, check_function, is_import_path, load_function

KEY = "algorithm.policy_loss"
SOURCE = """
from neighbour_of_losses import FACTOR
imports = []
def loss(value): return FACTOR * value
def count(): imports.append(1); return len(imports)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a user with `losses.py`, which is not the working directory; the module path is put back."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "neighbour_of_losses", raising=False)
    (tmp_path / "losses.py").write_text(SOURCE)
    (tmp_path / "neighbour_of_losses.py").write_text("FACTOR = 3\ndef triple(value): return FACTOR * value\n")
    return tmp_path


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("module:function", True),
        ("package.module:function", True),
        ("path/to/file.py:function", True),
        ("clip", False),
        (":function", False),
        ("module:", False),
        ("module:not a name", False),
    ],
)
def test_the_form_of_an_import_path(spec, expected):
    assert is_import_path(spec) is expected
    if not expected:
        for use in (check_function, load_function):
            with pytest.raises(ConfigError, match=rf"^{KEY} '{spec}' is neither 'module:function' nor"):
                use(spec, key=KEY)


@pytest.mark.parametrize("use", [check_function, load_function])
def test_an_error_begins_with_the_key_and_says_where_it_looked(use, folder):
    with pytest.raises(ConfigError, match=rf"^{KEY} 'nowhere.py:loss': there is no file {folder}/nowhere.py"):
        use("nowhere.py:loss", key=KEY, directory=folder)
    with pytest.raises(ConfigError, match=rf"^{KEY} 'no_such:loss': there is no module 'no_such'; .* {folder}$"):
        use("no_such:loss", key=KEY, directory=folder)
    with pytest.raises(ConfigError, match=rf"^{KEY} 'losses.py:los': losses.py has no function 'los'; .* 'loss'\?$"):
        use("losses.py:los", key=KEY, directory=folder)


def test_a_failed_import_is_the_error_that_was_asked_for_and_is_tried_again(folder):
    (folder / "broken.py").write_text("raise SystemExit('no')\n")
    with pytest.raises(TrainingError, match=rf"^{KEY} 'broken.py:f': importing .* raised SystemExit: no \(.*1\)"):
        load_function("broken.py:f", key=KEY, directory=folder, failure=TrainingError)
    (folder / "broken.py").write_text("def f(): return 1\n")
    assert load_function("broken.py:f", key=KEY, directory=folder)() == 1


def test_a_relative_path_starts_at_the_directory_and_the_file_may_import_its_neighbours(folder):
    assert ImportedFunction(KEY, "losses.py:loss", str(folder))(2) == 6
    assert ImportedFunction(KEY, "neighbour_of_losses:triple", str(folder))(2) == 6


def test_a_file_is_imported_once_however_many_of_its_functions_are_used(folder):
    functions = [ImportedFunction(key, "losses.py:count", str(folder)) for key in ("a", "b")]
    assert [function() for function in functions] == [1, 2]
    assert functions[0].load().__globals__ is ImportedFunction(KEY, "losses.py:loss", str(folder)).load().__globals__


def test_files_of_one_name_in_two_folders_are_two_modules(folder):
    (folder / "other").mkdir()
    (folder / "other" / "losses.py").write_text("def loss(value): return -value")
    assert ImportedFunction(KEY, "losses.py:loss", str(folder))(2) == 6
    assert ImportedFunction(KEY, "other/losses.py:loss", str(folder))(2) == -2


def test_nothing_is_imported_before_the_first_call(folder):
    (folder / "broken.py").write_text("1 / 0")
    function = ImportedFunction(KEY, "broken.py:f", str(folder))
    assert str(function) == "broken.py:f"
    with pytest.raises(ConfigError, match=rf"^{KEY} 'broken.py:f': importing broken.py raised ZeroDivisionError"):
        function()


def test_what_the_function_raises_is_named_with_key_file_and_line(folder):
    (folder / "raising.py").write_text("def f(value):\n    return value / 0\n")
    with pytest.raises(
        TrainingError, match=rf"^{KEY} 'raising.py:f' raised ZeroDivisionError: .* \(.*raising.py, line 2\)"
    ):
        ImportedFunction(KEY, "raising.py:f", str(folder))(1)


def test_it_crosses_processes_by_name_and_is_equal_to_its_copy(folder):
    function = ImportedFunction(KEY, "losses.py:loss", str(folder))
    assert function(1) == 3
    copy = pickle.loads(pickle.dumps(function))
    assert copy == function and hash(copy) == hash(function)
    assert copy != ImportedFunction(KEY, "losses.py:count", str(folder))
    program = "import pickle, sys; print(pickle.load(sys.stdin.buffer)(5), 'torch' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", program], input=pickle.dumps(function), capture_output=True, timeout=60, cwd="/"
    )
    assert run.stdout.split() == [b"15", b"False"], run.stderr
