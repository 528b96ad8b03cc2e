"""Drafts and traces of a run: made after it, without a change to it."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from specbench_ss import DraftTree, UserError, load_run, run
from specbench_ss.bench import draft_recording
from specbench_ss.bench.build_config import recording_of
from specbench_ss.bench.draft_recording import (
    draft_step,
    merged,
    places,
    samples_to_record,
    summary,
    timeline,
    trace_file,
)
from specbench_ss.bench.schedule import plan
from specbench_ss.engine.decoder import Generation, Step
from specbench_ss.engine.sampling import Sampling
from specbench_ss.engine.verify import verify_greedy
from specbench_ss.suite import Question

QUESTIONS = [Question(f"{task}-{i}", task, ("one", "two"), ((), ()), None) for task in ("x", "y") for i in range(5)]
FEW: dict[str, Any] = {"limit": 1, "categories": "qa,math_reasoning", "max_new_tokens": 12, "warmup": 0}


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


@pytest.mark.parametrize("share", ["second", "1.5", "-1", "nan", None])
def test_a_share_that_is_none_is_told(share: Any) -> None:
    with pytest.raises(UserError, match="--record-drafts is first, or a share"):
        recording_of({"telemetry": 0.1, "remake_disturbed": None, "record_drafts": share, "trace": False})


def test_kept_nodes_are_found_in_the_drafted_tree() -> None:
    drafted = DraftTree.of([9, 5, 6, 5, 5, 7], [-1, 0, 0, 1, 2, 4])
    for keep in ([0], [0, 2], [0, 2, 4, 5], [0, 1, 2, 3, 4, 5]):
        assert places(drafted, drafted.select(keep)) == keep
    with pytest.raises(ValueError, match="no part"):
        places(drafted, DraftTree.of([9, 8], [-1, 0]))


def test_a_step_is_written_down_with_what_became_of_each_node() -> None:
    drafted = DraftTree.of([9, 5, 6, 7], [-1, 0, 0, 2])
    kept = drafted.select([0, 2, 3])
    logits = torch.zeros(3, 10)
    logits[0, 6], logits[1, 3] = 2.0, 2.0  # 6 is accepted, 7 is not
    verdict = verify_greedy(logits, kept)
    target = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids, **_: f"<{ids[0]}>"))
    step = draft_step(target, drafted, kept, logits, verdict, Sampling())
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


def test_recorded_drafts_tell_the_answer_again(made: Path) -> None:
    results = load_run(made)
    samples = results.samples.set_index(["method", "question_id"])
    steps = results.steps.set_index(["method", "question_id"]).sort_index()
    assert len(results.drafts) == len(samples)
    for one in results.drafts:
        if one.method.startswith("suffix"):
            assert one.reason == draft_recording.REMEMBERS and not one.steps
            continue
        assert one.same_answer and not one.reason
        answer = samples.loc[(one.method, one.question_id), "token_ids"]
        told = [answer[0]]
        for step in one.steps:
            assert step.tokens[0] == told[-1]
            told += [step.tokens[node] for node in step.path[1:]] + [step.next]
        assert told[: len(answer)] == list(answer)
        counted = steps.loc[(one.method, one.question_id)]
        assert [len(s.tokens) - 1 for s in one.steps] == counted["nodes"].tolist()
        assert [len(s.tokens) - 1 - len(s.pruned) for s in one.steps] == counted["verified"].tolist()
        assert [len(s.path) - 1 for s in one.steps] == counted["accepted"].tolist()
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


def test_the_parts_of_every_step_add_up(made: Path) -> None:
    """Draft, verify, accept and host are the whole step within 2 %."""
    results = load_run(made)
    assert (results.machine()["parts_residual"].abs() < 0.02).all()
    assert results.machine()["bytes_per_step"].notna().all()


def test_resuming_makes_only_what_is_missing(made: Path) -> None:
    before = (made / "drafts.jsonl").read_bytes()
    lines = before.splitlines(keepends=True)
    (made / "drafts.jsonl").write_bytes(b"".join(lines[:-2]) + lines[-2][:9])
    run("ss,sd,pld,suffix[past=on]", out=made, resume=True, device="cpu", **FEW)
    assert (made / "drafts.jsonl").read_bytes() == before


HOPELESS = """
import torch
from specbench_ss import Decoder, DraftTree, State

