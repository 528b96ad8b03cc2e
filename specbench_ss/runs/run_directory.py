"""The run directory: append-only, crash-safe and resumable.

manifest.json   what was run, and on what; replaced atomically
questions.json  the questions asked, for a reader of the run who does not have the suite
steps.jsonl     one line for each decoding step, appended before its sample's row
rows.jsonl      one line for each sample; this commits the sample: steps without a row do not count
sameness.jsonl  one line for each comparison with the reference
judge.jsonl     one line for each answer that a judge rated, after the run
of served engines, requests.jsonl and levels.jsonl: levels.py
and what a run may have besides: side_files.py

A process killed at any byte loses at most the sample in flight. A failed sample is made again by --resume: of several
lines with the same key, the last one counts. Anything but a half-written last line is damage, which is refused with the
name of the file: docs/design/store.md.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from specbench_ss.decoding.generation import Step
from specbench_ss.errors import UserError, os_reason
from specbench_ss.files import crash_safe, records
from specbench_ss.files.folder_lock import in_use, lock
from specbench_ss.runs import levels, side_files
from specbench_ss.runs.config import RunTarget
from specbench_ss.runs.losses import held_against
from specbench_ss.runs.manifest_reading import MANIFEST, read_manifest, same_run
from specbench_ss.runs.rows import KILLED, JudgeVerdict, Key, Row, Run, Sameness, StepRow
from specbench_ss.runs.sameness import FAILED
from specbench_ss.runs.step_lines import StepLines, read_step_lines
from specbench_ss.runs.steps import Steps
from specbench_ss.runs.stored_steps import PARQUET, stored_steps
from specbench_ss.runs.suite import Message, Question

QUESTIONS, ROWS, STEPS, SAMENESS = "questions.json", "rows.jsonl", "steps.jsonl", "sameness.jsonl"
JUDGE = "judge.jsonl"
Record = TypeVar("Record", Row, Sameness)


class _StoredQuestion(msgspec.Struct):
    """An entry of questions.json: `Question.content`, with its fields in their order."""

    id: str
    category: str
    turns: tuple[str, ...]
    references: tuple[tuple[str, ...], ...]
    metric: str | None
    history: tuple[Message, ...] = ()


_read_questions = records.decoder(list[_StoredQuestion])


class RunDir:
    """An open run directory. Only one process may write to it at a time, and none that was forked since.

    rows: every committed sample, except those that failed in earlier sessions. judged: keys of samples with a verdict.
    """

    def __init__(self, path: Path, manifest: dict[str, Any], rows: list[Row], judged: Iterable[Key], held: int) -> None:
        self.path, self.manifest = path, manifest
        self.rows = {row.key: row for row in rows}
        self.judged = set(judged)
        self._process = os.getpid()
        self._lock, self._beside = held, side_files.SideFiles(path)
        self._files = {name: (path / name).open("ab", buffering=0) for name in (STEPS, ROWS, SAMENESS)}

    @classmethod
    def open(cls, where: RunTarget, manifest: dict[str, Any], questions: Sequence[Question] = ()) -> RunDir:
        """Make a new directory, or, with where.resume, open the unfinished one of the same run. Raises UserError."""
        path, rows, judged = where.out, list[Row](), list[Key]()
        resuming = check_out(where)
        with _errors_named(path), contextlib.ExitStack() as on_error:
            path.mkdir(parents=True, exist_ok=True)
            held = lock(path)
            on_error.callback(os.close, held)
            if resuming:
                manifest = same_run(path, manifest)
                rows, judged = _recover(path, manifest)
                for name in PARQUET:  # they are of what was there until now
                    (path / name).unlink(missing_ok=True)
            else:
                crash_safe.write_json(path / MANIFEST, manifest)
            if not read_questions(path):
                crash_safe.write_json(path / QUESTIONS, [q.content() for q in questions])
            run_dir = cls(path, manifest, rows, judged, held)
            on_error.pop_all()
        return run_dir

    def append(self, row: Row, steps: Sequence[Step]) -> None:
        """Commit a sample: write its steps, then its row, and flush each to the disk."""
        lines = [StepRow(*row.key, index=i, step=step).as_dict() for i, step in enumerate(steps)]
        with self._write_access():
            crash_safe.append(self._files[STEPS], lines)
            crash_safe.append(self._files[ROWS], [row.as_dict()])
        self.rows[row.key] = row

    def append_sameness(self, verdict: Sameness) -> None:
        """Commit one comparison with the reference."""
        with self._write_access():
            crash_safe.append(self._files[SAMENESS], [verdict.as_dict()])
        self.judged.add(verdict.key)

    def append_level(self, level: levels.Level, rows: Sequence[Row]) -> None:
        """Commit a level of a served engine with its requests."""
        with self._write_access():
            levels.append_level(self.path, level, rows)

    def append_beside(self, name: str, line: dict[str, Any]) -> str:
        """Append a line to one of the optional files that `side_files` names. Returns why it could not, or ''."""
        with self._write_access():
            return self._beside.append(name, line)

    def update(self, **changes: Any) -> None:
        """Change entries of the manifest atomically."""
        self.manifest |= changes
        with self._write_access():
            crash_safe.write_json(self.path / MANIFEST, self.manifest)

    def keep_warning(self, text: str) -> None:
        """Write a warning into the manifest, once."""
        kept = self.manifest.get("warnings", [])
        if text not in kept:
            self.update(warnings=[*kept, text])

    @contextlib.contextmanager
    def _write_access(self) -> Iterator[None]:
        """Convert errors as `_errors_named` does. Raises UserError in a forked process, before anything is written."""
        if os.getpid() != self._process:
            raise UserError(f"{self.path} belongs to process {self._process}; a forked process cannot write to it")
        with _errors_named(self.path):
            yield

    def close(self) -> None:
        """Close the files. What was appended is already on the disk."""
        self._beside.close()
        for file in self._files.values():
            file.close()
        os.close(self._lock)

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def check_out(where: RunTarget) -> bool:
    """Say whether a run is to be resumed: where.resume, and something is there. Raises UserError where it cannot be.

    This leaves nothing behind and is cheap: call it before anything is loaded.
    """
    with _errors_named(where.out):
        there = next(p for p in (where.out, *where.out.absolute().parents) if p.exists())
        if not there.is_dir():
            raise UserError(f"cannot write to {where.out}: {there} is not a folder")
        content = [p for p in where.out.iterdir() if p.suffix != ".tmp"] if where.out.exists() else []
        if content and not where.resume:
            raise UserError(f"{where.out} is not empty: give another directory, or --resume to continue that run")
        if content and not (where.out / MANIFEST).exists():
            raise UserError(f"{where.out} is not a run directory: it has no {MANIFEST}")
    check_place(where.out)
    return bool(content)


def run_around(path: Path) -> Path | None:
    """Return the run directory that a path is or lies in, links followed; None where there is none."""
    whole = path.resolve()
    return next((at for at in (whole, *whole.parents) if all((at / name).exists() for name in (MANIFEST, ROWS))), None)


def is_of_run(path: Path) -> bool:
    """Return True for a file that a run directory consists of, links followed."""
    whole = path.resolve()
    return whole.name in (MANIFEST, QUESTIONS, ROWS, STEPS, SAMENESS, JUDGE) and run_around(whole) == whole.parent


def check_place(path: Path) -> None:
    """Raise UserError where a folder cannot be made or written to. This leaves nothing behind."""
    with _errors_named(path):
        there = next(p for p in (path, *path.absolute().parents) if p.exists())
        if not os.access(there, os.W_OK | os.X_OK):
            raise UserError(f"cannot write to {path}: permission denied")
        if not path.exists():
            _try_to_make(path)


def _try_to_make(folder: Path) -> None:
    """Make a folder with its parents and remove them again, because access rights alone do not say whether it works."""
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        folder.mkdir(parents=True)
    finally:
        for made in missing:
            with contextlib.suppress(OSError):
                made.rmdir()


def read_run(path: Path) -> Run:
    """Read everything that is committed in a run directory, without changing it. Raises UserError.

    A run whose status says `running` although no process holds its directory gets the status KILLED.
    """
    manifest = read_manifest(path)
    if manifest["status"] == "running" and not in_use(path):
        manifest["status"] = KILLED
    rows = latest(crash_safe.scan(path / ROWS, Row.read)[0])
    there = {row.key for row in rows}
    verdicts = latest(crash_safe.scan(path / SAMENESS, Sameness.read)[0])
    return Run(
        path,
        manifest,
        rows,
        _steps(path, rows),
        [verdict for verdict in verdicts if verdict.key in there],
        read_questions(path),
        [verdict for verdict in crash_safe.scan(path / JUDGE, JudgeVerdict.read)[0] if verdict.key in there],
        *levels.read_levels(path),
    )


@contextlib.contextmanager
def judging(path: Path) -> Iterator[Callable[[JudgeVerdict], None]]:
    """Give a function that commits a judge's verdict. Only one process may write to a run directory at a time."""
    with _errors_named(path), contextlib.ExitStack() as stack:
        stack.callback(os.close, lock(path))
        crash_safe.cut(path / JUDGE, JudgeVerdict.read)
        file = stack.enter_context((path / JUDGE).open("ab", buffering=0))
        yield lambda verdict: crash_safe.append(file, [verdict.as_dict()])


