"""A file whose last line is cut loses that line alone; any other damage of a run directory is one clear line."""

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
from specbench_ss.runs.config import OutputOptions
from specbench_ss.runs.records import OutputMatch, SampleRecord
from specbench_ss.runs.run_dir import MANIFEST, OUTPUT_MATCH, QUESTIONS, SAMPLES, STEPS, RunDir, read_run
from specbench_ss.suite import SuiteData
from tests import fabricated
from tests.core import test_rundir
from tests.core.test_rundir import put

LINES = (SAMPLES, STEPS, OUTPUT_MATCH)
NUMBERS = range(6)  # samples: `ar` and `m` on three questions, with 0, 1, 2, 0, 1 and 2 steps
KEPT = [1, 3, 5]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # many files: the disk is not what is tested
    with RunDir.open(OutputOptions(tmp_path / "run"), _manifest(), test_rundir.QUESTIONS) as run:
        _go_on(run)
        run.update(status="complete")
    return tmp_path / "run"


def sample(i: int) -> tuple[SampleRecord, list[Step]]:
    row, steps = test_rundir.sample(i)
    row.question_id, row.method = f"q{i // 2}", ("ar", "m")[i % 2]
    return row, steps


def _manifest() -> dict[str, Any]:
    made = fabricated.manifest(("ar", "m"), SuiteData("specbench", "generated", test_rundir.QUESTIONS))
    made["suite"]["prompts"] = len(KEPT)
    return made


def _go_on(run: RunDir) -> list[int]:
    """Make and judge what is not there yet; return the numbers of the samples that were made."""
    todo = [i for i in NUMBERS if sample(i)[0].key not in run.rows]
    for i in todo:
        run.append(*sample(i))
    for i in KEPT:
        if sample(i)[0].key not in run.compared_keys:
            run.append_output_match(OutputMatch(*sample(i)[0].key, verdict="identical"))
    return todo


@pytest.mark.parametrize("name", [SAMPLES, OUTPUT_MATCH])
def test_a_last_line_that_is_cut_is_made_again(path: Path, name: str) -> None:
    before = {name: (path / name).read_bytes() for name in LINES}
    end = len(before[name]) - 1
    start = before[name].rfind(b"\n", 0, end) + 1
    for size in [start, *random.Random(0).sample(range(start + 1, end), 10), end]:
        put(path, {**before, name: before[name][:size]})
        run = read_run(path)
        assert unfinished(run) and len(run.rows) == len(NUMBERS) - (name == SAMPLES)
        assert (path / name).read_bytes() == before[name][:size]  # reading changes nothing
        with RunDir.open(OutputOptions(path, resume=True), _manifest(), test_rundir.QUESTIONS) as resumed:
            assert _go_on(resumed) == ([5] if name == SAMPLES else [])
            resumed.update(status="complete")
        done = read_run(path)
        assert [row.index for row in done.rows] == list(NUMBERS) and not unfinished(done)
        assert [done.steps.of(row.key).steps() for row in done.rows] == [sample(i)[1] for i in NUMBERS]
        assert len(done.output_match) == len(KEPT)


def test_steps_that_are_lost_are_one_line(path: Path) -> None:
    before = (path / STEPS).read_bytes()
    lines = before.splitlines(keepends=True)
    for left, stated in ((lines[:-1], "q2 turn 1 of m"), (lines[1:], "q0 turn 1 of m"), ([], "q0 turn 1 of m")):
        put(path, {STEPS: b"".join(left)})
        for act in (
            lambda: read_run(path),
            lambda: RunDir.open(OutputOptions(path, resume=True), _manifest(), test_rundir.QUESTIONS),
        ):
            with pytest.raises(UserError, match=f"steps.jsonl is damaged: it lacks steps of {stated}"):
                act()
        assert (path / STEPS).read_bytes() == b"".join(left)


def test_verdicts_that_are_lost_are_stated(path: Path) -> None:
    put(path, {OUTPUT_MATCH: (path / OUTPUT_MATCH).read_bytes().splitlines(keepends=True)[1]})
    assert load_run(path).unfinished == (
        "not complete (2 outputs were not compared with the baseline's): 6 of 6 samples"
    )


@pytest.mark.parametrize("name", [*LINES, QUESTIONS, MANIFEST])
def test_a_file_that_is_a_folder_is_one_line(path: Path, name: str) -> None:
    (path / name).unlink()
    (path / name).mkdir()
    for act in (
        lambda: read_run(path),
        lambda: RunDir.open(OutputOptions(path, resume=True), _manifest(), test_rundir.QUESTIONS),
    ):
        with pytest.raises(UserError, match=rf"(?i){name}: is a directory"):
            act()


def test_a_forked_process_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunDir.open(OutputOptions(path), _manifest(), test_rundir.QUESTIONS) as run:
        run.append(*sample(0))
        before = {file.name: file.read_bytes() for file in path.iterdir()}
        reader, writer = os.pipe()
        if not os.fork():
            stated = [_refusal(act) for act in (
                lambda: run.append(*sample(1)),
                lambda: run.append_output_match(OutputMatch(*sample(1)[0].key, verdict="identical")),
                lambda: run.append_optional("drafts.jsonl", {}),
                lambda: run.update(status="complete"),
            )]  # fmt: skip
            os.write(writer, "\n".join(stated).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as reported:
            assert ["fork" in line for line in reported] == [True] * 4
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
