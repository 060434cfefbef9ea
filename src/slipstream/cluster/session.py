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
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from slipstream.cluster.calls import EngineRecipe, EngineState, PendingCall, ProcessIdentity, RemoteEngine, gather
from slipstream.cluster.ray_processes import RayProcesses
from slipstream.cluster.remains import (
    RUN_ID_VARIABLE,
    TEMPORARY_PREFIX,
    kill_process_tree,
    kill_processes_of_run,
    posix_segments,
    remove_remains_of_dead_runs,
    remove_segments,
    remove_unused_posix_segments,
)
from slipstream.cluster.waits import WaitWatch, waiting
from slipstream.cluster.watchdog import Watchdog
from slipstream.config.schema import ClusterConfig
from slipstream.errors import EngineError, EngineLostError
from slipstream.observe.logs import get_logger

LOOPBACK, LOOPBACK_INTERFACE = "127.0.0.1", "lo"
OBJECT_STORE_BYTES = 1 << 30
ENGINE_SHUTDOWN_DEADLINE_S = 10.0
REACH_DEADLINE_S = 10.0
SLOW_START = "timed out during startup"
"""What Ray says where its own processes did not come up in time."""

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
        self._wait_watch: WaitWatch | None = None
        self._ray_processes = RayProcesses()
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
        # Ray would start an idle process for each core, and none of them would be used: engines have environments of
        # their own.
        os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        os.environ[RUN_ID_VARIABLE] = self.run_id
        if self.config.address is None:
            _use_own_token()

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
        self._wait_watch = WaitWatch()
        try:
            self._initialize_ray(options)
        except Exception as error:  # Ray raises that very class where its processes are slow to come up.
            if self.config.address is None:
                raise EngineLostError(f"could not start Ray here: {error}") from error
            raise EngineError(
                f"could not join the Ray cluster at {self.config.address} (cluster.address): {error}; "
                "if it asks for a token, set RAY_AUTH_MODE=token"
            ) from error
        self._ray_processes.find()

    def _initialize_ray(self, options: dict[str, Any]) -> None:
        """Start or join Ray. On a busy machine its processes may take longer than the half minute it gives them."""
        import ray

        deadline = time.monotonic() + self.config.start_timeout_s
        with waiting("Ray: start", deadline_s=self.config.start_timeout_s):
            while True:
                try:
                    ray.init(**options)
                    return
                except Exception as error:
                    if SLOW_START not in str(error) or time.monotonic() > deadline:
                        raise
                    logger.warning("Ray was slow to start, and is started once more")
                    ray.shutdown()
                    kill_processes_of_run(self.run_id)

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
        recipe = EngineRecipe(engine_class, arguments, cpus, gpus, self._environment | (environment or {}))
        handle = _make_actor(recipe, node_id=None)
        engine = RemoteEngine(name=name, handle=handle, log_folder=self.log_folder, recipe=recipe)
        if self.config.address is None:
            engine.address = LOOPBACK
        self.engines.append(engine)
        return engine

    def restart_engine(self, engine: RemoteEngine) -> PendingCall:
        """Kill what is left of an engine's process and make a new one in its place; see `Restarter`. Does not wait."""
        import ray

        ray.kill(engine.handle)
        if engine.pid is not None and engine.node == socket.gethostname():
            # A process that hangs takes no message of Ray's.
            kill_process_tree(engine.pid, engine.process_started)
        engine.pid = None
        # Where it was: the weights may come through that machine's memory.
        engine.handle = _make_actor(engine.recipe, node_id=engine.node_id)
        return identify(engine)

    @property
    def _environment(self) -> dict[str, str]:
        """What every engine finds in its environment. On one machine collectives stay on the loopback interface."""
        local = {"GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE} if self.config.address is None else {}
        return {RUN_ID_VARIABLE: self.run_id} | local

    def close(self) -> None:
        """Stop every engine, stop Ray where we started it, and remove what is left. Safe to call twice."""
        import ray

        with ignore_interrupts():
            if self._wait_watch is not None:
                self._wait_watch.close()
            if ray.is_initialized():
                if self._ray_processes.are_alive:
                    self._stop_engines()
                ray.shutdown()
            self._ray_processes.forget()
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

        # One that is being started anew answers only when that is done, and has nothing to put away.
        running = [engine for engine in self.engines if engine.state is not EngineState.STARTING]
        calls = [engine.submit("shutdown") for engine in running]
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
        for engine in self.engines:
            ray.kill(engine.handle)

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


def _make_actor(recipe: EngineRecipe | None, *, node_id: str | None) -> Any:
    """A Ray actor by the recipe, on the node of that id; None leaves the node to Ray."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    assert recipe is not None, "an engine of a session has a recipe"
    options: dict[str, Any] = {}
    if node_id is not None:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=False)
    actor_class = ray.remote(recipe.engine_class)
    return actor_class.options(
        num_cpus=recipe.cpus,
        num_gpus=recipe.gpus,
        max_restarts=0,
        runtime_env={"env_vars": recipe.environment},
        **options,
    ).remote(*recipe.arguments)


def identify(engine: RemoteEngine) -> PendingCall:
    """Ask an engine which process it is; its answer is for `RemoteEngine.identified`."""
    return PendingCall(engine, "process start", engine.handle.__ray_call__.remote(_identity), engine.incarnation)


def identify_engines(engines: list[RemoteEngine], *, deadline_s: float) -> None:
    """Wait until each engine's process runs; learn its process id, host and address. Errors then show its log.

    On one machine the address is the loopback one, so that nothing listens where others could come.
    """
    _note_identities([identify(engine) for engine in engines], deadline_s=deadline_s)


def _note_identities(calls: list[PendingCall], *, deadline_s: float) -> None:
    import ray

    identities = gather(calls, deadline_s=deadline_s)
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()} if calls else {}
    for call, identity in zip(calls, identities, strict=True):
        call.engine.identified(identity)
        call.engine.address = call.engine.address or addresses[call.engine.node_id]


@dataclass(frozen=True)
class EngineStart:
    """An engine that is on its way: which process it is, and the call of its `start`."""

    identity: PendingCall
    start: PendingCall


def begin_starts(engines: list[RemoteEngine]) -> list[EngineStart]:
    """Have `start` run on each engine as soon as its process is up, whatever the others do. Does not wait."""
    return [EngineStart(identify(engine), engine.submit("start", *engine.start_arguments)) for engine in engines]


def await_starts(starts: list[EngineStart], *, deadline_s: float) -> list[dict[str, Any]]:
    """Wait until every engine has started; returns what each `start` returned."""
    _note_identities([each.identity for each in starts], deadline_s=deadline_s)
    return gather([each.start for each in starts], deadline_s=deadline_s)


def await_engines(engines: list[RemoteEngine], *, deadline_s: float) -> list[dict[str, Any]]:
    """Call `start` on each engine and wait until all have returned; returns what each returned."""
    return await_starts(begin_starts(engines), deadline_s=deadline_s)


def _identity(_actor: object) -> ProcessIdentity:
    import psutil
    import ray

    started = psutil.Process().create_time()
    return ProcessIdentity(os.getpid(), started, socket.gethostname(), ray.get_runtime_context().get_node_id())
