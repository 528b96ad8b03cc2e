"""The run directory: append-only, crash-safe, resumable.

manifest.json   what was run on what; replaced atomically
questions.json  the questions asked, for whoever reads the run without the suite
steps.jsonl     a line for each decoding step, appended before its sample's row
rows.jsonl      a line for each sample: the commit mark; steps without a row do not count
sameness.jsonl  a line for each comparison with the reference

A process killed at any byte loses at most the sample in flight. Knows no method and no suite.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from specbench_ss import jsonl
from specbench_ss.config import RunTarget
from specbench_ss.errors import UserError
from specbench_ss.records import Step
from specbench_ss.rows import Key, Row, Run, Sameness, StepRow
from specbench_ss.suite import Question

FORMAT = 1
MANIFEST, QUESTIONS, ROWS, STEPS, SAMENESS = (
    "manifest.json", "questions.json", "rows.jsonl", "steps.jsonl", "sameness.jsonl",
)  # fmt: skip
IDENTITY = {  # what must be the same for two sessions to share a directory: where it is, how the user calls it
    ("fingerprint",): "configuration",
    ("suite", "content_hash"): "suite content",
    ("model", "hash"): "model",
    ("model", "dtype"): "dtype",
    ("model", "device"): "device",
    ("model", "chat_template"): "chat template",
}
REQUIRED = {  # what reports and tables read of a manifest
    (): ("version", "command", "config", "fingerprint", "suite", "model", "methods", "environment", "created",
         "finished", "status"),
    ("config",): ("temperature", "top_p", "top_k"),
    ("suite",): ("name", "edition", "content_hash", "size", "prompts", "notes"),
    ("model",): ("name", "hash", "parameters", "dtype", "device", "context_length"),
    ("environment",): ("python", "platform", "packages", "gpus"),
}  # fmt: skip
REQUIRED_OF_METHOD = ("label", "summary", "options", "paper")


class RunDir:
    """An open run directory; one writer at a time. rows: every committed sample; judged: those with a verdict."""

    def __init__(self, path: Path, manifest: dict[str, Any], rows: list[Row], judged: Iterable[Key], lock: int) -> None:
        self.path, self.manifest = path, manifest
        self.rows = {row.key: row for row in rows}
        self.judged = set(judged)
        self._lock = lock
        self._files = {name: (path / name).open("ab", buffering=0) for name in (STEPS, ROWS, SAMENESS)}

    @classmethod
    def open(cls, where: RunTarget, manifest: dict[str, Any], questions: Sequence[Question] = ()) -> RunDir:
        """A new directory, or with where.resume the unfinished one of the same run. Raises UserError."""
        path, rows, judged = where.out, list[Row](), list[Key]()
        resuming = check_out(where)
        with _writing(path), contextlib.ExitStack() as on_error:
            path.mkdir(parents=True, exist_ok=True)
            lock = _lock(path)
            on_error.callback(os.close, lock)
            if resuming:
                manifest = _same_run(path, manifest)
                rows, judged = _recover(path)
            else:
                jsonl.write_json(path / MANIFEST, manifest)
            if not (path / QUESTIONS).exists():
                jsonl.write_json(path / QUESTIONS, [asdict(q) for q in questions])
            run_dir = cls(path, manifest, rows, judged, lock)
            on_error.pop_all()
        return run_dir

    def append(self, row: Row, steps: Sequence[Step]) -> None:
        """Commit a sample: its steps, then its row, each flushed to the disk."""
        lines = [StepRow(*row.key, index=i, step=step).as_dict() for i, step in enumerate(steps)]
        with _writing(self.path):
            jsonl.append(self._files[STEPS], lines)
            jsonl.append(self._files[ROWS], [row.as_dict()])
        self.rows[row.key] = row

    def append_sameness(self, verdict: Sameness) -> None:
        """Commit one comparison with the reference."""
        with _writing(self.path):
            jsonl.append(self._files[SAMENESS], [verdict.as_dict()])
        self.judged.add(verdict.key)

    def update(self, **changes: Any) -> None:
        """Change entries of the manifest, atomically."""
        self.manifest |= changes
        with _writing(self.path):
            jsonl.write_json(self.path / MANIFEST, self.manifest)

    def close(self) -> None:
        """Close the files; what was appended is already on the disk."""
        for file in self._files.values():
            file.close()
        os.close(self._lock)

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def check_out(where: RunTarget) -> bool:
    """Whether there is a run to resume; makes nothing. Raises UserError where the run cannot go there.

    Cheap: to be called before anything is loaded.
    """
    with _writing(where.out):
        there = next(p for p in (where.out, *where.out.absolute().parents) if p.exists())
        if not there.is_dir():
            raise UserError(f"cannot write to {where.out}: {there} is not a folder")
        content = [p for p in where.out.iterdir() if p.suffix != ".tmp"] if where.out.exists() else []
        if content and not where.resume:
            raise UserError(f"{where.out} is not empty: give another directory, or --resume to continue that run")
        if content and not (where.out / MANIFEST).exists():
            raise UserError(f"{where.out} is not a run directory: it has no {MANIFEST}")
        if not os.access(there, os.W_OK | os.X_OK):
            raise UserError(f"cannot write to {where.out}: permission denied")
    return bool(content)


def read_run(path: Path) -> Run:
    """Everything that is committed in a run directory, without changing it. Raises UserError."""
    manifest = _read_manifest(path)
    rows = jsonl.scan(path / ROWS, Row.of)[0]
    done = {row.key for row in rows}
    steps = jsonl.scan(path / STEPS, StepRow.of, lambda step: step.key in done)[0]
    _check_steps(path, rows, steps)
    questions = []
    if (path / QUESTIONS).exists():
        try:
            questions = [_question(entry) for entry in json.loads((path / QUESTIONS).read_bytes())]
        except (ValueError, TypeError, KeyError) as e:
            raise UserError(f"{path / QUESTIONS} is damaged") from e
    return Run(path, manifest, rows, steps, jsonl.scan(path / SAMENESS, Sameness.of)[0], questions)


def _question(data: Mapping[str, Any]) -> Question:
    references = tuple(tuple(answers) for answers in data["references"])
    return Question(data["id"], data["category"], tuple(data["turns"]), references, data["metric"])


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_bytes())
    except OSError as e:
        raise UserError(f"{path} is not a run directory: cannot read {MANIFEST}: {e.strerror}") from e
    except ValueError as e:
        raise UserError(f"{file} is damaged: it is not JSON") from e
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(f"{file} is not the manifest of a run that this version can read")
    return manifest


def _same_run(path: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """The stored manifest, once it is known to describe the wanted run."""
    stored = _read_manifest(path)
    for keys, name in IDENTITY.items():
        old, new = _at(stored, keys), _at(wanted, keys)
        if old != new:
            raise UserError(f"{path} is a run directory from another configuration: its {name} differs")
    _same_methods(path, stored, wanted)
    return {**stored, "sessions": [*stored.get("sessions", []), *wanted.get("sessions", [])]}


def _same_methods(path: Path, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises UserError where a method has other weights or settings than those that the run was begun with."""
    old, new = _resolved(stored), _resolved(wanted)
    for label in {**old, **new}:
        changed = [key for key in {**old.get(label, {}), **new.get(label, {})} if _differs(old, new, label, key)]
        if changed or (label in old) != (label in new):
            what = f" ({', '.join(changed)})" if changed else ""
            raise UserError(f"{path} is a run directory from another configuration: its method {label} differs{what}")


