"""Run directory: append-only, crash-safe and resumable.

- manifest.json: what was run, and on what; replaced atomically
- questions.json: the questions asked, for a reader of the run who does not have the suite
- steps.jsonl: one line for each decoding step, appended before its sample's row
- samples.jsonl: one line for each sample; this commits the sample: steps without a row do not count
- output_match.jsonl: one line for each comparison with the reference
- judge.jsonl: one line for each answer that a judge rated, after the run
- requests.jsonl, concurrency.jsonl: with several requests at a time, one line for each request, and one for each
level of a
  method and repeat, written last: it commits the level's requests, since its throughput is that of all of them
- telemetry.jsonl, drafts.jsonl: what was read of the machine during one try at a sample, and the drafts of one answer

A process killed at any byte loses at most the sample in flight or, with Ray, the questions under way. A failed sample
is made again by --resume: of several lines with the same key, the last one counts. Where lines were lost afterwards,
what is whole still counts, and --resume makes the rest again: docs/design/store.md.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

import msgspec

from specbench_ss import storage, user_files
from specbench_ss.engine.decoder import Step
from specbench_ss.errors import UserError, os_reason
from specbench_ss.runs.config import OutputOptions
from specbench_ss.runs.manifest import MANIFEST, read_manifest, same_run
from specbench_ss.runs.output_match import FAILED
from specbench_ss.runs.records import (
    KILLED,
    ConcurrencyKey,
    JudgeVerdict,
    Key,
    KeyedRecord,
    OutputMatch,
    Run,
    SampleRecord,
    Steps,
    baseline_of,
    read_judged,
    read_output_match,
    step_line,
)
from specbench_ss.runs.records import ConcurrencyResult as ConcurrencyResult
from specbench_ss.runs.step_files import PARQUET, StepLines, read_step_lines, stored_steps
from specbench_ss.storage import in_use, lock
from specbench_ss.suite import Message, Question


class RunStore(Protocol):
    """rows: every sample that is there, by key. compared_keys: keys of samples with a verdict. path: of the run
    directory."""

    path: Path
    manifest: dict[str, Any]
    rows: dict[Key, SampleRecord]
    compared_keys: set[Key]

    def append(self, row: SampleRecord, steps: Sequence[Step]) -> None:
        """Take a sample."""

    def append_output_match(self, verdict: OutputMatch) -> None:
        """Take one comparison with the reference."""

    def append_beside(self, name: str, line: dict[str, Any]) -> str:
        """Take a line of an optional file, TELEMETRY or DRAFTS. Returns why it could not, or ''."""

    def update(self, **changes: Any) -> None:
        """Change entries of the manifest."""

    def keep_warning(self, text: str) -> None:
        """Take what whoever reads the results should know."""


def is_compared(row: KeyedRecord, baseline: str) -> bool:
    """Say whether an answer is held against another one: all are, except the first ones of the run's reference."""
    return row.method != baseline or row.repeat != 0


def compared_with(row: KeyedRecord, manifest: Mapping[str, Any]) -> Key:
    """Return the sample that an answer is held against; repeats of the run's reference, against its first."""
    if row.method == (baseline := baseline_of(manifest)):
        return (row.question_id, row.turn, baseline, 0)
    references = {method["label"]: method.get("reference", baseline) for method in manifest["methods"]}
    return (row.question_id, row.turn, references.get(row.method, baseline), row.repeat)


def without_verdict(run: Run) -> list[SampleRecord]:
    """Return the good samples that should have a verdict on their answer and have none.

    In a run that has not ended, questions that are still being answered have none yet.
    """
    compared, pending = {verdict.key for verdict in run.output_match}, _pending(run)
    held = (row for row in run.rows if row.ok and is_compared(row, run.baseline))
    return [row for row in held if row.key not in compared and row.question_id not in pending]


