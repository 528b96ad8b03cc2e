"""Subprocess that executes code of a model within limits (docs/design/code-execution.md).

This file is also the program of the subprocess, so it imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

CPU_S = 5  # of all threads together
WALL_S = 15  # for programs that wait
GRACE_S = 2.0  # from then until the caller ends the process
MEMORY_BYTES = 2**30  # address space
FILE_BYTES = 2**24  # of each file
REASON_BYTES = 400
STARTED = b"started\n"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a program. reason: why it failed, in one line; '' of a program that ran to its end."""

    reason: str = ""

    @property
    def passed(self) -> bool:
        """Return True if the program ran to its end."""
        return not self.reason


def run_program(parts: Sequence[str]) -> Outcome:
    """Execute the parts of a program one after another, in one namespace, and wait for the end.

    The process, its process group and its working folder are gone afterwards. Raise RuntimeError if the process ends
    before it reaches the first part, which is no property of the program.
    """
    token = secrets.token_hex()
    with (
        tempfile.TemporaryDirectory(prefix="ssbench-code-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as request,
        tempfile.TemporaryFile() as report,
    ):
        limits = {"cpu_s": CPU_S, "wall_s": WALL_S}
        request.write(json.dumps({"token": token, "parts": list(parts), "limits": limits}).encode())
        request.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-sPB", str(Path(__file__).resolve())],
            stdin=request,
            stdout=report,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=_environment(folder),
            start_new_session=True,
        )
        try:
            status = process.wait(WALL_S + GRACE_S)
        except subprocess.TimeoutExpired:
            status = -signal.SIGALRM
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        report.seek(0)
        text = report.read(len(STARTED) + REASON_BYTES)
    if not text.startswith(STARTED):
        raise RuntimeError(f"the Python process for tests did not start ({_ending(status)})")
    written = text.removeprefix(STARTED).decode(errors="replace")
    return Outcome() if written == token else Outcome(" ".join(written.split()) or _ending(status))


def _environment(folder: str) -> dict[str, str]:
    """Return the variables of the subprocess: none of the user's, and a fixed order of sets."""
    libraries = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {"HOME": folder, "TMPDIR": folder, "PYTHONHASHSEED": "0", "PYTHONUTF8": "1", **libraries}


def _ending(status: int) -> str:
    """Describe the end of a process that did not report its result."""
    if status >= 0:
        return f"exited with status {status} before the end of the tests"
    if status == -signal.SIGXCPU:
        return f"used more than {CPU_S} s of CPU time"
    if status == -signal.SIGALRM:
        return f"took longer than {WALL_S} s"
    return f"ended by signal {-status}"


# The subprocess.

REFUSED = (  # audit events, by their beginning
    "socket.", "subprocess.", "ctypes.", "os.exec", "os.fork", "os.posix_spawn", "os.system", "os.kill", "pty.spawn",
)  # fmt: skip
WRITES: dict[str, tuple[tuple[int, int | None], ...]] = {  # positions of the paths that change, and of their dir_fd
    "os.remove": ((0, 1),), "os.rmdir": ((0, 1),), "os.mkdir": ((0, 2),), "os.rename": ((0, 2), (1, 3)),
    "os.link": ((0, 2), (1, 3)), "os.symlink": ((1, 2),), "os.chmod": ((0, 2),), "os.chown": ((0, 3),),
    "os.utime": ((0, 3),), "os.truncate": ((0, None),), "os.setxattr": ((0, None),), "os.removexattr": ((0, None),),
    "sqlite3.connect": ((0, None),),
}  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000  # of linux/sched.h


def _main() -> NoReturn:
    """Read the program from the standard input, execute it, and write the token to the standard output if it ends."""
    request = json.load(sys.stdin)
    out, null = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    _limit_resources(**request["limits"])
    _leave_network()
    os.write(out, STARTED)

    def end(reason: str) -> NoReturn:
        os.write(out, reason.encode(errors="replace")[:REASON_BYTES])
        os._exit(0)

    sys.argv = ["answer"]
    _refuse_access(os.path.realpath(os.getcwd()), end)
    end(_execute(request["parts"]) or request["token"])


def _limit_resources(cpu_s: int, wall_s: int) -> None:
    """Limit CPU time, memory, sizes of files, and the time until the process ends; no core dumps."""
    signal.alarm(wall_s)
    limits = {
        resource.RLIMIT_CPU: (cpu_s, cpu_s + 1),  # the first is a signal of its own
        resource.RLIMIT_AS: (MEMORY_BYTES, MEMORY_BYTES),
        resource.RLIMIT_FSIZE: (FILE_BYTES, FILE_BYTES),
        resource.RLIMIT_CORE: (0, 0),
    }
    for kind, wanted in limits.items():
        most = resource.getrlimit(kind)[1]
        with contextlib.suppress(ValueError):  # macOS refuses some
            soft, hard = (value if most == resource.RLIM_INFINITY else min(value, most) for value in wanted)
            resource.setrlimit(kind, (soft, hard))


def _leave_network() -> None:
    """Move into a network namespace without interfaces, where the system permits that to users."""
    if sys.platform == "linux":
        ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNET)


def _refuse_access(folder: str, end: Callable[[str], NoReturn]) -> None:
    """End the process at the first attempt to use the network, start or signal a process, or write elsewhere."""
    allowed, inside = (folder, os.path.realpath(os.devnull)), folder + os.sep

    def check(path: Any, dir_fd: int = -1) -> None:
        if not isinstance(path, int):
            place = "" if dir_fd < 0 else f"/dev/fd/{dir_fd}"  # a link to the directory; on macOS outside of the folder
            full = os.path.realpath(os.path.join(place, os.fsdecode(path)))
            if full not in allowed and not full.startswith(inside):
                end(f"wrote outside its folder: {full}")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(REFUSED):
            end(f"{event} is not allowed")
        if event == "open" and arguments[2] & WRITING:
            check(arguments[0])
        for at, fd_at in WRITES.get(event, ()):
            check(arguments[at], -1 if fd_at is None else arguments[fd_at])

    def refused(*_: Any) -> NoReturn:
        end("subprocess is not allowed")

    import _posixsubprocess  # multiprocessing calls it without an event

    _posixsubprocess.fork_exec = refused
    sys.addaudithook(hook)


def _execute(parts: Sequence[str]) -> str:
    """Execute the parts in a module of their own. Return '' at their end, else the exception, SystemExit included."""
    module = sys.modules["answer"] = types.ModuleType("answer")
    try:
        for part in parts:
            exec(compile(part, "<answer>", "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    return ""


if __name__ == "__main__":
    _main()
