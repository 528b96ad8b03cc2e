"""Samples that take too long, or end the process: a failed row with the reason, and the run goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from specbench_ss import run
from specbench_ss.cli.main import main
from specbench_ss.runs.run_dir import read_run
from tests.tiny import thorough

PLUGIN = """
import signal, time
from specbench_ss import Decoder, DecodeState, DraftTree

def ring():  # at once, and not at the limit, which honest methods meet on any machine
    left, every_s = signal.getitimer(signal.ITIMER_REAL)
    assert 0 < left <= 90 and every_s
    signal.setitimer(signal.ITIMER_REAL, 0.01, every_s)

class {kind}(Decoder):
    name, summary = "{name}", "misbehaves"

    def propose(self, state: DecodeState) -> DraftTree:
        {body}
        return DraftTree.root_only(state.root)
"""
BODIES = {
    "hangs": "ring()\n        while True: pass",
    "sleeps": "ring(); time.sleep(1000)",
    "catches": "ring()\n        while True:\n            try: time.sleep(1000)\n            except Exception: pass",
    "exits": "raise SystemExit(3)",
    "listing": "return [1, 2]",
    "garbage": "return DraftTree([1, 2], DraftTree.root_only(state.root).topology)",
    "uprooted": "return DraftTree.root_only(state.root + 1)",
}
STATED = {
    "exits": "SystemExit: 3",
    "listing": "TypeError: propose returned a list, not a DraftTree",
    "garbage": "TypeError: propose returned a DraftTree of 1 nodes with tokens a list",
    "uprooted": "ValueError: propose returned a tree under token",
}


def plugin(folder: Path, *names: str) -> Path:
    file = folder / "plugin.py"
    file.write_text("".join(PLUGIN.format(kind=n.title(), name=n, body=BODIES[n]) for n in names))
    return file


@thorough
def test_samples_over_the_limit_fail_and_the_run_goes_on(tmp_path: Path) -> None:
    names = tuple(BODIES)
    given = {"tasks": "qa", "limit": 1, "warmup": 0, "max_new_tokens": 4, "out": tmp_path / "run"}
    run(["pld", *names], plugin=plugin(tmp_path, *names), timeout=60.0, **given)  # type: ignore[arg-type]
    done = read_run(tmp_path / "run")
    assert done.manifest["status"] == "complete" and "timeout" not in done.manifest["config"]
    found = {row.method: row.error or "" for row in done.rows}
    assert found.pop("ar") == found.pop("pld") == ""
    for name, error in found.items():
        assert error.startswith(STATED.get(name, "TimeoutError: no answer within 60 s")), (name, error)


@thorough
def test_a_run_is_resumed_with_another_limit(tmp_path: Path) -> None:
    """The limit is no part of what is measured; failed samples are run again."""
    file, out = plugin(tmp_path, "sleeps"), str(tmp_path / "run")
    words = ["run", "--methods", "sleeps", "--plugin", str(file), "--tasks", "qa", "--limit", "1", "--warmup", "0"]
    words += ["--max-new-tokens", "4", "--out", out]
    assert main([*words, "--timeout", "60"]) == 1  # every sample of it failed
    assert main([*words, "--timeout", "90", "--resume"]) == 1
    errors = [row.error for row in read_run(tmp_path / "run").rows if not row.ok]
    assert errors == ["TimeoutError: no answer within 90 s"]


def test_what_cannot_be_interrupted_ends_the_process_in_a_line() -> None:
    """A wait that is begun again by the operating system's own code, with Python's lock released."""
    code = (
        "import ctypes, signal\n"
        "from specbench_ss import time_limit as t\n"
        "t.GRACE_S = 0.3\n"
        "with t.time_limit(0.2, lambda: 'it is stuck', 4):\n"
        "    lock = ctypes.create_string_buffer(64)\n"
        "    libc = ctypes.CDLL(None)\n"
        "    libc.pthread_mutex_lock(lock)\n"
        "    libc.pthread_mutex_lock(lock)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (4, "\nssbench: it is stuck\n")
