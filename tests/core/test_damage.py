"""What is lost of a run directory costs no more than the samples that it belongs to, and is said."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specbench_ss.engine.decoder import Step
from specbench_ss.errors import UserError
from specbench_ss.results.analysis import load_run
from specbench_ss.results.sample_checks import unfinished
from specbench_ss.runs.config import RunTarget
from specbench_ss.runs.records import Row, Run, Sameness
from specbench_ss.runs.run_dir import MANIFEST, QUESTIONS, ROWS, SAMENESS, STEPS, RunDir, losses, read_run
from specbench_ss.suite import SuiteData
from tests import conftest
from tests.core import test_rundir
from tests.core.test_rundir import put

LINES = (ROWS, STEPS, SAMENESS)
NUMBERS = range(6)  # samples: `ar` and `m` on three questions, with 0, 1, 2, 0, 1 and 2 steps
HELD = [1, 3, 5]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # hundreds of files: the disk is not what is tested


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with RunDir.open(RunTarget(tmp_path / "run"), _manifest(), test_rundir.QUESTIONS) as run:
        _go_on(run)
        run.update(status="complete")
    return tmp_path / "run"


def sample(i: int) -> tuple[Row, list[Step]]:
    row, steps = test_rundir.sample(i)
    row.question_id, row.method = f"q{i // 2}", ("ar", "m")[i % 2]
    return row, steps


def _mark(i: int) -> bytes:
    """The beginning of a line about this sample."""
    return f'{{"question_id": "q{i // 2}", "turn": 0, "method": "{("ar", "m")[i % 2]}"'.encode()


def _manifest() -> dict[str, Any]:
    made = conftest.manifest(("ar", "m"), SuiteData("specbench", "generated", test_rundir.QUESTIONS))
    made["suite"]["prompts"] = len(HELD)
    return made


def _go_on(run: RunDir) -> list[int]:
    """Make and judge what is not there yet; return the numbers of the samples that were made."""
    todo = [i for i in NUMBERS if sample(i)[0].key not in run.rows]
    for i in todo:
        run.append(*sample(i))
    for i in HELD:
        if sample(i)[0].key not in run.judged:
            run.append_sameness(Sameness(*sample(i)[0].key, verdict="identical"))
    return todo


def _contents(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in (*LINES, QUESTIONS)}


def _whole_samples(files: dict[str, bytes]) -> set[int]:
    """The samples of which the row and every step stand in these files as whole lines, found by their text alone."""
    rows, steps = (b"".join(_lines(files[name])) for name in (ROWS, STEPS))
    return {i for i in NUMBERS if _mark(i) in rows and steps.count(_mark(i)) == len(sample(i)[1])}


def _lines(content: bytes) -> list[bytes]:
    return [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]


def _check_read_and_resumed(path: Path, files: dict[str, bytes]) -> Run:
    """Whatever is whole is read, and nothing else; after --resume the run is as if nothing had happened."""
    whole = _whole_samples(files)
    run = read_run(path)
    assert {row.index for row in run.rows} == whole
    assert set(run.steps.keys) == {sample(i)[0].key for i in whole if sample(i)[1]}
    assert all(run.steps_by_sample[sample(i)[0].key] == sample(i)[1] for i in whole)
    frames = load_run(path)
    assert len(frames.samples) == len(whole) and len(frames.steps) == sum(len(sample(i)[1]) for i in whole)
    assert _contents(path) == files  # reading changes nothing
    with RunDir.open(RunTarget(path, resume=True), _manifest(), test_rundir.QUESTIONS) as resumed:
        assert {row.index for row in resumed.rows.values()} == whole
        assert set(_go_on(resumed)) == set(NUMBERS) - whole
        resumed.update(status="complete")
    done = read_run(path)
    assert sorted(row.index for row in done.rows) == list(NUMBERS) and not unfinished(done)
    assert [done.steps_by_sample[row.key] for row in done.rows] == [sample(row.index)[1] for row in done.rows]
    assert len(done.steps) == sum(len(sample(i)[1]) for i in NUMBERS) == (path / STEPS).read_bytes().count(b"\n")
    assert len(done.sameness) == len(HELD) and tuple(done.questions) == test_rundir.QUESTIONS
    return run


@pytest.mark.parametrize("name", [*LINES, QUESTIONS])
def test_a_file_cut_at_any_byte(path: Path, name: str) -> None:
    before = _contents(path)
    ends = [i + 1 for i in range(len(before[name])) if before[name][i : i + 1] == b"\n"]
    near = {end + off for end in (0, *ends) for off in range(-1, 2)}
    within = random.Random(0).sample(range(len(before[name])), 10)
    for size in sorted(n for n in near.union(within) if 0 <= n < len(before[name])):
        files = {**before, name: before[name][:size]}
        put(path, files)
        run = _check_read_and_resumed(path, files)
        assert unfinished(run) or size >= len(before[name].rstrip()), size


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("many", [1, 2, 3])
def test_any_line_lost(path: Path, name: str, many: int) -> None:
    before = _contents(path)
    lines = before[name].splitlines(keepends=True)
    for at in range(len(lines) - many + 1):
        files = {**before, name: b"".join(lines[:at] + lines[at + many :])}
        put(path, files)
        assert unfinished(_check_read_and_resumed(path, files))


@pytest.mark.parametrize("name", [*LINES, QUESTIONS])
def test_a_file_that_is_gone(path: Path, name: str) -> None:
    before = _contents(path)
    (path / name).unlink()
    run = read_run(path)
    assert unfinished(run) and {row.index for row in run.rows} == _whole_samples({**before, name: b""}) - (
        set(NUMBERS) if name == ROWS else set()
    )
    put(path, {name: b""})
    _check_read_and_resumed(path, {**before, name: b""})


def test_all_cuts_together(path: Path) -> None:
    before, rng = _contents(path), random.Random(1)
    for _ in range(25):
        files = {name: content[: rng.randrange(len(content) + 1)] for name, content in before.items()}
        put(path, files)
        _check_read_and_resumed(path, files)


def test_what_is_lost_is_said(path: Path) -> None:
    before = _contents(path)
    lines = before[STEPS].splitlines(keepends=True)
    put(path, {STEPS: b"".join(lines[:1] + lines[2:-1])})
    assert load_run(path).unfinished == (
        "not complete (the steps of 2 samples are lost, first q1 turn 1 of ar; 1 answer was not compared with the "
        "reference's): 4 of 6 samples"
    )
    put(path, {STEPS: b"".join(lines[:-1])})
    assert losses(read_run(path)) == ["the steps of 1 sample are lost, q2 turn 1 of m"]
    verdicts = before[SAMENESS].splitlines(keepends=True)
    put(path, {**before, SAMENESS: verdicts[1]})
    assert (
        load_run(path).unfinished == "not complete (2 answers were not compared with the reference's): 6 of 6 samples"
    )
    put(path, {**before, QUESTIONS: before[QUESTIONS][:-3]})
    assert load_run(path).unfinished == "not complete (questions.json is missing or cut): 6 of 6 samples"


def test_steps_of_a_first_try_are_never_taken_for_the_second(path: Path) -> None:
    """Killed after the steps of the second try and before its row: the old row must not count with the new steps."""
    lines = (path / STEPS).read_bytes().splitlines(keepends=True)
    put(path, {STEPS: b"".join(lines[:-1])})
    with RunDir.open(RunTarget(path, resume=True), _manifest(), test_rundir.QUESTIONS):
        pass
    with (path / STEPS).open("ab") as file:
        file.writelines(lines[-2:])
    run = read_run(path)
    assert [row.index for row in run.rows] == [0, 1, 2, 3, 4] and not run.lost
    assert sample(5)[0].key not in {verdict.key for verdict in run.sameness}  # it was on the first try


@pytest.mark.parametrize("name", [*LINES, QUESTIONS, MANIFEST])
def test_a_file_that_is_a_folder_is_one_line(path: Path, name: str) -> None:
    (path / name).unlink()
    (path / name).mkdir()
    for act in (
        lambda: read_run(path),
        lambda: RunDir.open(RunTarget(path, resume=True), _manifest(), test_rundir.QUESTIONS),
    ):
        with pytest.raises(UserError, match=rf"(?i){name}: is a directory"):
            act()


def test_a_forked_process_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunDir.open(RunTarget(path), _manifest(), test_rundir.QUESTIONS) as run:
        run.append(*sample(0))
        before = {file.name: file.read_bytes() for file in path.iterdir()}
        reader, writer = os.pipe()
        if not os.fork():
            said = [_refusal(act) for act in (
                lambda: run.append(*sample(1)),
                lambda: run.append_sameness(Sameness(*sample(1)[0].key, verdict="identical")),
                lambda: run.append_beside("drafts.jsonl", {}),
                lambda: run.update(status="complete"),
            )]  # fmt: skip
            os.write(writer, "\n".join(said).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as told:
            assert ["fork" in line for line in told] == [True] * 4
        os.wait()
        assert {file.name: file.read_bytes() for file in path.iterdir()} == before
        run.append(*sample(1))
    assert len(read_run(path).rows) == 2


def _refusal(act: Callable[[], Any]) -> str:
    """The line that is raised; '' where nothing is."""
    try:
        act()
    except UserError as error:
        return str(error)
    return ""
