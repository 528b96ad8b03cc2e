"""Reading a YAML file that a user gives: whatever is wrong with it is one line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specbench_ss.errors import UserError


def read_bytes(path: Path) -> bytes:
    """The file's content. Raises UserError where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from error


def mapping(content: bytes, path: Path) -> Mapping[Any, Any]:
    """The content of `path` as YAML; an empty file is an empty mapping. Raises UserError for anything else."""
    import yaml

    try:
        parsed = yaml.safe_load(content)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:  # ValueError: a date that is none
        raise UserError(f"{path} is not YAML: {error}") from error
    if not isinstance(parsed or {}, dict):
        raise UserError(f"{path}: expected 'option: value' lines")
    return parsed or {}
