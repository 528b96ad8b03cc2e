"""Registry of plugins: methods, trainers, suites, reports, experiments and commands by name.

A plugin is imported on its first use, not when names are listed.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from importlib.metadata import EntryPoint
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import typer

from specbench_ss.errors import UserError, did_you_mean, plugin_code
from specbench_ss.options import METHOD_ALIASES, PluginFile, options_problem, parse_options
from specbench_ss.user_files import read_bytes

if TYPE_CHECKING:  # `ssbench --help` imports this module, and none of these
    from specbench_ss.engine.decoder import Decoder
    from specbench_ss.engine.target import Target
    from specbench_ss.options import MethodSpec
    from specbench_ss.suite import Suite
    from specbench_ss.training.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Group:
    """One kind of plugin: where it is registered, and the class that it must derive from."""

    entry_points: str
    base: str

    @property
    def kind(self) -> str:
        """Return 'method', 'trainer', 'suite', 'report' or 'experiment', for messages."""
        return self.entry_points.rpartition(".")[2].removesuffix("s")


ALL = "all"  # stands for every registered method that can decode with the model
# attributes that are read of a method's class more than once: plain values, since a property may answer differently
DECLARED = {"name": str, "summary": str, "paper": str, "autoregressive": bool}
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")  # distinct from options and lists on the command line
METHODS = Group("specbench_ss.methods", "specbench_ss.engine.decoder:Decoder")
SUITES = Group("specbench_ss.suites", "specbench_ss.suite:Suite")
REPORTS = Group("specbench_ss.reports", "specbench_ss.results.report:Report")
FIGURES = Group("specbench_ss.figures", "specbench_ss.results.report:Figures")
EXPERIMENTS = Group("specbench_ss.experiments", "specbench_ss.results.report:Experiment")
COMMANDS = "specbench_ss.commands"  # entry points of functions and of `typer.Typer` groups, which are no classes
TRAINERS = Group("specbench_ss.trainers", "specbench_ss.training.trainer:Trainer")


class PluginWarning(UserWarning):
    """Warns of a registered plugin that cannot be used. The other plugins still work."""


_of_files: dict[str, EntryPoint] = {}  # methods from the --plugin files of the present command


def register_methods(values: Mapping[str, str], owner: str) -> None:
    """Register methods of a loaded module: values maps a method's name to 'module:Class'.

    Raises UserError where a name already stands for another class; then none of them is registered.
    """
    known = _registered(METHODS)
    for name, value in values.items():
        if name in known and known[name].value != value:
            raise UserError(f"{owner}: there is a method {name!r} already ({known[name].value})")
    _of_files.update({name: EntryPoint(name, value, METHODS.entry_points) for name, value in values.items()})


def clear_file_methods() -> None:
    """Forget methods registered from --plugin files."""
    _of_files.clear()


def entry_points(group: str) -> Iterable[EntryPoint]:
    """Return the entry points of a group."""
    return _entry_points(group, tuple(sys.path))


@cache  # reading the metadata of every installed package takes tens of milliseconds
def _entry_points(group: str, path: tuple[str, ...]) -> metadata.EntryPoints:
    return metadata.entry_points(group=group)


def _registered(group: Group) -> dict[str, EntryPoint]:
    """Return {name: entry point} in order of names. A name that is registered twice keeps its first entry point."""
    found: dict[str, EntryPoint] = dict(_of_files) if group == METHODS else {}
    for point in entry_points(group=group.entry_points):
        first = found.setdefault(point.name, point)
        if first.value != point.value:
            _warn(f"{group.kind} {point.name!r} is registered twice: {first.value} is used, {point.value} is not")
    return dict(sorted(found.items()))


def names(group: Group) -> list[str]:
    """Return the registered names, sorted, without loading any plugin."""
    return list(_registered(group))


def load(group: Group, name: str) -> type[Any]:
    """Return the class registered under `name`. Raises UserError where it is unknown or does not load."""
    registered = _registered(group)
    if name not in registered:
        also = METHOD_ALIASES if group == METHODS else ()
        closest = did_you_mean(name, [*registered, *also])
        own = "; for one of your own give --plugin FILE.py" if group == METHODS and not closest else ""
        raise UserError(f"no {group.kind} {name!r}{closest}; known: {', '.join(registered)}{own}")
    return _loaded(group, registered[name])


def _loaded(group: Group, point: EntryPoint) -> type[Any]:
    with plugin_code(f"{group.kind} {point.name!r} does not load"):
        return _checked(group, point)


def load_all(group: Group) -> dict[str, type[Any]]:
    """Load every plugin of a group. One that does not load is named in a PluginWarning and left out."""
    loaded = {}
    for name, point in _registered(group).items():
        try:
            loaded[name] = _loaded(group, point)
        except UserError as error:
            _warn(str(error))
    return loaded


def load_commands(taken: Collection[str]) -> dict[str, Any]:
    """Return every command that plugins add to `ssbench`, by name: a function, or a `typer.Typer` with several.

    One that does not load, is neither, or has a name that is taken, is named in a PluginWarning and left out.
    """
    loaded = {}
    for point in sorted(entry_points(group=COMMANDS), key=lambda point: point.name):
        if point.name in taken or point.name in loaded:
            _warn(f"command {point.name!r} of {point.value} is left out: there is one of that name already")
            continue
        try:
            with plugin_code(f"command {point.name!r} does not load"):
                found = point.load()
        except UserError as error:
            _warn(str(error))
            continue
        if isinstance(found, typer.Typer) or inspect.isfunction(found):
            loaded[point.name] = found
        else:
            _warn(f"command {point.name!r}: {point.value} is neither a function nor a typer.Typer")
    return loaded


def _base(group: Group) -> type[Any]:
    """Import the class that plugins of a group derive from."""
    module, _, attribute = group.base.partition(":")
    return cast("type[Any]", getattr(import_module(module), attribute))


def _checked(group: Group, point: EntryPoint) -> type[Any]:
    """Load the class behind an entry point and check that it derives from the group's base class."""
    base = _base(group)
    found = point.load()
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(f"{group.kind} {point.name!r}: {point.value} is not a subclass of {base.__name__}")
    problem = method_problem(found, point.name) if group == METHODS else abstract_problem(found)
    if problem:
        raise UserError(f"{group.kind} {point.name!r}: {point.value}: {problem}")
    return found


