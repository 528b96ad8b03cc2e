"""A stand-in for a CUDA graph: what the host decided while a pass was recorded is frozen, and looks at numbers fail."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from specbench_ss.decoding.replaying import Pass

COUNTING = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"}  # of torch


class Recorder(TorchDispatchMode):
    """Notes every operator with the tensors that it was given and made, all of which stay."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        looked = isinstance(out, (int, float, complex)) and any(map(torch.is_tensor, args))  # .item() and .tolist()
        if looked or _counts(func, args):  # a graph cannot wait for the host
            raise RuntimeError("operation not permitted when stream is capturing: a look at a number")
        self.steps.append((func, args, kwargs or {}, out))
        return out


def frozen(one: Pass) -> Pass:
    """Make the pass once; from then on the same operators again, over the same memory, with nothing asked of the host.

    Results lie in memory that the next replay writes, as those of a graph do.
    """
    with Recorder() as recorder:
        outs = one()
    results = tuple(out.clone() for out in outs)

    def replayed() -> tuple[torch.Tensor, ...]:
        now: dict[int, torch.Tensor] = {}  # what an operator made in the recording -> what it makes this time

        def of_now(tensor: torch.Tensor) -> torch.Tensor:
            return now.get(id(tensor), tensor)

        for func, args, kwargs, made in recorder.steps:
            args, kwargs = tree_map_only(torch.Tensor, of_now, (args, kwargs))
            with _disable_current_modes():  # nobody sees the operators of a graph
                again = func(*args, **kwargs)
            for before, after in zip(_tensors(made), _tensors(again), strict=True):
                now[id(before)] = after
        for result, out in zip(results, outs, strict=True):
            result.copy_(of_now(out))
        return results

    return replayed


def _counts(func: Any, args: Any) -> bool:
    """Say whether the operator makes as many rows as numbers say, so that the host has to know them."""
    name = func.overloadpacket.__name__
    chosen = args[1] if name == "index" else ()
    return name in COUNTING or any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in chosen)


def _tensors(made: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, found.append, made)
    return found
