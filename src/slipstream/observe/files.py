"""Writing files that survive a kill: atomic replacement, and append-only line files that are never left half a line.

Everything else in `observe` writes through here, so a full disk is reported in one way. Durability against power loss
is left to `sync`, which is called where a checkpoint depends on it.
"""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from slipstream.errors import RunDirectoryError, TrainingError

FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn a full disk (or an exhausted quota) inside the block into a TrainingError that names `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL_DISK_ERRORS:
            raise TrainingError(
                f"no space left on the disk while writing {path}: free some space and continue with `slipstream resume`"
            ) from error
        raise


def to_json(record: Any, *, indent: int | None = None) -> str:
    """Strict JSON: NaN and infinity raise ValueError; objects JSON does not know (dates, arrays) become their text."""
    return json.dumps(record, allow_nan=False, ensure_ascii=False, default=str, indent=indent)


def encode(text: str) -> bytes:
    """UTF-8. A lone surrogate becomes its escape `\\udXXX`, which inside a JSON string is still valid JSON."""
    return text.encode("utf-8", errors="backslashreplace")


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable (a rename is only safe once its folder is)."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Make every file below `folder`, and every name, durable."""
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    sync_folder(folder)


def replace_folder(target: Path, fill: Callable[[Path], None]) -> None:
    """Replace a folder by what `fill` writes into a fresh one, once all of that is durable.

    If anything fails, the old content stays. After a crash `recover_folder` finds the old content or the new, never a
    mixture. Raises TrainingError on a full disk, and whatever else `fill` raises as it is.
    """
    partial, removed = _set_aside(target)
    recover_folder(target)
    try:
        with storage_errors(target):
            partial.mkdir()
            fill(partial)
            sync_tree(partial)
            if target.exists():
                target.rename(removed)
            partial.rename(target)
            sync_folder(target.parent)
    finally:
        recover_folder(target)


def recover_folder(target: Path) -> None:
    """Put right what a crash in `replace_folder` left: the folder is there if it ever was, and nothing beside it."""
    partial, removed = _set_aside(target)
    if removed.exists() and not target.exists():
        removed.rename(target)
    for folder in (partial, removed):
        if folder.exists():
            shutil.rmtree(folder)


def _set_aside(target: Path) -> tuple[Path, Path]:
    return target.with_name(f".{target.name}.partial"), target.with_name(f".{target.name}.removed")


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` at the end, made durable; after an error inside `path` is as it was."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with storage_errors(path), partial.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_text_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text`: a reader, or a crash at any moment, sees the old content or the new, never a mixture.

    Raises TrainingError on a full disk; the old content is then still there.
    """
    with _replacing(path) as stream:
        stream.write(encode(text))


def write_json_atomically(path: Path, record: Any) -> None:
    """`write_text_atomically` of an indented JSON document."""
    write_text_atomically(path, to_json(record, indent=2) + "\n")


def replace_json_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> int:
    """Replace `path` by one JSON object a line, as `write_text_atomically` does; returns how many there are.

    `records` is read as it is written. Raises ValueError on NaN or infinity.
    """
    count = 0
    with _replacing(path) as stream:
        for record in records:
            stream.write(encode(to_json(record) + "\n"))
            count += 1
    return count


class LineFile:
    """A file to which whole lines are appended, each handed to the kernel at once (a `kill -9` loses none).

    Opening drops a last line without its newline, which only a killed writer leaves behind.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with storage_errors(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self.truncate(self._end_of_last_whole_line())

    @property
    def offset(self) -> int:
        """Length in bytes: where the next line will start."""
        return os.fstat(self._descriptor).st_size

    def append(self, line: str) -> None:
        """Append `line` and a newline. On a full disk nothing of it stays and TrainingError is raised."""
        start = self.offset
        remaining = memoryview(encode(line) + b"\n")
        with storage_errors(self.path):
            try:
                while remaining:
                    remaining = remaining[os.write(self._descriptor, remaining) :]
            except BaseException:
                os.ftruncate(self._descriptor, start)
                raise

    def truncate(self, offset: int) -> None:
        """Drop everything from byte `offset` on. Raises RunDirectoryError if the file is shorter than that."""
        if offset > self.offset:
            raise RunDirectoryError(
                f"{self.path} has {self.offset} bytes but the checkpoint was taken at byte {offset}: "
                "the file was changed after the checkpoint; restore it or start a new run"
            )
        if offset < self.offset:
            os.ftruncate(self._descriptor, offset)

    def sync(self) -> None:
        """Make all lines durable against power loss."""
        with storage_errors(self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _end_of_last_whole_line(self) -> int:
        end = self.offset
        while end > 0:
            start = max(0, end - 65536)
            newline = os.pread(self._descriptor, end - start, start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
        return 0


class JsonLinesFile(LineFile):
    """A `LineFile` of one JSON object a line, which can be cut back to a step when a run is resumed."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one object. Raises ValueError on NaN or infinity."""
        self.append(to_json(record))

    def truncate_after(self, step: int) -> None:
        """Drop the lines from the first one on whose `step` exceeds `step` (lines are in the order of their steps)."""
        for start, record in json_line_records(self.path):
            if record["step"] > step:
                self.truncate(start)
                return


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """All objects of a JSON lines file, in order; none if it does not exist.

    A last line without newline (its writer was killed) is left out. Raises RunDirectoryError, naming the line, if
    another line is not a JSON object.
    """
    return [record for _, record in json_line_records(path)] if path.exists() else []


def json_line_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Byte offset and object of every whole line. Raises as `read_json_lines` does."""
    offset = 0
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except ValueError as error:
                raise RunDirectoryError(f"{path}, line {number}: not valid JSON ({error}); remove that line") from error
            if not isinstance(record, dict):
                raise RunDirectoryError(f"{path}, line {number}: expected a JSON object, found {line[:40]!r}")
            yield offset, record
            offset += len(line)
