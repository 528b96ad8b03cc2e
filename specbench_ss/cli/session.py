"""One session of a run, in a process that `bench.sessions` starts: `python -m specbench_ss.cli.session FD`."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import warnings
from dataclasses import replace
from typing import IO, Any

from specbench_ss.bench import preflight
from specbench_ss.bench.build_config import asked_run
from specbench_ss.bench.runner import measure
from specbench_ss.bench.sessions import INTERRUPTED
from specbench_ss.cli import run_output
from specbench_ss.errors import UserError
from specbench_ss.runs.run_options import RunOptions


def make(task: dict[str, Any]) -> None:
    """Make the session of a task."""
    config, where, _ = asked_run(RunOptions(**task["options"]))
    where, shown = replace(where, session=task["session"]), task["shown"]
    if not shown or task["session"]:  # notes were given by the first one
        warnings.simplefilter("ignore")
    if not shown:
        measure(preflight.check(config, where), where, task["command"])
        return
    print(f"session {task['session'] + 1} of {where.sessions}", file=sys.stderr, flush=True)
    sys.argv = task["command"]
    run_output.make(config, where)


def _end_with_parent(channel: IO[bytes]) -> None:
    """End this process when the one that started it is gone: nobody would go on after this session."""
    channel.read()
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Read the task from the socket, make it, and answer with the text of a user's error."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    channel = connection.makefile("rb")
    task = json.loads(channel.readline())
    threading.Thread(target=_end_with_parent, args=(channel,), daemon=True).start()
    try:
        make(task)
    except UserError as error:
        connection.sendall(str(error).encode())
        code = error.exit_code
    except KeyboardInterrupt:
        code = INTERRUPTED
    else:
        code = 0
    sys.stderr.flush()
    os._exit(code)  # the thread is blocked in a read


if __name__ == "__main__":
    main()
