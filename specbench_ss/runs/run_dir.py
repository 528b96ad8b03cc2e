"""Run directory: append-only, crash-safe and resumable.

- manifest.json: configuration and environment; replaced atomically
- questions.json: the questions, for readers without the suite; with status running, without their references
- steps.jsonl: one line per decoding step, appended before its sample's line
- samples.jsonl: one line per sample, which commits it: steps without a sample do not count
- output_match.jsonl: one line per comparison with the reference
- judge.jsonl: one line per output that a judge rated, after the run
- requests.jsonl, concurrency.jsonl: of load levels, one line per request, and one per level of a
  method and repeat, which is written last and commits the level's requests
- baseline_answers.jsonl: one line per answer of a served baseline that later turns continue before it is measured
- telemetry.jsonl, drafts.jsonl: machine readings of one attempt at a sample, and the drafts of one output

A process killed at any byte loses at most the sample in flight or, with Ray, the current questions. --resume runs a
failed sample again: of several lines with the same key, the last one counts. If lines are lost later, complete records
still count and --resume measures the others again (docs/design/store.md).
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, TypeVar

import msgspec

from specbench_ss import storage, user_files
from specbench_ss.engine.decoder import Step
from specbench_ss.errors import UserError, os_errors, os_reason
from specbench_ss.runs.config import OutputOptions
from specbench_ss.runs.environment import between_sessions
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
from specbench_ss.runs.server_tokens import accounted
from specbench_ss.runs.step_files import PARQUET, read_step_lines, stored_steps
from specbench_ss.storage import in_use, lock
from specbench_ss.suite import Message, Question
from specbench_ss.user_files import Count


class RunStore(Protocol):
    """Store of a run's records. rows: samples by key. compared_keys: keys of samples with a verdict."""

    path: Path
    manifest: dict[str, Any]
    rows: dict[Key, SampleRecord]
    compared_keys: set[Key]

    def append(self, row: SampleRecord, steps: Sequence[Step]) -> None:
        """Store a sample."""

    def append_output_match(self, verdict: OutputMatch) -> None:
        """Store one comparison with the reference."""

    def append_optional(self, name: str, line: KeyedRecord) -> str:
        """Store a line of an optional file, TELEMETRY or DRAFTS. Return the error, or ''."""

    def update(self, **changes: Any) -> None:
        """Change entries of the manifest."""

    def keep_warning(self, text: str) -> None:
        """Store a warning for readers of the results."""


def is_compared(row: KeyedRecord, baseline: str) -> bool:
    """Return True if an output is compared with another: all are, except the first repeat of the run's baseline."""
    return row.method != baseline or row.repeat != 0


def compared_with(row: KeyedRecord, manifest: Mapping[str, Any]) -> Key:
    """Return the sample that an output is compared with; repeats of the baseline are compared with its first."""
    if row.method == (baseline := baseline_of(manifest)):
        return (row.question_id, row.turn, baseline, 0)
    references = {method["label"]: method.get("reference", baseline) for method in manifest["methods"]}
    return (row.question_id, row.turn, references.get(row.method, baseline), row.repeat)


def without_verdict(run: Run) -> list[SampleRecord]:
    """Return the successful samples whose verdict is missing.

    In an unfinished run, pending questions have none yet.
    """
    compared, pending = {verdict.key for verdict in run.output_match}, _pending(run)
    expected = (row for row in run.rows if row.ok and is_compared(row, run.baseline))
    return [row for row in expected if row.key not in compared and row.question_id not in pending]


def _pending(run: Run) -> set[str]:
    """Return the questions with missing samples in an unfinished run."""
    if run.manifest.get("status") == "complete":
        return set()
    counts = Counter(row.question_id for row in run.rows)
    totals = {question.id: len(question.turns) * run.repeats * len(run.labels) for question in run.questions}
    return {question for question, n in counts.items() if n < totals.get(question, n)}


def uncompared(run: Run) -> list[SampleRecord]:
    """Return the samples of a complete run whose verdict is lost; an unfinished run may still add it."""
    return without_verdict(run) if run.manifest.get("status") == "complete" else []


TELEMETRY, DRAFTS, TRACES = "telemetry.jsonl", "drafts.jsonl", "traces"


