"""From options and a configuration file to a `RunConfig`. Imports nothing heavy."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any

import typer

from specbench_ss.benchmark.asked import check_plugins, method_specs
from specbench_ss.errors import UserError, did_you_mean
from specbench_ss.files.user_files import mapping, read_bytes
from specbench_ss.models.chat_templates import template_text
from specbench_ss.options import value_text
from specbench_ss.runs.config import RunConfig
from specbench_ss.runs.preset import read_preset


def read_config_file(ctx: typer.Context, path: Path | None) -> Path | None:
    """Option callback: the file's values become the defaults of the options not given on the command line."""
    if path is not None and not ctx.resilient_parsing:
        names = {p.opts[0].lstrip("-").replace("-", "_"): str(p.name) for p in ctx.command.params}
        values = _as_options(mapping(read_bytes(path), path), set(names) - {"config", "help"}, path)
        ctx.default_map = {names[option]: value for option, value in values.items()}
    return path


def _as_options(content: Mapping[Any, Any], known: set[str], path: Path) -> dict[str, Any]:
    """Values in the form that the command line has them in."""
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise UserError(f"{path}: no option {str(key)!r}{did_you_mean(name, known)}")
        if value is None:
            continue
        if name == "set":
            values[name] = _set_items(value, path)
        elif name in ("stop", "plugin"):
            values[name] = [value] if isinstance(value, str) else _texts(value, path, name)
        else:
            values[name] = ",".join(map(str, value)) if isinstance(value, list) else value
    return values


def _set_items(value: Any, path: Path) -> list[str]:
    """{ss: {k: 1}}, {ss.k: 1} or ['ss.k=1'] -> ['ss.k=1']."""
    if not isinstance(value, dict):
        return _texts(value, path, "set")
    items: list[str] = []
    for name, options in value.items():
        if isinstance(options, dict):
            items += [f"{name}.{key}={value_text(v)}" for key, v in options.items()]
        elif "." in str(name) and not isinstance(options, list):
            items.append(f"{name}={value_text(options)}")
        else:
            raise UserError(f"{path}: 'set' has {name!r}; expected method.option: value, or method: {{option: value}}")
    return items


def _texts(value: Any, path: Path, name: str) -> list[str]:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    form = "method.option=value, or method: {option: value}" if name == "set" else "texts"
    raise UserError(f"{path}: {name!r} must be a list of {form}")


def run_config(values: Mapping[str, Any]) -> RunConfig:
    """The run that the options describe; the reference method comes first, asked for or not."""
    own = {f.name for f in fields(RunConfig)} - {"methods", "categories", "data", "stop", "presets"}
    if not (math.isfinite(values["temperature"]) and values["temperature"] >= 0):
        raise UserError(f"--temperature must be a number of at least 0, not {values['temperature']:g}")
    if not 0 < values["top_p"] <= 1:
        raise UserError(f"--top-p must be above 0 and at most 1, not {values['top_p']:g}")
    if "" in (values["stop"] or ()):
        raise UserError("--stop must not be empty")
    if values["chat_template"] is not None:
        template_text(values["chat_template"])  # found wrong before anything is loaded
    presets = tuple(read_preset(Path(part.strip())) for part in (values["preset"] or "").split(",") if part.strip())
    check_plugins(presets)
    return RunConfig(
        methods=method_specs(values["methods"], values["set"] or (), presets),
        categories=tuple(part.strip() for part in (values["categories"] or "").split(",") if part.strip()),
        data=None if values["data"] is None else str(values["data"]),
        stop=tuple(values["stop"] or ()),
        presets=presets,
        **{name: values[name] for name in own},
    )


def default_out(config: RunConfig, now: datetime) -> Path:
    """runs/<timestamp>-<model>-<suite>, with only plain characters."""
    model = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(config.model).name or config.model).strip("-.") or "model"
    return Path("runs") / f"{now:%Y%m%d-%H%M%S}-{model}-{config.suite}"
