"""Imports modules that take seconds to load when they are first used: for the command line alone.

With this, `import torch` on top of a method costs nothing until something of torch is used, and `ssbench methods` can
ask every method for its options. docs/design/light-commands.md says why it is not the standard library's LazyLoader.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

HEAVY = ("numpy", "torch")


class _StandIn(ModuleType):
    """What importers hold in place of a module until they first ask it for something."""

    def __init__(self, name: str, hook: _Hook) -> None:
        super().__init__(name)
        self.hook = hook
        self.holders: list[dict[str, Any]] = []  # global names of the modules that imported it

    def __getattr__(self, name: str) -> Any:
        self.hook.remove()
        module = import_module(self.__name__)
        for names in self.holders:
            names.update({key: module for key, value in names.items() if value is self})
        self.holders.clear()  # from here on the modules that imported it hold the module itself
        return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__") or name in ("hook", "holders"):
            super().__setattr__(name, value)
        else:  # whoever sets an attribute means the module's
            setattr(import_module(self.__name__), name, value)


class _Hook:
    """Stands in for `__import__`, which an import statement calls, until a heavy module is first used."""

    def __init__(self, names: Sequence[str]) -> None:
        self.own = builtins.__import__
        self.active = True
        self.stand_ins = {name: _StandIn(name, self) for name in names}

    def __call__(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """`import NAME` of a heavy module gives its stand-in; everything else, submodules included, is as ever.

        The statement passes None as fromlist. Compiled code that imports passes a list, and then takes the module from
        `sys.modules`: it has to be there.
        """
        stand_in = self.stand_ins.get(name)
        if not self.active or stand_in is None or fromlist is not None or level or name in sys.modules:
            return self.own(name, globals, locals, fromlist, level)
        if isinstance(globals, dict):
            stand_in.holders.append(globals)
        return stand_in

    def remove(self) -> None:
        """Import statements are as ever again; stand-ins that are held already go on working.

        Where another hook was put on top of this one, this one only passes on from now.
        """
        self.active = False
        if builtins.__import__ is self:
            builtins.__import__ = self.own


@contextmanager
def deferred_imports(names: Sequence[str] = HEAVY) -> Iterator[None]:
    """Within, until one of these modules is first used, `import NAME` of them imports nothing."""
    hook = _Hook(names)
    builtins.__import__ = hook
    try:
        yield
    finally:
        hook.remove()
