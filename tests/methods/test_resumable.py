"""Training that is cut off: at any step, in the middle of a save, and resumed under other settings."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from specbench_ss.errors import UserError
from specbench_ss.storage import replacing
from specbench_ss.training.loop import Resumable


class Line(Resumable):
    """A line fitted to other points at every step."""

    def __init__(self, folder: Path, **about: Any) -> None:
        torch.manual_seed(0)
        line = torch.nn.Linear(2, 1)
        optimizers = [torch.optim.AdamW([line.weight], lr=0.1), torch.optim.SGD([line.bias], lr=0.1, momentum=0.9)]
        super().__init__(folder, [line], optimizers, 10, about)

    def _update(self) -> str:
        x = torch.randn(4, 2, generator=torch.Generator().manual_seed(self.step))
        loss = (self.modules[0](x) - x.sum(1, keepdim=True)).pow(2).mean()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return f"loss {loss.item():.3f}"

    @property
    def found(self) -> list[float]:
        return [x for p in self.modules[0].parameters() for x in p.detach().flatten().tolist()]


def trained(line: Line) -> list[float]:
    line.train(lambda _: None, save_every=2)
    return line.found


class Killed(BaseException):
    """Nothing in the code under test may catch it."""


def killed_while_saving(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends when half of the checkpoint is written."""
    whole = torch.save

    def half(state: Any, file: Any) -> None:
        whole(state, file)
        file.truncate(file.tell() // 2)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", half)
        with pytest.raises(Killed):
            line.save()


@pytest.mark.parametrize("steps", [0, 1, 2, 7])
def test_cut_off_anywhere_it_ends_as_if_it_had_not_been(steps: int, tmp_path: Path) -> None:
    whole = trained(Line(tmp_path / "whole"))
    cut = Line(tmp_path / "cut")
    for _ in range(steps):
        cut.advance()
    cut.save()
    cut.advance()  # lost
    again = Line(tmp_path / "cut")
    assert (again.resumed, again.step) == (True, steps)
    assert trained(again) == whole


@pytest.mark.parametrize("last", [3, 10])
def test_ctrl_c_ends_it_behind_the_step_with_a_checkpoint(
    last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained(Line(tmp_path / "whole"))
    step = Line._update

    def interrupted(self: Line) -> str:
        if self.step + 1 == last:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Line, "_update", interrupted)
        with pytest.raises(KeyboardInterrupt, match=rf"^step {last} of 10 is saved in .*cut/checkpoint\.pt$"):
            trained(Line(tmp_path / "cut"))
    again = Line(tmp_path / "cut")
    assert again.step == last
    assert trained(again) == whole
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)  # as before


def test_killed_in_the_middle_of_a_save_it_goes_on_from_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained(Line(tmp_path / "whole"))
    line = Line(tmp_path / "cut")
    killed_while_saving(line, monkeypatch)
    assert Line(tmp_path / "cut").step == 0  # the first save never was
    for step in (3, 4):
        while line.step < step:
            line.advance()
        if step == 3:
            line.save()
    killed_while_saving(line, monkeypatch)
    again = Line(tmp_path / "cut")
    assert again.step == 3
    assert trained(again) == whole


def test_a_checkpoint_of_other_settings_is_refused_by_name(tmp_path: Path) -> None:
    Line(tmp_path, hidden=96, tokens=100).save()
    with pytest.raises(UserError, match=r"made with tokens 100, not 200; use another --out"):
        Line(tmp_path, hidden=96, tokens=200)
    with pytest.raises(UserError, match=r"made with tokens 100, not None"):
        Line(tmp_path, hidden=96)
    assert Line(tmp_path, hidden=96, tokens=100).resumed


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "rows.npy"
    for content, expected in ((b"old", b"old"), (b"half", b"old"), (b"new", b"new")):
        try:
            with replacing(path) as file:
                file.write(content)
                if content == b"half":
                    raise Killed
        except Killed:
            pass
        assert path.read_bytes() == expected
        assert list(tmp_path.iterdir()) == [path]
