"""Lies to a run, and what the finished run must state of each.

Others are planted where what catches them is tested: a method that answers repeats from memory in `test_remembering`,
one that alters the target while it loads in `test_unchanged`, NaN in `test_not_finite`, one that does not end in
`test_time_limit`, work before the clock in `test_outside_time`, the checks of `ssbench check` in `test_conformance`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from specbench_ss import UserError, registry, run
from specbench_ss.bench import timed_sample
from specbench_ss.cli.main import main
from specbench_ss.conformance import tiny_target
from specbench_ss.results.checks import checks
from specbench_ss.results.ranking import headline, output, rank_ranges, speedup
from specbench_ss.results.summary import OVERALL, SummaryRow, summarise
from specbench_ss.runs.records import Run
from specbench_ss.runs.run_dir import read_run

LIES = Path(__file__).with_name("planted_lies.py")
REFUSED = {
    "of-itself": "is not autoregressive",
    "of-speculative": "is not autoregressive",
    "plain-of-itself": "leave baseline_for out",
    "of-missing": "no method 'nobody'",
    "of-text": "return MethodSpec",
}
STATED = {  # method -> what a finding about it holds
    "fails": r"failed: .* failed in warm-up: RuntimeError: out of luck (planted_lies.py:",
    "exits": r"failed in warm-up: SystemExit: 0 (planted_lies.py:",
    "keeps-nothing": "failed in warm-up: ValueError: keeps-nothing: accept returned no token",
    "keeps-more": "failed in warm-up: RuntimeError: ",
    "lengthens-answer": "failed in warm-up: RuntimeError: counts do not add up",
    "plain-drafts": "failed in warm-up: ValueError: plain-drafts sets autoregressive",
    "another-root": "failed in warm-up: ValueError: propose returned a tree under token",
    "drafts-unknown": "failed in warm-up: ValueError: propose drafted token",
    "answers-unknown": "failed in warm-up: ValueError: answers-unknown answered with token -1",
    "negative-calls": "failed: 4 samples, first a turn 1: ValueError: num_draft_forwards",
    "half-calls": "failed: 4 samples, first a turn 1: ValueError: num_draft_forwards",
    "nan-calls": "failed: 4 samples, first a turn 1: ValueError: ",
    "accepts-anything": "mismatch: ",
    "rewrites": "mismatch: ",
    "forgets": "mismatch: ",
    "verifies-more": "impossible: more nodes verified than drafted",
    "writes-what-it-likes": "mismatch: ",
    "shapeless-logits": "mismatch: ",
}
NO_FINDING = ("honest",)
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


def made(methods: str, questions: Path, out: Path, warmup: int = 1) -> Run:
    target = tiny_target("llama", words=61)
    target.tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    run(
        methods, plugin=LIES, suite=f"jsonl:{questions}", model=target, max_new_tokens=8, warmup=warmup, telemetry=0,
        out=out,
    )  # fmt: skip
    return read_run(out)


@pytest.fixture(scope="module")
def lied(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One run of all the lies that leave the others alone."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(timed_sample, "EXTRA_ROUNDS", 0)
        return made(
            ",".join([*NO_FINDING, COMPARED_WITH_A_LIAR, *STATED]), questions, tmp_path_factory.mktemp("lied") / "run"
        )


@pytest.fixture(scope="module")
def found(lied: Run) -> dict[str, SummaryRow]:
    """The summary of that run over all tasks, by method."""
    return {row.method: row for row in summarise(lied) if row.task == OVERALL}


def overall(of: Run, method: str) -> SummaryRow:
    return next(row for row in summarise(of) if (row.task, row.method) == (OVERALL, method))


@pytest.mark.parametrize("method", STATED)
def test_a_lie_is_found_under_its_name(found: dict[str, SummaryRow], method: str) -> None:
    row = found[method]
    stated = " | ".join(row.health)
    for part in STATED[method].split(" .* "):
        assert part in stated
    assert stated.startswith("impossible") or not output(row, {"temperature": 0.0}).startswith("identical")
    assert ("failed" in stated) == (row.n_failed == 4) == (not row.n_prompts)
    assert (speedup(row) == "invalid") == stated.startswith(("impossible", "invalid", "mismatch"))


@pytest.mark.parametrize("method", NO_FINDING)
def test_nothing_is_found_of_others(found: dict[str, SummaryRow], method: str) -> None:
    row = found[method]
    assert not any(line.startswith(("failed", "mismatch", "invalid", "impossible")) for line in row.health)
    assert row.output_match == {"identical": 4}


def test_a_method_that_is_compared_with_a_liar_has_no_speedup(found: dict[str, SummaryRow]) -> None:
    row = found[COMPARED_WITH_A_LIAR]
    assert output(row, {"temperature": 0.0}) == "identical to writes-what-it-likes"
    assert speedup(row) == "invalid" and any("reference writes-what-it-likes" in line for line in row.health)


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


def test_a_stopped_clock_voids(questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", time.perf_counter)  # given back afterwards
    row = overall(made("stops-clock", questions, tmp_path / "run", warmup=0), "stops-clock")
    assert any("outside the clock" in line for line in row.health) and speedup(row) == "invalid"


def test_a_model_that_was_altered_voids_every_method(questions: Path, tmp_path: Path) -> None:
    done = made("honest,tampers", questions, tmp_path / "run")
    assert {row.comparison for row in summarise(done)} == {"baseline", "invalid"}


def test_without_warm_up_every_sample_fails(questions: Path, tmp_path: Path) -> None:
    row = overall(made("fails", questions, tmp_path / "run", warmup=0), "fails")
    assert row.n_failed == 4 and "RuntimeError: out of luck (planted_lies.py:" in " ".join(row.health)


def test_a_liar_that_fails_leaves_the_headline_to_the_others(questions: Path, tmp_path: Path) -> None:
    done = made("honest,fails,half-calls", questions, tmp_path / "run")
    rows = summarise(done)
    stated = headline(rows, checks(done, rows), rank_ranges(done, rows))
    assert not stated.startswith("Unreliable") and "fails" not in stated and "half-calls" not in stated
