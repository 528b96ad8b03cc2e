"""`ssbench check` and `ssbench new-method`: what they print, write and refuse."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from specbench_ss import registry
from specbench_ss.cli import check
from specbench_ss.cli.main import main
from specbench_ss.conformance import Check, tiny_target
from specbench_ss.conformance.exact_checks import GREEDY
from specbench_ss.conformance.harness import Case, Subject, TinyModel, first_failure
from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.tree import DraftTree
from specbench_ss.options import MethodSpec
from tests.cli import failing
from tests.core import test_conformance as broken
from tests.tiny import thorough


class Failing(broken.Honest):
    """A method that drafts nothing: it fails, each time alike."""

    def propose(self, state: DecodeState) -> DraftTree:
        raise RuntimeError("no luck")


class Stuck(broken.Honest):
    """The alarm of the time limit rings while it drafts."""

    def propose(self, state: DecodeState) -> DraftTree:
        assert signal.getitimer(signal.ITIMER_REAL)[0], "no time limit is set"
        signal.raise_signal(signal.SIGALRM)
        raise AssertionError("the alarm ends nothing")


METHODS: dict[str, type[Decoder]] = {
    "honest": broken.Honest,
    "lossy": broken.Lossy,
    "hasty": broken.AcceptsAnything,
    "shy": broken.TooManyRows,
    "failing": Failing,
}


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch, few_checks: tuple[Check, ...]) -> None:
    """One architecture, quick checks, made-up methods."""
    monkeypatch.setattr("specbench_ss.cli.check.FEW", ("llama",))
    monkeypatch.setattr(registry, "load", lambda group, name: METHODS[name])
    monkeypatch.setattr(registry, "load_all", lambda group: METHODS)


def test_a_line_for_each_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "lossy"]) == 0
    first, *checks, last = capsys.readouterr().out.splitlines()
    assert first == "lossy, test instances: default"
    assert [line.split()[:2] for line in checks] == [
        ["ok", "draft"], ["ok", "rows"], ["exempt", "greedy"], ["ok", "description"],
    ]  # fmt: skip
    assert checks[2].endswith("lossless = False")
    assert "outputs, " in last and last.endswith(" s")


def test_what_is_broken_is_shown_with_its_example_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "hasty"]) == 1
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.split()[:2] == ["failed", "greedy"])
    assert [line.split()[0] for line in lines[at + 1 : at + 4]] == ["instance", "example", "found"]
    assert any(line.split()[:2] == ["ok", "description"] for line in lines)


@thorough
def test_all_of_them_and_who_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--all"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == ("2 of 5 methods pass all checks; failed: hasty, shy, failing")


def test_an_error_that_breaks_several_checks_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "failing"]) == 1
    out = capsys.readouterr().out
    assert re.search(
        r"  failed +[2-4] checks stopped by the same error: RuntimeError: no luck \(.*py:\d+ in propose", out
    )
    assert out.count("no luck") == out.count("example  ") == 1 and len(out.splitlines()) < 10


def test_two_equal_time_outs_end_the_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(METHODS, "stuck", Stuck)
    assert main(["check", "stuck", "--timeout", "50"]) == 1
    out = capsys.readouterr().out
    assert "2 checks stopped by the same error: no end within 50 s" in out
    assert "skipped  other checks: two had no end within 50 s" in out and "description" not in out


def test_the_time_limit_is_that_of_one_request() -> None:
    """A trial of many takes longer: each one finds the whole hour, though half of it passed in the one before."""
    limits = list[float]()

    class Spends(broken.Honest):
        def propose(self, state: DecodeState) -> DraftTree:
            if len(state.ids) == state.prompt_tokens + 1:  # the first step of an answer
                limits.append(signal.getitimer(signal.ITIMER_REAL)[0])
                signal.setitimer(signal.ITIMER_REAL, limits[-1] - 1800)
            return super().propose(state)

    subject = Subject("default", TinyModel(tiny_target("llama")), lambda: Spends(tiny_target("llama")))

    def test(subject: Subject, case: Case) -> str:
        for most in (6, 7, 8):
            subject.watch(replace(case, max_new_tokens=most))
        return ""

    trial = Check("long", "a long trial", lambda subject: [GREEDY], test)
    assert first_failure(trial, subject, 3600.0) is None and subject.answers == len(limits) == 3
    assert all(2700 < left <= 3600 for left in limits)


def test_options_make_the_first_example_another(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "honest[width=1]"]) == 0
    assert capsys.readouterr().out.startswith("honest[width=1], test instances: honest[width=1]\n")


def test_references_are_those_that_methods_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class FineTunedDecoder(broken.Honest):
        @classmethod
        def baseline_for(cls, options: object) -> MethodSpec:
            return MethodSpec("lossy")

    monkeypatch.setitem(METHODS, "own", FineTunedDecoder)
    assert "lossy" in check.references_of([MethodSpec("lossy")])
    assert check.references_of([MethodSpec("honest")]) == set()


def test_a_new_method_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a" / "b"
    assert main(["new-method", "my-way", "--out", str(folder)]) == 0
    stated = capsys.readouterr().out
    assert "change `propose`" in stated and f"next: ssbench check --plugin {folder}/ssbench_my_way.py" in stated
    written = {path.name: path.read_text() for path in folder.iterdir()}
    assert set(written) == {"README.md", "pyproject.toml", "ssbench_my_way.py", "test_ssbench_my_way.py"}
    assert 'my-way = "ssbench_my_way:MyWay"' in written["pyproject.toml"]
    assert written["ssbench_my_way.py"].startswith('"""Decoding method `my-way`. As written it ')
    assert "class MyWay(Decoder):" in written["ssbench_my_way.py"]
    assert not any("{{" in text or "copycat" in text.lower() for text in written.values())
    assert "is not empty" in failing(["new-method", "my-way", "--out", str(folder)], capsys)


@pytest.mark.parametrize("name", ["decoder", "decode-state", "options", "draft-tree"])
def test_a_name_that_the_file_uses_itself_makes_another_class(name: str, tmp_path: Path) -> None:
    assert main(["new-method", name, "--out", str(tmp_path / "x")]) == 0
    module = (tmp_path / "x" / f"ssbench_{name.replace('-', '_')}.py").read_text()
    assert "Method(Decoder):" in module
    compile(module, name, "exec")
