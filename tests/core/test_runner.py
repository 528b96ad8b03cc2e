"""The runner: what is run when, what is committed, and that stopping anywhere loses nothing."""

from __future__ import annotations

import contextlib
import gc
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch

from specbench_ss import storage
from specbench_ss.bench.runner import run
from specbench_ss.bench.schedule import warmup_prompts
from specbench_ss.bench.timed_sample import EXTRA_ROUNDS, warm_up
from specbench_ss.engine.decoder import Decoder, Generation, Step
from specbench_ss.engine.generate import StopParams
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.errors import UserError
from specbench_ss.options import MethodSpec
from specbench_ss.results.summary import summarise
from specbench_ss.runs import environment
from specbench_ss.runs.config import OutputOptions, Recording, RunConfig, StoppingRule
from specbench_ss.runs.manifest import manifest_for, method_entry
from specbench_ss.runs.records import Run, SampleRecord, step_line
from specbench_ss.runs.run_dir import RunDir, read_run
from specbench_ss.suite import Question, Suite, SuiteData

ASKED = (Question("a", "x", ("hi", "more", "last")), Question("b", "y", ("go",)), Question("c", "y", ("c",)))
DATA = SuiteData("fake", "generated", ASKED)


class FakeTarget:
    """A character is a token."""

    name, weights_hash, is_lab = "fake", "0" * 64, True
    number_format = "float32"
    device, dtype = torch.device("cpu"), torch.float32
    layer_devices: ClassVar[dict[torch.device, list[int]]] = {device: []}
    device_names, is_multi_device = "cpu", False
    tokenizer = None
    processors, settings_not_applied = None, {}
    eos_ids: frozenset[int] = frozenset({0})
    context_length, vocab_size, parameter_count = 1000, 256, 10

    def encode_chat(self, messages: list[dict[str, str]], tools: object = ()) -> list[int]:
        return list("".join(f"<{m['role'][0]}>{m['content']}" for m in messages).encode())

    def decode_text(self, ids: list[int]) -> str:
        return bytes(ids).decode()

    def thinking_tokens(self, prompt: list[int], ids: list[int]) -> int:
        return 0

    def next_logits(self, ids: list[int], cache: Any = None) -> torch.Tensor:
        return torch.arange(256.0)


class FakeDecoder(Decoder):
    name, summary = "fake", "a fake"

    def propose(self, state: Any) -> Any:
        raise NotImplementedError


class Weighted(FakeDecoder):
    """With weights that can be exchanged."""

    weights = "one"

    def metadata(self) -> dict[str, Any]:
        return {"shape": (1, 2), "weights_hash": self.weights}


class Lossy(FakeDecoder):
    lossless = False


class Changed(FakeDecoder):
    """Changes the model: it must equal the method `own`, whose logits explain a difference."""

    @classmethod
    def baseline_for(cls, options: Any) -> MethodSpec:
        return MethodSpec("own")


class Own(FakeDecoder):
    autoregressive = True
    lossless = False
    asked: ClassVar[list[str]] = []

    def next_logits(self, prompt: Any, answer: Any) -> torch.Tensor:
        self.asked.append(bytes(answer).decode())
        return torch.zeros(256)  # all alike: a numerical tie


class FakeSuite(Suite):
    name, summary, categories = "fake", "a fake", ("x", "y")

    def load(self, request: Any) -> SuiteData:
        return DATA

    def score(self, question: Question, turn: int, answer: str) -> float | None:
        return 0.5


class Recorder:
    """Events, kept."""

    def __init__(self) -> None:
        self.total, self.rows, self.warnings, self.tokens = 0, list[SampleRecord](), list[str](), 0
        self.warmed: list[str] = []
        self.recorded: list[int] = []

    def on_start(self, total: int) -> None:
        self.total = total

    def on_warm_up(self, label: str) -> None:
        self.warmed.append(label)

    def on_estimate(self, seconds: float, samples: int) -> None:
        self.estimate = seconds, samples

    def on_sample_start(self, label: str, question_id: str) -> None:
        pass

    def on_tokens(self, n: int) -> None:
        self.tokens += n

    def on_sample(self, row: SampleRecord) -> None:
        self.rows.append(row)

    def on_recording(self, answers: int) -> None:
        self.recorded.append(answers)

    def on_warning(self, text: str) -> None:
        self.warnings.append(text)


