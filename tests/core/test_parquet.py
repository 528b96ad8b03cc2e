"""Parquet files next to a complete run: they hold the documented columns, and a stale one is never believed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from specbench_ss.results import frames as parquet_files
from specbench_ss.results.analysis import load_run
from specbench_ss.runs import step_files
from specbench_ss.runs.run_dir import SAMPLES, STEPS, read_run
from specbench_ss.runs.step_files import PARQUET, STEPS_PARQUET, checksum

MakeRun = Callable[..., Path]


@pytest.fixture
def path(make_run: MakeRun) -> Path:
    made = make_run(questions=2, categories=("qa", "math"), failing=("medusa",))
    assert not load_run(made).write_parquet()
    return made


def _from_parquet(path: Path) -> bool:
    return step_files.stored_steps(path, (path / SAMPLES, path / STEPS)) is not None


def test_they_hold_the_frames(path: Path) -> None:
    results = load_run(path)
    frames = {"steps": results.steps, "samples": results.samples, "output_match": results.output_match}
    for name, frame in {**frames, "summary": results.summary(all=True)}.items():
        read = pd.read_parquet(path / f"{name}.parquet")
        assert {c: str(kind) for c, kind in read.dtypes.items()} == {c: str(kind) for c, kind in frame.dtypes.items()}
        plain = [c for c, kind in frame.dtypes.items() if str(kind) != "object"]
        pd.testing.assert_frame_equal(read[plain], frame[plain])
        for column in frame.columns.difference(plain):
            for mine, theirs in zip(read[column], frame[column], strict=True):
                assert (mine is None and theirs is pd.NA) or list(mine) == list(theirs)


def test_the_steps_are_those_of_the_lines(path: Path) -> None:
    assert _from_parquet(path)
    quick = read_run(path)
    (path / STEPS_PARQUET).unlink()
    slow = read_run(path)
    assert quick.steps.keys == slow.steps.keys and np.array_equal(quick.steps.starts, slow.steps.starts)
    assert quick.steps.columns.steps() == slow.steps.columns.steps()


@pytest.mark.parametrize("name", [SAMPLES, STEPS])
def test_a_stale_one_is_not_believed(path: Path, name: str) -> None:
    """Not even if size and time of the lines are as they were."""
    file = path / name
    before, reported = file.read_bytes(), file.stat()
    at = before.index(b'"tokens": ') + len(b'"tokens": ')
    file.write_bytes(before[:at] + (b"7" if before[at : at + 1] != b"7" else b"8") + before[at + 1 :])
    os.utime(file, ns=(reported.st_atime_ns, reported.st_mtime_ns))
    assert not _from_parquet(path)
    file.write_bytes(before)
    assert _from_parquet(path)


@pytest.mark.parametrize("damage", [b"", b"PAR1", b"x" * 500])
def test_a_damaged_one_is_passed_over(path: Path, damage: bytes) -> None:
    whole = len(read_run(path).steps)
    (path / STEPS_PARQUET).write_bytes(damage)
    assert not _from_parquet(path) and len(read_run(path).steps) == whole


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7])
def test_one_with_a_changed_byte_is_passed_over_or_states_the_same(path: Path, share: float) -> None:
    """Not all bytes are read: those of a column that follows from the samples' rows are not."""
    whole, file = read_run(path).steps, path / STEPS_PARQUET
    content = bytearray(file.read_bytes())
    for at in range(int(share * len(content)), int(share * len(content)) + 40):
        content[at] ^= 0x10
    file.write_bytes(bytes(content))
    read = read_run(path).steps
    assert read.keys == whole.keys and checksum(read) == checksum(whole)


def test_a_run_that_is_not_complete_has_none(path: Path) -> None:
    for name in PARQUET:
        (path / name).unlink()
    (path / SAMPLES).write_bytes((path / SAMPLES).read_bytes()[:-5])
    assert not load_run(path).write_parquet() and not list(path.glob("*.parquet"))


def test_what_cannot_be_written_is_a_sentence(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parquet_files, "_put", full)
    results = load_run(path)
    problem = results.write_parquet()
    assert "could not be written" in problem and "No space left" in problem
    assert not list(path.glob("*.parquet")) and not load_run(path).unfinished
    results.write_parquet()
    assert results.manifest["warnings"] == load_run(path).manifest["warnings"] == [problem]


def test_half_a_surrogate_pair_does_not_stop_them(path: Path) -> None:
    rows = (path / SAMPLES).read_bytes()
    (path / SAMPLES).write_bytes(rows.replace(b'"text": "', b'"text": "\\ud800'))
    assert not load_run(path).write_parquet()
    assert pq.read_table(path / "samples.parquet")["text"][0].as_py().startswith("\ufffd")
    assert load_run(path).samples["text"].dropna().iloc[0].startswith("\ufffd")
