"""A folder that is written whole or not at all, for verbs that make a model folder of something else."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.errors import ModelError


def require_free(out: Path) -> None:
    """Raise ModelError if `out` exists and is not an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out} exists and is not an empty folder; choose another output folder or remove it")


@contextmanager
def written_whole(out: Path) -> Iterator[Path]:
    """A folder to write into, which gets the name `out` when the block ends, and is removed if it fails."""
    require_free(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temporary:
        partial = Path(temporary) / out.name
        partial.mkdir()
        yield partial
        partial.replace(out)
