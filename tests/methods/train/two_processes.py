"""Run by `test_processes.py` in two processes: the same training twice, the second time with the base shared out."""

from __future__ import annotations

import sys

from specbench_ss.cli import main
from specbench_ss.methods.train.processes import Processes

if __name__ == "__main__":
    plain, sharded, *command = sys.argv[1:]
    assert main([*command, "--out", plain]) == 0
    Processes.shards_base = property(lambda self: True)  # type: ignore[assignment, method-assign]
    assert main([*command, "--out", sharded]) == 0
