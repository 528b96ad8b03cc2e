"""Models that methods make of a target, each once while anybody uses it: a method and its reference share one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakValueDictionary

import torch

from specbench_ss.engine.cpu_kernels import holds_numbers
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError

_in_use: WeakValueDictionary[Hashable, Target] = WeakValueDictionary()


def one_in_use(key: Hashable, make: Callable[[], Target]) -> Target:
    """The model with this key, made where nobody uses it yet."""
    own = _in_use.get(key)
    if own is None:
        own = _in_use[key] = make()
    return own


def copy_to_change(target: Target) -> Any:
    """The target's model, in full precision, to be changed and given to `Target.with_model`.

    Its weights are the target's own memory, all that the target holds in full precision: one that is to be changed is
    replaced by a copy. Raises UserError where the target's are held in fewer bits and cannot be read again.
    """
    if target.held is None:
        return copy.deepcopy(target.model, {id(p): p for p in target.model.parameters()})
    if target.held.reread is None:
        raise UserError(
            f"no LoRA can be merged into {target.name!r}, whose weights are quantised ({target.quantised}) and cannot "
            "be read again as they were: load it with load_model(quantize=...)"
        )
    model = target.held.reread()
    _share(model, target.model)
    return model


def _share(model: Any, other: Any) -> None:
    """Let a model's weights be the other's memory, where the other holds the same numbers under the same name."""
    for name, module in other.named_modules():
        own = dict(module.named_parameters(recurse=False))
        for key, weight in own.items():
            mine = model.get_submodule(name)
            if holds_numbers(weight) and torch.equal(weight, getattr(mine, key)):
                setattr(mine, key, weight)
