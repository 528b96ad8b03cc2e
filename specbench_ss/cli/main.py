"""Entry point of `ssbench`: output that cannot fail, and interruptions while the commands are imported."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
import traceback
from typing import NoReturn

from specbench_ss.cli.placeholders import only_prints, use_placeholders

BUG = 3  # exit code of an exception that no code expected


class _Output(io.FileIO):
    """stdout or stderr whose reader may be gone or whose disk may be full: the rest is dropped."""

    lost: OSError | None = None

    def write(self, data: object) -> int:
        """Write what can be written, and report all of it as written."""
        try:
            while self.lost is None:
                if (written := super().write(data)) is not None:  # type: ignore[arg-type]
                    return written
                select.select([], [self], [])  # a full pipe that does not block
        except OSError as error:
            self.lost = error
        return memoryview(data).nbytes  # type: ignore[arg-type]


def _replace_outputs() -> _Output:
    """Replace stdout and stderr by streams that never fail; return that of stdout.

    A closed one becomes the null device, so that no file of a run gets its number.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    outputs = []
    for number, name in ((1, "stdout"), (2, "stderr")):
        encoding = getattr(getattr(sys, name), "encoding", "utf-8")
        outputs.append(_Output(number, "wb", closefd=False))
        buffered = io.BufferedWriter(outputs[-1])
        text = io.TextIOWrapper(buffered, encoding, "replace", line_buffering=number == 2 or os.isatty(number))
        setattr(sys, name, text)
    return outputs[0]


def main(args: list[str] | None = None) -> int:
    """Run the command line in this process, as `commands.main` does."""
    from specbench_ss.cli import commands

    return commands.main(args)


def console() -> NoReturn:
    """Run the command line and exit. What cannot be printed changes nothing else, the exit code included."""
    stdout = _replace_outputs()
    try:
        if only_prints(sys.argv[1:]):
            use_placeholders()
        code = main()
    except KeyboardInterrupt:  # in an import
        print("ssbench: interrupted", file=sys.stderr)
        code = 130
    except Exception:
        traceback.print_exc()
        code = BUG
    sys.stdout.flush()
    if stdout.lost is not None and stdout.lost.errno != errno.EPIPE:
        print(f"ssbench: warning: stdout is incomplete: {stdout.lost.strerror}".lower(), file=sys.stderr)
    sys.exit(code)
