"""`ssbench tune`: what it writes, what it states last. Sessions are made up; nothing is timed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab import text
from specbench_ss.cli import tune as tune_work
from specbench_ss.cli.main import main
from specbench_ss.models.load import load_model_info
from specbench_ss.options import MethodSpec
from specbench_ss.runs.preset import read_preset
from specbench_ss.suite import Question, Suite, SuiteData, SuiteRequest
from specbench_ss.tuning.search import Cost, Measurements
from specbench_ss.tuning.session import TuneResult


def book(prompts: int = 6, /, **seconds: float) -> Measurements:
    """Blocks on so many prompts in which every configuration takes its time."""
    made = Measurements()
    for prompt in range(prompts):
        block = made.open_block(prompt)
        for label, s in seconds.items():
            made.add(label.replace("_", "[k=") + "]" * ("_" in label), block, Cost(s * (1 + prompt / 100), 10))
    return made


Session = Callable[..., TuneResult]


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Session:
    """Runs the real command on the lab model with a session that measures nothing; returns what it printed."""

    def run(confirmed: Measurements, interrupted: bool = False) -> Any:
        def fake(bench: Any, default: MethodSpec, categories: list[str], *_: Any) -> TuneResult:
            assert sorted(categories) == ["math"] * 4 + ["qa"] * 4
            best = MethodSpec("ss", {"k": "2"})
            searched = book(ss=1.0, ss_2=0.8, ss_4=1.3)
            failed = {"ss[k=6]": "RuntimeError: [no] room"}
            return TuneResult(default, best, best, searched, confirmed, failed, interrupted, 12.3, 45.6)

        monkeypatch.setattr(tune_work, "tune", fake)
        out = tmp_path / "p.yaml"
        assert main(["tune", "ss", "--tasks", "qa,math", "--out", str(out), "--device", "cpu"]) == 0
        return read_preset(out), capsys.readouterr()

    return run


def test_what_is_faster_is_written_and_named_last(tune: Any) -> None:
    preset, reported = tune(book(ar=1.4, ss=1.0, ss_2=0.8))
    assert preset.options == {"k": "2"}
    assert (preset.made_for["model"], preset.made_for["dtype"], preset.made_for["device"]) == ("lab", "float32", "cpu")
    assert preset.resolved["k"] == 2 and preset.resolved["streams_hash"]
    calibration = text.questions(("math", "qa"), "calibration", 4)
    assert preset.prompts == tuple(question.mark for question in calibration)
    assert reported.out.splitlines()[-1] == f"use it: ssbench run --methods ss --preset {preset.file}"
    for words in ("ss[k=2] is faster than the default (1.25×", "1.75×", "RuntimeError: [no] room", "ss (default)"):
        assert words in reported.out


@pytest.mark.parametrize("prompts", [0, 3])
def test_a_leader_that_is_not_confirmed_is_a_candidate_and_the_default_is_kept(tune: Any, prompts: int) -> None:
    preset, reported = tune(book(prompts, ar=1.4, ss=1.0, ss_2=0.8), interrupted=True)
    assert preset.options == {} and preset.resolved["k"] != 2
    assert "interrupted" in reported.err
    stated = (
        f"the default is kept: ss[k=2] led the search, but was not confirmed on other prompts ({prompts} of at least 4)"
    )
    assert stated in reported.out and "46 s more" in reported.out
    assert "use it" not in reported.out
    assert reported.out.splitlines()[-1] == f"no preset is needed; the measurements are in {preset.file}"
    written = yaml.safe_load(Path(preset.file).read_text())
    assert written["candidate"] == "ss[k=2]" and written["verdict"].startswith(stated)


def test_a_suite_without_a_split_of_its_own_lends_its_last_questions_and_states_so(tmp_path: Path) -> None:
    class Plain(Suite):
        name, summary, categories = "plain", "plain", ("a", "b")

        def load(self, request: SuiteRequest) -> SuiteData:
            asked = [Question(f"{c}{i}", c, (f"{c} {i}",)) for c in "ab" for i in range(5)]
            return SuiteData("plain", "files", tuple(asked), notes=("first",))

    lent = Plain().calibration(SuiteRequest(limit=2))
    assert [question.id for question in lent.questions] == ["a3", "a4", "b3", "b4"]
    assert lent.notes == ("first", "the last 2 questions of each category of the suite, which it evaluates too")
    given = Plain().calibration(SuiteRequest(limit=0, data=tmp_path))
    assert len(given.questions) == 10 and given.notes == ("first",)


@pytest.mark.parametrize(("suite", "categories"), [("specbench", 13), ("apps", 3)])
def test_lab_prompts_are_none_that_a_run_asks(suite: str, categories: int) -> None:
    from specbench_ss.registry import load_suite

    asked = tune_work.questions(tune_work.TuneOptions("ss", suite=suite), load_model_info("lab"))
    assert len(asked.questions) == 4 * categories
    everything = load_suite(suite).load(SuiteRequest(limit=0, lab=True))
    assert not {q.mark for q in asked.questions} & {q.mark for q in everything.questions}
