"""Presets: tuned options of a method for one model and device."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import yaml

from specbench_ss import user_files
from specbench_ss.errors import UserError, os_errors
from specbench_ss.options import value_text
from specbench_ss.storage import replacing, temporary
from specbench_ss.user_files import mapping, read_bytes

FORMAT = 1


class _Calibration(msgspec.Struct):
    prompts: tuple[str, ...] = ()


class _Plugin(msgspec.Struct):
    file: str
    sha256: str


class _Content(msgspec.Struct, kw_only=True):
    """Content of a preset file. Only method and options are required, since presets may be written by hand."""

    preset: int = FORMAT
    method: str
    options: dict[Any, Any]
    made_for: dict[Any, Any] = {}
    resolved: dict[Any, Any] = {}
    calibration: _Calibration = msgspec.field(default_factory=_Calibration)
    plugin: _Plugin | None = None


@dataclass(frozen=True, slots=True)
class Preset:
    """A preset. Fields other than method and options may be empty if it was written by hand.

    options: values as text, as on the command line. made_for: conditions of the measurement (`preflight.conditions`).
    resolved: the resulting settings (`Decoder.metadata`). prompts: marks of the calibration questions. plugin: file and
    sha256, if the method came from a file.
    """

    file: str
    sha256: str
    method: str
    options: dict[str, str]
    made_for: dict[str, Any] = field(default_factory=dict)
    resolved: dict[str, Any] = field(default_factory=dict)
    prompts: tuple[str, ...] = ()
    plugin: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, str]:
        """Return the manifest's entry of the preset."""
        return {"file": self.file, "sha256": self.sha256, "method": self.method}


def read_preset(path: Path) -> Preset:
    """Return the preset in a file. Raises UserError for an invalid or unsupported one."""
    content = read_bytes(path)
    try:
        stored = user_files.convert({str(name): value for name, value in mapping(content, path).items()}, _Content)
    except ValueError as problem:
        raise UserError(f"{path} is not a preset: {problem}") from None
    if stored.preset != FORMAT:
        raise UserError(f"{path} has preset format {stored.preset}; this version reads {FORMAT}")
    if nested := [name for name, value in stored.options.items() if isinstance(value, dict | list)]:
        raise UserError(f"{path} is not a preset: options.{nested[0]} is not a single value")
    return Preset(
        file=str(path),
        sha256=hashlib.sha256(content).hexdigest(),
        method=stored.method,
        options={str(name): value_text(value) for name, value in stored.options.items()},
        made_for=stored.made_for,
        resolved=stored.resolved,
        prompts=stored.calibration.prompts,
        plugin=msgspec.structs.asdict(stored.plugin) if stored.plugin else {},
    )


def check_writable(path: Path) -> None:
    """Raise UserError if a preset cannot be written: no such folder, no permission, or another kind of file."""
    if path.exists():
        if path.is_dir():
            raise UserError(f"cannot write {path}: it is a folder")
        read_preset(path)  # only a preset may be replaced
    with os_errors(f"cannot write {path}"), temporary(path):  # access rights are not conclusive
        pass


def write_preset(path: Path, content: Mapping[str, Any]) -> None:
    """Write a preset atomically, and keep an earlier one as FILE.old. Raises UserError on failure."""
    head = f"# Made by `ssbench tune`. Use: ssbench run --methods {content['method']} --preset {path.name}\n"
    text = yaml.safe_dump(
        {"preset": FORMAT, **content}, sort_keys=False, default_flow_style=None, allow_unicode=True, width=120
    )
    with os_errors(f"cannot write {path}"), replacing(path) as file:
        file.write((head + text).encode())
        if path.exists():
            os.replace(path, path.with_name(path.name + ".old"))
