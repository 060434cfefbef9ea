"""Metrics for other tools: TensorBoard event files, and Weights & Biases where a project is configured.

The run directory's own `metrics.jsonl` is the record; trackers show the same numbers elsewhere. TensorBoard's own
record format is written, so no torch is imported here.
"""

import importlib
import os
import platform
import time
import uuid
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from slipstream.config.schema import TrackingConfig
from slipstream.errors import ConfigError
from slipstream.observe.files import storage_errors, write_text_atomically


class _Tracker(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """All trackers that the configuration switches on.

    `folder` is the run directory, `name` what the run is called elsewhere. With `resumed_after` (the step of the
    checkpoint) later steps that an interrupted run had logged are superseded.
    Raises ConfigError if a tracker is configured that cannot work: package or key missing.
    """

    def __init__(self, config: TrackingConfig, folder: Path, *, name: str, resumed_after: int | None = None) -> None:
        self._trackers: list[_Tracker] = []
        if config.wandb_project is not None:
            self._trackers.append(_WeightsAndBiases(config.wandb_project, folder, name))
        if config.tensorboard:
            self._trackers.append(_TensorBoard(folder / "tensorboard", resumed_after))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log the numbers of a step; values that are not numbers (null in a metrics line) are left out."""
        numbers = {
            name: float(value)
            for name, value in metrics.items()
            if isinstance(value, Real) and name not in ("step", "policy_version")
        }
        for tracker in self._trackers:
            tracker.log(step, numbers)

    def close(self) -> None:
        """Write out what is buffered. Closing twice is harmless."""
        while self._trackers:
            self._trackers.pop().close()


class _TensorBoard:
    """An event file under `tensorboard/`, complete after each step, so that a killed run has it.

    Written record by record: TensorBoard's EventFileWriter writes in a thread, where a full disk goes unnoticed.
    """

    def __init__(self, folder: Path, resumed_after: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        name = f"events.out.tfevents.{time.time_ns()}.{platform.node()}.{os.getpid()}"
        self._path = folder / name
        with storage_errors(self._path):
            folder.mkdir(parents=True, exist_ok=True)
            self._records = RecordWriter(self._path.open("wb"))
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if resumed_after is not None:
            # TensorBoard discards what earlier files have from this step on.
            start = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=resumed_after + 1, session_log=start))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        with storage_errors(self._path):
            self._records.close()

    def _write(self, event: Any) -> None:
        with storage_errors(self._path):
            self._records.write(event.SerializeToString())
            self._records.flush()


class _WeightsAndBiases:
    """A W&B run, continued under its identifier when the run directory is resumed."""

    def __init__(self, project: str, folder: Path, name: str) -> None:
        wandb = _import_wandb()
        offline = os.environ.get("WANDB_MODE") in ("offline", "disabled")
        if not offline and not os.environ.get("WANDB_API_KEY"):
            raise ConfigError(
                f"tracking.wandb_project is {project!r} but WANDB_API_KEY is not set: set it, or WANDB_MODE=offline, "
                "or leave tracking.wandb_project out"
            )
        identifier_file = folder / "wandb_run_id.txt"
        if not identifier_file.exists():
            write_text_atomically(identifier_file, uuid.uuid4().hex[:12])
        identifier = identifier_file.read_text(encoding="utf-8").strip()
        self._run = wandb.init(project=project, name=name, dir=str(folder), id=identifier, resume="allow")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def _import_wandb() -> ModuleType:
    try:
        return importlib.import_module("wandb")
    except ModuleNotFoundError as error:
        if error.name != "wandb":
            raise
        raise ConfigError(
            "tracking.wandb_project is set but the package wandb is not installed: run `pip install wandb`, or leave "
            "tracking.wandb_project out"
        ) from error
