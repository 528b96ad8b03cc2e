"""Load methods from a single Python file that a user gives with --plugin. What is imported is up to that file."""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

from specbench_ss import registry
from specbench_ss.decoding.decoder import Decoder
from specbench_ss.errors import UserError, first_line
from specbench_ss.files.user_files import read_bytes
from specbench_ss.method_spec import PluginFile


def load_plugin(path: Path) -> PluginFile:
    """Register every Decoder that a file defines, under its `name`, until the next command.

    Raises UserError where the file cannot be read or does not load, where it defines no method, or where a method's
    name is taken or nothing can be decoded with the method.
    """
    content = read_bytes(path)
    sha256 = hashlib.sha256(content).hexdigest()
    found = _methods(_module(path, content, sha256))
    if not found:
        raise UserError(f"plugin {path} defines no method: no subclass of specbench_ss.decoding.decoder.Decoder")
    names: list[str] = []
    for kind in found:
        name = getattr(kind, "name", None)
        problem = registry.method_problem(kind, name)
        if not problem and name in names:
            problem = f"its name {name!r} is that of another one in the file"
        if problem:
            raise UserError(f"plugin {path}: {kind.__name__}: {problem}")
        names.append(str(name))
    values = {name: f"{kind.__module__}:{kind.__qualname__}" for name, kind in zip(names, found, strict=True)}
    registry.register_methods(values, f"plugin {path}")
    return PluginFile(str(path), sha256, tuple(names))


def _module(path: Path, content: bytes, sha256: str) -> ModuleType:
    """Load the file as a module with a name of its own, so that it replaces no other module."""
    name = f"ssbench_file_{re.sub(r'[^A-Za-z0-9_]', '_', path.stem)}_{sha256[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_loader(name, loader=None, origin=str(path))
    assert spec is not None
    module = module_from_spec(spec)
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        exec(compile(content, str(path), "exec"), module.__dict__)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise UserError(f"plugin {path} does not load: {first_line(error)}") from error
    return module


def _methods(module: ModuleType) -> list[type[Decoder]]:
    """Return the decoders that the file defines itself, not those that it imports.

    An abstract one, or a base of others without a name, is returned only if there is nothing else.
    """
    own = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Decoder) and value.__module__ == module.__name__
    ]
    unique = list(dict.fromkeys(own))

    def is_base(kind: type[Decoder]) -> bool:
        nameless = not hasattr(kind, "name") and any(issubclass(o, kind) for o in unique if o is not kind)
        return inspect.isabstract(kind) or nameless

    return [kind for kind in unique if not is_base(kind)] or unique
