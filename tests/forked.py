"""Processes that begin as copies of this one: they are there in milliseconds, with every package imported.

They stand for processes that would import all packages first, which takes seconds, where a test is not of the imports.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn


class Forked:
    """A process that calls a function and ends with the code that it returns, or by which it exits.

    output: file of what it prints. env: variables of its own. keep: descriptors that stay open, or None for all.
    """

    def __init__(
        self,
        function: Callable[[], Any],
        output: Path = Path(os.devnull),
        env: Mapping[str, str] | None = None,
        keep: Sequence[int] | None = None,
    ) -> None:
        self.pid = os.fork()
        if not self.pid:
            _run(function, output, env or {}, keep)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, or a signal's number below 0. Raises TimeoutError after so many seconds."""
        until = time.monotonic() + timeout if timeout is not None else None
        while True:
            pid, status = os.waitpid(self.pid, 0 if until is None else os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if until is not None and time.monotonic() > until:
                self.send_signal(signal.SIGKILL)
                raise TimeoutError(f"no end within {timeout} s")
            time.sleep(0.01)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def module(command: Sequence[str], **given: Any) -> Forked:
    """Return a process as `subprocess.Popen` makes it of `python -m MODULE ARGUMENTS`, without input and output."""
    _, dash, name, *arguments = command
    assert dash == "-m"

    def run() -> None:
        os.setpgid(0, given.get("process_group", os.getpgid(0)))
        sys.argv = [name, *arguments]
        runpy.run_module(name, run_name="__main__")

    return Forked(run, keep=given.get("pass_fds", ()))


def _run(function: Callable[[], Any], output: Path, env: Mapping[str, str], keep: Sequence[int] | None) -> NoReturn:
    code: Any = 1
    try:
        written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for standard in (1, 2):
            os.dup2(written, standard)
        if keep is not None:
            for descriptor in map(int, os.listdir("/proc/self/fd")):
                if descriptor > 2 and descriptor not in keep:
                    with suppress(OSError):  # the folder that was listed
                        os.close(descriptor)
        sys.stdout, sys.stderr = (open(n, "w", closefd=False) for n in (1, 2))  # noqa: SIM115
        os.environ.update(env)
        code = function()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else code is not None)