class Bench:
    """A run of fakes; `calls` holds (label, prompt text, seed) of every measured or warm-up request."""

    recording = Recording()
    goal: StoppingRule | None = None

    def __init__(self, path: Path, labels: tuple[str, ...] = ("ar", "m"), lossy: bool = False, **config: Any) -> None:
        self.path = path
        self.config = RunConfig(tuple(map(MethodSpec, labels)), **{"warmup": 0, **config})
        self.target: Any = FakeTarget()
        kind = Lossy if lossy else FakeDecoder
        self.decoders: dict[str, Decoder] = {x: (FakeDecoder if x == "ar" else kind)(self.target) for x in labels}
        self.calls: list[tuple[str, str, int]] = []
        self.limits: list[StopParams] = []
        self.events, self.suite = Recorder(), FakeSuite()
        self.answer: Callable[[str, str], str] = lambda label, prompt: f"[{prompt.count('<')}]"
        self.before: Callable[[str, str], None] = lambda label, prompt: None

    def decode(
        self, decoder: Decoder, prompt: list[int], limits: StopParams, sampling: SamplingParams, on_step: Any
    ) -> Generation:
        label = next(x for x, d in self.decoders.items() if d is decoder)
        text = bytes(prompt).decode()
        self.calls.append((label, text, sampling.seed))
        self.limits.append(limits)
        self.before(label, text)
        ids = list(self.answer(label, text).encode())
        steps = [Step(0, 0, 0, 0, 1, 0.0, 0.01, 0.0, 0.0, 0.01) for _ in ids[1:]]
        if on_step:
            on_step(len(ids))
        return Generation(ids, len(prompt), "length", 0.1, 1, steps)

    def run(self, resume: bool = False) -> Run:
        entries = [method_entry(label, decoder) for label, decoder in self.decoders.items()]
        manifest = manifest_for(self.config, self.target, DATA, entries, ["ssbench", "run"])
        where = OutputOptions(self.path, resume, recording=self.recording, goal=self.goal)
        with RunDir.open(where, manifest, DATA.questions) as run_dir:
            run(self.config, self.target, self.suite, DATA, self.decoders, run_dir, self.events, where, self.decode)
        return read_run(self.path)


def unlucky(where: Callable[[str, str], bool], error: Exception | None = None) -> Callable[[str, str], None]:
    """Fail where a method is asked such a prompt."""

    def fail(label: str, prompt: str) -> None:
        if where(label, prompt):
            raise error or RuntimeError("out of luck")

    return fail


def test_every_sample_is_made_once_and_committed_with_its_steps(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ("ar", "m", "n"), repeats=2)
    done = bench.run()
    assert len({r.key for r in done.rows}) == len(done.rows) == bench.events.total == 5 * 3 * 2
    assert done.manifest["status"] == "complete"
    assert [r.key for r in bench.events.rows] == [r.key for r in done.rows]
    for row in done.rows:
        steps = done.steps.of(row.key).steps()
        assert row.tokens == len(row.token_ids or []) == (row.prefill_tokens or 0) + sum(s.tokens for s in steps)
        assert row.wall_s == pytest.approx((row.prefill_s or 0) + sum(s.total_s for s in steps))
        assert (row.quality, row.suite_hash, row.status) == (0.5, DATA.content_hash, "ok")
    assert bench.events.tokens == sum(r.tokens or 0 for r in done.rows)


