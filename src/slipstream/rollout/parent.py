"""Processes that end with the process that started them, however that ends."""

import ctypes
import multiprocessing
import os
import signal

PR_SET_PDEATHSIG = 1  # of prctl(2)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends; leave at once where it is gone already.

    The parent is the thread that started this process. For processes that `multiprocessing` started.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)
