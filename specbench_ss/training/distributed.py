"""Processes of a training through Hugging Face accelerate, and their memory.

One process needs no `accelerate config`; `accelerate launch` starts several, on one or many machines. Each computes its
rows of every batch and its part of the whole batch's loss, and gradients are summed: a step equals that of a single
process. Trainable weights are replicated. Under FSDP the frozen base is sharded layer by layer.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.training.batch import Batch
from specbench_ss.training.trainer import DrafterTrainer

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # parameters of mallopt(3)


def disable_malloc_trim() -> None:
    """Make the GNU C library keep freed memory; no effect on others.

    Every step allocates and frees tensors of some hundred megabytes, above all logits. The library would return the
    memory and request it again, and the system would zero it: two trainings on two cores spent half of their time so
    (docs/log.md). It cannot be undone, so it is not for a process that measures.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is not None and hasattr(library, "gnu_get_libc_version"):
        library.mallopt(MMAP_MAX, 0)
        library.mallopt(TRIM_THRESHOLD, -1)


WAIT_TIMEOUT = timedelta(days=30)  # for processes that wait while the first one regenerates all responses


class DistributedContext:
    """Processes that compute a step: this one alone, or those of `accelerate launch`.

    exact: float32 throughout, instead of bfloat16 by autocast.
    """

    def __init__(self, device: torch.device, exact: bool = False, accelerator: Any = None) -> None:
        self.device, self.exact, self.accelerator = device, exact, accelerator
        self.count = 1 if accelerator is None else int(accelerator.num_processes)
        self.first = accelerator is None or bool(accelerator.is_main_process)  # writes and prints

    @classmethod
    def launched(cls, device: str) -> DistributedContext:
        """Return the launched processes. device: 'cpu', 'cuda' or 'cuda:N'; several processes take a GPU each."""
        from accelerate import Accelerator
        from accelerate.utils import InitProcessGroupKwargs

        cpu = device == "cpu"
        if not cpu and ":" in device:
            torch.cuda.set_device(torch.device(device))
        process_group = InitProcessGroupKwargs(timeout=WAIT_TIMEOUT)
        accelerator = Accelerator(
            cpu=cpu, mixed_precision="no", kwargs_handlers=[process_group]
        )  # `autocast` sets precision
        device_of_process = torch.device("cpu") if cpu else accelerator.device
        return cls(
            torch.device(device) if accelerator.num_processes == 1 else device_of_process, accelerator=accelerator
        )

    @property
    def shards_base(self) -> bool:
        """Return True if `accelerate launch` uses FSDP."""
        kind = getattr(self.accelerator, "distributed_type", None)
        return str(getattr(kind, "value", "")) == "FSDP"

    def check(self, rows: int) -> None:
        """Raise UserError if a batch of this many rows cannot be split equally."""
        if rows % self.count:
            raise UserError(f"a batch of {rows} rows cannot be split over {self.count} processes; change --batch-size")

    def wait(self) -> None:
        """Wait for all processes."""
        if self.count > 1:
            self.accelerator.wait_for_everyone()

    def print(self, line: str) -> None:
        """Print a line in the first process only."""
        if self.first:
            print(line, flush=True)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context that sets the precision of forward passes."""
        return nullcontext() if self.exact else torch.autocast(self.device.type, dtype=torch.bfloat16)

    def share(self, batch: Batch) -> Batch:
        """Return this process's rows of a batch: every count-th one."""
        return batch if self.count == 1 else batch.rows(slice(self.accelerator.process_index, None, self.count))

    def gradients(self, loss: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        """Compute the gradients of the whole batch's loss, summed over all processes, and clip them to norm 1."""
        loss.backward()
        if self.count > 1:
            for p in parameters:
                if p.requires_grad:  # without a gradient here, another process may have one
                    p.grad = self.total(torch.zeros_like(p) if p.grad is None else p.grad)
        nn.utils.clip_grad_norm_(parameters, 1.0)

    def total(self, value: Tensor) -> Tensor:
        """Return the sum of the value over all processes."""
        return value if self.count == 1 else self.accelerator.reduce(value, "sum")

    def broadcast(self, module: nn.Module) -> None:
        """Copy the weights of the first process to all."""
        if self.count > 1:
            from accelerate.utils import broadcast

            with torch.no_grad():
                for p in module.parameters():
                    p.copy_(broadcast(p.detach().to(self.device)))

    def shard(self, target: Target, trainers: Sequence[DrafterTrainer]) -> None:
        """Under FSDP, shard the parts of the frozen layers; they are gathered when used.

        Embeddings and LM head are replicated, since losses read them directly. Raises UserError for a base in 4 bits,
        and for a trainer of weights inside the layers.
        """
        if not self.shards_base:
            return
        for trainer in trainers:
            if trainer.adapts_base:
                raise UserError(f"{trainer.name} trains weights inside sharded layers; launch it without FSDP")
        from torch.distributed.fsdp import fully_shard

        for layer in _layers(target):
            for part in layer.children():
                weights = list(part.parameters())
                if any(not p.is_floating_point() for p in weights):
                    raise UserError("--load-in-4bit does not support FSDP; launch without it")
                if weights:  # gathered for its own forward pass only
                    fully_shard(part, reshard_after_forward=True)


def _layers(target: Target) -> Sequence[nn.Module]:
    """Return the decoder layers."""
    if not target.has_layer_access:
        return [block.layer for block in target.family.blocks]
    attentions = {id(block.attention) for block in target.family.blocks}
    return [m for m in target.model.modules() if any(id(child) in attentions for child in m.children())]