@pytest.mark.parametrize("warmup", [0, 1])
def test_caches_have_room_for_the_longest_conversation_before_the_first_sample(tmp_path: Path, warmup: int) -> None:
    bench, reserved = Bench(tmp_path, warmup=warmup, max_new_tokens=7), list[int]()
    bench.before = lambda label, prompt: reserved.append(bench.target.longest_request)
    bench.run()
    longest = max(len("".join(f"<u>{turn}<a>-" for turn in q.turns)) - len("<a>-") + 7 * len(q.turns) for q in ASKED)
    assert set(reserved) == {longest} and bench.target.longest_request == 0


def test_all_methods_continue_the_reference_answers(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.answer = lambda label, prompt: f"{label} says"
    bench.run()
    third = [prompt for label, prompt, _ in bench.calls if prompt.endswith("last")]
    assert set(third) == {"<u>hi<a>ar says<u>more<a>ar says<u>last"}


def test_own_history_continues_each_method_and_is_not_compared(tmp_path: Path) -> None:
    bench = Bench(tmp_path, history="own")
    bench.answer = lambda label, prompt: f"{label} says"
    done = bench.run()
    assert {(label, p) for label, p, _ in bench.calls if p.endswith("last")} == {
        (x, f"<u>hi<a>{x} says<u>more<a>{x} says<u>last") for x in ("ar", "m")
    }
    later = [s for s in done.output_match if s.turn]
    assert later
    assert {(s.verdict, s.reason) for s in later} == {("not compared", "another history")}


def test_a_failing_method_leaves_a_row_without_numbers_and_the_run_goes_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.before = unlucky(lambda label, prompt: label == "m" and prompt.endswith("more"))
    done = bench.run()
    bad = [r for r in done.rows if not r.ok]
    assert [(r.method, r.question_id, r.turn) for r in bad] == [("m", "a", 1)]
    assert bad[0].error and bad[0].error.startswith("RuntimeError: out of luck (test_runner.py:")
    numbers = ("tokens", "steps", "wall_s", "prefill_s", "decode_s", "accepted_tokens", "quality", "text", "token_ids")
    assert [getattr(bad[0], n) for n in numbers] == [None] * len(numbers)
    assert len(done.rows) == 10
    assert any("out of luck" in w for w in bench.events.warnings)
    assert [s.reason for s in done.output_match if s.verdict == "not compared"] == ["the sample failed"]


def test_failed_samples_are_made_again_by_resuming(tmp_path: Path) -> None:
    """And whatever they stood in the way of: later turns, and verdicts on the others."""
    bench = Bench(tmp_path)
    bench.before = unlucky(lambda label, prompt: (label, prompt) in (("ar", "<u>hi"), ("m", "<u>go")))
    failed = [r.key for r in bench.run().rows if not r.ok]
    assert len(failed) == 6
    again = Bench(tmp_path)
    done = again.run(resume=True)
    assert again.events.total == len(again.calls) == 6
    assert [r.key for r in done.rows] == [r.key for r in bench.events.rows]
    assert {r.status for r in done.rows} == {"ok"}
    assert {(s.method, s.verdict) for s in done.output_match} == {("m", "identical")}
    assert len(done.output_match) == 5
    assert len(done.steps) == sum(r.steps or 0 for r in done.rows)


def test_killed_while_a_failed_sample_is_made_again(tmp_path: Path) -> None:
    """Steps of the second try without its row do not count."""
    bench = Bench(tmp_path)
    bench.before = unlucky(lambda label, prompt: label == "m" and prompt == "<u>go")
    done = bench.run()
    good, bad = next(r for r in done.rows if r.ok), next(r for r in done.rows if not r.ok)
    half = [step_line(bad.key, 0, done.steps.of(good.key).steps()[0])]
    with (tmp_path / "steps.jsonl").open("ab", buffering=0) as file:
        storage.append(file, half)
    assert not len(read_run(tmp_path).steps.of(bad.key))
    whole = Bench(tmp_path).run(resume=True)
    assert len(whole.steps.of(bad.key)) == next(r.steps for r in whole.rows if r.key == bad.key)


SPOILT: dict[str, Callable[[Generation], Any]] = {
    "tokens and steps do not add up": lambda made: made.tokens.append(65),
    "calls below 0": lambda made: setattr(made, "num_draft_forwards", -1),
    "no number of calls": lambda made: setattr(made, "num_draft_forwards", math.nan),
    "no time": lambda made: setattr(made.steps[-1], "total_s", math.nan),
    "no whole number": lambda made: setattr(made.steps[-1], "tokens", 1.0),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_numbers_that_cannot_be_fail_the_sample(tmp_path: Path, spoil: Callable[[Generation], Any]) -> None:
    bench = Bench(tmp_path)
    honest = bench.decode

    def lie(decoder: Decoder, *rest: Any) -> Generation:
        made = honest(decoder, *rest)
        if decoder is bench.decoders["m"]:
            spoil(made)
        return made

    bench.decode = lie  # type: ignore[method-assign]
    assert {(r.method, r.status, bool(r.error)) for r in bench.run().rows} == {
        ("ar", "ok", False),
        ("m", "failed", True),
    }


@pytest.mark.parametrize("after", (0, 4, 9))
def test_an_interrupted_run_is_finished_by_resuming(tmp_path: Path, after: int) -> None:
    whole = Bench(tmp_path / "whole")
    expected = whole.run()
    bench = Bench(tmp_path / "cut")

    def interrupt(label: str, prompt: str) -> None:
        if len(bench.calls) > after:
            raise KeyboardInterrupt

    bench.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        bench.run()
    assert read_run(tmp_path / "cut").manifest["status"] == "interrupted"
    again = Bench(tmp_path / "cut")
    done = again.run(resume=True)
    assert again.events.total == len(again.calls) == 10 - after
    strip = [(r.key, r.index, r.position, r.seed, r.text, r.tokens) for r in done.rows]
    assert strip == [(r.key, r.index, r.position, r.seed, r.text, r.tokens) for r in expected.rows]
    assert sorted(s.key for s in done.output_match) == sorted(s.key for s in expected.output_match)
    assert done.manifest["status"] == "complete"


def test_a_run_records_its_drafters_and_is_not_resumed_with_others(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.decoders["m"] = drafter = Weighted(bench.target)
    methods = bench.run().manifest["methods"]
    assert [m["resolved"] for m in methods] == [{}, {"shape": [1, 2], "weights_hash": "one"}]
    bench.run(resume=True)
    assert len(read_run(tmp_path).manifest["sessions"]) == 2
    drafter.weights = "two"
    with pytest.raises(UserError, match="has method m with weights_hash one, not two"):
        bench.run(resume=True)


def test_resuming_under_other_conditions_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = Bench(tmp_path)

    def interrupt(label: str, prompt: str) -> None:
        if len(cut.calls) > 3:
            raise KeyboardInterrupt

    cut.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        cut.run()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    again = Bench(tmp_path)
    made = again.run(resume=True)
    assert any("other conditions: threads; times do not compare" in w for w in again.events.warnings)
    assert environment.between_sessions(made.manifest) == ["threads"]


def test_resuming_a_finished_run_does_nothing(tmp_path: Path) -> None:
    Bench(tmp_path, warmup=2).run()
    again = Bench(tmp_path, warmup=2)
    again.run(resume=True)
    assert (again.calls, again.events.total, again.events.recorded) == ([], 0, [])


def test_seeds_differ_by_prompt_and_repeat_but_not_by_method(tmp_path: Path) -> None:
    bench = Bench(tmp_path, repeats=2, temperature=1.0)
    done = bench.run()
    seeds: dict[Any, set[int]] = {}
    for row in done.rows:
        seeds.setdefault((row.question_id, row.turn, row.repeat), set()).add(row.seed)
    assert all(len(s) == 1 for s in seeds.values())
    assert len({min(s) for s in seeds.values()}) == len(seeds) == 10
    assert [seed for *_, seed in bench.calls] == [row.seed for row in done.rows]


def test_output_match_holds_every_sample_against_the_reference(tmp_path: Path) -> None:
    bench = Bench(tmp_path, repeats=2)
    bench.answer = lambda label, prompt: "xyA" if label == "m" and prompt == "<u>go" else "xyz"
    done = bench.run()
    verdicts = Counter((s.method, s.verdict) for s in done.output_match)
    # the reference's second repeat is compared with its first
    assert verdicts == {("m", "identical"): 8, ("m", "mismatch"): 2, ("ar", "identical"): 5}
    assert {s.first_difference for s in done.output_match if s.verdict == "mismatch"} == {2}
    assert any("differs" in w for w in bench.events.warnings)


def test_a_method_that_changes_the_model_is_kept_against_its_own_reference(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ("ar", "m", "own"))
    bench.decoders |= {"m": Changed(bench.target), "own": Own(bench.target)}
    bench.answer = lambda label, prompt: {"ar": "abc", "own": "xyz", "m": "xyA" if prompt == "<u>go" else "xyz"}[label]
    done = bench.run()
    assert Counter((s.method, s.verdict) for s in done.output_match) == {
        ("m", "identical"): 4, ("m", "numerical tie"): 1, ("own", "not compared"): 5,
    }  # fmt: skip
    assert Own.asked.count("xy") and len(Own.asked) == 6  # the one that differs, and one place of each answer
    row = next(r for r in summarise(done) if r.method == "m")
    assert (row.reference, row.reference_speedup) == ("own", pytest.approx(1.0))
    others = [r for r in summarise(done) if r.method != "m"]
    assert {(r.reference, r.reference_speedup) for r in others} == {("ar", None)}


@pytest.mark.parametrize(("options", "reason"), [({"lossy": True}, "preserve"), ({"temperature": 0.5}, "no logits")])
def test_where_equality_is_not_promised_it_is_not_compared(tmp_path: Path, options: Any, reason: str) -> None:
    done = Bench(tmp_path, **options).run()
    assert {s.verdict for s in done.output_match} == {"not compared"}
    assert all(reason in s.reason for s in done.output_match)


def test_the_collector_is_off_during_samples_and_on_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, calls = Bench(tmp_path, warmup=1), list[str]()
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: calls.append(name))
    states: list[bool] = []
    bench.before = lambda label, prompt: states.append(gc.isenabled())
    bench.run()
    assert states
    assert not any(states)
    assert gc.isenabled()
    assert calls == ["freeze", "unfreeze"]


def test_warm_up_precedes_and_is_not_recorded(tmp_path: Path) -> None:
    bench = Bench(tmp_path, warmup=2)
    done = bench.run()
    warm = len(bench.calls) - len(done.rows)
    assert [c[1] for c in bench.calls[:4]] == ["<u>ih"] * 2 + ["<u>og"] * 2  # nothing that is asked
    assert warm == 2 * 4  # the fake's times agree at once: two prompts, and two more rounds of the last
    assert len(done.rows) == 10
    seconds, samples = bench.events.estimate
    assert samples == 10 and seconds > 0


def test_what_remembers_prompts_forgets_those_of_the_warm_up_and_is_named(tmp_path: Path) -> None:
    bench = Bench(tmp_path, warmup=1)
    known: list[int] = []
    decoder = bench.decoders["m"]
    decoder.stateful = True
    decoder.reset_history = lambda: known.append(len(bench.calls))  # type: ignore[method-assign]
    bench.run()
    assert known == [len(bench.calls) - 10]  # once, before the first of the measured samples
    assert bench.events.warnings == ["m is stateful: its speed depends on earlier prompts"]


def test_the_warm_up_asks_nothing_that_the_run_asks() -> None:
    texts = ["what is it", "it is what", "go", "og", "c", "0. c", "", "Level level", "a b\n  c"]
    asked = [Question(str(i), "x", (text,)) for i, text in enumerate(texts)]
    target = cast(Any, FakeTarget())
    warm = warm_prompts_of(target, asked)
    assert warm == warm_prompts_of(target, asked) and len(warm) == len(texts)
    plain = [{" ".join(text.casefold().split()) for text in some} for some in (warm, texts)]
    assert not plain[0] & plain[1]
    assert warm[-1] == "c\n  b a" and warm[0] == "ti si tahw"  # words backwards, or letters where that is asked
    long = [Question("a", "x", ("z" * 990,))]
    assert len(warmup_prompts(target, [*long, Question("b", "x", ("0. " + "z" * 990,))], 1)[0]) < target.context_length


def warm_prompts_of(target: Any, asked: list[Question]) -> list[str]:
    return [bytes(ids).decode().removeprefix("<u>") for ids in warmup_prompts(target, asked, 99)]


def test_warm_up_goes_on_until_times_settle_and_is_bounded() -> None:
    made: list[tuple[str, int]] = []
    warned: list[str] = []

    def sample(label: str, prompt: list[int], limit: int) -> float:
        made.append((label, prompt[0]))
        own = [m for m in made if m[0] == label]
        return {"calm": 1.0, "slow start": max(1.0, 5.0 - len(own)), "wild": 2.0 ** len(own)}[label]

    rounds = warm_up(["calm", "slow start", "wild"], [[1], [2]], sample, warned.append, cast(Any, None))
    assert rounds == 2 + EXTRA_ROUNDS
    count = Counter(label for label, _ in made)
    assert count["calm"] == 4  # a round per prompt, then the last prompt until three times agree
    assert count["slow start"] == 6
    assert warned == ["times had not settled after warm-up: wild"]


@pytest.mark.parametrize("where", ["decode", "forget"])
def test_a_method_that_fails_in_warm_up_is_dropped_with_its_line(tmp_path: Path, where: str) -> None:
    bench = Bench(tmp_path, ("ar", "good", "bad"), warmup=1, repeats=2)

    def fail(label: str = "bad", prompt: str = "") -> None:
        if label == "bad":
            raise RuntimeError("out of luck")

    if where == "decode":
        bench.before = fail
    else:
        bench.decoders["bad"].reset_history = fail  # type: ignore[method-assign]
    done = bench.run()
    bad = [row for row in done.rows if row.method == "bad"]
    assert len(bad) == 10 and not any(row.ok for row in bad)
    (why,) = {row.error for row in bad}
    assert why and why.startswith("failed in warm-up: ") and "RuntimeError: out of luck (test_runner.py:" in why
    assert sum("bad" in text for text in bench.events.warnings) == 1
    assert all(row.ok for row in done.rows if row.method != "bad")


def test_a_reference_that_fails_in_warm_up_ends_the_run(tmp_path: Path) -> None:
    bench = Bench(tmp_path, warmup=1)
    bench.before = unlucky(lambda label, prompt: label == "ar")
    with pytest.raises(UserError, match="ar failed in warm-up"):
        bench.run()
    assert not read_run(tmp_path).rows


def test_drafts_are_looked_at_when_nothing_is_measured_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, inside, seen = Bench(tmp_path), list[bool](), list[tuple[str, bool, bool]]()

    @contextlib.contextmanager
    def watched(*_: Any) -> Iterator[None]:
        inside.append(True)
        try:
            yield
        finally:
            inside.pop()

    def decode(decoder: Decoder, prompt: list[int], *rest: Any) -> Generation:
        done = Bench.decode(bench, decoder, prompt, *rest)
        if ord("g") in prompt:
            raise RuntimeError("out of luck")
        return replace(
            done, steps=[replace(step, draft_nodes=1, verified_nodes=1, draft_depth=1) for step in done.steps]
        )

    def probe(decoder: Decoder, prompt: list[int], *_: Any) -> None:
        seen.append((bytes(prompt).decode(), bool(inside), gc.isenabled()))

    monkeypatch.setattr("specbench_ss.bench.telemetry.MachineRecord.watch", watched)
    monkeypatch.setattr("specbench_ss.bench.timed_sample.probe_drafts", probe)
    bench.decode = decode  # type: ignore[method-assign]
    made = bench.run().rows
    assert len(seen) == len(made) == 10 and not any(watching for _, watching, _ in seen)
    assert all(collecting for *_, collecting in seen)
    assert sum(not row.ok for row in made) == 2