class Hopeless(Decoder):
    name, summary = "hopeless", "drafts what is never right"
    asked = []

    def propose(self, state: State) -> DraftTree:
        Hopeless.asked.append(len(state.ids))
        worst = int(self.target.next_logits(state.ids).argmin())
        return DraftTree.chain(state.root, torch.tensor([worst]))
"""


def test_the_profiler_says_nothing_on_its_own(tmp_path: Path) -> None:
    script = (
        "import sys, torch, pathlib; from specbench_ss.bench.draft_recording import traced\n"
        "traced(lambda: len(torch.ones(3) + 1), torch.device('cpu'), pathlib.Path(sys.argv[1], 'trace.json.gz'))"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_an_answer_in_vain_is_recorded_and_traced_once(tmp_path: Path) -> None:
    """What it is begun again for is no part of its drafts, its trace or its time."""
    file, asked = tmp_path / "hopeless.py", list[tuple[str, int]]()
    file.write_text(HOPELESS)

    class Noted(draft_recording.Recorder):
        def propose(self, state: Any) -> DraftTree:
            asked.append((self.inner.name, len(state.ids)))
            return super().propose(state)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(draft_recording, "Recorder", Noted)
        run("hopeless", plugin=file, out=tmp_path / "run", device="cpu", trace=True, **(FEW | {"max_new_tokens": 6}))
    results = load_run(tmp_path / "run")
    own = [one for one in results.drafts if one.method == "hopeless"]
    samples = results.samples.set_index(["method", "question_id"])
    assert len(own) == 2 and set(results.samples["accepted"]) == {0}
    steps = [samples.loc[("hopeless", one.question_id), "steps"] for one in own]
    assert [len(one.steps) for one in own] == steps and sum(name == "hopeless" for name, _ in asked) == sum(steps)
    assert results.manifest["traces"]["hopeless"]["tokens"] == 6
    recorder: Any = SimpleNamespace(steps=[None] * 4)
    with pytest.raises(RuntimeError, match="4 steps were recorded of an answer of 3"):
        draft_recording.recorded(
            samples_to_record(list(plan(QUESTIONS, ("ar",), 1, 0)), "first", 0)[0], recorder, answer_of(3), []
        )


def answer_of(steps: int) -> Generation:
    return Generation([], 1, "length", 0.1, 1, [Step(0, 0, 0, 0, 1, 0.0, 0.01, 0.0, 0.0, 0.01)] * steps)


def event(name: str, start: float, end: float, on: DeviceType = DeviceType.CPU, parent: Any = None) -> Any:
    return SimpleNamespace(
        name=name, time_range=SimpleNamespace(start=start, end=end), device_type=on, cpu_parent=parent
    )


def test_kernels_are_what_counts_where_there_are_any() -> None:
    host = [event("aten::mm", 0, 90), event("cudaLaunchKernel", 1, 2), event("cudaLaunchKernel", 50, 51)]
    device = [
        event("gemm", 10, 30, DeviceType.CUDA),
        event("gemm", 20, 40, DeviceType.CUDA),
        event("add", 90, 110, DeviceType.CUDA),
    ]
    found = summary([*host, *device], tokens=2)
    assert (found["what"], found["busy_share"], found["launches_per_token"]) == ("kernels", 0.5, 1.0)
    assert found["gaps"] == {"number": 1, "mean_s": 50e-6, "longest_s": 50e-6}
    assert summary(host, 1)["what"] == "operators"
    assert summary([], 1) == {"what": "nothing", "tokens": 1}


def test_a_timeline_keeps_the_covered_time() -> None:
    spans = merged([(0, 5), (4, 6), (8, 20)])
    assert spans == [(0, 6), (8, 20)]
    bins = timeline(spans, 10)
    assert sum(bins) * 2 == pytest.approx(18) and bins[3] == 0 and bins[0] == 1


def test_trace_files_have_plain_and_different_names() -> None:
    assert trace_file("ss[k=2,x=a/b]") == "ss-k-2-x-a-b.json.gz"
    assert trace_file("a b", ["a-b.json.gz"]) == "a-b-1.json.gz"