def method_problem(kind: type[Any], name: Any) -> str:
    """Return why this subclass of Decoder, registered as `name`, cannot be used; '' if it can."""
    if problem := abstract_problem(kind):
        return problem
    for attribute, wanted in DECLARED.items():
        value = inspect.getattr_static(kind, attribute, None)
        if value is None:
            return f"it has no {attribute}"
        if type(value) is not wanted:
            return f"its {attribute} is a {type(value).__name__}, not a plain {wanted.__name__}"
        read, computed = (inspect.getattr_static(type(kind), x, None) for x in ("__getattribute__", attribute))
        if read is not type.__getattribute__ or inspect.isdatadescriptor(computed):
            return f"its metaclass computes {attribute}, which may change from read to read"
    if kind.name != name:
        return f"its `name` is {kind.name!r}, which must be the name that it is registered under"
    if not NAME.fullmatch(kind.name) or kind.name == ALL:
        return f"a method cannot be called {kind.name!r}: use a letter, then letters, digits, - or _, and not {ALL!r}"
    if name in METHOD_ALIASES:
        return f"{name!r} is another name of method {METHOD_ALIASES[name]!r}; give the method a name of its own"
    return options_problem(kind.Options)


def abstract_problem(kind: type[Any]) -> str:
    """Return what an abstract class lacks; '' if the class is not abstract."""
    lacking = sorted(getattr(kind, "__abstractmethods__", ())) if inspect.isabstract(kind) else []
    return f"it is abstract and lacks {', '.join(lacking)}" if lacking else ""


def method_class(name: str) -> type[Decoder]:
    """Return the class of a method. Raises UserError as `load` does."""
    return cast("type[Decoder]", load(METHODS, name))


def method_options(spec: MethodSpec) -> Any:
    """Return the method's `Options`, filled from the text that was given for it. No model is needed."""
    return read_method_options(method_class(spec.name), spec.options)


