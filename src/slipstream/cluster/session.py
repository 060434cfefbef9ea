"""One Ray session for one run: started (or joined) here, and cleaned up here whatever happens.

Everything a run starts carries its run id in the environment (`SLIPSTREAM_RUN_ID`), and shared memory carries it in
the name, so that at the end nothing of it stays: no process, no Ray session, no segment. A controller that is killed
outright cannot clean up; a watchdog does it then.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from slipstream.cluster.calls import PendingCall, RemoteEngine, gather
from slipstream.cluster.remains import (
    RUN_ID_VARIABLE,
    TEMPORARY_PREFIX,
    kill_processes_of_run,
    posix_segments,
    remove_remains_of_dead_runs,
    remove_segments,
    remove_unused_posix_segments,
)
from slipstream.cluster.watchdog import Watchdog
from slipstream.config.schema import ClusterConfig
from slipstream.errors import EngineError
from slipstream.observe.logs import get_logger

LOOPBACK, LOOPBACK_INTERFACE = "127.0.0.1", "lo"
OBJECT_STORE_BYTES = 1 << 30
ENGINE_SHUTDOWN_DEADLINE_S = 10.0
REACH_DEADLINE_S = 10.0

logger = get_logger("cluster")


class ClusterSession:
    """A Ray session and the engines started in it. Use it as a context manager.

    `log_folder` receives the engines' log files when the session ends.
    """

    def __init__(self, config: ClusterConfig, *, log_folder: Path) -> None:
        self.config = config
        self.run_id = f"{os.getpid()}-{os.urandom(3).hex()}"
        self.engines: list[RemoteEngine] = []
        self._final_log_folder = log_folder
        self._temporary_folder: Path | None = None
        self._watchdog: Watchdog | None = None
        self._psm_before = posix_segments()

    @property
    def log_folder(self) -> Path | None:
        """Where engines write while they run; None in a cluster that we joined."""
        return self._temporary_folder / "session_latest" / "logs" if self._temporary_folder else None

    @property
    def temporary_folder(self) -> Path | None:
        """Removed at the end with all that engines put into it; None in a cluster that we joined."""
        return self._temporary_folder

    def __enter__(self) -> ClusterSession:
        remove_remains_of_dead_runs()
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        # Ray lowers the priority of workers by default: imports then take minutes beside a busy controller.
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - the name Ray reads
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        os.environ[RUN_ID_VARIABLE] = self.run_id
        if self.config.address is None:
            _use_own_token()
        import ray

        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
        if self.config.address is None:
            # A short path: the sockets in it may not exceed 107 characters.
            self._temporary_folder = Path("/tmp") / f"{TEMPORARY_PREFIX}{self.run_id}"
            self._temporary_folder.mkdir(mode=0o700)
            options |= {
                "address": "local",
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
                "_temp_dir": str(self._temporary_folder),
            }
        else:
            _require_reachable(self.config.address)
            options |= {"address": self.config.address}
        self._watchdog = Watchdog(self.run_id, self._temporary_folder)
        try:
            ray.init(**options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            if self.config.address is None:
                raise EngineError(f"could not start Ray here: {error}") from error
            raise EngineError(
                f"could not join the Ray cluster at {self.config.address} (cluster.address): {error}; "
                "if it asks for a token, set RAY_AUTH_MODE=token"
            ) from error

    def start_engine(
        self,
        name: str,
        engine_class: type,
        *arguments: Any,
        cpus: float,
        gpus: float = 0.0,
        environment: dict[str, str] | None = None,
    ) -> RemoteEngine:
        """Make a Ray actor of `engine_class`; its constructor runs there. Wait for it with `await_engines`."""
        import ray

        actor_class = ray.remote(engine_class)
        handle = actor_class.options(
            num_cpus=cpus,
            num_gpus=gpus,
            max_restarts=0,
            runtime_env={"env_vars": self._environment | (environment or {})},
        ).remote(*arguments)
        engine = RemoteEngine(name=name, handle=handle, log_folder=self.log_folder)
        if self.config.address is None:
            engine.address = LOOPBACK
        self.engines.append(engine)
        return engine

    @property
    def _environment(self) -> dict[str, str]:
        """What every engine finds in its environment. On one machine collectives stay on the loopback interface."""
        local = {"GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE} if self.config.address is None else {}
        return {RUN_ID_VARIABLE: self.run_id} | local

    def close(self) -> None:
        """Stop every engine, stop Ray where we started it, and remove what is left. Safe to call twice."""
        import ray

        with ignore_interrupts():
            if ray.is_initialized():
                self._stop_engines()
                ray.shutdown()
            self.engines.clear()
            kill_processes_of_run(self.run_id)
            self._keep_logs()
            remove_segments(self.run_id)
            remove_unused_posix_segments(posix_segments() - self._psm_before)
            os.environ.pop(RUN_ID_VARIABLE, None)
            if self._watchdog is not None:
                self._watchdog.dismiss()
                self._watchdog = None

    def _stop_engines(self) -> None:
        import ray
        from ray.exceptions import RayError

        calls = [engine.submit("shutdown") for engine in self.engines]
        ready, _ = (
            ray.wait([call.reference for call in calls], num_returns=len(calls), timeout=ENGINE_SHUTDOWN_DEADLINE_S)
            if calls
            else ([], [])
        )
        for call in calls:
            if call.reference in ready:
                try:
                    ray.get(call.reference)
                except RayError as error:
                    logger.info(f"{call.engine.name} did not shut down by itself: {type(error).__name__}")
            else:
                logger.warning(f"{call.engine.name} did not shut down within {ENGINE_SHUTDOWN_DEADLINE_S:.0f} s")
            ray.kill(call.engine.handle)

    def _keep_logs(self) -> None:
        if self._temporary_folder is None:
            return
        if self.log_folder is not None and self.log_folder.is_dir():
            # A full disk must not keep us from cleaning up.
            with suppress(OSError):
                self._final_log_folder.mkdir(parents=True, exist_ok=True)
                for path in self.log_folder.glob("worker-*"):
                    if path.stat().st_size:
                        shutil.copy2(path, self._final_log_folder / path.name)
        shutil.rmtree(self._temporary_folder, ignore_errors=True)
        self._temporary_folder = None


def _use_own_token() -> None:
    """Protect the Ray that we start by a token that only this process and its children know.

    Left to itself Ray writes a token into the user's home folder and says so at every start. One token for the life
    of the process: Ray remembers the first it was given.
    """
    if "RAY_AUTH_MODE" in os.environ or "ray" in sys.modules:
        return  # chosen by the user, or read by Ray already
    os.environ["RAY_AUTH_MODE"] = "token"
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def _require_reachable(address: str) -> None:
    """Raise EngineError if nothing listens at 'host:port': Ray would end the process without an exception."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=REACH_DEADLINE_S).close()
    except OSError as error:
        raise EngineError(
            f"could not join the Ray cluster at {address} (cluster.address): {error}; start it with `ray start --head`"
        ) from error


