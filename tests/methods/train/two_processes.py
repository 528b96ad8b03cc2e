"""Run by `test_processes.py` in two processes: trainings one after another.

The last but one has the base shared out; in the last one Ctrl-C reaches the second process alone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import torch
from accelerate import Accelerator

from specbench_ss.cli import main
from specbench_ss.methods.together import TogetherTrainer
from specbench_ss.methods.train.processes import PATIENCE, Processes


def interrupted(self: TogetherTrainer, update: Any = TogetherTrainer._update) -> str:
    if os.environ["RANK"] == "1":
        signal.raise_signal(signal.SIGINT)
    return str(update(self))


if __name__ == "__main__":
    *plain, sharded, cut = json.loads(sys.argv[1])
    Accelerator.clip_grad_norm_ = lambda *_: None  # type: ignore[assignment, method-assign] # cut, a wrong scale is hidden
    for command in plain:
        assert main(command) == 0
    group = torch.distributed.distributed_c10d._get_default_group()
    assert group._get_backend(torch.device("cpu")).options._timeout == PATIENCE
    Processes.shards_base = property(lambda self: True)  # type: ignore[assignment, method-assign]
    assert main(sharded) == 0
    TogetherTrainer._update = interrupted  # type: ignore[method-assign]
    assert main(cut) == 130
