"""Drafts and traces of a run: made after or before its samples, without a change to them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specbench_ss import Decoder, DraftTree, load_run, run
from specbench_ss.bench import draft_recording
from specbench_ss.bench.draft_recording import (
    draft_step,
    merged,
    places,
    samples_to_record,
    timeline,
)
from specbench_ss.bench.run_loop import NullCallbacks
from specbench_ss.bench.runner import LocalSession
from specbench_ss.bench.schedule import plan
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.verify import verify_greedy
from specbench_ss.runs.manifest import read_manifest
from specbench_ss.suite import Question
from tests.tiny import thorough

QUESTIONS = [Question(f"{task}-{i}", task, ("one", "two"), ((), ()), None) for task in ("x", "y") for i in range(5)]
FEW: dict[str, Any] = {"limit": 1, "tasks": "qa,math_reasoning", "max_new_tokens": 12, "warmup": 0}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    run("ss,sd,pld,suffix[past=on]", out=out, device="cpu", trace=True, **FEW)
    return out


def test_chosen_answers_are_first_turns_of_some_questions() -> None:
    samples = list(plan(QUESTIONS, ("ar", "m"), 2, seed=0))
    first = samples_to_record(samples, "first", 0)
    assert {s.question.id for s in first} == {"x-0", "y-0"} and len(first) == 4
    assert {(s.turn, s.repeat) for s in first} == {(0, 0)}
    half = samples_to_record(samples, "0.5", 0)
    assert len(half) == 10 and half == samples_to_record(samples, "0.5", 0) and not samples_to_record(samples, "0", 0)
    assert len(samples_to_record(samples, "1", 0)) == 20


def test_kept_nodes_are_found_in_the_drafted_tree() -> None:
    drafted = DraftTree.from_parents([9, 5, 6, 5, 5, 7], [-1, 0, 0, 1, 2, 4])
    for keep in ([0], [0, 2], [0, 2, 4, 5], [0, 1, 2, 3, 4, 5]):
        assert places(drafted, drafted.subtree(keep)) == keep
    with pytest.raises(ValueError, match="no part"):
        places(drafted, DraftTree.from_parents([9, 8], [-1, 0]))


def test_a_step_is_written_down_with_what_became_of_each_node() -> None:
    drafted = DraftTree.from_parents([9, 5, 6, 7], [-1, 0, 0, 2])
    kept = drafted.subtree([0, 2, 3])
    logits = torch.zeros(3, 10)
    logits[0, 6], logits[1, 3] = 2.0, 2.0  # 6 is accepted, 7 is not
    verdict = verify_greedy(logits, kept)
    target = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids, **_: f"<{ids[0]}>"))
    step = draft_step(target, drafted, kept, logits, verdict, SamplingParams())
    assert (step.tokens, step.parents, step.pruned) == ([9, 5, 6, 7], [-1, 0, 0, 2], [1])
    assert (step.path, step.next, step.next_text) == ([0, 2], 3, "<3>")
    expected = logits.softmax(-1)
    assert step.p == [
        None,
        None,
        pytest.approx(float(expected[0, 6]), abs=1e-5),
        pytest.approx(float(expected[1, 7]), abs=1e-5),
    ]
    assert step.text == ["<9>", "<5>", "<6>", "<7>"] and step.q is None


@thorough
def test_recorded_drafts_report_the_answer_again(made: Path) -> None:
    results = load_run(made)
    samples = results.samples.set_index(["method", "question_id"])
    steps = results.steps.set_index(["method", "question_id"]).sort_index()
    assert len(results.drafts) == len(samples)
    for one in results.drafts:
        if one.method.startswith("suffix"):
            assert one.reason == draft_recording.STATEFUL and not one.steps
            continue
        assert one.same_answer and not one.reason
        answer = samples.loc[(one.method, one.question_id), "token_ids"]
        reported = [answer[0]]
        for step in one.steps:
            assert step.tokens[0] == reported[-1]
            reported += [step.tokens[node] for node in step.path[1:]] + [step.next]
        assert reported[: len(answer)] == list(answer)
        counted = steps.loc[(one.method, one.question_id)]
        assert [len(s.tokens) - 1 for s in one.steps] == counted["draft_nodes"].tolist()
        assert [len(s.tokens) - 1 - len(s.pruned) for s in one.steps] == counted["verified_nodes"].tolist()
        assert [len(s.path) - 1 for s in one.steps] == counted["accepted_tokens"].tolist()
        accepted = [s.p[node] for s in one.steps for node in s.path[1:]]
        assert all(p is not None and 0 < p <= 1 for p in accepted)
    assert any(s.text[1:] for d in results.drafts for s in d.steps)


def test_a_trace_opens_and_adds_up(made: Path) -> None:
    results = load_run(made)
    traces = results.manifest["traces"]
    assert list(traces) == ["ar", "ss", "sd", "pld", "suffix[past=on]"]
    for found in traces.values():
        content = json.loads(gzip.decompress((made / "traces" / found["file"]).read_bytes()))
        assert content["traceEvents"]
        assert found["what"] == "operators" and 0 < found["busy_share"] <= 1 and found["launches_per_token"] > 1
        assert len(found["timeline"]) == 120 and all(0 <= share <= 1 for share in found["timeline"])
    machine = results.machine().set_index("method")
    assert machine.loc["ar", "trace_busy_share"] == traces["ar"]["busy_share"]


@thorough
def test_an_interrupted_run_has_its_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalSession, "run_sample", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run("pld", out=tmp_path / "run", device="cpu", trace=True, **FEW)
    assert list(read_manifest(tmp_path / "run")["traces"]) == ["ar", "pld"]


@thorough
def test_a_trace_that_fails_leaves_no_prompt_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(*_: Any) -> None:
        raise SystemExit

    reset: list[str] = []
    monkeypatch.setattr(draft_recording, "traced", leave)
    monkeypatch.setattr(Decoder, "reset_history", lambda self: reset.append(self.name))
    done = run("pld", out=tmp_path / "run", device="cpu", trace=True, **FEW)
    assert reset == ["ar", "pld"] and all(done.samples["status"] == "ok")


@thorough
def test_resuming_makes_only_what_is_missing(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    announced: list[int] = []
    monkeypatch.setattr(NullCallbacks, "on_recording", lambda self, answers: announced.append(answers))
    before = (made / "drafts.jsonl").read_bytes()
    lines = before.splitlines(keepends=True)
    (made / "drafts.jsonl").write_bytes(b"".join(lines[:-2]) + lines[-2][:9])
    run("ss,sd,pld,suffix[past=on]", out=made, resume=True, device="cpu", **FEW)
    assert (made / "drafts.jsonl").read_bytes() == before and announced == [2]
    run("ss,sd,pld,suffix[past=on]", out=made, resume=True, device="cpu", **FEW)
    assert announced == [2]


def test_a_timeline_keeps_the_covered_time() -> None:
    spans = merged([(0, 5), (4, 6), (8, 20)])
    assert spans == [(0, 6), (8, 20)]
    bins = timeline(spans, 10)
    assert sum(bins) * 2 == pytest.approx(18) and bins[3] == 0 and bins[0] == 1