def _pending(run: Run) -> set[str]:
    """Return the questions of which samples are missing in a run that has not ended."""
    if run.manifest.get("status") == "complete":
        return set()
    made = Counter(row.question_id for row in run.rows)
    whole = {question.id: len(question.turns) * run.repeats * len(run.labels) for question in run.questions}
    return {question for question, n in made.items() if n < whole.get(question, n)}


def uncompared(run: Run) -> list[SampleRecord]:
    """Return those of a complete run: their verdicts are lost, where those of an unfinished run may still come."""
    return without_verdict(run) if run.manifest.get("status") == "complete" else []


TELEMETRY, DRAFTS, TRACES = "telemetry.jsonl", "drafts.jsonl", "traces"


@dataclass(slots=True)
class Readings(KeyedRecord):
    """What was read of the machine during one try at a sample.

    attempt: from 0; the last one is the sample's. disturbed: what disturbed it, or ''. started: Unix time of the first
    reading. columns: `t_s`, seconds since then, and the readings by name, each as long as `t_s`, None where one is
    missing.
    """

    attempt: int
    started: float
    noise_reason: str = ""
    columns: dict[str, list[Any]] = field(default_factory=dict)


@dataclass(slots=True)
class DraftStep:
    """The draft of one step. Node 0 is the root, which was decided before; parents come before children.

    tokens, parents, text: of every drafted node, [n]. pruned: nodes that the method left out before verification.
    path: accepted nodes, the root first. next: the token that the target put behind them. p: the target's probability
    of each node behind its parent, [n], and None for the root and for pruned nodes. q: the probability with which a
    node was drawn, [n]; None where candidates were not drawn but chosen, as by top-k.
    """

    tokens: list[int]
    parents: list[int]
    text: list[str]
    path: list[int]
    next: int
    next_text: str
    pruned: list[int] = field(default_factory=list)
    p: list[float | None] = field(default_factory=list)
    q: list[float] | None = None


@dataclass(slots=True)
class Drafts(KeyedRecord):
    """The drafts of one answer, from an untimed second pass.

    same_answer: whether this pass gave the tokens that the timed one gave, as far as it went. reason: why there are no
    steps, or why there are not all of them; may be empty.
    """

    same_answer: bool | None = None
    reason: str = ""
    steps: list[DraftStep] = field(default_factory=list)


_read_readings, _read_drafts = user_files.decoder(Readings), user_files.decoder(Drafts)


def read_telemetry(path: Path) -> list[Readings]:
    """Return the readings of a run directory; of a sample that was made again after a kill, the later tries."""
    found: dict[Key, list[Readings]] = {}
    for one in storage.scan(path / TELEMETRY, _read_readings)[0]:
        found[one.key] = [*(found.get(one.key, ()) if one.attempt else ()), one]
    return [one for tries in found.values() for one in tries]


def read_drafts(path: Path) -> list[Drafts]:
    """Return the recorded drafts of a run directory; of an answer that was recorded twice, the later record."""
    return latest(storage.scan(path / DRAFTS, _read_drafts)[0])


REQUESTS, CONCURRENCY = "requests.jsonl", "concurrency.jsonl"
_read_concurrency = user_files.decoder(ConcurrencyResult)


def read_concurrency(path: Path) -> tuple[list[ConcurrencyResult], list[SampleRecord]]:
    """Return the committed levels of a run directory with their requests. Raises UserError for a damaged line."""
    levels: dict[ConcurrencyKey, ConcurrencyResult] = {
        one.key: one for one in storage.scan(path / CONCURRENCY, _read_concurrency)[0]
    }
    rows = {(*row.key, row.concurrency): row for row in storage.scan(path / REQUESTS, SampleRecord.read)[0]}
    return list(levels.values()), [r for r in rows.values() if (r.method, r.concurrency or 1, r.repeat) in levels]


QUESTIONS, SAMPLES, STEPS, OUTPUT_MATCH = "questions.json", "samples.jsonl", "steps.jsonl", "output_match.jsonl"
JUDGE = "judge.jsonl"
Record = TypeVar("Record", bound=KeyedRecord)


