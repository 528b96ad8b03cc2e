"""Placeholders for packages that take seconds to import, for commands that only print what classes declare.

`ssbench methods`, `ssbench suites` and the help of every command compute nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

from specbench_ss.registry import COMMANDS, METHODS, SUITES, TRAINERS, entry_points

HEAVY = {
    "accelerate", "httpx", "huggingface_hub", "jinja2", "numpy", "pandas", "plotly", "psutil", "pyarrow", "pynvml",
    "safetensors", "scipy", "tokenizers", "torch", "transformers",
}  # fmt: skip


class Placeholder(ModuleType):
    """A heavy package, and its attributes and results; a decorator that changes nothing; as a base class, none."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if args and isinstance(args[0], (type, FunctionType)) else self

    def __mro_entries__(self, bases: Any) -> tuple[()]:
        return ()

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def _self(self, *_: Any) -> Any:
        return self

    __getitem__ = __or__ = __ror__ = __add__ = __sub__ = __mul__ = __rmul__ = __truediv__ = __neg__ = _self


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] in HEAVY else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Placeholder(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def only_prints(words: Sequence[str]) -> bool:
    """Return True for a command line that lists methods or suites, or asks for help, with no plugin of others.

    Their modules may compute when they are imported.
    """
    plain = not any(word.startswith("-") for word in words[:-1])  # else --help may be an option's value
    asks = words[-1:] in (["-h"], ["--help"]) or words == ["suites"] or (words[:1] == ["methods"] and len(words) < 3)
    groups = (METHODS.entry_points, SUITES.entry_points, TRAINERS.entry_points, COMMANDS)
    points = (point for group in groups for point in entry_points(group))
    return plain and asks and all(point.value.startswith("specbench_ss.") for point in points)


def use_placeholders() -> None:
    """Import placeholders from here on. Only for a process that ends after the command."""
    sys.meta_path.insert(0, _Finder())