@contextmanager
def ignore_interrupts() -> Iterator[None]:
    """A second Ctrl-C must not cut the clean-up short."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM (a scheduler's polite end) takes the same way out as Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def identify_engines(engines: list[RemoteEngine], *, deadline_s: float) -> None:
    """Wait until each engine's process runs; learn its process id, host and address. Errors then show its log.

    On one machine the address is the loopback one, so that nothing listens where others could come.
    """
    import ray

    calls = [PendingCall(engine, "process start", engine.handle.__ray_call__.remote(_identity)) for engine in engines]
    identities = gather(calls, deadline_s=deadline_s)
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()} if engines else {}
    for engine, (pid, host, node_id) in zip(engines, identities, strict=True):
        engine.pid, engine.node = pid, host
        engine.address = engine.address or addresses[node_id]


def await_engines(engines: list[RemoteEngine], *, deadline_s: float) -> list[dict[str, Any]]:
    """Call `start` on each engine and wait until all have returned; returns what each returned."""
    identify_engines([engine for engine in engines if engine.pid is None], deadline_s=deadline_s)
    return gather([engine.submit("start", *engine.start_arguments) for engine in engines], deadline_s=deadline_s)


def _identity(_actor: object) -> tuple[int, str, str]:
    import ray

    return os.getpid(), socket.gethostname(), ray.get_runtime_context().get_node_id()
