"""What a folder of `ssbench paper` was begun for, so that nothing else is ever made into it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from specbench_ss.errors import UserError, os_reason
from specbench_ss.files import crash_safe, records
from specbench_ss.results.experiment import Request
from specbench_ss.runs.manifest import plain

ASKED = "asked.json"


class _Asked(msgspec.Struct):
    """What is read of either file. A result has more fields."""

    experiment: str
    request: dict[str, Any]


def check_folder(folder: Path, name: str, request: Request) -> None:
    """Raise UserError where the folder was begun for another experiment, or with other options."""
    if (asked := _read(folder)) is None:
        return
    if asked.experiment != name:
        raise UserError(f"{folder} holds {asked.experiment}, not {name}: give another --out")
    begun, now = plain(asdict(Request())) | asked.request, plain(asdict(request))
    if other := [_differs(field, begun[field], now[field]) for field in now if begun[field] != now[field]]:
        raise UserError(f"{folder} was begun with {', '.join(other)}: give another --out")


def begin_folder(folder: Path, name: str, request: Request) -> None:
    """Note in the folder what it is for, unless it says so already. Raises UserError as `check_folder` does."""
    check_folder(folder, name, request)
    if (folder / ASKED).exists():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with crash_safe.replacing(folder / ASKED) as file:
            file.write(msgspec.json.encode({"experiment": name, "request": plain(asdict(request))}))
    except OSError as error:
        raise UserError(f"cannot write {folder / ASKED}: {os_reason(error)}") from None


def _read(folder: Path) -> _Asked | None:
    """Return the experiment and the options that the folder was begun for; None for a folder of none."""
    file = folder / ASKED
    try:
        return records.decoder(_Asked)(file.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"cannot read {file}: {os_reason(error)}") from None
    except ValueError as error:
        raise UserError(f"{file} is damaged: {error}; give another --out") from None


def _differs(field: str, begun: Any, now: Any) -> str:
    option = "set" if field == "settings" else field.replace("_", "-")
    return f"--{option} {_told(begun)}, not {_told(now)}"


def _told(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "nothing"
    return "nothing" if value is None else str(value)