def _steps(path: Path, rows: Iterable[Row]) -> Steps:
    stored = stored_steps(path, (path / ROWS, path / STEPS))
    return stored if stored is not None else _steps_of(path, read_step_lines(path / STEPS), rows)


def _steps_of(path: Path, lines: StepLines, rows: Iterable[Row]) -> Steps:
    """Return the steps of the good samples. Raises UserError where some are missing."""
    try:
        return lines.steps({row.key: row.steps or 0 for row in rows if row.ok})
    except ValueError as error:
        raise UserError(f"{path / STEPS} is damaged: {error}") from None


def read_questions(path: Path) -> list[Question]:
    """Return the questions of a run directory; none where it was killed before they were written.

    Raises UserError where they cannot be read.
    """
    file = path / QUESTIONS
    try:
        stored = _read_questions(file.read_bytes())
    except FileNotFoundError:
        return []
    except OSError as e:
        raise UserError(f"cannot read {file}: {os_reason(e)}") from e
    except ValueError as e:
        raise UserError(f"{file} is damaged: {e}") from e
    return [Question(*msgspec.structs.astuple(question)) for question in stored]


def latest(records: Iterable[Record]) -> list[Record]:
    """Return the last record of each key, in the order in which the keys first appear."""
    return list({record.key: record for record in records}.values())


def _recover(path: Path, manifest: Mapping[str, Any]) -> tuple[list[Row], list[Key]]:
    """Cut off the half of a last line, and return the successful rows and the keys that have a verdict.

    Verdicts that only say that a sample failed do not count: there may be a real one now.
    """
    rows = latest(crash_safe.cut(path / ROWS, Row.read))
    verdicts = latest(crash_safe.cut(path / SAMENESS, Sameness.read))
    lines = read_step_lines(path / STEPS)
    _steps_of(path, lines, rows)
    crash_safe.truncate(path / STEPS, lines.end)
    side_files.recover(path)
    levels.recover(path)
    good = [row for row in rows if row.ok]
    done = {row.key for row in good}
    kept = (v for v in verdicts if v.key in done and held_against(v, manifest) in done)
    return good, [verdict.key for verdict in kept if verdict.reason not in FAILED]


@contextlib.contextmanager
def _errors_named(path: Path) -> Iterator[None]:
    """Turn an error of the operating system into a one-line UserError."""
    try:
        yield
    except OSError as e:
        raise UserError(f"cannot write to {path}: {os_reason(e)}") from e
