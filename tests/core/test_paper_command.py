"""`ssbench paper`: what it asks for, what it writes, what it states when that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specbench_ss import registry
from specbench_ss.cli.main import main
from specbench_ss.errors import UserError
from specbench_ss.results.report import Bench, Claim, Column, Experiment, Grid, Part, Plot, Request, Result, Span
from tests.cli import failing

EVIL = "</script><script>alert(1)</script>"


class Made(Experiment):
    """An experiment of no paper."""

    name = "figure-99"
    title = "a title"
    source = "EMNLP figure 99"

    def parts(self, request: Request) -> list[Part]:
        return [Part("lab"), Part(request.model, "the moon")]

    def claims(self, result: Result) -> list[Claim]:
        return [Claim("it | rises", True, "1.5 to 7"), Claim("it falls", False, "no"), Claim("it flies", None, "?")]

    def run(self, bench: Bench) -> Result:
        grid = Grid("speedup", (Column("k"), Column("speedup", "times")), ((1, 1.5), (2, bench.request.seed)))
        plot = Plot("drawn", "Drawn", "Line chart.", [{"type": "scatter", "x": [1, 2], "y": [1, 2]}], {}, grid)
        return Result((), (plot,), ((Span(EVIL, "rejected"),),), (EVIL,))


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only experiment."""
    monkeypatch.setattr(registry, "load_all", lambda group: {"figure-99": Made})
    monkeypatch.setattr(registry, "load", _load)


def _load(group: registry.Group, name: str, real: object = registry.load) -> object:
    return Made if name == "figure-99" else real(group, name)  # type: ignore[operator]


def test_list_names_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "list", "--model", "org/model"]) == 0
    out = capsys.readouterr().out
    assert "figure-99" in out and "runs: lab" in out and "needs the moon: org/model" in out


def test_a_result_is_written_with_how_it_was_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["paper", "figure-99", "--out", str(out), "--seed", "7"]) == 0
    assert "1.50×" in capsys.readouterr().out
    kept = json.loads((out / "result.json").read_text())
    assert kept["request"]["seed"] == 7 and kept["environment"]["python"] and kept["experiment"] == "figure-99"
    assert (out / "table.csv").read_text() == "k,speedup\n1,1.5\n2,7\n"
    page = (out / "figure.html").read_text()
    assert EVIL not in page and "EMNLP figure 99" in page and 'src="http' not in page


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "figure-99", "--dry-run", "--out", str(tmp_path / "out")]) == 0
    assert "needs the moon: lab" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


class Broken(Made):
    """One that cannot run."""

    name, title, uses = "figure-9", "another title", ()

    def run(self, bench: Bench) -> Result:
        assert bench.request == Request(), "options that make no difference to it are left out for it"
        raise UserError("nothing of it can run here")


def test_all_of_them_are_made_and_kept_against_the_papers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "load_all", lambda group: {"figure-99": Made, "figure-9": Broken})
    out, often = tmp_path / "out", []
    monkeypatch.setattr(Made, "parts", lambda self, request: often.append(request.seed) or [Part("x", "the moon")])
    assert main(["paper", "all", "--out", str(out), "--seed", "7"]) == 0
    page = (out / "paper.md").read_text()
    assert page.index("## figure-9: ") < page.index("## figure-99: ")
    assert "Not made: nothing of it can run here" in page and "Left out: x needs the moon." in page
    assert "1 *agrees*, 0 *tends to agree*, 1 *open*, 0 *tends not to*, 1 *does not agree*" in page
    assert "| it \\| rises | agrees | 1.5 to 7 |" in page and "| it flies | open | ? |" in page
    numbers = page[page.index("<details>") :]
    assert "| k | speedup |\n| ---: | ---: |\n| 1.00 | 1.50× |" in numbers and "statement of the paper" not in numbers
    assert EVIL not in numbers.replace("```text\n[-" + EVIL, "")
    assert json.loads((out / "figure-99" / "result.json").read_text())["claims"][1]["holds"] is False
    assert "it falls" in (out / "figure-99" / "figure.html").read_text()
    assert often == [0, 7]
    capsys.readouterr()
    monkeypatch.setattr(Made, "run", None)  # what was made is not run again
    assert main(["paper", "all", "--out", str(out), "--seed", "7", "--resume"]) == 0
    assert (out / "paper.md").read_text() == page
    assert "1 of 2: figure-9" in capsys.readouterr().err
    reported = failing(["paper", "all", "--out", str(out), "--seed", "8", "--resume"], capsys)
    assert "was started with --seed 7, not 8; use another --out" in reported
    assert (out / "paper.md").read_text() == page


def test_a_folder_is_gone_on_with_for_what_it_was_begun_for_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["paper", "figure-99", "--out", str(out), "--seed", "7"]) == 0
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    again = ["paper", "figure-99", "--out", str(out), "--resume"]
    assert "started with --limit nothing, not 3, --seed 7, not 0; u" in failing([*again, "--limit", "3"], capsys)
    monkeypatch.setattr(Made, "name", "figure-98")
    monkeypatch.setattr(registry, "load", lambda group, name: Made if name == "figure-98" else _load(group, name))
    assert "has figure-99, not figure-98" in failing(["paper", "figure-98", *again[2:], "--seed", "7"], capsys)
    assert "has figure-99, not all" in failing(["paper", "all", *again[2:], "--seed", "7"], capsys)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    monkeypatch.setattr(Made, "name", "figure-99")
    (out / "asked.json").write_text("{")
    assert f"{out / 'asked.json'} is damaged: it is not JSON" in failing([*again, "--seed", "7"], capsys)
