"""A stand-in for a CUDA graph: what the host decided while a pass was recorded is frozen, and looks at numbers fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from specbench_ss.engine.cuda_graphs import CudaGraphRunner, Pass

COUNTING = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"}  # of torch


class Step:
    """An operator of a recording, with what it was given and made. made: what operators before it have made."""

    def __init__(self, func: Any, args: Any, kwargs: Any, out: Any, made: set[int]) -> None:
        self.func, self.args, self.kwargs, self.outs = func, args, kwargs, _tensors(out)
        self.leaves, spec = tree_flatten((args, kwargs))
        self.spec: TreeSpec = spec
        self.remapped = [i for i, leaf in enumerate(self.leaves) if id(leaf) in made]
        made |= {id(one) for one in self.outs}

    def again(self, now: dict[int, torch.Tensor]) -> None:
        """Make it again. now: what an operator made in the recording -> what it makes this time."""
        args, kwargs = self.args, self.kwargs
        if self.remapped:
            leaves = list(self.leaves)
            for i in self.remapped:
                leaves[i] = now[id(leaves[i])]
            args, kwargs = tree_unflatten(leaves, self.spec)
        for before, after in zip(self.outs, _tensors(self.func(*args, **kwargs)), strict=True):
            now[id(before)] = after


class Recorder(TorchDispatchMode):
    """Notes every operator with the tensors that it was given and made, all of which stay."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        looked = isinstance(out, (int, float, complex)) and any(map(torch.is_tensor, args))  # .item() and .tolist()
        if looked or _counts(func, args):  # a graph cannot wait for the host
            raise RuntimeError("operation not permitted when stream is capturing: a look at a number")
        self.steps.append(Step(func, args, kwargs or {}, out, self.made))
        return out


def frozen(one: Pass) -> Pass:
    """Make the pass once; from then on the same operators again, over the same memory, with nothing asked of the host.

    Results lie in memory that the next replay writes, as those of a graph do.
    """
    with Recorder() as recorder:
        outs = one()
    results = tuple(out.clone() for out in outs)

    def replayed() -> tuple[torch.Tensor, ...]:
        now: dict[int, torch.Tensor] = {}
        with _disable_current_modes():  # nobody sees the operators of a graph
            for step in recorder.steps:
                step.again(now)
        for result, out in zip(results, outs, strict=True):
            result.copy_(now.get(id(out), out))
        return results

    return replayed


def called(passes: CudaGraphRunner, name: str, function: Callable[..., Any], *inputs: torch.Tensor) -> torch.Tensor:
    """Run a function of tensors alone."""
    made = passes.run_pass(name, lambda _, *given: function(*given), None, inputs, (), 1)
    found: torch.Tensor = (made or function(*inputs))[0]
    return found


def _counts(func: Any, args: Any) -> bool:
    """State whether the operator makes as many rows as numbers state, so that the host has to have them."""
    name = func.overloadpacket.__name__
    chosen = args[1] if name == "index" else ()
    return name in COUNTING or any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in chosen)


def _tensors(made: Any) -> list[torch.Tensor]:
    if isinstance(made, torch.Tensor):
        return [made]
    return [one for one in tree_leaves(made) if isinstance(one, torch.Tensor)]
