"""`ssbench run --dry-run --target-ci`: number of questions that narrow intervals need, based on an earlier run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from specbench_ss.bench.server_client import Server
from specbench_ss.errors import UserError
from specbench_ss.results.text import pluralize
from specbench_ss.runs.config import RunConfig
from specbench_ss.runs.manifest import newest_runs
from specbench_ss.runs.output_match import wrong_methods
from specbench_ss.runs.records import Run, baseline_of
from specbench_ss.runs.run_dir import read_run
from specbench_ss.stats.intervals import FEWEST
from specbench_ss.stats.precision import MORE_PROCESSES, Width, widths

MAY_DIFFER = {  # settings that an earlier run need not share, since samples take the same time
    "limit", "repeats", "warmup", "seed", "order", "rate", "run_code",
    "methods", "endpoints",  # compared one by one
    "presets",  # the options of methods contain those of presets
}  # fmt: skip


def questions_needed(
    config: RunConfig, sizes: Mapping[str, int], target: float, folder: Path, servers: Sequence[Server] = ()
) -> str:
    """Return the number of questions that each method needs for an interval of ±target, as text.

    sizes: number of questions of each task of the suite. target: half the width, relative to the speedup. folder: of
    earlier runs; the newest complete one with the same settings, the same baseline and one of the methods is used.
    servers: those that the run is connected with.
    """
    found = _earlier_run(config, folder, servers)
    if found is None:
        return f"not known: no complete run in {folder} has these settings, this baseline and one of these methods"
    run, common = found
    answering, wrong = {row.method for row in run.rows if row.ok}, wrong_methods(run.output_match, run.manifest)
    stated = []
    for label in _labels(config)[1:]:
        if label not in common or label not in answering:
            stated.append(f"{label} has no outputs there")
        elif label in wrong:
            stated.append(f"{label} has wrong outputs there")
        else:
            (width,) = widths(run.rows, [run.baseline, label], run.repeats)
            stated.append(_needed(width, run, target, sizes))
    return f"±{target:.3f} based on {run.path}, with {_conditions(run)}: {'; '.join(stated)}"


def _earlier_run(config: RunConfig, folder: Path, servers: Sequence[Server]) -> tuple[Run, list[str]] | None:
    """Return the run that predicts, and the labels of the methods that both have, the baseline first."""
    for path, manifest in newest_runs(folder):
        common = _common(manifest, config, {server.label: server for server in servers})
        if manifest["status"] == "complete" and len(common) > 1:
            with contextlib.suppress(UserError):  # damaged samples
                return read_run(path), common
    return None


def _common(manifest: Mapping[str, Any], config: RunConfig, connected: Mapping[str, Server]) -> list[str]:
    """Return the labels of the methods that a run has in common with a configuration, the baseline first.

    There are none if another setting or the baseline differs. connected: servers by label.
    """
    stored, asked = manifest["config"], json.loads(json.dumps(config.as_dict()))  # tuples become lists
    if any(stored.get(name) != asked[name] for name in asked.keys() - MAY_DIFFER):
        return []
    labels, measured = _labels(config), _members(stored)
    entries = {entry["label"]: entry for entry in manifest["methods"]}
    common = [
        label
        for label, member in zip(labels, _members(asked), strict=True)
        if member in measured and _same_server(entries.get(label, {}), connected.get(label))
    ]
    return common if common[:1] == labels[:1] == [baseline_of(manifest)] else []


def _labels(config: RunConfig) -> list[str]:
    return [*(spec.label for spec in config.methods), *(endpoint.label for endpoint in config.endpoints)]


def _members(config: Mapping[str, Any]) -> list[Any]:
    """Return the methods or the endpoints of a stored configuration, with their options and commands."""
    return [*config.get("methods", ()), *config.get("endpoints", ())]


def _same_server(entry: Mapping[str, Any], server: Server | None) -> bool:
    """Return whether a method of a manifest is of the connected server's model and engine.

    server: None for a method or a server that the run starts, whose settings have both.
    """
    if server is None:
        return True
    same_engine = server.engine in ("", entry.get("served", {}).get("software"))
    return bool(same_engine and entry.get("resolved", {}).get("model") == server.model)


def _conditions(run: Run) -> str:
    """Return the repeats, sessions and blocks of a run as text, on which the width of its intervals depends."""
    repeats, blocks = pluralize(run.repeats // run.sessions, "repeat"), run.manifest.get("blocks") or 1
    if run.sessions > 1:
        return f"{repeats} in each of {run.sessions} sessions"
    return f"{repeats} in {blocks} blocks" if blocks > 1 else repeats


def _needed(width: Width, run: Run, target: float, sizes: Mapping[str, int]) -> str:
    if width.half is None:
        return f"{width.method} and {run.baseline} both answered fewer than {FEWEST} questions there"
    had = f"{width.method} had ±{width.half:.3f} with {pluralize(width.questions, 'question')}"
    needed = width.needed(target)
    if needed is None:
        differ = len(width.parts) > 1  # sessions or blocks
        return f"{had}, and no number of questions suffices{f'; {MORE_PROCESSES}' if differ else ''}"
    most = sum(sizes.values())
    if needed > most:
        stated = f"{had} and needs about {needed}, but the suite has only {most}"
    else:
        limit = next(n for n in count(1) if sum(min(size, n) for size in sizes.values()) >= needed)
        stated = f"{had} and needs about {needed} (--limit {limit})"
    return f"{stated}; repeats cannot help" if width.half > target and width.repeats_cannot_help else stated
