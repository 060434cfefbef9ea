import contextlib
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.errors import RunDirectoryError, TrainingError
from slipstream.observe.files import (
    JsonLinesFile,
    LineFile,
    read_json_lines,
    recover_folder,
    replace_folder,
    write_text_atomically,
)


def full_disk(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_an_atomic_write_replaces_the_content_and_leaves_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text_atomically(path, "old")
    write_text_atomically(path, "new")
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_full_disk_during_an_atomic_write_keeps_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    write_text_atomically(path, "old")
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(TrainingError, match=r"no space left .*a\.txt"):
        write_text_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_line_that_finds_the_disk_full_halfway_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = LineFile(tmp_path / "lines")
    file.append("first")
    write, calls = os.write, []

    def half_then_full(descriptor: int, data: memoryview) -> int:
        calls.append(data)
        return write(descriptor, data[:3]) if len(calls) == 1 else full_disk()

    monkeypatch.setattr(os, "write", half_then_full)
    with pytest.raises(TrainingError, match="no space left"):
        file.append("second")
    assert (tmp_path / "lines").read_text() == "first\n"


@pytest.mark.parametrize("length", [10, 200_000])
def test_opening_drops_the_half_line_of_a_killed_writer(tmp_path: Path, length: int) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"b": "' + "x" * length)
    assert read_json_lines(path) == [{"a": 1}]
    file = JsonLinesFile(path)
    file.write({"c": 3})
    assert read_json_lines(path) == [{"a": 1}, {"c": 3}]


def test_a_file_that_is_only_a_half_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a"')
    assert JsonLinesFile(path).offset == 0


@pytest.mark.parametrize("text", ["a\nb", "line\u2028separator", "\ud800 lone surrogate", "null \x00 byte"])
def test_any_text_is_one_line_of_valid_json_and_comes_back(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lines.jsonl"
    JsonLinesFile(path).write({"text": text})
    assert path.read_bytes().count(b"\n") == 1
    assert json.loads(path.read_bytes())["text"] == text
    assert read_json_lines(path) == [{"text": text}]


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(RunDirectoryError, match=r"lines\.jsonl, line 2: not valid JSON"):
        read_json_lines(path)


def test_truncating_beyond_the_end_is_an_error_instead_of_a_hole(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="has 0 bytes but the checkpoint was taken at byte 7"):
        LineFile(tmp_path / "lines").truncate(7)


def test_truncate_after_cuts_at_the_first_later_step(tmp_path: Path) -> None:
    file = JsonLinesFile(tmp_path / "lines.jsonl")
    for step in (0, 1, 1, 2, 3):
        file.write({"step": step})
    file.truncate_after(1)
    assert [line["step"] for line in read_json_lines(file.path)] == [0, 1, 1]
    file.truncate_after(5)
    assert len(read_json_lines(file.path)) == 3


def fill(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "inside").mkdir()
        (folder / "inside" / "file").write_text(text)

    return write


def content(folder: Path) -> str:
    return (folder / "inside" / "file").read_text()


def test_a_folder_is_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "export"
    for text in ("old", "new"):
        replace_folder(target, fill(text))
        assert content(target) == text
    assert os.listdir(tmp_path) == ["export"]


def test_a_folder_whose_replacement_fails_keeps_its_content(tmp_path: Path) -> None:
    target = tmp_path / "export"
    replace_folder(target, fill("old"))

    def fail(folder: Path) -> None:
        fill("half")(folder)
        raise RuntimeError("rank 1 died")

    with pytest.raises(RuntimeError, match="rank 1 died"):
        replace_folder(target, fail)
    assert content(target) == "old"
    assert os.listdir(tmp_path) == ["export"]


@pytest.mark.parametrize(("renames", "expected"), [(0, "old"), (1, "old"), (2, "new")])
def test_a_crash_while_a_folder_is_replaced_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int, expected: str
) -> None:
    """It stops after so many renames."""
    target = tmp_path / "export"
    replace_folder(target, fill("old"))
    done: list[Path] = []
    rename = Path.rename

    def rename_or_stop(path: Path, new: Path) -> Path:
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(path)
        return rename(path, new)

    with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
        patched.setattr(Path, "rename", rename_or_stop)
        replace_folder(target, fill("new"))
    recover_folder(target)
    assert content(target) == expected
    assert os.listdir(tmp_path) == ["export"]