@dataclass(slots=True)
class Readings(KeyedRecord):
    """Machine readings of one attempt at a sample.

    attempt: from 0; the last one is the sample's. noise_reason: detected noise, or ''. started: Unix time of the first
    reading. columns: `t_s`, seconds since then, and the readings by name, each of the same length, None if missing.
    """

    attempt: int
    started: float
    noise_reason: str = ""
    columns: dict[str, list[Any]] = field(default_factory=dict)


@dataclass(slots=True)
class DraftStep:
    """Draft of one step. Node 0 is the root, decided before; parents come before children.

    tokens, parents, text: of every node, [n]. pruned: nodes that the method removed before verification. path: accepted
    nodes, root first. next: the target's token after them. p: the target's probability of each node at its parent, [n],
    None for the root and pruned nodes. q: probability with which a node was sampled, [n]; None for deterministic
    candidates, as with top-k.
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
    """Drafts of one output, from an untimed second pass.

    same_answer: this pass gave the same tokens as the timed one, as far as it went. reason: why steps are missing, or
    ''.
    """

    same_answer: bool | None = None
    reason: str = ""
    steps: list[DraftStep] = field(default_factory=list)


_read_readings, _read_drafts = user_files.decoder(Readings), user_files.decoder(Drafts)

BASELINE_ANSWERS = "baseline_answers.jsonl"


class _BaselineAnswer(msgspec.Struct):
    question_id: str
    turn: Count
    text: str


_read_baseline_answer = user_files.decoder(_BaselineAnswer)


def read_baseline_answers(path: Path) -> dict[tuple[str, int], str]:
    """Return the stored answers of a run directory by question and turn."""
    stored = storage.scan(path / BASELINE_ANSWERS, _read_baseline_answer)[0]
    return {(answer.question_id, answer.turn): answer.text for answer in stored}


def read_telemetry(path: Path) -> list[Readings]:
    """Return the readings of a run directory; of a sample that was repeated after a kill, the later attempts."""
    readings: dict[Key, list[Readings]] = {}
    for reading in storage.scan(path / TELEMETRY, _read_readings)[0]:
        readings[reading.key] = [*(readings.get(reading.key, ()) if reading.attempt else ()), reading]
    return [reading for attempts in readings.values() for reading in attempts]


def read_drafts(path: Path) -> list[Drafts]:
    """Return the recorded drafts of a run directory, the last record of each output."""
    return latest(storage.scan(path / DRAFTS, _read_drafts)[0])


REQUESTS, CONCURRENCY = "requests.jsonl", "concurrency.jsonl"
_read_concurrency = user_files.decoder(ConcurrencyResult)


def read_concurrency(path: Path) -> tuple[list[ConcurrencyResult], list[SampleRecord]]:
    """Return the committed levels of a run directory whose requests are all there, with these requests.

    Raises UserError for a damaged line.
    """
    levels: dict[ConcurrencyKey, ConcurrencyResult] = {
        one.key: one for one in storage.scan(path / CONCURRENCY, _read_concurrency)[0]
    }
    rows = {(*row.key, row.load): row for row in storage.scan(path / REQUESTS, SampleRecord.read)[0]}
    found = Counter((row.method, row.load, row.repeat) for row in rows.values())
    levels = {key: level for key, level in levels.items() if found[key] == level.requests}
    return list(levels.values()), [r for r in rows.values() if (r.method, r.load, r.repeat) in levels]


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
    tools: tuple[dict[str, Any], ...] = ()


_read_questions = user_files.decoder(list[_StoredQuestion])


class RunDir:
    """An open run directory, writable by one process, not by its forks.

    rows: every committed sample, except failed ones of earlier sessions. compared_keys: keys of samples with a verdict.
    """

    def __init__(
        self, path: Path, manifest: dict[str, Any], rows: list[SampleRecord], compared_keys: Iterable[Key], lock_fd: int
    ) -> None:
        self.path, self.manifest = path, manifest
        self._questions: Sequence[Question] = ()
        self.rows = {row.key: row for row in rows}
        self.compared_keys = set(compared_keys)
        self._process = os.getpid()
        self._lock, self._write_errors = lock_fd, dict[str, str]()
        self._files = {name: _appending(path / name) for name in (STEPS, SAMPLES, OUTPUT_MATCH)}

    @classmethod
    def open(cls, where: OutputOptions, manifest: dict[str, Any], questions: Sequence[Question] = ()) -> RunDir:
        """Create a directory, or, with where.resume, open the unfinished one of the same run. Raises UserError."""
        path, rows, compared_keys = where.out, list[SampleRecord](), list[Key]()
        resuming = check_out(where)
        with os_errors(f"cannot write to {path}"), contextlib.ExitStack() as on_error:
            path.mkdir(parents=True, exist_ok=True)
            lock_fd = lock(path)
            on_error.callback(os.close, lock_fd)
            if resuming:
                manifest = same_run(path, manifest)
                _check_sessions(where, manifest)
                rows, compared_keys = _recover(path, manifest, where.session)
                for name in PARQUET:  # outdated from now on
                    (path / name).unlink(missing_ok=True)
            if where.session is not None:
                *before, last = manifest["sessions"]
                manifest |= {"n_sessions": where.sessions, "sessions": [*before, {**last, "session": where.session}]}
            if not resuming:
                storage.write_json(path / MANIFEST, manifest)
            run_dir = cls(path, manifest, rows, compared_keys, lock_fd)
            run_dir._questions = questions or read_questions(path)
            run_dir._write_questions()
            on_error.pop_all()
        return run_dir

    def append(self, row: SampleRecord, steps: Sequence[Step]) -> None:
        """Commit a sample: write its steps, then its line, and flush each to the disk."""
        lines = [step_line(row.key, i, step) for i, step in enumerate(steps)]
        with self._write_access():
            storage.append(self._files[STEPS], lines)
            storage.append(self._files[SAMPLES], [row])
        self.rows[row.key] = row

    def append_output_match(self, verdict: OutputMatch) -> None:
        """Commit one comparison with the reference."""
        with self._write_access():
            storage.append(self._files[OUTPUT_MATCH], [verdict])
        self.compared_keys.add(verdict.key)

    def append_concurrency(self, level: ConcurrencyResult, rows: Sequence[SampleRecord]) -> None:
        """Commit a level: write its requests, then the level, and flush each to the disk."""
        with self._write_access():
            for name, records in ((REQUESTS, rows), (CONCURRENCY, [level])):
                with _appending(self.path / name) as file:
                    storage.append(file, records)

    def append_baseline_answer(self, question_id: str, turn: int, text: str) -> None:
        """Commit an answer that later turns continue, and flush it to the disk."""
        with self._write_access(), _appending(self.path / BASELINE_ANSWERS) as file:
            storage.append(file, [{"question_id": question_id, "turn": turn, "text": text}])

    def append_optional(self, name: str, line: KeyedRecord) -> str:
        """Append a line to an optional file, TELEMETRY or DRAFTS. Return the error, or ''.

        No error is raised, since the run matters more. After one the file gets no more lines in this session, so that
        none follows an incomplete one.
        """
        with self._write_access():
            if name in self._write_errors:
                return self._write_errors[name]
            try:
                if name not in self._files:
                    self._files[name] = _appending(self.path / name)
                storage.append(self._files[name], [line])
            except ValueError as e:  # NaN or infinity: nothing of the line was written
                return f"a line of {name} could not be written: {e}"
            except OSError as e:
                self._write_errors[name] = f"{name} could not be written any further: {os_reason(e)}"
            return self._write_errors.get(name, "")

    def update(self, **changes: Any) -> None:
        """Change entries of the manifest atomically."""
        self.manifest |= changes
        with self._write_access():
            if "status" in changes:  # methods, which shall find no references, run only in between
                self._write_questions(**({"references": ()} if changes["status"] == "running" else {}))
            storage.write_json(self.path / MANIFEST, self.manifest)

    def _write_questions(self, **replaced: Any) -> None:
        storage.write_json(self.path / QUESTIONS, [question.content() | replaced for question in self._questions])

    def keep_warning(self, text: str) -> None:
        """Write a warning into the manifest, once."""
        if text not in self.manifest.get("warnings", []):
            self.update(warnings=_with_warning(self.manifest, text))

    @contextlib.contextmanager
    def _write_access(self) -> Iterator[None]:
        """Convert errors of the operating system. Raises UserError in a forked process before anything is written."""
        if os.getpid() != self._process:
            raise UserError(f"{self.path} belongs to process {self._process}; a forked process cannot write to it")
        with os_errors(f"cannot write to {self.path}"):
            yield

    def close(self) -> None:
        """Close the files; appended lines are already on the disk."""
        for file in self._files.values():
            file.close()
        os.close(self._lock)

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _appending(file: Path) -> IO[bytes]:
    return open(file, "ab", buffering=0, opener=storage.ordinary)


def check_out(where: OutputOptions) -> bool:
    """Return True if a run is to be resumed: where.resume, and the directory has content. Raises UserError.

    Leaves no trace and is fast: call it before anything is loaded.
    """
    with os_errors(f"cannot write to {where.out}"):
        existing = next(p for p in (where.out, *where.out.absolute().parents) if p.exists())
        if not existing.is_dir():
            raise UserError(f"cannot write to {where.out}: {existing} is not a folder")
        content = [p for p in where.out.iterdir() if p.suffix != ".tmp"] if where.out.exists() else []
        if content and not where.resume:
            if in_use(where.out):
                raise UserError(f"{where.out} is not empty, and a process may be writing to it; use another directory")
            raise UserError(f"{where.out} is not empty; use another directory, or --resume to continue that run")
        if content and not (where.out / MANIFEST).exists():
            raise UserError(f"{where.out} is not a run directory: it has no {MANIFEST}")
    check_place(where.out)
    return bool(content)


def run_around(path: Path) -> Path | None:
    """Return the run directory that contains the path, links followed, or None."""
    resolved = path.resolve()
    return next(
        (
            folder
            for folder in (resolved, *resolved.parents)
            if all((folder / name).exists() for name in (MANIFEST, SAMPLES))
        ),
        None,
    )


def is_of_run(path: Path) -> bool:
    """Return True for a file of a run directory, links followed."""
    resolved = path.resolve()
    return (
        resolved.name in (MANIFEST, QUESTIONS, SAMPLES, STEPS, OUTPUT_MATCH, JUDGE)
        and run_around(resolved) == resolved.parent
    )


def check_place(path: Path) -> None:
    """Raise UserError if a folder cannot be created or written to. Leaves no trace."""
    with os_errors(f"cannot write to {path}"):
        existing = next(p for p in (path, *path.absolute().parents) if p.exists())
        if not os.access(existing, os.W_OK | os.X_OK):
            raise UserError(f"cannot write to {path}: permission denied")
        if not path.exists():
            _test_mkdir(path)


def _test_mkdir(folder: Path) -> None:
    """Create a folder with its parents and remove them again: access rights alone are not conclusive."""
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        folder.mkdir(parents=True)
    finally:
        for created in missing:
            with contextlib.suppress(OSError):
                created.rmdir()


def read_run(path: Path) -> Run:
    """Read everything committed in a run directory, without changing it. Raises UserError.

    A run with status `running` gets the status KILLED if no process has locked its directory.
    """
    manifest = read_manifest(path)
    if manifest["status"] == "running" and not in_use(path):
        manifest["status"] = KILLED
    levels, requests = read_concurrency(path)
    stored = latest(storage.scan(path / SAMPLES, SampleRecord.read)[0])
    steps = stored_steps(path, (path / SAMPLES, path / STEPS))
    if steps is None:
        steps = read_step_lines(path / STEPS).steps({row.key: _n_steps(row) for row in stored})
    whole = _with_steps(stored, steps)
    every = accounted([*whole, *requests])
    rows, requests = every[: len(whole)], every[len(whole) :]
    keys = {row.key for row in rows}
    verdicts = read_verdicts(path)
    return Run(
        path,
        manifest,
        rows,
        steps,
        [verdict for verdict in verdicts if verdict.key in keys],
        read_questions(path),
        [verdict for verdict in storage.scan(path / JUDGE, read_judged)[0] if verdict.key in keys],
        levels,
        requests,
        len(stored) - len(whole),
    )


def add_warning(path: Path, text: str) -> list[str]:
    """Write a warning into the manifest of a run that no process writes to, once; return all its warnings.

    Raises UserError.
    """
    with os_errors(f"cannot write to {path}"), contextlib.ExitStack() as stack:
        stack.callback(os.close, lock(path))
        manifest = read_manifest(path)
        manifest["warnings"] = _with_warning(manifest, text)
        storage.write_json(path / MANIFEST, manifest)
    return list(manifest["warnings"])


def _with_warning(manifest: Mapping[str, Any], text: str) -> list[str]:
    return list(dict.fromkeys([*manifest.get("warnings", []), text]))


@contextlib.contextmanager
def judging(path: Path) -> Iterator[Callable[[JudgeVerdict], None]]:
    """Yield a function that commits a judge's verdict, with the directory locked."""
    with os_errors(f"cannot write to {path}"), contextlib.ExitStack() as stack:
        stack.callback(os.close, lock(path))
        storage.cut(path / JUDGE, read_judged)
        file = stack.enter_context(_appending(path / JUDGE))
        yield lambda verdict: storage.append(file, [verdict])


