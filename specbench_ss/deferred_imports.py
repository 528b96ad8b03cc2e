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
        self.holders.clear()  # from here on they hold the module itself: no use of it is slower than ever
        return getattr(module, name)


class _Hook:
    """Stands in for `__import__`, which an import statement calls, until a heavy module is first used."""

    def __init__(self, names: Sequence[str]) -> None:
        self.own = builtins.__import__
        self.stand_ins = {name: _StandIn(name, self) for name in names}

    def __call__(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """`import NAME` of a heavy module gives its stand-in; everything else, submodules included, is as ever."""
        stand_in = self.stand_ins.get(name)
        if stand_in is None or fromlist or level or name in sys.modules:
            return self.own(name, globals, locals, fromlist, level)
        if isinstance(globals, dict):
            stand_in.holders.append(globals)
        return stand_in

    def remove(self) -> None:
        """Import statements are as ever again; stand-ins that are held already go on working."""
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
