"""The run directory: a process killed at any byte loses at most the sample in flight."""

from __future__ import annotations

import contextlib
import json
import os
import random
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from specbench_ss import storage
from specbench_ss.engine.decoder import Generation, Step
from specbench_ss.errors import UserError
from specbench_ss.results.sample_checks import unfinished
from specbench_ss.runs.config import OutputOptions
from specbench_ss.runs.records import OutputMatch, SampleRecord
from specbench_ss.runs.run_dir import MANIFEST, OUTPUT_MATCH, SAMPLES, STEPS, RunDir, check_out, read_run
from specbench_ss.runs.run_dir import QUESTIONS as QUESTIONS_FILE
from specbench_ss.suite import Question, SuiteData
from tests import fabricated

QUESTIONS = (Question("q0", "c", ("é\u2028?", "two"), (("yes",), ()), "rouge_l"),)


def manifest(**changes: Any) -> dict[str, Any]:
    return {**fabricated.manifest(("ar",), SuiteData("specbench", "generated", QUESTIONS)), **changes}


def sample(i: int) -> tuple[SampleRecord, list[Step]]:
    row = SampleRecord(f"q{i}", 0, "ar", 0, "c", i, 0, 7, "e", "s", "ok")
    steps = [Step(0, 0, 0, 0, 1, 0.0, 0.01, 0.0, 0.0, 0.01) for _ in range(i % 3)]
    row.fill(Generation([5] * (1 + len(steps)), 3, "length", 0.1, 1, steps))
    row.text = "answer é\n\u2028 \ud800"  # line separators and a lone surrogate: one line of the file all the same
    return row, steps


def fill(path: Path, numbers: range) -> None:
    with RunDir.open(OutputOptions(path), manifest(), QUESTIONS) as run:
        for i in numbers:
            run.append(*sample(i))
            run.append_output_match(OutputMatch(*sample(i)[0].key, verdict="identical"))


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    fill(tmp_path / "run", range(5))
    run = read_run(tmp_path / "run")
    assert run.rows == [sample(i)[0] for i in range(5)]
    assert [run.steps.of(r.key).steps() for r in run.rows] == [sample(i)[1] for i in range(5)]
    assert tuple(run.questions) == QUESTIONS
    assert [s.verdict for s in run.output_match] == ["identical"] * 5
    assert run.labels == ["ar"]


def test_references_are_away_only_while_a_run_goes_on(tmp_path: Path) -> None:
    with RunDir.open(OutputOptions(tmp_path), manifest(), QUESTIONS) as run:
        for status, there in (("running", False), ("interrupted", True), ("running", False), ("complete", True)):
            run.update(status=status)
            run.update(repeats_made=1)
            assert (tuple(read_run(tmp_path).questions) == QUESTIONS) is there


def cuts(content: bytes, start: int = 0) -> list[int]:
    """Lengths at which to cut a file: around the end of every record, and a few within them."""
    ends = [start, *(i + 1 for i in range(start, len(content)) if content[i : i + 1] == b"\n")]
    near = {end + off for end in ends for off in range(-2, 3)}
    within = random.Random(0).sample(range(start, len(content)), 20)
    return sorted(n for n in near.union(within) if start <= n <= len(content))


def put(path: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (path / name).write_bytes(content)


def _resume_and_finish(path: Path, numbers: range) -> None:
    with RunDir.open(OutputOptions(path, resume=True), manifest(), QUESTIONS) as run:
        for i in numbers:
            row, steps = sample(i)
            if row.key not in run.rows:
                run.append(row, steps)
            if row.key not in run.compared_keys:
                run.append_output_match(OutputMatch(*row.key, verdict="identical"))
    done = read_run(path)
    assert sorted(r.index for r in done.rows) == list(numbers)
    assert [done.steps.of(r.key).steps() for r in done.rows] == [sample(r.index)[1] for r in done.rows]
    assert len({s.key for s in done.output_match}) == len(done.output_match) == len(numbers)


def test_steps_cut_at_any_byte_before_their_row_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    path = tmp_path / "run"
    fill(path, range(2))
    before = {name: (path / name).read_bytes() for name in (SAMPLES, STEPS, OUTPUT_MATCH)}
    with RunDir.open(OutputOptions(path, resume=True), manifest(), QUESTIONS) as run:
        run.append(*sample(2))
    content = (path / STEPS).read_bytes()
    for size in cuts(content, len(before[STEPS])):
        put(path, {**before, STEPS: content[:size]})
        assert len(read_run(path).steps) == 1
        _resume_and_finish(path, range(3))


@pytest.mark.parametrize("file", [SAMPLES, STEPS])
def test_damage_in_the_middle_is_reported_not_repaired(tmp_path: Path, file: str) -> None:
    fill(tmp_path / "run", range(4))
    path = tmp_path / "run" / file
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"{]\n", *lines[1:]]))
    before = path.read_bytes()
    with pytest.raises(UserError, match="damaged in line 2"):
        RunDir.open(OutputOptions(tmp_path / "run", resume=True), manifest())
    assert path.read_bytes() == before


