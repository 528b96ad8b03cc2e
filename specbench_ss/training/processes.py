"""Hugging Face accelerate, in one place: which processes train, where, and in what precision.

One process needs no `accelerate config`; `accelerate launch` starts several, on one machine or many. Each computes its
rows of every batch and its part of the whole batch's loss, and gradients are added up: a step is the one that a single
process would take. The weights that learn are whole in every process. Under FSDP the frozen base is split among the
processes, layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor, nn

from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.training.batches import Batch
from specbench_ss.training.side_by_side import Machine
from specbench_ss.training.trainee import Trainee

PATIENCE = timedelta(days=30)  # of processes that wait while the first one lets the base answer all the data


class Processes(Machine):
    """The processes of this training. They compute in bfloat16 by autocast, unless `exact` is set.

    device: 'cpu', 'cuda' or 'cuda:N', as resolved; several processes take a GPU each.
    """

    def __init__(self, device: str) -> None:
        from accelerate import Accelerator
        from accelerate.utils import InitProcessGroupKwargs

        cpu = device == "cpu"
        if not cpu and ":" in device:
            torch.cuda.set_device(torch.device(device))
        patient = InitProcessGroupKwargs(timeout=PATIENCE)
        # precision is `autocast`'s, alike everywhere
        self.accelerator = Accelerator(cpu=cpu, mixed_precision="no", kwargs_handlers=[patient])
        several = torch.device("cpu") if cpu else self.accelerator.device
        super().__init__(torch.device(device) if self.count == 1 else several)

    @property
    def count(self) -> int:
        """Number of processes."""
        return int(self.accelerator.num_processes)

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes and prints."""
        return bool(self.accelerator.is_main_process)

    @property
    def shards_base(self) -> bool:
        """Whether `accelerate launch` was asked for FSDP."""
        return str(getattr(self.accelerator.distributed_type, "value", "")) == "FSDP"

    def check(self, rows: int) -> None:
        """Raise UserError where a batch of this many rows cannot be shared equally."""
        if rows % self.count:
            raise UserError(f"a batch of {rows} rows cannot be shared by {self.count} processes: see --batch-size")

    def wait(self) -> None:
        """Wait until all processes are here."""
        self.accelerator.wait_for_everyone()

    def share(self, batch: Batch) -> Batch:
        """Return this process's rows of a batch: every count-th one."""
        return batch if self.count == 1 else batch.rows(slice(self.accelerator.process_index, None, self.count))

    def gradients(self, loss: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        """Compute the gradients of the sum of all processes' losses and clip them to norm 1."""
        self.accelerator.backward(loss)
        if self.count > 1:
            for p in parameters:
                if p.requires_grad:  # one that this share does not reach may be reached by another's
                    p.grad = self.total(torch.zeros_like(p) if p.grad is None else p.grad)
        self.accelerator.clip_grad_norm_(parameters, 1.0)

    def total(self, value: Tensor) -> Tensor:
        """Return the sum of the value over all processes."""
        return value if self.count == 1 else self.accelerator.reduce(value, "sum")

    def alike(self, module: nn.Module) -> None:
        """Give every process the weights of the first one."""
        if self.count > 1:
            from accelerate.utils import broadcast

            with torch.no_grad():
                for p in module.parameters():
                    p.copy_(broadcast(p.detach().to(self.device)))

    def shard(self, target: Target, trainees: Sequence[Trainee]) -> None:
        """Under FSDP, split the frozen layers' parts among the processes; they are gathered when they are used.

        Embeddings and LM head stay whole, since losses read them directly. Raises UserError for a base in 4 bits, and
        for a trainee that learns inside the layers.
        """
        if not self.shards_base:
            return
        for trainee in trainees:
            if trainee.adapts_base:
                raise UserError(
                    f"{trainee.name} learns inside the layers that FSDP would share out: launch it without FSDP"
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
    if not target.taken_apart:
        return [block.layer for block in target.family.blocks]
    found = {id(block.attention) for block in target.family.blocks}
    return [m for m in target.model.modules() if any(id(child) in found for child in m.children())]
