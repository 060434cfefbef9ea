"""What runs inside vLLM's EngineCore where an engine has several workers: vLLM's own executor, bound to its engine.

vLLM makes it by its import path (`distributed_executor_backend`). Everything that it starts is gone as soon as any of
it is: the kernel kills the EngineCore with the engine's process and the workers with the EngineCore
(`vllm_worker.py`), and here a worker that dies ends the EngineCore, which the engine notices. vLLM's own way is to ask
the other workers to leave first, and these wait for the dead one in a collective.
"""

import multiprocessing.connection
import os
import signal
import sys
import weakref
from threading import Thread

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from slipstream.rollout.parent import die_with_parent


class BoundExecutor(MultiprocExecutor):
    """vLLM's executor `mp`: the workers of one machine, each a child of this process."""

    def _init_executor(self) -> None:
        die_with_parent()
        super()._init_executor()

    def start_worker_monitor(self, inline: bool = False) -> None:
        """Kill this process when a worker ends before all of them are asked to."""
        watching = Thread(target=_watch, args=(weakref.ref(self),), daemon=True, name="worker watch")
        watching.start()
        if inline:
            watching.join()


def _watch(executor_reference: "weakref.ref[BoundExecutor]") -> None:
    executor = executor_reference()
    if executor is None:
        return
    processes = [(worker.rank, worker.proc) for worker in executor.workers]
    del executor
    ended = multiprocessing.connection.wait([process.sentinel for _, process in processes])
    executor = executor_reference()
    if executor is None or getattr(executor, "shutting_down", False):
        return
    for rank, process in processes:
        if process.sentinel in ended:
            # The exit code is only known once the process has been waited for.
            process.join()
            print(f"worker {rank} (process {process.pid}) died: exit code {process.exitcode}", file=sys.stderr)
    sys.stderr.flush()
    # Nothing is to be saved, and no way out of a collective with a dead worker is to be waited for.
    os.kill(os.getpid(), signal.SIGKILL)