class _StoredQuestion(msgspec.Struct):
    """An entry of questions.json: `Question.content`, with its fields in their order."""

    id: str
    category: str
    turns: tuple[str, ...]
    references: tuple[tuple[str, ...], ...]
    metric: str | None
    history: tuple[Message, ...] = ()


_read_questions = user_files.decoder(list[_StoredQuestion])


class RunDir:
    """An open run directory. Only one process may write to it at a time, and none that was forked since.

    rows: every committed sample, except those that failed in earlier sessions. compared_keys: keys of samples with
    a verdict.
    """

    def __init__(
        self, path: Path, manifest: dict[str, Any], rows: list[SampleRecord], compared_keys: Iterable[Key], held: int
    ) -> None:
        self.path, self.manifest = path, manifest
        self.rows = {row.key: row for row in rows}
        self.compared_keys = set(compared_keys)
        self._process = os.getpid()
        self._lock, self._given_up = held, dict[str, str]()
        self._files = {name: (path / name).open("ab", buffering=0) for name in (STEPS, SAMPLES, OUTPUT_MATCH)}

    @classmethod
    def open(cls, where: OutputOptions, manifest: dict[str, Any], questions: Sequence[Question] = ()) -> RunDir:
        """Make a new directory, or, with where.resume, open the unfinished one of the same run. Raises UserError."""
        path, rows, compared_keys = where.out, list[SampleRecord](), list[Key]()
        resuming = check_out(where)
        with _errors_named(path), contextlib.ExitStack() as on_error:
            path.mkdir(parents=True, exist_ok=True)
            held = lock(path)
            on_error.callback(os.close, held)
            if resuming:
                manifest = same_run(path, manifest)
                rows, compared_keys = _recover(path, manifest)
                for name in PARQUET:  # they are of what was there until now
                    (path / name).unlink(missing_ok=True)
            else:
                storage.write_json(path / MANIFEST, manifest)
            if not read_questions(path):
                storage.write_json(path / QUESTIONS, [q.content() for q in questions])
            run_dir = cls(path, manifest, rows, compared_keys, held)
            on_error.pop_all()
        return run_dir

    def append(self, row: SampleRecord, steps: Sequence[Step]) -> None:
        """Commit a sample: write its steps, then its row, and flush each to the disk."""
        lines = [step_line(row.key, i, step) for i, step in enumerate(steps)]
        with self._write_access():
            storage.append(self._files[STEPS], lines)
            storage.append(self._files[SAMPLES], [row.as_dict()])
        self.rows[row.key] = row

    def append_output_match(self, verdict: OutputMatch) -> None:
        """Commit one comparison with the reference."""
        with self._write_access():
            storage.append(self._files[OUTPUT_MATCH], [verdict.as_dict()])
        self.compared_keys.add(verdict.key)

    def append_concurrency(self, level: ConcurrencyResult, rows: Sequence[SampleRecord]) -> None:
        """Commit a level: write its requests, then the level itself, and flush each to the disk."""
        with self._write_access():
            for name, made in ((REQUESTS, [row.as_dict() for row in rows]), (CONCURRENCY, [level.as_dict()])):
                with (self.path / name).open("ab", buffering=0) as file:
                    storage.append(file, made)

    def append_beside(self, name: str, line: dict[str, Any]) -> str:
        """Append a line to an optional file, TELEMETRY or DRAFTS. Returns why it could not, or ''.

        These are worth less than the run: no failure is raised. After one nothing more is written to that file in this
        session: no line is put behind half of one.
        """
        with self._write_access():
            if name in self._given_up:
                return self._given_up[name]
            try:
                if name not in self._files:
                    self._files[name] = (self.path / name).open("ab", buffering=0)
                storage.append(self._files[name], [line])
            except ValueError as e:  # a number that is not finite: nothing of the line was written
                return f"a line of {name} could not be written: {e}"
            except OSError as e:
                self._given_up[name] = f"{name} could not be written any further: {os_reason(e)}"
            return self._given_up.get(name, "")

    def update(self, **changes: Any) -> None:
        """Change entries of the manifest atomically."""
        self.manifest |= changes
        with self._write_access():
            storage.write_json(self.path / MANIFEST, self.manifest)

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
        for file in self._files.values():
            file.close()
        os.close(self._lock)

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def check_out(where: OutputOptions) -> bool:
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
    return next(
        (at for at in (whole, *whole.parents) if all((at / name).exists() for name in (MANIFEST, SAMPLES))), None
    )