def _resolved(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {method["label"]: method.get("resolved", {}) for method in manifest.get("methods", [])}


def _differs(old: dict[str, dict[str, Any]], new: dict[str, dict[str, Any]], label: str, key: str) -> bool:
    missing = object()
    return bool(old.get(label, {}).get(key, missing) != new.get(label, {}).get(key, missing))


def check_manifest(run: Run) -> None:
    """Raises UserError where the manifest lacks what every report reads."""
    for keys, names in REQUIRED.items():
        part = _at(run.manifest, keys)
        _check_has(run.path, part, names, ".".join((*keys, "")))
    for i, method in enumerate(run.manifest["methods"]):
        _check_has(run.path, method, REQUIRED_OF_METHOD, f"methods[{i}].")


def _check_has(path: Path, part: Any, names: Sequence[str], where: str) -> None:
    lacking = [name for name in names if not isinstance(part, dict) or name not in part]
    if lacking:
        raise UserError(f"{path / MANIFEST} is damaged: it lacks {where}{lacking[0]}")


def _at(data: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def _recover(path: Path) -> tuple[list[Row], list[Key]]:
    """Cut off whatever a killed process left half-written; the committed rows and the keys already judged."""
    rows = jsonl.cut(path / ROWS, Row.of)
    done = {row.key for row in rows}
    _check_steps(path, rows, jsonl.cut(path / STEPS, StepRow.of, lambda step: step.key in done))
    return rows, [verdict.key for verdict in jsonl.cut(path / SAMENESS, Sameness.of)]


def _check_steps(path: Path, rows: list[Row], steps: list[StepRow]) -> None:
    found = Counter(step.key for step in steps)
    for row in rows:
        if found[row.key] != (row.steps or 0):
            raise UserError(f"{path / STEPS} is damaged: {found[row.key]} of {row.steps} steps of sample {row.index}")


def _lock(path: Path) -> int:
    """One writer at a time: a lock on the folder, held until the descriptor returned is closed or the process ends."""
    folder = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        os.close(folder)
        raise UserError(f"{path} is in use by another process") from e
    except OSError:  # a file system without locks: go without
        pass
    return folder


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn what the operating system refuses into one clear line."""
    try:
        yield
    except OSError as e:
        raise UserError(f"cannot write to {path}: {(e.strerror or str(e)).lower()}") from e
