"""Lies to a run, and what the finished run must state of each.

Others are planted where what catches them is tested: a method that answers repeats from memory in `test_remembering`,
one that alters the target while it loads in `test_unchanged`, NaN in `test_not_finite`, one that does not end in
`test_time_limit`, work before the clock in `test_outside_time`, the checks of `ssbench check` in `test_conformance`.
"""

from __future__ import annotations

import json
import time
from abc import ABCMeta
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specbench_ss import UserError, load_run, registry, run
from specbench_ss.bench import runner, timed_sample
from specbench_ss.cli.main import main
from specbench_ss.conformance import tiny_target
from specbench_ss.engine import generate, timing
from specbench_ss.engine.decoder import DecodeState
from specbench_ss.engine.generate import StopParams
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Output
from specbench_ss.engine.tree import DraftTree, TreeTopology
from specbench_ss.engine.verify import VerifyResult
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.results.checks import checks
from specbench_ss.results.ranking import headline, output, rank_ranges, speedup
from specbench_ss.results.summary import OVERALL, SummaryRow, summarise
from specbench_ss.runs.records import Run
from specbench_ss.runs.run_dir import read_run
from tests.fabricated import paced
from tests.served.fake_server import Clock
from tests.tiny import thorough

LIES = Path(__file__).with_name("planted_lies.py")
REFUSED = {
    "of-itself": "is not autoregressive",
    "of-speculative": "is not autoregressive",
    "plain-of-itself": "leave baseline_for out",
    "of-missing": "no method 'nobody'",
    "of-text": "return MethodSpec",
    "check-fails": "method 'check-fails': ZeroDivisionError",
    "advises-text": "method 'advises-text': ValueError",
    "baseline-fails": "method 'baseline-fails': SystemExit: 0",
}
STATED = {  # method -> what a finding about it holds
    "fails": r"failed: .* failed in warm-up: RuntimeError: out of luck (planted_lies.py:",
    "exits": r"failed in warm-up: SystemExit: 0 (planted_lies.py:",
    "keeps-nothing": "failed in warm-up: ValueError: keeps-nothing: accept returned no token",
    "keeps-more": "failed in warm-up: RuntimeError: ",
    "plain-drafts": "failed in warm-up: ValueError: plain-drafts sets autoregressive",
    "another-root": "failed in warm-up: ValueError: propose returned a tree under token",
    "drafts-unknown": "failed in warm-up: ValueError: propose drafted token",
    "answers-unknown": "failed in warm-up: ValueError: answers-unknown answered with token -1",
    "negative-calls": "failed: 4 samples, first a turn 1: ValueError: num_draft_forwards",
    "half-calls": "failed: 4 samples, first a turn 1: ValueError: num_draft_forwards",
    "nan-calls": "failed: 4 samples, first a turn 1: ValueError: ",
    "accepts-anything": "mismatch: ",
    "forgets": "mismatch: ",
    "verifies-more": "impossible: more nodes verified than drafted",
    "writes-what-it-likes": "mismatch: ",
    "shapeless-logits": "mismatch: ",
    "equal-tokens": "mismatch: ",
    "equals-in-place": "mismatch: ",
    "lying-result": "failed in warm-up: TypeError: lying-result: accept returned a LyingResult",
    "long-path": "failed in warm-up: ValueError: long-path: accept returned the path",
    "negative-path": "failed in warm-up: ValueError: negative-path: accept returned the path",
    "no-next-token": "failed in warm-up: TypeError: no-next-token: accept returned next_token an int",
    "tensor-tokens": "failed in warm-up: TypeError: propose returned",
    "tensor-logits": "failed in warm-up: TypeError: tensor-logits: accept returned next_token a MyTensor",
    "counts-fewer-nodes": "failed in warm-up: TypeError: propose returned",
    "raises-unusual": "failed in warm-up: RuntimeError: it raised Unusual: and nothing catches it (planted_lies.py:",
    "lossy-from-now-on": "mismatch: ",
    "another-name": "mismatch: ",
    "info-nan": "failed: 4 samples, first a turn 1: method 'info-nan' declares what cannot be stored: ValueError",
    "info-text": "declares what cannot be stored: ValueError: training_info.tokens is not a number",
    "info-list": "declares what cannot be stored: TypeError",
    "info-keys": "declares what cannot be stored: TypeError",
    "info-huge": "declares what cannot be stored: ValueError: more than",
    "lossless-number": "declares what cannot be stored: ValueError: lossless is not true or false",
    "stateful-text": "declares what cannot be stored: ValueError: stateful is not true or false",
    "summary-number": "declares what cannot be stored: ValueError: summary is not a text",
    "metadata-nan": "declares what cannot be stored: ValueError",
    "metadata-fails": "declares what cannot be stored: KeyError: 'hash' (planted_lies.py:",
    "weights-fail": "declares what cannot be stored: AttributeError",
    "load-fails": "method 'load-fails' does not load: ZeroDivisionError: on loading (planted_lies.py:",
    "load-exits": "method 'load-exits' does not load: SystemExit: 0 (planted_lies.py:",
    "load-raises-unusual": "method 'load-raises-unusual' does not load: Unusual (planted_lies.py:",
    "loads-nothing": "does not load: TypeError: load returned a NoneType, not a LoadsNothing",
    "loads-another": "does not load: TypeError: load returned a WritesWhatItLikes, not a LoadsAnother",
    "float-rows": "failed in warm-up: TypeError: ",
}
NO_FINDING = (  # "honest", and others that gain nothing by what they try
    "honest", "growing-path", "changes-result", "changes-tree", "replaces-ids", "lengthens-answer", "rewrites",
    "other-cache", "reads-cache", "stops-clock",
)  # fmt: skip
COMPARED_WITH_A_LIAR = "of-what-it-likes"


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("asked") / "asked.jsonl"
    texts = {"a": "abcdefg", "b": "hihihihi", "c": "klmn", "d": "opqrsto"}
    file.write_text("".join(json.dumps({"id": name, "prompt": text}) + "\n" for name, text in texts.items()))
    return file


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    registry.clear_file_methods()