def is_of_run(path: Path) -> bool:
    """Return True for a file that a run directory consists of, links followed."""
    whole = path.resolve()
    return (
        whole.name in (MANIFEST, QUESTIONS, SAMPLES, STEPS, OUTPUT_MATCH, JUDGE) and run_around(whole) == whole.parent
    )


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
    rows = latest(storage.scan(path / SAMPLES, SampleRecord.read)[0])
    there = {row.key for row in rows}
    verdicts = latest(storage.scan(path / OUTPUT_MATCH, read_output_match)[0])
    return Run(
        path,
        manifest,
        rows,
        _steps(path, rows),
        [verdict for verdict in verdicts if verdict.key in there],
        read_questions(path),
        [verdict for verdict in storage.scan(path / JUDGE, read_judged)[0] if verdict.key in there],
        *read_concurrency(path),
    )


@contextlib.contextmanager
def judging(path: Path) -> Iterator[Callable[[JudgeVerdict], None]]:
    """Give a function that commits a judge's verdict. Only one process may write to a run directory at a time."""
    with _errors_named(path), contextlib.ExitStack() as stack:
        stack.callback(os.close, lock(path))
        storage.cut(path / JUDGE, read_judged)
        file = stack.enter_context((path / JUDGE).open("ab", buffering=0))
        yield lambda verdict: storage.append(file, [verdict.as_dict()])


def _steps(path: Path, rows: Iterable[SampleRecord]) -> Steps:
    stored = stored_steps(path, (path / SAMPLES, path / STEPS))
    return _steps_of(path, read_step_lines(path / STEPS), rows) if stored is None else stored


def _steps_of(path: Path, lines: StepLines, rows: Iterable[SampleRecord]) -> Steps:
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
        return [Question(*msgspec.structs.astuple(stored)) for stored in _read_questions(file.read_bytes())]
    except FileNotFoundError:
        return []
    except OSError as e:
        raise UserError(f"cannot read {file}: {os_reason(e)}") from e
    except ValueError as e:
        raise UserError(f"{file} is damaged: {e}") from e


def latest(records: Iterable[Record]) -> list[Record]:
    """Return the last record of each key, in the order in which the keys first appear."""
    return list({record.key: record for record in records}.values())


def _recover(path: Path, manifest: Mapping[str, Any]) -> tuple[list[SampleRecord], list[Key]]:
    """Cut off the half of a last line, and return the successful rows and the keys that have a verdict.

    Verdicts that only say that a sample failed do not count: there may be a real one now.
    """
    rows = latest(storage.cut(path / SAMPLES, SampleRecord.read))
    verdicts = latest(storage.cut(path / OUTPUT_MATCH, read_output_match))
    lines = read_step_lines(path / STEPS)
    _steps_of(path, lines, rows)
    storage.truncate(path / STEPS, lines.end)
    of_others = {
        TELEMETRY: _read_readings,
        DRAFTS: _read_drafts,
        CONCURRENCY: _read_concurrency,
        REQUESTS: SampleRecord.read,
    }
    for name, read in of_others.items():
        storage.cut(path / name, read)
    good = [row for row in rows if row.ok]
    done = {row.key for row in good}
    kept = (v for v in verdicts if v.key in done and compared_with(v, manifest) in done)
    return good, [verdict.key for verdict in kept if verdict.reason not in FAILED]


@contextlib.contextmanager
def _errors_named(path: Path) -> Iterator[None]:
    """Turn an error of the operating system into a one-line UserError."""
    try:
        yield
    except OSError as e:
        raise UserError(f"cannot write to {path}: {os_reason(e)}") from e
