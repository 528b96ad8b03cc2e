"""Time limit and memory limit for arbitrary code that may never return.

An alarm of the operating system interrupts Python code anywhere. Code that does not return to Python cannot be
interrupted: a thread then prints a message and ends the process. Everything committed by then is kept.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from types import FrameType

from specbench_ss.errors import TimeIsOver as TimeIsOver
from specbench_ss.errors import UserError

GRACE_S = 20.0  # for native code to return after the limit
REPEAT_S = 1.0  # interval of the alarm, since the first may be caught
_deferred: list[bool] = []  # one entry per active `defer_alarm`


@contextlib.contextmanager
def time_limit(
    seconds: float | None, final_message: Callable[[], str] = lambda: "", exit_code: int = UserError.exit_code
) -> Iterator[Callable[[], None]]:
    """End the block with TimeIsOver after so many seconds; None sets no limit. Yield a function that restarts the time.

    final_message: returns the line to print if the block cannot be interrupted and the process ends with `exit_code`.
    Raises UserError outside the main thread, which alone can be interrupted. Limits do not nest.
    """
    if seconds is None:
        yield lambda: None
        return
    check_thread()
    end, ended = [math.inf], threading.Event()

    def restart() -> None:
        end[0] = monotonic() + seconds + GRACE_S
        signal.setitimer(signal.ITIMER_REAL, seconds, REPEAT_S)

    def watch() -> None:
        while not ended.wait(min(1.0, max(0.0, end[0] - monotonic()))):
            if monotonic() >= end[0]:
                _exit_process(final_message, exit_code)

    over = threading.Thread(target=watch, daemon=True)
    before = signal.signal(signal.SIGALRM, _interrupt)
    over.start()
    try:
        try:
            restart()
            yield restart
        finally:
            _disarm()
    finally:
        ended.set()
        over.join()
        signal.signal(signal.SIGALRM, signal.SIG_DFL if before is None else before)


@contextlib.contextmanager
def defer_alarm() -> Iterator[None]:
    """Defer TimeIsOver to the end of the block; the alarm repeats.

    For operations that must not be interrupted, such as a CUDA-graph capture.
    """
    _deferred.append(True)
    try:
        yield
    finally:
        _deferred.pop()


@contextlib.contextmanager
def memory_limit(size: int) -> Iterator[None]:
    """Raise MemoryError where the block needs this many bytes more than now; only Linux counts them."""
    before, statm = resource.getrlimit(resource.RLIMIT_AS), Path("/proc/self/statm")
    if statm.exists() and before[0] == resource.RLIM_INFINITY:
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def check_thread() -> None:
    """Raise UserError outside the main thread, where no time limit can be set."""
    if threading.current_thread() is not threading.main_thread():
        raise UserError("a time limit needs the main thread; call this from it")


def _disarm() -> None:
    """Disable the alarm, even if it fires meanwhile."""
    while True:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)  # first, since an alarm may fire between the two calls
            signal.setitimer(signal.ITIMER_REAL, 0)
        except TimeIsOver:
            continue
        return


def _interrupt(number: int, frame: FrameType | None) -> None:
    if not _deferred:
        raise TimeIsOver


def _exit_process(final_message: Callable[[], str], code: int) -> None:
    """End the process at once; the main thread cannot."""
    show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""
    os.write(2, f"{show_cursor}\nssbench: {final_message()}\n".encode(errors="replace"))
    os._exit(code)
