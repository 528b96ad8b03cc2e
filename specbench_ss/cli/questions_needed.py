"""`ssbench run --dry-run --target-ci`: how many questions narrow intervals need, by an earlier run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from specbench_ss.errors import UserError
from specbench_ss.runs.config import RunConfig
from specbench_ss.runs.manifest import MANIFEST, read_manifest
from specbench_ss.runs.records import Run
from specbench_ss.runs.run_dir import read_run
from specbench_ss.stats.precision import Width, widths
from specbench_ss.suite import SuiteData

ALIKE = ("suite", "model", "temperature", "max_new_tokens", "engine", "dtype")  # of a run that predicts another one


def questions_needed(config: RunConfig, data: SuiteData, target: float, folder: Path) -> str:
    """Return how many questions each method needs for an interval of ±target, relative to its speedup, as text.

    folder: of earlier runs. The newest complete one with the same settings, the baseline and a method decides.
    """
    run = _earlier_run(config, folder)
    if run is None:
        return f"not known: no run in {folder} has this suite, model, decoding and one of these methods"
    labels = [label for label in _labels(config) if label in run.labels and label != run.baseline]
    tasks = len({question.category for question in data.questions})
    found = "; ".join(_text(width, target, tasks) for width in widths(run.rows, [run.baseline, *labels], run.repeats))
    return f"±{target:.3f} by {run.path}: {found}"


def _earlier_run(config: RunConfig, folder: Path) -> Run | None:
    for path in _newest_first(folder):
        with contextlib.suppress(UserError):  # damaged, or of another version
            manifest = read_manifest(path)
            stored, asked = manifest["config"], config.as_dict()
            alike = all(stored.get(name) == asked[name] for name in ALIKE)
            labels = {method["label"] for method in manifest["methods"]}
            if alike and len(labels & set(_labels(config))) > 1:
                return read_run(path)
    return None


def _labels(config: RunConfig) -> list[str]:
    return [one.label for one in (*config.methods, *config.endpoints)]


def _newest_first(folder: Path) -> Iterator[Path]:
    created = {}
    for file in folder.glob(f"*/{MANIFEST}"):
        with contextlib.suppress(UserError):
            manifest = read_manifest(file.parent)
            if manifest["status"] == "complete":
                created[file.parent] = str(manifest["created"])
    yield from sorted(created, key=lambda path: created[path], reverse=True)


def _text(width: Width, target: float, tasks: int) -> str:
    if width.half is None:
        return f"{width.method} has too few questions there"
    had = f"{width.method} had ±{width.half:.3f} with {width.questions}"
    if width.half <= target:
        return had
    if target <= width.floor:
        return f"{had}, of which no question narrows ±{width.floor:.3f}"
    needed = replace(width, at_best=None).needed(target)  # with as many repeats
    more = f"{had} and needs about {needed} questions (--limit {math.ceil(needed / tasks)})"
    return f"{more}; repeats cannot help" if width.repeats_cannot_help else more
