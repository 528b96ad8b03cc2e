"""The processes of a training, through Hugging Face accelerate, and their memory.

One process needs no `accelerate config`; `accelerate launch` starts several, on one machine or many. Each computes
its rows of every batch and its part of the whole batch's loss, and gradients are added up: a step is the one that a
single process would take. The weights that learn are whole in every process. Under FSDP the frozen base is split
among the processes, layer by layer.
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
    """Have the GNU C library keep what is freed, from now on; others are left alone.

    Every step makes and frees tensors of some hundred megabytes, rows of logits above all. The library would give such
    memory back and ask for it anew, and the system would fill it with zeros: two trainings on two cores spent half of
    their time so (docs/log.md). It cannot be undone, so it is not for a process that measures.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is not None and hasattr(library, "gnu_get_libc_version"):
        library.mallopt(MMAP_MAX, 0)
        library.mallopt(TRIM_THRESHOLD, -1)


PATIENCE = timedelta(days=30)  # of processes that wait while the first one lets the base answer all the data


class DistributedContext:
    """The processes that compute a step: this one alone, or those of `accelerate launch`.

    exact: in float32 throughout, instead of bfloat16 where autocast allows it.
    """

    def __init__(self, device: torch.device, exact: bool = False, accelerator: Any = None) -> None:
        self.device, self.exact, self.accelerator = device, exact, accelerator
        self.count = 1 if accelerator is None else int(accelerator.num_processes)
        self.first = accelerator is None or bool(accelerator.is_main_process)  # the one that writes and prints

    @classmethod
    def launched(cls, device: str) -> DistributedContext:
        """Return the processes that were launched. device: 'cpu', 'cuda' or 'cuda:N'; several take a GPU each."""
        from accelerate import Accelerator
        from accelerate.utils import InitProcessGroupKwargs

        cpu = device == "cpu"
        if not cpu and ":" in device:
            torch.cuda.set_device(torch.device(device))
        patient = InitProcessGroupKwargs(timeout=PATIENCE)
        accelerator = Accelerator(cpu=cpu, mixed_precision="no", kwargs_handlers=[patient])  # `autocast` sets precision
        several = torch.device("cpu") if cpu else accelerator.device
        return cls(torch.device(device) if accelerator.num_processes == 1 else several, accelerator=accelerator)

    @property
    def shards_base(self) -> bool:
        """Whether `accelerate launch` was asked for FSDP."""
        kind = getattr(self.accelerator, "distributed_type", None)
        return str(getattr(kind, "value", "")) == "FSDP"

    def check(self, rows: int) -> None:
        """Raise UserError where a batch of this many rows cannot be shared equally."""
        if rows % self.count:
            raise UserError(f"a batch of {rows} rows cannot be shared by {self.count} processes: see --batch-size")

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.count > 1:
            self.accelerator.wait_for_everyone()

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context that sets the precision of forward passes."""
        return nullcontext() if self.exact else torch.autocast(self.device.type, dtype=torch.bfloat16)

    def share(self, batch: Batch) -> Batch:
        """Return this process's rows of a batch: every count-th one."""
        return batch if self.count == 1 else batch.rows(slice(self.accelerator.process_index, None, self.count))

    def gradients(self, loss: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        """Compute the gradients of the whole batch's loss, the sum of all processes', and clip them to norm 1."""
        loss.backward()
        if self.count > 1:
            for p in parameters:
                if p.requires_grad:  # one that this share does not reach may be reached by another's
                    p.grad = self.total(torch.zeros_like(p) if p.grad is None else p.grad)
        nn.utils.clip_grad_norm_(parameters, 1.0)

    def total(self, value: Tensor) -> Tensor:
        """Return the sum of the value over all processes."""
        return value if self.count == 1 else self.accelerator.reduce(value, "sum")

    def broadcast(self, module: nn.Module) -> None:
        """Give every process the weights of the first one."""
        if self.count > 1:
            from accelerate.utils import broadcast

            with torch.no_grad():
                for p in module.parameters():
                    p.copy_(broadcast(p.detach().to(self.device)))

    def shard(self, target: Target, trainers: Sequence[DrafterTrainer]) -> None:
        """Under FSDP, split the frozen layers' parts among the processes; they are gathered when they are used.

        Embeddings and LM head stay whole, since losses read them directly. Raises UserError for a base in 4 bits, and
        for a trainer that learns inside the layers.
        """
        if not self.shards_base:
            return
        for trainer in trainers:
            if trainer.adapts_base:
                raise UserError(
                    f"{trainer.name} learns inside the layers that FSDP would share out: launch it without FSDP"
                )
        from torch.distributed.fsdp import fully_shard

        for layer in _layers(target):
            for part in layer.children():
                weights = list(part.parameters())
                if any(not p.is_floating_point() for p in weights):
                    raise UserError("--load-in-4bit cannot be shared out by FSDP: launch without it")
                if weights:  # each is gathered for its own pass alone, without a backward pass too
                    fully_shard(part, reshard_after_forward=True)


def _layers(target: Target) -> Sequence[nn.Module]:
    """Return the decoder layers."""
    if not target.has_layer_access:
        return [block.layer for block in target.family.blocks]
    found = {id(block.attention) for block in target.family.blocks}
    return [m for m in target.model.modules() if any(id(child) in found for child in m.children())]
