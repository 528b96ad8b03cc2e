"""Models that methods make of a target, each once while anybody uses it: a method and its reference share one."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from weakref import WeakValueDictionary

from specbench_ss.decoding.target import Target
from specbench_ss.errors import UserError

_in_use: WeakValueDictionary[Hashable, Target] = WeakValueDictionary()


def one_in_use(key: Hashable, make: Callable[[], Target]) -> Target:
    """The model with this key, made where nobody uses it yet."""
    own = _in_use.get(key)
    if own is None:
        own = _in_use[key] = make()
    return own


def check_not_quantised(target: Target) -> None:
    """Raises UserError where the target's weights are held in fewer bits: a model made of it would not be."""
    if target.quantised:
        raise UserError(
            "methods that decode with a model of their own cannot be compared under --quantize: leave them out"
        )
