"""Run by `test_processes.py`: trainings one after another, in two processes, which share what they import.

Launched as by `torchrun`, which sets the same variables.

The last but one, and the one before it, have the base shared out; in the last Ctrl-C reaches the second process alone.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from specbench_ss.cli.main import main
from specbench_ss.engine.target import Target
from specbench_ss.training.distributed import WAIT_TIMEOUT, DistributedContext
from specbench_ss.training.loop import DrafterLoop


def interrupted(self: DrafterLoop, update: Any = DrafterLoop._update) -> str:
    if os.environ["RANK"] == "1":
        signal.raise_signal(signal.SIGINT)
    return str(update(self))


def fork() -> None:
    """Go on as rank 1 in a child, as rank 0 in this process, which fails where the child does."""
    child = os.fork()
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = "0" if child else "1"
    if child:
        atexit.register(lambda: os._exit(1) if os.wait()[1] else None)


if __name__ == "__main__":
    fork()
    *plain, streams, heads, cut = json.loads(sys.argv[1])
    torch.nn.utils.clip_grad_norm_ = lambda *_: None  # type: ignore[assignment] # cut, a wrong scale is hidden
    for command in plain:
        assert main(command) == 0
    group = torch.distributed.distributed_c10d._get_default_group()
    assert group._get_backend(torch.device("cpu")).options._timeout == WAIT_TIMEOUT
    DistributedContext.shards_base = property(lambda self: True)  # type: ignore[assignment, method-assign]
    bases: list[Target] = []
    shard = DistributedContext.shard
    DistributedContext.shard = lambda self, target, trainee: bases.append(target) or shard(self, target, trainee)  # type: ignore
    for command in (streams, heads):
        assert main(command) == 0
        parts = [part for part in bases[-1].model.modules() if isinstance(part, FSDPModule)]
        assert parts and all(isinstance(p, DTensor) for part in parts for p in part.parameters())  # none left gathered
    DrafterLoop._update = interrupted  # type: ignore[method-assign]
    assert main(cut) == 130
