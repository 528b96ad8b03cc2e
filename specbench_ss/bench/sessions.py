"""Sessions of a run: fresh processes, one after the other, each with all repeats."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specbench_ss.errors import RunStopped, UserError
from specbench_ss.runs.config import OutputOptions
from specbench_ss.runs.manifest import MANIFEST
from specbench_ss.runs.output_match import FAILED
from specbench_ss.runs.records import Run
from specbench_ss.runs.run_dir import is_compared, read_run
from specbench_ss.runs.run_options import RunOptions

CHILD = "specbench_ss.cli.session"  # module that makes one session
INTERRUPTED = 130


def run_sessions(options: RunOptions, where: OutputOptions, command: Sequence[str], shown: bool) -> None:
    """Make the sessions of a run that are not complete. options: of the run. shown: print progress on stderr.

    Raises what the session raised: UserError, RunStopped or KeyboardInterrupt; RuntimeError for a bug.
    """
    given = {name: _plain(value) for name, value in options.as_given().items()}
    given |= {"out": str(where.out), "resume": True}
    for session in pending(where):
        _make({"options": given, "session": session, "command": list(command), "shown": shown}, where.sessions)


def pending(where: OutputOptions) -> Iterator[int]:
    """Yield the sessions with samples or comparisons that are missing or failed; all of a new run."""
    if not (where.out / MANIFEST).exists():
        yield from range(where.sessions)
        return
    run = read_run(where.out)
    left = [session for session in range(where.sessions) if not _complete(run, session)]
    yield from left or ([where.sessions - 1] if run.manifest["status"] != "complete" else [])


def _complete(run: Run, session: int) -> bool:
    rows = [row for row in run.rows if row.session == session and row.ok]
    each = int(run.manifest["suite"]["prompts"]) * len(run.labels) * int(run.manifest["config"]["repeats"])
    compared = {one.key for one in run.output_match if one.reason not in FAILED}
    return len(rows) == each and all(row.key in compared for row in rows if is_compared(row, run.baseline))


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _make(task: dict[str, Any], sessions: int) -> None:
    """Run one session to its end. It has a process group of its own, so that Ctrl-C reaches it once, from here."""
    name = f"session {task['session'] + 1} of {sessions}"
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            command = [sys.executable, "-m", CHILD, str(theirs.fileno())]
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], process_group=0, env=os.environ
            )
        ours.sendall(json.dumps(task).encode() + b"\n")
        stopped = False
        while True:
            try:
                code = child.wait()
                break
            except KeyboardInterrupt:
                stopped = True
                child.send_signal(signal.SIGINT)
        text = ours.makefile().read()
    if stopped or code == INTERRUPTED:
        raise KeyboardInterrupt
    if code in (UserError.exit_code, RunStopped.exit_code) and text:
        raise (RunStopped if code == RunStopped.exit_code else UserError)(text)
    if code < 0 or code == RunStopped.exit_code:
        how = f"was killed by signal {-code}" if code < 0 else "stopped"
        raise RunStopped(f"{name} {how}; --resume continues the run")
    if code:
        raise RuntimeError(f"{name} ended with exit code {code}")