@pytest.mark.parametrize("line", [2, 4])
@pytest.mark.parametrize(
    ("file", "key", "value", "words"),
    [
        (SAMPLES, "tokens", "x", "tokens is not a whole number"),
        (SAMPLES, "tokens", None, "it lacks tokens"),
        (SAMPLES, "tokens", -1, "tokens is less than 0"),
        (SAMPLES, "repeat", -1, "repeat is less than 0"),
        (SAMPLES, "wall_s", -0.5, "wall_s is less than 0"),
        (SAMPLES, "quality", 1.5, "quality is more than 1"),
        (STEPS, "draft_nodes", -1, "draft_nodes is less than 0"),
        (STEPS, "tokens", 2**40, "tokens is more than 2147483647"),
        (OUTPUT_MATCH, "first_difference", -1, "first_difference is less than 0"),
        (SAMPLES, "turn", 0.5, "turn is not a whole number"),
        (SAMPLES, "status", "fine", "status cannot be 'fine'"),
        (SAMPLES, "token_ids", [1, "2"], r"token_ids\[1\] is not a whole number"),
        (SAMPLES, "wall_s", float("nan"), "it is not JSON"),
        (STEPS, "draft_nodes", [], "draft_nodes is not a whole number"),
        (STEPS, "index", "0", "index is not a whole number"),
        (OUTPUT_MATCH, "verdict", "same", "verdict cannot be 'same'"),
        (OUTPUT_MATCH, "gap", "0", "gap is not a number"),
    ],
)
def test_a_wrong_type_is_reported_with_its_line_and_nothing_is_cut(
    tmp_path: Path, file: str, key: str, value: Any, words: str, line: int
) -> None:
    fill(tmp_path / "run", range(5))
    path = tmp_path / "run" / file
    lines = path.read_text().splitlines()
    lines[line - 1] = json.dumps(json.loads(lines[line - 1]) | {key: value})
    path.write_text("\n".join(lines) + "\n")
    before = path.read_bytes()
    with pytest.raises(UserError, match=f"{file} is damaged in line {line}: {words}"):
        read_run(tmp_path / "run")
    with pytest.raises(UserError, match=f"{file} is damaged in line {line}: {words}"):
        RunDir.open(OutputOptions(tmp_path / "run", resume=True), manifest())
    assert path.read_bytes() == before


def test_reading_changes_nothing(tmp_path: Path) -> None:
    fill(tmp_path / "run", range(3))
    rows = tmp_path / "run" / SAMPLES
    rows.write_bytes(rows.read_bytes()[:-3])
    assert len(read_run(tmp_path / "run").rows) == 2
    assert not rows.read_bytes().endswith(b"\n")


def test_asking_whether_a_place_will_do_makes_nothing(tmp_path: Path) -> None:
    assert not check_out(OutputOptions(tmp_path / "a" / "b"))
    assert not list(tmp_path.iterdir())


