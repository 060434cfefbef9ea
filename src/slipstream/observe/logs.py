"""Structured logging to standard error: a message and named fields, `12:30:01 INFO workflow: saved step=10 bytes=512`.

For events that are worth a line outside of the metrics: starts, warnings, faults. Standard output is left to people's
tables and to the last line of JSON.
"""

import json
import logging
import sys
from typing import Any, TextIO

ROOT_NAME = "slipstream"
FIELDS = "slipstream_fields"


class StructuredLogger:
    """A named logger whose methods take a message and fields as keyword arguments."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, message: str, **fields: Any) -> None:
        """For developers; not shown by default."""
        self._log(logging.DEBUG, message, fields)

    def info(self, message: str, **fields: Any) -> None:
        """Something expected happened."""
        self._log(logging.INFO, message, fields)

    def warning(self, message: str, **fields: Any) -> None:
        """Something that the user should know, while the run goes on."""
        self._log(logging.WARNING, message, fields)

    def error(self, message: str, **fields: Any) -> None:
        """Something that ends the run or loses work."""
        self._log(logging.ERROR, message, fields)

    def _log(self, level: int, message: str, fields: dict[str, Any]) -> None:
        self._logger.log(level, "%s", message, extra={FIELDS: fields})


def get_logger(name: str) -> StructuredLogger:
    """The logger `name` (such as "workflow" or "rollout"), below the one root that writes to standard error."""
    root = logging.getLogger(ROOT_NAME)
    if not any(isinstance(handler, _StandardErrorHandler) for handler in root.handlers):
        handler = _StandardErrorHandler()
        handler.setFormatter(_Formatter())
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        root.propagate = False
    return StructuredLogger(root.getChild(name))


class _StandardErrorHandler(logging.StreamHandler[TextIO]):
    """Looks `sys.stderr` up at each line, because a live progress bar replaces it while it is on the screen."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class _Formatter(logging.Formatter):
    """One line a record, with newlines and control characters escaped."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, FIELDS, {})
        name = record.name.removeprefix(f"{ROOT_NAME}.")
        shown = "".join(f" {key}={_show(value)}" for key, value in fields.items())
        message = "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in record.getMessage())
        return f"{self.formatTime(record, '%H:%M:%S')} {record.levelname} {name}: {message}{shown}"


def _show(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    plain = text and text.isprintable() and not any(c in text for c in ' "=')
    return text if plain else json.dumps(text, ensure_ascii=not text.isprintable())
