"""Run by `test_processes.py` in two processes: trainings one after another, the last one with the base shared out."""

from __future__ import annotations

import json
import sys

import torch
from accelerate import Accelerator

from specbench_ss.cli import main
from specbench_ss.methods.train.processes import PATIENCE, Processes

if __name__ == "__main__":
    *plain, sharded = json.loads(sys.argv[1])
    Accelerator.clip_grad_norm_ = lambda *_: None  # type: ignore[assignment, method-assign] # cut, a wrong scale is hidden
    for command in plain:
        assert main(command) == 0
    group = torch.distributed.distributed_c10d._get_default_group()
    assert group._get_backend(torch.device("cpu")).options._timeout == PATIENCE
    Processes.shards_base = property(lambda self: True)  # type: ignore[assignment, method-assign]
    assert main(sharded) == 0
