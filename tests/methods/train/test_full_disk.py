"""A training whose disk takes no more ends in one line; the same command goes on from the last checkpoint."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from specbench_ss.cli.main import main
from specbench_ss.storage import disk_error, writing
from specbench_ss.training import data, session
from specbench_ss.training.loop import CHECKPOINT, DrafterLoop
from tests.methods.test_resumable import Line
from tests.methods.train.test_train import _cache, arguments, chats, models
from tests.tiny import few

__all__ = ["_cache", "chats", "models"]  # fixtures
PLACES = {"rows": (data, "_store"), "checkpoint": (DrafterLoop, "save"), "weights": (session, "_finish")}


@contextmanager
def full_disk(left: int = 100) -> Iterator[None]:
    """No file becomes longer than so many bytes: the system refuses to write more, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (left, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def on_full_disk(act: Callable[..., Any], skipped: int) -> Callable[..., Any]:
    """The function, with no room from its call after `skipped` on."""
    calls: list[None] = []

    def called(*given: Any) -> Any:
        calls.append(None)
        if len(calls) <= skipped:
            return act(*given)
        with full_disk():
            return act(*given)

    return called


@few(3)
@pytest.mark.parametrize(
    ("trainer", "place", "skipped"),
    [
        ("medusa", "rows", 0), ("medusa", "checkpoint", 0), ("medusa", "checkpoint", 1),
        ("medusa", "weights", 0), ("draft", "weights", 0), ("medusa2", "weights", 0),
    ],
)  # fmt: skip
def test_a_full_disk_is_one_line_and_nothing_is_lost(
    trainer: str,
    place: str,
    skipped: int,
    models: dict[str, Path],
    chats: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    words = arguments(trainer, models["llama"], chats, out, "--steps", "2", "--save-every", "1")
    owner, name = PLACES[place]
    capsys.readouterr()  # of making the model
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, on_full_disk(getattr(owner, name), skipped))
        assert main(words) == 2
    reported = capsys.readouterr().err
    assert reported.count("\n") == 1 and ("cannot write" in reported or "cannot store" in reported)
    assert "file too large" in reported or "part of a file" in reported or "requested" in reported
    steps = {"rows": 0, "checkpoint": skipped, "weights": 2}[place]
    assert (out / CHECKPOINT).exists() == bool(steps) and not list(out.glob("*.tmp"))
    assert main(words) == 0
    assert (f"resumes at step {steps} of 2" if steps else "takes 2 steps") in capsys.readouterr().out


def test_the_earlier_checkpoint_stays(tmp_path: Path) -> None:
    line = Line(tmp_path)
    line.advance()
    line.save()
    before = (tmp_path / CHECKPOINT).read_bytes()
    line.advance()
    with full_disk(), pytest.raises((OSError, RuntimeError)) as raised:
        line.save()
    assert disk_error(raised.value) and (tmp_path / CHECKPOINT).read_bytes() == before


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    for error in (RuntimeError("unexpected pos"), ConnectionRefusedError(111, "refused"), ValueError("5 requested")):
        with pytest.raises(type(error)), writing(tmp_path, "make room"):
            raise error
