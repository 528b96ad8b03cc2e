"""A file whose last line is cut loses that line alone; any other damage of a run directory is one clear line."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specbench_ss.engine.decoder import Step
from specbench_ss.errors import UserError
from specbench_ss.results.analysis import load_run
from specbench_ss.results.sample_checks import unfinished
from specbench_ss.runs.config import OutputOptions
from specbench_ss.runs.records import KEY, ConcurrencyResult, OutputMatch, SampleRecord, step_line
from specbench_ss.runs.run_dir import (
    DRAFTS,
    JUDGE,
    MANIFEST,
    OUTPUT_MATCH,
    QUESTIONS,
    SAMPLES,
    STEPS,
    TELEMETRY,
    RunDir,
    read_drafts,
    read_run,
    read_telemetry,
)
from specbench_ss.suite import SuiteData
from specbench_ss.user_files import encoded
from tests import fabricated
from tests.core import test_rundir
from tests.core.test_rundir import put
from tests.tiny import few

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


@few(1)
@pytest.mark.parametrize("name", LINES)
def test_a_last_line_that_is_cut_is_made_again(path: Path, name: str) -> None:
    before = {name: (path / name).read_bytes() for name in LINES}
    end = len(before[name]) - 1
    start = before[name].rfind(b"\n", 0, end) + 1
    for size in [0, *range(start, end, 5), end]:
        put(path, {**before, name: before[name][:size]})
        found = read_run(path)
        lost = {OUTPUT_MATCH: 0, SAMPLES: 1, STEPS: 1}[name] if size else {OUTPUT_MATCH: 0, SAMPLES: 6, STEPS: 4}[name]
        assert unfinished(found) and len(found.rows) == len(NUMBERS) - lost
        assert ("steps.jsonl is cut: it lacks the steps of" in unfinished(found)) == (name == STEPS)
        assert (path / name).read_bytes() == before[name][:size]  # reading changes nothing
        with RunDir.open(OutputOptions(path, resume=True), _manifest(), test_rundir.QUESTIONS) as resumed:
            assert len(_go_on(resumed)) == lost
            resumed.update(status="complete")
        done = read_run(path)
        assert sorted(row.index for row in done.rows) == list(NUMBERS) and not unfinished(done)
        assert all(done.steps.of(row.key).steps() == sample(row.index)[1] for row in done.rows)
        assert len(done.output_match) == len(KEPT)


def test_steps_of_a_second_attempt_are_not_those_of_the_first(path: Path) -> None:
    """A run is killed between the steps and the line of a sample whose earlier steps are lost."""
    (path / STEPS).write_bytes((path / STEPS).read_bytes()[:-57])
    row, steps = sample(5)
    with RunDir.open(OutputOptions(path, resume=True), _manifest(), test_rundir.QUESTIONS) as run:
        assert row.key not in run.rows
    again = b"".join(encoded(step_line(row.key, i, replace(step, total_s=9.0))) for i, step in enumerate(steps))
    (path / STEPS).write_bytes((path / STEPS).read_bytes() + again)
    found = {row.index: row for row in read_run(path).rows}
    assert not found[5].ok and "steps are lost" in (found[5].error or "") and found[4].ok


@pytest.mark.parametrize("name", [TELEMETRY, DRAFTS, JUDGE])
def test_an_optional_file_that_is_cut_loses_that_line_alone(path: Path, name: str) -> None:
    key = dict(zip(KEY, sample(5)[0].key, strict=True))
    fields = {
        TELEMETRY: {"attempt": 0, "started": 1.0},
        JUDGE: {"judge": "j", "prompts": "p", "digest": "d", "score": 1},
    }
    content = encoded(key | fields.get(name, {}))
    for size in range(len(content)):
        (path / name).write_bytes(content + content[:size])
        assert not unfinished(read_run(path)) and len((read_telemetry if name == TELEMETRY else read_drafts)(path)) < 2
        RunDir.open(OutputOptions(path, resume=True), _manifest(), test_rundir.QUESTIONS).close()
        assert (path / name).read_bytes() == (content + content[:size] if name == JUDGE else content)


def test_a_level_whose_requests_are_lost_is_made_again(path: Path) -> None:
    rows = [replace(sample(i)[0], concurrency=2) for i in KEPT]
    with RunDir.open(OutputOptions(path, resume=True), _manifest(), test_rundir.QUESTIONS) as run:
        run.append_concurrency(ConcurrencyResult("m", 2, 0, 0.0, 1.0, 1.0, len(rows)), rows)
    assert len(read_run(path).concurrency) == 1
    for name in ("requests.jsonl", "concurrency.jsonl"):
        whole = (path / name).read_bytes()
        (path / name).write_bytes(whole[:-7])
        found = read_run(path)
        assert not found.concurrency and not found.requests
        (path / name).write_bytes(whole)


@pytest.mark.parametrize("size", [0, 1, 40])
def test_questions_that_are_cut_are_written_again(path: Path, size: int) -> None:
    whole = (path / QUESTIONS).read_bytes()
    (path / QUESTIONS).write_bytes(whole[:size])
    with pytest.raises(UserError, match="--resume"):
        read_run(path)
    RunDir.open(OutputOptions(path, resume=True), _manifest(), test_rundir.QUESTIONS).close()
    assert (path / QUESTIONS).read_bytes() == whole


@pytest.mark.parametrize("name", [*LINES, QUESTIONS, MANIFEST, TELEMETRY, DRAFTS, JUDGE, "requests.jsonl"])
@pytest.mark.parametrize("device", ["", "/dev/zero"])
def test_pipes_and_devices_are_refused(path: Path, name: str, device: str) -> None:
    (path / name).unlink(missing_ok=True)
    (path / name).symlink_to(device) if device else os.mkfifo(path / name)
    with pytest.raises(UserError, match=f"{name}.*pipe"):
        _ = read_run(path), read_drafts(path), read_telemetry(path)
    if name != JUDGE:  # which a run does not open
        with pytest.raises(UserError, match="pipe"):
            RunDir.open(OutputOptions(path, resume=True), _manifest(), test_rundir.QUESTIONS)


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
        with pytest.raises(UserError, match=rf"(?i){name}: (is a directory|it is a folder)"):
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
                lambda: run.append_optional("drafts.jsonl", sample(0)[0]),
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