def _n_steps(row: SampleRecord) -> int:
    """Return the number of stored steps that a sample needs."""
    return row.steps or 0 if row.ok and not row.counted else 0


def _with_steps(rows: Iterable[SampleRecord], steps: Steps) -> list[SampleRecord]:
    """Return the samples without those whose steps are lost, which count as not measured."""
    return [row for row in rows if not _n_steps(row) or row.key in steps.place]


def read_questions(path: Path) -> list[Question]:
    """Return the questions of a run directory; none if the run was killed before writing them.

    Raises UserError if they cannot be read.
    """
    file = path / QUESTIONS
    try:
        return [Question(*msgspec.structs.astuple(stored)) for stored in _read_questions(storage.read_bytes(file))]
    except FileNotFoundError:
        return []
    except OSError as e:
        raise UserError(f"cannot read {file}: {os_reason(e)}") from e
    except ValueError as e:
        raise UserError(f"{file} is damaged: {e}; --resume writes it again") from e


def latest(records: Iterable[Record]) -> list[Record]:
    """Return the last record of each key, in the order in which the keys first appear."""
    return list({record.key: record for record in records}.values())


def read_verdicts(path: Path) -> list[OutputMatch]:
    """Return the last verdict on each output."""
    return latest(storage.scan(path / OUTPUT_MATCH, read_output_match)[0])


