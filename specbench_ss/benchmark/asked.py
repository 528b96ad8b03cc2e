"""From what was asked for, methods, settings and presets, to the methods of a run. Imports nothing heavy."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from specbench_ss import registry
from specbench_ss.errors import UserError, did_you_mean
from specbench_ss.method_spec import REFERENCE, MethodSpec, split_methods
from specbench_ss.runs.preset import Preset


def check_plugins(presets: Sequence[Preset]) -> None:
    """Raises UserError where a preset is of a method in a file that was not given."""
    for preset in presets:
        if preset.plugin and preset.method not in registry.names(registry.METHODS):
            file = preset.plugin["file"]
            raise UserError(f"--preset {preset.file} is for method {preset.method!r} of {file}: give --plugin {file}")


def method_specs(methods: str, settings: Sequence[str], presets: Sequence[Preset] = ()) -> tuple[MethodSpec, ...]:
    """Methods with their options; `settings` hold for every variant of a method that does not say otherwise.

    Presets hold where neither says otherwise.
    """
    shared = read_settings(settings)
    specs = [MethodSpec.parse(text) for text in with_all(split_methods(methods))]
    if not specs:
        raise UserError("no method given: --methods NAME,NAME[option=value],...")
    chosen = _by_method(presets, [s.name for s in specs])
    specs = [MethodSpec(s.name, chosen.get(s.name, {}) | shared.get(s.name, {}) | s.options) for s in specs]
    if not any(s.label == REFERENCE for s in specs):
        specs.append(MethodSpec(REFERENCE))
    specs = _numbered(specs)
    _check(specs, shared)
    return tuple(sorted(specs, key=lambda s: s.label != REFERENCE))  # stable: the others keep their order


def _numbered(specs: Sequence[MethodSpec]) -> list[MethodSpec]:
    """Give every further copy of the reference a number: 'ar,ar' compares it with itself, as `ar` and `ar#2`."""
    made: list[MethodSpec] = []
    for spec in specs:
        copies = sum(s.name == REFERENCE for s in made) if spec.label == REFERENCE else 0
        made.append(MethodSpec(spec.name, spec.options, copies + 1) if copies else spec)
    return made


def with_all(methods: Sequence[str]) -> list[str]:
    """'all' is every registered method that is not named beside it."""
    if registry.ALL not in methods:
        return list(methods)
    named = [MethodSpec.parse(text).name for text in methods]
    others = [name for name in registry.names(registry.METHODS) if name not in named]
    return [name for text in methods for name in (others if text == registry.ALL else [text])]


def optional_methods(methods: str, specs: Sequence[MethodSpec]) -> frozenset[str]:
    """Labels of the methods that only 'all' asks for."""
    listed = split_methods(methods)
    named = {MethodSpec.parse(text).name for text in listed if text != registry.ALL} | {REFERENCE}
    return frozenset(s.label for s in specs if s.name not in named) if registry.ALL in listed else frozenset()


def read_settings(settings: Sequence[str]) -> dict[str, dict[str, str]]:
    """METHOD.OPTION=VALUE -> the options of each method, as text."""
    found: dict[str, dict[str, str]] = {}
    for text in settings:
        match = re.fullmatch(r"([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)=(.*)", text.strip())
        if match is None:
            raise UserError(f"cannot read --set {text!r}: expected method.option=value")
        found.setdefault(match[1], {})[match[2]] = match[3].strip()
    return found


def _by_method(presets: Sequence[Preset], names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Method -> the options of its preset."""
    chosen: dict[str, dict[str, str]] = {}
    for preset in presets:
        if preset.method not in names:
            raise UserError(f"--preset {preset.file} is for method {preset.method!r}, which is not part of this run")
        if preset.method in chosen:
            raise UserError(f"--preset: two presets for method {preset.method!r}")
        chosen[preset.method] = preset.options
    return chosen


def _check(specs: list[MethodSpec], settings: Mapping[str, Any]) -> None:
    labels = [s.label for s in specs]
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(f"method {label!r} is asked for twice")
    names = [s.name for s in specs]
    for name in settings:
        if name not in names:
            raise UserError(f"--set names method {name!r}, which is not part of this run{did_you_mean(name, names)}")
