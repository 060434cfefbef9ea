"""Checkpoints that are complete or absent, and are verified before they are trusted.

A checkpoint is written aside into `step-000010.partial`, described by a manifest (size and checksum of every file),
made durable, and renamed. What it contains is the workflow's and the learner's business. Only after a newer checkpoint
is complete are older ones removed; one of them, that of the best policy, can be protected from it.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from slipstream.errors import TrainingError
from slipstream.observe.files import FULL_DISK_ERRORS, sync_folder, sync_tree, write_json_atomically

MANIFEST = "manifest.json"
PARTIAL_SUFFIX = ".partial"
REMOVED_SUFFIX = ".removed"
READ_BYTES = 1 << 20
# A writer that wraps its errors (torch.save does) leaves no error number; this little free space tells the same.
FULL_DISK_FREE_BYTES = 1 << 20


class CheckpointStore:
    """The checkpoints of one run: the `keep` newest, and that of `protected_step` however old it is.

    Opening removes what a killed run left half done.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep
        self.protected_step: int | None = None
        self.warnings: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)
        self._clean_up()

    def write(self, step: int, write: Callable[[Path], None]) -> Path:
        """Save the checkpoint of `step`: `write` fills the folder it is given. Returns the finished folder.

        A checkpoint of the same step is replaced. If anything fails, the half-written folder is removed and older
        checkpoints stay. Raises TrainingError if the disk is full, and whatever else `write` raises as it is.
        """
        target = self.folder / checkpoint_name(step)
        partial = target.with_name(target.name + PARTIAL_SUFFIX)
        try:
            partial.mkdir()
            write(partial)
            _write_manifest(partial, step)
        except BaseException as error:
            full = _is_full_disk(error, self.folder)
            shutil.rmtree(partial, ignore_errors=True)
            if full:
                raise TrainingError(
                    f"no space left on the disk while saving the checkpoint of step {step} in {self.folder}: earlier "
                    "checkpoints are untouched; free some space and continue with `slipstream resume`"
                ) from error
            raise
        if target.exists():
            self._remove(target)
        partial.rename(target)
        sync_folder(self.folder)
        self.prune(step)
        return target

    def prune(self, step: int) -> None:
        """Of the checkpoints up to `step`, remove all but the `keep` newest complete ones and the protected one."""
        complete = 0
        for folder in reversed([path for path in self._checkpoints() if checkpoint_step(path) <= step]):
            if complete < self.keep:
                complete += find_damage(folder, checksums=False) is None
            elif checkpoint_step(folder) != self.protected_step:
                self._remove(folder)

    def latest(self) -> Path | None:
        """The newest complete checkpoint, every file of it verified, or None.

        `warnings` then holds one text for each newer checkpoint that is damaged and was passed over.
        """
        self.warnings = []
        for folder in reversed(self._checkpoints()):
            damage = find_damage(folder)
            if damage is None:
                return folder
            self.warnings.append(f"checkpoint {folder} is damaged and was passed over: {damage}")
        return None

    def _checkpoints(self) -> list[Path]:
        """Folders named like checkpoints, oldest first; not verified."""
        return sorted(
            (path for path in self.folder.iterdir() if re.fullmatch(r"step-\d+", path.name)), key=checkpoint_step
        )

    def _remove(self, folder: Path) -> None:
        # Renamed first: a kill halfway leaves no folder that looks like a checkpoint.
        removed = folder.with_name(folder.name + REMOVED_SUFFIX)
        folder.rename(removed)
        shutil.rmtree(removed)

    def _clean_up(self) -> None:
        for partial in self.folder.glob(f"*{PARTIAL_SUFFIX}"):
            target = partial.with_name(partial.name.removesuffix(PARTIAL_SUFFIX))
            # The manifest is written last: a partial folder that agrees with it was complete but for its name.
            if find_damage(partial) is None and not target.exists():
                partial.rename(target)
            else:
                shutil.rmtree(partial)
        for removed in self.folder.glob(f"*{REMOVED_SUFFIX}"):
            shutil.rmtree(removed)
        sync_folder(self.folder)


def checkpoint_name(step: int) -> str:
    """The name of the folder of a step's checkpoint."""
    return f"step-{step:06d}"


def checkpoint_step(folder: Path) -> int:
    """The step a checkpoint folder was taken at, from its name."""
    return int(folder.name.removeprefix("step-"))


def find_damage(folder: Path, *, checksums: bool = True) -> str | None:
    """What is wrong with a checkpoint, or None if all files of its manifest are there, whole and unchanged.

    Without `checksums` only existence and sizes are compared, which reads nothing but the manifest.
    """
    try:
        files: dict[str, dict[str, Any]] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (ValueError, KeyError, TypeError) as error:
        return f"its {MANIFEST} is not readable ({error})"
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != expected["bytes"]:
            return f"{name} has {size} bytes instead of {expected['bytes']}"
        if checksums and _checksum(path) != expected["xxh3_64"]:
            return f"{name} does not have the checksum it was written with"
    return None


def _write_manifest(folder: Path, step: int) -> None:
    """Make every file and folder durable, then write the manifest that declares them complete."""
    sync_tree(folder)
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "xxh3_64": _checksum(path)}
        for path in _files(folder)
    }
    if not files:
        raise ValueError(f"the checkpoint of step {step} is empty")
    write_json_atomically(folder / MANIFEST, {"step": step, "files": files})


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as stream:
        while block := stream.read(READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _is_full_disk(error: BaseException, folder: Path) -> bool:
    """Whether `error`, or one that led to it, comes from a full disk.

    Has to be asked before the half-written files are removed, which frees space.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in FULL_DISK_ERRORS:
            return True
        cause = cause.__cause__ or cause.__context__
    if not isinstance(error, Exception):
        return False
    return os.strerror(errno.ENOSPC) in str(error) or shutil.disk_usage(folder).free < FULL_DISK_FREE_BYTES