def _check_sessions(where: OutputOptions, manifest: Mapping[str, Any]) -> None:
    """Raise UserError if the sessions of a resumed run would be others, or under other conditions."""
    have = manifest.get("n_sessions") or 1
    if where.sessions < have:
        raise UserError(f"--resume: the run in {where.out} has {have} sessions; use --sessions {have}")
    if where.session is None:
        return
    if manifest.get("repeats_made"):
        raise UserError(f"--sessions: the run in {where.out} has the repeats of --target-ci; use another --out")
    if changed := between_sessions(dict(manifest)):
        raise UserError(
            f"--sessions: the run in {where.out} was made under other conditions ({', '.join(changed)}); "
            "use another --out"
        )


def _recover(
    path: Path, manifest: Mapping[str, Any], session: int | None = None
) -> tuple[list[SampleRecord], list[Key]]:
    """Truncate incomplete last lines; return the successful samples and the keys with a verdict.

    session: failed samples of other sessions are returned too, since only this one is made.

    A sample whose steps are lost becomes a failed one, so that steps of another attempt are never taken for its own.
    Verdicts on a failed sample or reference do not count, since a resumed run may replace them.
    """
    rows = latest(storage.cut(path / SAMPLES, SampleRecord.read))
    verdicts = latest(storage.cut(path / OUTPUT_MATCH, read_output_match))
    lines = read_step_lines(path / STEPS)
    measured = _with_steps(rows, lines.steps({row.key: _n_steps(row) for row in rows}))
    storage.truncate(path / STEPS, lines.end)
    if len(measured) < len(rows):
        kept = {row.key for row in measured}
        with _appending(path / SAMPLES) as file:
            storage.append(file, [row.without_numbers() for row in rows if row.key not in kept])
    readers = {
        TELEMETRY: _read_readings,
        DRAFTS: _read_drafts,
        CONCURRENCY: _read_concurrency,
        REQUESTS: SampleRecord.read,
        BASELINE_ANSWERS: _read_baseline_answer,
    }
    for name, read in readers.items():
        storage.cut(path / name, read)
    good = [row for row in measured if row.ok]
    failed = [row for row in measured if not row.ok and session not in (None, row.session)]
    done = {row.key for row in good}
    current = (v for v in verdicts if v.key in done and compared_with(v, manifest) in done)
    return [*good, *failed], [verdict.key for verdict in current if verdict.reason not in FAILED]