def read_method_options(kind: type[Decoder], given: Mapping[str, str]) -> Any:
    """Return a method's `Options` from text; the option `nodes` is what `Decoder.with_nodes` makes of it."""
    owner, text = f"method {kind.name!r}", given.get("nodes", "")
    if kind.node_options and text:
        if text.isdecimal() and int(text):
            given = kind.with_nodes({name: value for name, value in given.items() if name != "nodes"}, int(text))
        elif not hasattr(kind.Options, "nodes"):
            raise UserError(f"{owner}: nodes must be a whole number of at least 1, not {text!r}")
    return parse_options(kind.Options, given, owner)


def load_method(spec: MethodSpec, target: Target) -> Decoder:
    """Return the method with its options and weights, bound to a target. Raises UserError where it does not load."""
    kind, options = method_class(spec.name), method_options(spec)
    with plugin_code(f"method {spec.name!r} does not load"):
        made = kind.load(target, options)
        if not isinstance(made, kind) or method_problem(type(made), spec.name):
            raise TypeError(f"load returned a {type(made).__name__}, not a {kind.__name__}")
    return made


def load_suite(name: str) -> Suite:
    """Return a new instance of a suite. Raises UserError as `load` does."""
    return cast("type[Suite]", load(SUITES, name))()


def trainer_class(name: str) -> type[Trainer]:
    """Return the class of a trainer. Raises UserError as `load` does."""
    return cast("type[Trainer]", load(TRAINERS, name))


def _warn(message: str) -> None:
    warnings.warn(message, PluginWarning, stacklevel=3)


def load_plugins(files: Iterable[str]) -> tuple[PluginFile, ...]:
    """Register the methods of these files, and of no others, until the next command; raises as `load_plugin` does."""
    clear_file_methods()
    return tuple(load_plugin(Path(file)) for file in dict.fromkeys(files))


def load_plugin(path: Path) -> PluginFile:
    """Register every Decoder that a file defines, under its `name`, until the next command.

    Raises UserError where the file cannot be read or does not load, where it defines no method, or where a method's
    name is taken or nothing can be decoded with the method.
    """
    content = read_bytes(path)
    sha256 = hashlib.sha256(content).hexdigest()
    found = _methods(_module(path, content, sha256))
    if not found:
        raise UserError(f"plugin {path} defines no method: no subclass of specbench_ss.engine.decoder.Decoder")
    names: list[str] = []
    for kind in found:
        name = getattr(kind, "name", None)
        problem = method_problem(kind, name)
        if not problem and name in names:
            problem = f"its name {name!r} is that of another one in the file"
        if problem:
            raise UserError(f"plugin {path}: {kind.__name__}: {problem}")
        names.append(str(name))
    values = {name: f"{kind.__module__}:{kind.__qualname__}" for name, kind in zip(names, found, strict=True)}
    register_methods(values, f"plugin {path}")
    return PluginFile(str(path), sha256, tuple(names))


def _module(path: Path, content: bytes, sha256: str) -> ModuleType:
    """Load the file as a module with a name of its own, so that it replaces no other module."""
    name = f"ssbench_file_{re.sub(r'[^A-Za-z0-9_]', '_', path.stem)}_{sha256[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_loader(name, loader=None, origin=str(path))
    assert spec is not None
    _base(METHODS)  # its import binds the clocks, which the plugin may replace
    module = module_from_spec(spec)
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        with plugin_code(f"plugin {path} does not load"):
            exec(compile(content, str(path), "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _methods(module: ModuleType) -> list[type[Decoder]]:
    """Return the decoders that the file defines itself, not those that it imports.

    An abstract one, or a base of others without a name, is returned only if there is nothing else.
    """
    base = _base(METHODS)
    own = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, base) and value.__module__ == module.__name__
    ]
    unique = list(dict.fromkeys(own))

    def is_base(kind: type[Decoder]) -> bool:
        nameless = not hasattr(kind, "name") and any(issubclass(o, kind) for o in unique if o is not kind)
        return inspect.isabstract(kind) or nameless

    return [kind for kind in unique if not is_base(kind)] or unique
