"""A limit on the time of one piece of work, which may be anybody's code and may never return.

An alarm of the operating system interrupts Python code wherever it is. Code that does not come back to Python cannot be
interrupted: a thread ends the process then, after what it was told to say. What is committed by then stays so.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from specbench_ss.errors import UserError

GRACE_S = 20.0  # for code outside Python to return once its time is over
AGAIN_S = 1.0  # the alarm is repeated: somebody may have caught the first
_held_back: list[bool] = []  # one for each that holds it back


class TimeIsOver(BaseException):  # noqa: N818
    """Raised within the work. No Exception, so that work which goes on after any of these ends all the same."""


@contextlib.contextmanager
def time_limit(seconds: float | None, last_words: Callable[[], str] = lambda: "") -> Iterator[None]:
    """End the block with TimeIsOver after so many seconds; None sets no limit.

    last_words: gives the line that is printed where the block cannot be interrupted and the process ends, with exit
    code 2. Only the main thread can be interrupted: elsewhere UserError is raised at once. Limits do not nest.
    """
    if seconds is None:
        yield
        return
    check_thread()
    over = threading.Timer(seconds + GRACE_S, _leave, (last_words,))
    over.daemon = True
    before = signal.signal(signal.SIGALRM, _interrupt)
    over.start()
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
            yield
        finally:
            _disarm()
    finally:
        over.cancel()
        over.join()
        signal.signal(signal.SIGALRM, signal.SIG_DFL if before is None else before)


@contextlib.contextmanager
def defer_alarm() -> Iterator[None]:
    """Within: time that is over ends nothing. The alarm is repeated, so that it ends the work soon afterwards.

    For what may not be broken off half-way, such as a recording of a device's work.
    """
    _held_back.append(True)
    try:
        yield
    finally:
        _held_back.pop()


def check_thread() -> None:
    """Raise UserError where no time limit can be set."""
    if threading.current_thread() is not threading.main_thread():
        raise UserError("a time limit can only be set in the main thread of a program")


def _disarm() -> None:
    """No alarm from now on. One that comes while this is done is of no use any more."""
    while True:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)  # first: an alarm between the two would be another one
            signal.setitimer(signal.ITIMER_REAL, 0)
        except TimeIsOver:
            continue
        return


def _interrupt(number: int, frame: FrameType | None) -> None:
    if not _held_back:
        raise TimeIsOver


def _leave(last_words: Callable[[], str]) -> None:
    """End the process at once: the main thread cannot."""
    show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""
    os.write(2, f"{show_cursor}\nssbench: {last_words()}\n".encode(errors="replace"))
    os._exit(2)