def test_a_place_where_no_folder_can_be_made_is_found_by_trying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Access rights may allow what the file system then refuses; whatever was made is removed again."""
    real = os.mkdir

    def refuse(path: Any, *rest: Any, **more: Any) -> None:
        if Path(path).name == "c":
            raise OSError(30, "Read-only file system")
        real(path, *rest, **more)

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(UserError, match="cannot write to .*/c: read-only file system"):
        check_out(OutputOptions(tmp_path / "a" / "b" / "c"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["id", "category", "turns", "references", "metric"])
@pytest.mark.parametrize("value", [[3], {}, 7, "gone"])
def test_damaged_questions_are_refused(tmp_path: Path, key: str, value: Any) -> None:
    fill(tmp_path, range(1))
    entries = json.loads((tmp_path / QUESTIONS_FILE).read_text())
    entries[0][key] = value
    if value == "gone":
        del entries[0][key]
    (tmp_path / QUESTIONS_FILE).write_text(json.dumps(entries))
    with pytest.raises(UserError, match=rf"questions\.json is damaged: .*\[0\]\.{key}"):
        read_run(tmp_path)


@pytest.mark.parametrize("made", [True, False])
def test_resuming_where_nothing_was_begun_begins(tmp_path: Path, made: bool) -> None:
    path = tmp_path / "run"
    if made:
        path.mkdir()
        (path / f"{MANIFEST}.tmp").write_text("{half")  # killed while writing the first manifest
    assert not check_out(OutputOptions(path, resume=True))
    assert path.exists() == made
    with RunDir.open(OutputOptions(path, resume=True), manifest(), QUESTIONS) as run:
        assert not run.rows
    assert tuple(read_run(path).questions) == QUESTIONS


def test_a_place_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to"):
        check_out(OutputOptions(tmp_path / "file" / "run"))
    with pytest.raises(UserError, match="cannot write to"):
        check_out(OutputOptions(tmp_path / "file"))


def test_a_full_disk_is_one_clear_line(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with RunDir.open(OutputOptions(tmp_path / "run"), manifest(), QUESTIONS) as run:
        run._files[SAMPLES].close()
        run._files[SAMPLES] = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
        with pytest.raises(UserError, match="cannot write to .*no space left"):
            run.append(*sample(0))
        assert not run.rows


def test_two_processes_cannot_write_to_one_directory(tmp_path: Path) -> None:
    with RunDir.open(OutputOptions(tmp_path), manifest(), QUESTIONS), pytest.raises(UserError, match="in use"):
        RunDir.open(OutputOptions(tmp_path, resume=True), manifest(), QUESTIONS)
    RunDir.open(OutputOptions(tmp_path, resume=True), manifest(), QUESTIONS).close()


def test_a_number_that_is_not_finite_is_never_written(tmp_path: Path) -> None:
    row, steps = sample(0)
    row.quality = float("nan")
    with RunDir.open(OutputOptions(tmp_path), manifest(), QUESTIONS) as run, pytest.raises(ValueError, match="JSON"):
        run.append(row, steps)


def test_update_replaces_the_manifest_whole(tmp_path: Path) -> None:
    with RunDir.open(OutputOptions(tmp_path), manifest(), QUESTIONS) as run:
        run.update(status="complete")
    assert json.loads((tmp_path / MANIFEST).read_text())["status"] == "complete"
    assert not list(tmp_path.glob("*.tmp"))


def write_until_killed(path: Path, written: Connection) -> None:
    with RunDir.open(OutputOptions(path), manifest()) as run:
        for i in range(100_000):
            run.append(*sample(i))
            written.send(i)


def test_kill_nine_loses_at_most_the_sample_in_flight(tmp_path: Path) -> None:
    context = get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=write_until_killed, args=(tmp_path / "run", writer))
    process.start()
    writer.close()
    for _ in range(20):
        last = reader.recv()
    assert read_run(tmp_path / "run").manifest["status"] == "running"
    process.kill()
    with contextlib.suppress(EOFError):
        while True:
            last = reader.recv()
    process.join()
    killed = unfinished(read_run(tmp_path / "run"))
    assert killed.startswith("not complete (no process has locked this folder")
    with RunDir.open(OutputOptions(tmp_path / "run", resume=True), manifest()) as run:
        assert len(run.rows) in (last + 1, last + 2)
        steps = sum(row.steps or 0 for row in run.rows.values())
    assert len(read_run(tmp_path / "run").steps) == steps


def test_a_warning_is_kept_once(tmp_path: Path) -> None:
    with RunDir.open(OutputOptions(tmp_path), manifest(), QUESTIONS) as run:
        run.keep_warning("x")
        run.keep_warning("x")
        assert run.manifest["warnings"] == ["x"]


def test_a_file_is_replaced_through_a_new_one_with_a_random_name(tmp_path: Path) -> None:
    path, victim = tmp_path / "report.html", tmp_path / "victim"
    victim.write_text("mine")
    for link in (path, tmp_path / "report.html.tmp"):
        link.symlink_to(victim)
    umask = os.umask(0o027)
    try:
        with storage.replacing(path) as first, storage.replacing(path) as second:
            assert len({name.name for name in tmp_path.glob(".report.html.*.tmp")}) == 2
            first.write(b"1")
            second.write(b"2")
    finally:
        os.umask(umask)
    assert path.read_bytes() == b"1" and not path.is_symlink() and path.stat().st_mode & 0o777 == 0o640
    assert victim.read_text() == "mine" and len(list(tmp_path.iterdir())) == 3
    with pytest.raises(UserError, match="folder"), storage.replacing(tmp_path):
        pass


@pytest.mark.parametrize("name", ["file", "é" * 120])
def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path, name: str) -> None:
    def killed() -> None:
        with storage.replacing(tmp_path / name), storage.replacing_folder(tmp_path / f"{name}s"):
            os.kill(os.getpid(), 9)

    process = get_context("fork").Process(target=killed)
    process.start()
    process.join()
    assert len(list(tmp_path.iterdir())) == 2
    (tmp_path / f".{name}.tmp").write_text("the user's")
    with storage.replacing(tmp_path / name) as first:
        with storage.replacing(tmp_path / name) as second:  # keeps the first, which is in use
            second.write(b"2")
        first.write(b"1")
    with storage.replacing_folder(tmp_path / f"{name}s") as folder:
        (folder / "a").write_text("")
    assert {file.name for file in tmp_path.iterdir()} == {name, f"{name}s", f".{name}.tmp"}
    assert (tmp_path / name).read_bytes() == b"1"