def made(methods: str, questions: Path, out: Path, warmup: int = 1, resume: bool = False) -> Run:
    target = tiny_target("llama", words=61)
    target.tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    run(
        methods, plugin=LIES, suite=f"jsonl:{questions}", model=target, max_new_tokens=8, warmup=warmup, telemetry=0,
        out=out, resume=resume,
    )  # fmt: skip
    return read_run(out)


@pytest.fixture(scope="module")
def lied(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One run of all the lies that leave the others alone."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(timed_sample, "EXTRA_ROUNDS", 0)
        patched.setattr(time, "perf_counter", time.perf_counter)  # given back afterwards
        return made(
            ",".join([*NO_FINDING, COMPARED_WITH_A_LIAR, *STATED]), questions, tmp_path_factory.mktemp("lied") / "run"
        )


@pytest.fixture(scope="module")
def found(lied: Run) -> dict[str, SummaryRow]:
    """The summary of that run over all tasks, with planted seconds, by method."""
    return {row.method: row for row in summarise(paced(lied)) if row.task == OVERALL}


def overall(of: Run, method: str) -> SummaryRow:
    return next(row for row in summarise(of) if (row.task, row.method) == (OVERALL, method))


@pytest.mark.parametrize("method", STATED)
def test_a_lie_is_found_under_its_name(found: dict[str, SummaryRow], method: str) -> None:
    row = found[method]
    stated = " | ".join(map(str, row.health))
    for part in STATED[method].split(" .* "):
        assert part in stated
    assert stated.startswith("impossible") or not output(row, {"temperature": 0.0}).startswith("identical")
    assert ("failed" in stated) == (row.n_failed == 4) == (not row.n_prompts)
    assert (speedup(row) == "invalid") == stated.startswith(("impossible", "invalid", "mismatch"))


@pytest.mark.parametrize("method", NO_FINDING)
def test_nothing_is_found_of_others(found: dict[str, SummaryRow], method: str) -> None:
    row = found[method]
    assert not {"failed", "mismatch", "invalid", "impossible"} & {finding.kind for finding in row.health}
    assert row.output_match == {"identical": 4}
    for name in ("mean_acceptance_length", "acceptance_rate", "draft_nodes"):
        assert getattr(row, name, None) == getattr(found["honest"], name, None)


def test_a_clock_that_a_method_stops_is_not_the_one_that_times_it(lied: Run) -> None:
    """It stops its clock for 20 ms in each pass."""
    rows = lied.of("stops-clock")
    assert rows and all((row.wall_s or 0.0) >= 0.02 * (1 + (row.steps or 0)) for row in rows)


def test_a_method_that_is_compared_with_a_liar_has_no_speedup(found: dict[str, SummaryRow]) -> None:
    row = found[COMPARED_WITH_A_LIAR]
    assert output(row, {"temperature": 0.0}) == "identical to writes-what-it-likes"
    assert speedup(row) == "invalid" and any("reference writes-what-it-likes" in one.text for one in row.health)


@pytest.mark.parametrize("method", REFUSED)
def test_references_that_are_none_are_refused(
    method: str, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=REFUSED[method]):
        made(method, questions, tmp_path / "run")
    registry.clear_file_methods()
    out = str(tmp_path / "run")
    assert main(["run", "--plugin", str(LIES), "--methods", method, "--limit", "1", "--out", out]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1 and not (tmp_path / "run").exists()


class Ticks(Clock):
    """A clock that is also 1 ms later at each reading."""

    def __call__(self) -> float:
        self.pass_by(0.001)
        return self.now


def test_a_stopped_clock_voids(questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 ms of each pass are outside a clock on which the rest of it takes a few."""
    registry.load_plugins([str(LIES)])
    ticks, liar = Ticks(), registry.method_class("stops-our-clock")
    for place, name in ((timing, "now"), (generate, "now"), (runner, "unix_time"), (liar, "real")):
        monkeypatch.setattr(place, name, ticks)
    monkeypatch.setattr(liar, "lost", 0.0)
    monkeypatch.setattr(time, "sleep", ticks.pass_by)
    row = overall(made("stops-our-clock", questions, tmp_path / "run", warmup=0), "stops-our-clock")
    assert any("outside the clock" in finding.text for finding in row.health) and speedup(row) == "invalid", row.health


@pytest.mark.parametrize(
    ("attributes", "stated"),
    [
        ({"autoregressive": property(lambda self: True)}, "its autoregressive is a property, not a plain bool"),
        ({"autoregressive": 1}, "its autoregressive is a int"),
        ({"name": type("Text", (str,), {})("lies")}, "its name is a Text, not a plain str"),
    ],
)
def test_a_class_whose_attributes_may_change_is_refused(attributes: dict[str, Any], stated: str) -> None:
    kind = type("Lies", (Autoregressive,), {"name": "lies", "summary": "lies"} | attributes)
    assert stated in registry.method_problem(kind, "lies")


@pytest.mark.parametrize(
    ("answers", "stated"),
    [
        ({"autoregressive": property(lambda cls: False)}, "metaclass"),
        ({"__getattribute__": lambda cls, name: type.__getattribute__(cls, name)}, "metaclass"),
        ({"plugins": []}, ""),
    ],
)
def test_a_metaclass_that_computes_attributes_is_refused(answers: dict[str, Any], stated: str) -> None:
    meta = type("Meta", (ABCMeta,), answers)
    allowed = {"lossless": property(lambda self: True), "node_options": ["nodes"]}
    problem = registry.method_problem(
        meta("Lies", (Autoregressive,), {"name": "lies", "summary": ""} | allowed), "lies"
    )
    assert stated in problem and bool(problem) == bool(stated)


def test_a_draft_counts_as_it_was_before_it_was_accepted() -> None:
    class Falsifies(Autoregressive):
        autoregressive = False

        def max_tokens_per_step(self) -> int:
            return 2

        def propose(self, state: DecodeState) -> DraftTree:
            return DraftTree(state.root.repeat(2), TreeTopology((-1, 0)))  # no cached topology, which others share

        def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
            result = super().accept(state, tree, output)
            object.__setattr__(tree.topology, "depths", (0,) * 9)
            object.__setattr__(tree.topology, "parents", (-1,) * 9)
            return result

    steps = generate.generate(Falsifies(tiny_target("llama")), [3, 4], StopParams(6), SamplingParams()).steps
    assert {(step.draft_nodes, step.verified_nodes, step.draft_depth) for step in steps} == {(1, 1, 1)}


def test_a_method_alone_that_does_not_load_is_an_error_before_anything_is_written(
    questions: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="'load-fails' does not load"):
        made("load-fails", questions, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@thorough
def test_a_run_with_a_method_that_does_not_load_is_read_again_and_resumed(questions: Path, tmp_path: Path) -> None:
    for resume in (False, True):
        done = made("honest,info-text", questions, tmp_path / "run", resume=resume)
        assert {row.method: row.ok for row in done.rows} == {"ar": True, "honest": True, "info-text": False}
        assert load_run(tmp_path / "run").checks


@thorough
def test_a_method_that_loads_no_more_states_why_until_it_loads_again(
    questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def entry(resume: bool = True) -> dict[str, Any]:
        return made("honest,other-cache", questions, tmp_path / "run", resume=resume).entry("other-cache")

    before = entry(resume=False)
    with monkeypatch.context() as patched:
        patched.setattr(registry.method_class("other-cache"), "load", lambda *_: 1 / 0)
        for _ in range(2):
            assert "does not load: ZeroDivisionError" in entry()["error"]
    assert entry() == before


def test_a_model_that_was_altered_voids_every_method(questions: Path, tmp_path: Path) -> None:
    done = made("honest,tampers", questions, tmp_path / "run")
    assert {row.comparison for row in summarise(done)} == {"baseline", "invalid"}


def test_without_warm_up_every_sample_fails(questions: Path, tmp_path: Path) -> None:
    row = overall(made("fails", questions, tmp_path / "run", warmup=0), "fails")
    assert row.n_failed == 4 and "RuntimeError: out of luck (planted_lies.py:" in " ".join(map(str, row.health))


def test_a_liar_that_fails_leaves_the_headline_to_the_others(questions: Path, tmp_path: Path) -> None:
    done = paced(made("honest,fails,half-calls", questions, tmp_path / "run"))
    rows = summarise(done)
    stated = headline(rows, checks(done, rows), rank_ranges(done, rows))
    assert stated.startswith("honest ") and stated.endswith(" fails and half-calls failed.")
