"""What a run directory says of a run of served engines: addresses without users and keys, and what the servers told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specbench_ss.runs.config import RunConfig
from specbench_ss.runs.manifest import manifest_of
from specbench_ss.runs.suite import SuiteData
from specbench_ss.served.connect import Found

AS_SERVED = "as served"  # where a local run names a number format or a device


def manifest_for(
    config: RunConfig, data: SuiteData, found: Sequence[Found], command: Sequence[str]
) -> Mapping[str, Any]:
    """Return the manifest of a run that is about to start, as JSON-ready data."""
    baseline = found[0].server
    model = dict.fromkeys(("hash", "parameters", "context_length", "chat_template"))
    model |= {"name": baseline.model, "dtype": AS_SERVED, "device": AS_SERVED}
    methods = [_entry(one, baseline.label) for one in found]
    return manifest_of(config, data, command, model, methods) | {"baseline": baseline.label}


def _entry(found: Found, baseline: str) -> dict[str, Any]:
    server, about = found.server, found.about
    version = {"version": about["version"]} if about["version"] else {}
    return {
        "label": server.label,
        "name": "endpoint",
        "options": {},
        "resolved": {"url": server.shown_url, "model": server.model, **version},  # what --resume must find again
        "served": {name: value for name, value in about.items() if name != "version"},
        "lossless": False,
        "reference": baseline,
        "summary": f"served at {server.shown_url}",
        "paper": "",
    }
