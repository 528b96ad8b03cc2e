"""Which workers are asked for, from options as the command line or Python has them. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from specbench_ss.errors import UserError, known_words
from specbench_ss.models.devices import check_one_device
from specbench_ss.options import whole_number
from specbench_ss.runs.config import Workers

EXECUTORS = ("local", "ray")


def workers_of(values: Mapping[str, Any]) -> Workers | None:
    """Return who makes the samples, None where this process does. Raises UserError for options that do not fit."""
    executor, count, address = (values[name] for name in ("executor", "workers", "ray_address"))
    if executor not in EXECUTORS:
        raise UserError(f"--executor: there is no {executor!r}{known_words(str(executor), EXECUTORS)}")
    if executor == "local":
        given = [name for name, value in (("--workers", count), ("--ray-address", address)) if value is not None]
        if given:
            raise UserError(f"{given[0]} needs --executor ray: without it, this process makes all samples")
        return None
    if values.get("endpoint"):
        raise UserError(
            "--executor is of methods in processes of ours, and --endpoint measures a server: leave one out"
        )
    if values.get("batch_size"):
        raise UserError("--batch-size is measured in one process: leave out --batch-size or --executor")
    if values.get("trace"):
        raise UserError("--trace profiles a method in one process: leave out --trace or --executor")
    check_one_device(values.get("device", "auto"), "--executor ray")
    if find_spec("ray") is None:
        raise UserError("--executor ray needs Ray: pip install -e '.[ray]'")
    if not isinstance(address, str | None):
        raise UserError(f"--ray-address must be text, not {address!r}")
    return Workers(None if count is None else whole_number("--workers", count, 1), address)
