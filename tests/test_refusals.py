"""Bad input: one clear line on stderr, exit code 2, nothing written. The rows are in refusals.yaml."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants

from specbench_ss.cli.main import main
from specbench_ss.models.resolve import LAB
from tests import refusals
from tests.tiny import few

TABLE: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text())


@dataclass(frozen=True)
class Refusal:
    words: str
    keyword: str
    file: str = ""
    content: str = ""
    leaves: tuple[str, ...] = ()  # empty folders that may be left


def rows() -> Iterator[Refusal]:
    for group in TABLE:
        for words, keyword in group.get("rows", {}).items():
            yield Refusal(f"{group['command']} {words}", keyword, leaves=tuple(group.get("leaves", ())))
        for content, keyword in group.get("contents", {}).items():
            yield Refusal(group["command"], keyword, group["file"], content)
        for family in group.get("drafters", ()):
            for damage, keyword in group["damages"].items():
                words = f"run --limit 1 --methods {family} --set {family}.weights={{{family}:{damage}}}"
                yield Refusal(words, keyword or family)


ROWS = tuple(rows())


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inputs")


def test_there_are_enough() -> None:
    assert len(ROWS) >= 200


@few(200)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.words} {row.content}".strip())
def test_it_is_refused_in_one_line(
    row: Refusal, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")  # answers nobody
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    places = {"tmp": str(tmp_path), "lab": str(LAB), "file": str(tmp_path / row.file)}
    if row.file:
        (tmp_path / row.file).write_text(row.content)

    def place(found: re.Match[str]) -> str:
        name = found[1]
        return places.get(name) or str(refusals.build(name, inputs))

    words = [re.sub(r"\{([\w:-]+)\}", place, word) for word in shlex.split(row.words)]
    before = sorted(inputs.rglob("*"))
    code = main(words)
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), err
    assert err.startswith("ssbench: ") and err.count("\n") == 1, err
    assert row.keyword in err, err
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")} <= {row.file, *row.leaves}
    assert sorted(inputs.rglob("*")) == before
