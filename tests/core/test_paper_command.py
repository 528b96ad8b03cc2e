"""`ssbench paper`: what it asks for, what it writes, what it says when that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specbench_ss import registry
from specbench_ss.bench.build_config import method_specs
from specbench_ss.cli.main import main
from specbench_ss.errors import UserError
from specbench_ss.results.report import Bench, Claim, Column, Experiment, Grid, Part, Plot, Request, Result, Span
from specbench_ss.runs.config import RunConfig
from tests.cli import failing

EVIL = "</script><script>alert(1)</script>"


class Made(Experiment):
    """An experiment of no paper."""

    name = "figure-99"
    title = "a title"
    source = "ACL figure 99"

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
    assert EVIL not in page and "ACL figure 99" in page and 'src="http' not in page


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "figure-99", "--dry-run", "--out", str(tmp_path / "out")]) == 0
    assert "needs the moon: lab" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments,words",
    [(["paper"], "NAME"), (["paper", "figur-99", "--dry-run"], "no experiment 'figur-99'"),
     (["paper", "figure-99", "--resume"], "--out"), (["paper", "figure-99", "--limit", "few"], "--limit")],
)  # fmt: skip
def test_mistakes_are_one_line_and_exit_2(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_options_that_an_experiment_does_not_use_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Made, "uses", ("seed",))
    idle = ["--model", "nosuch", "--chat-template", "plain", "--set", "ss.k=1", "--limit", "3"]
    arguments = ["paper", "figure-99", "--out", str(tmp_path / "out"), "--seed", "7"]
    told = failing([*arguments, *idle], capsys)
    assert "'figure-99' takes no --model, no --limit, no --chat-template, no --set: it would make no" in told
    assert main(arguments) == 0


def test_results_that_are_there_are_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").write_text("mine")
    assert main(["paper", "figure-99", "--out", str(tmp_path)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["paper", "figure-99", "--out", str(tmp_path), "--resume"]) == 0
    assert (tmp_path / "other").read_text() == "mine"


class Broken(Made):
    """One that cannot run."""

    name, title, uses = "figure-9", "another title", ()

    def run(self, bench: Bench) -> Result:
        assert bench.request == Request(), "options that make no difference to it are left out for it"
        raise UserError("nothing of it can run here")


def test_all_of_them_are_made_and_held_against_the_papers(
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
    assert "| k | speedup |\n| ---: | ---: |\n| 1.00 | 1.50× |" in numbers and "the paper says" not in numbers
    assert EVIL not in numbers.replace("```text\n[-" + EVIL, "")
    assert json.loads((out / "figure-99" / "result.json").read_text())["claims"][1]["holds"] is False
    assert "it falls" in (out / "figure-99" / "figure.html").read_text()
    assert often == [0, 7]
    capsys.readouterr()
    monkeypatch.setattr(Made, "run", None)  # what was made is not made again
    assert main(["paper", "all", "--out", str(out), "--seed", "7", "--resume"]) == 0
    assert (out / "paper.md").read_text() == page
    assert "1 of 2: figure-9" in capsys.readouterr().err
    told = failing(["paper", "all", "--out", str(out), "--seed", "8", "--resume"], capsys)
    assert "was begun with --seed 7, not 8: give another --out" in told
    assert (out / "paper.md").read_text() == page


def test_a_folder_is_gone_on_with_for_what_it_was_begun_for_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["paper", "figure-99", "--out", str(out), "--seed", "7"]) == 0
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    again = ["paper", "figure-99", "--out", str(out), "--resume"]
    assert "begun with --limit nothing, not 3, --seed 7, not 0: g" in failing([*again, "--limit", "3"], capsys)
    monkeypatch.setattr(Made, "name", "figure-98")
    monkeypatch.setattr(registry, "load", lambda group, name: Made if name == "figure-98" else _load(group, name))
    assert "holds figure-99, not figure-98" in failing(["paper", "figure-98", *again[2:], "--seed", "7"], capsys)
    assert "holds figure-99, not all" in failing(["paper", "all", *again[2:], "--seed", "7"], capsys)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    monkeypatch.setattr(Made, "name", "figure-99")
    (out / "asked.json").write_text("{")
    assert f"{out / 'asked.json'} is damaged: it is not JSON" in failing([*again, "--seed", "7"], capsys)


def test_a_setting_that_no_run_takes_is_refused_by_one_and_left_out_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def configs(self: Experiment, request: Request) -> dict[str, RunConfig]:
        return {"run": RunConfig(methods=method_specs("ss[gamma=2]", request.settings), suite="specbench")}

    monkeypatch.setattr(Made, "configs", configs)
    asked = ["paper", "figure-99", "--dry-run", "--out", str(tmp_path / "out")]
    told = failing([*asked, "--set", "ss.gamma=3"], capsys)
    assert "--set ss.gamma=3 makes no difference to figure-99, which sets this option itself" in told
    assert main([*asked, "--set", "ss.k=2"]) == 0
    assert "method     ss[k=2,gamma=2]" in capsys.readouterr().out
    given = [f"--set={text}" for text in ("ss.gamma=3", "medusa.nodes=4", "ss.k=2")]
    assert main(["paper", "all", "--out", str(tmp_path / "all"), *given]) == 0
    assert json.loads((tmp_path / "all" / "figure-99" / "result.json").read_text())["request"]["settings"] == ["ss.k=2"]


def test_what_cannot_be_held_against_a_result_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Made, "claims", lambda self, result: [][0])
    assert main(["paper", "figure-99", "--out", str(tmp_path / "out")]) == 0
    (claim,) = json.loads((tmp_path / "out" / "result.json").read_text())["claims"]
    assert claim["holds"] is None and "could not be held against this result" in claim["found"]


@pytest.mark.parametrize("wrong", [["--set", "medusa.typo=1"], ["--model", "no-such-model"]])
def test_mistakes_of_all_are_found_before_anything_is_made(
    wrong: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(["paper", "all", "--out", str(tmp_path / "out"), *wrong], capsys)
    assert not (tmp_path / "out").exists()


def test_a_dry_run_of_all_lists_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "all", "--out", str(tmp_path / "out"), "--dry-run"]) == 0
    assert "figure-99" in capsys.readouterr().out and not (tmp_path / "out").exists()
