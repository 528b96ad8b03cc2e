"""A real Ray of this machine with two workers, one of which is killed while it answers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from specbench_ss import run
from specbench_ss.runs.run_dir import read_run
from tests.tiny import thorough

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")

OPTIONS = {"tasks": "qa,translation,math_reasoning", "limit": 2, "max_new_tokens": 32, "warmup": 0}
LONGEST_S = 240


@thorough  # the quick suite has a pool in one process: test_sharded_runs.py
@pytest.mark.slow
def test_a_killed_worker_costs_no_sample(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = [word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "specbench_ss", "run", "--methods", "pld,ss", "--executor", "ray"]
    process = subprocess.Popen(
        [*command, "--workers", "2", "--device", "cpu", *words, "--out", str(out)],
        env=os.environ | {"RAY_TMPDIR": "/tmp"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        _kill_one(process, out)
        reported = process.communicate(timeout=LONGEST_S)[0]
    finally:
        process.kill()
    assert process.returncode == 0, reported
    made = read_run(out)
    # on a busy machine the run may end before the other worker, or the one in place of the killed one, has begun
    assert made.manifest["status"] == "complete" and made.manifest["sessions"][-1]["workers"]
    assert sum("a worker was lost at question" in text for text in made.manifest["warnings"]) == 1
    alone = run("pld,ss", device="cpu", out=tmp_path / "alone", **OPTIONS)  # type: ignore[arg-type]
    answers = {row.key: row.token_ids for row in read_run(alone.path).rows}
    assert {row.key: row.token_ids for row in made.rows} == answers and len(answers) == 18
    assert {v.verdict for v in made.output_match} == {"identical"}


def _kill_one(process: subprocess.Popen[str], out: Path) -> None:
    """Kill a worker of the run that makes a question, as soon as a first sample is there."""
    rows, until = out / "samples.jsonl", time.monotonic() + LONGEST_S
    while not (rows.exists() and rows.stat().st_size):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.05)
    while not (workers := [child for child in psutil.Process(process.pid).children(recursive=True) if _makes(child)]):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.02)  # the workers need the processor
    workers[0].kill()


def _makes(process: psutil.Process) -> bool:
    """Return True for a worker that runs a question now: Ray puts the method that runs into a process's title."""
    try:
        return "Worker.make" in " ".join(process.cmdline())
    except psutil.Error:
        return False
