"""What tells one model folder from another, without reading all of it."""

import hashlib
from pathlib import Path

PIECES, PIECE_BYTES = 16, 1 << 16
WEIGHT_PATTERNS = ("*.safetensors", "*.bin")


def model_fingerprint(path: str) -> str:
    """Changes with the configuration and the weights of a model folder, and not with its place; else the name itself.

    Of each file of weights the size is read, and pieces from its beginning to its end: training moves nearly every
    weight, so two models that differ do so in these.
    """
    folder = Path(path)
    if not folder.is_dir():
        return path
    digest = hashlib.sha256()
    config = folder / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    for file in sorted(file for pattern in WEIGHT_PATTERNS for file in folder.glob(pattern)):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            for piece in range(PIECES):
                stream.seek(max(0, size - PIECE_BYTES) * piece // (PIECES - 1))
                digest.update(stream.read(PIECE_BYTES))
    return digest.hexdigest()
