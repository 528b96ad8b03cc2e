"""Served engines as the thing measured: the checks of every run, with servers that answer."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from specbench_ss import compare, load_run, run
from specbench_ss.bench import server_run
from specbench_ss.bench.run_loop import NullCallbacks
from specbench_ss.bench.schedule import Sample, arrivals, plan
from specbench_ss.bench.server_client import Server, event
from specbench_ss.cli.main import main
from specbench_ss.errors import RunStopped, UserError
from specbench_ss.results.checks import checks
from specbench_ss.results.summary import OVERALL, summarise
from specbench_ss.runs.config import Load
from specbench_ss.runs.records import SampleRecord
from specbench_ss.runs.run_dir import read_run
from specbench_ss.suite import Question
from tests.served.fake_server import Behaviour, Clock, Fake, serving, ticking
from tests.tiny import thorough

TWO_TURNS = {"a": ["one fish", "two fish"], "b": ["red fish"], "c": ["blue fish swims"], "d": ["old"], "e": ["new one"]}
PROMPTS = sum(map(len, TWO_TURNS.values()))


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    lines = [json.dumps({"question_id": name, "category": "fish", "turns": turns}) for name, turns in TWO_TURNS.items()]
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


def measured(servers: list[Fake], labels: list[str], questions: Path, out: Path, **more: Any) -> Any:
    given = {"suite": "jsonl", "data": questions, "max_new_tokens": 8, "warmup": 0, "out": out, **more}
    return run(endpoint=[server.url for server in servers], label=labels, **given)


def clocked(monkeypatch: pytest.MonkeyPatch, clock: Callable[[], float]) -> None:
    monkeypatch.setattr(server_run, "Server", partial(Server, clock=clock))


def test_counts_add_up_and_the_schedule_is_that_of_every_run(questions: Path, tmp_path: Path) -> None:
    with serving() as one, serving(Behaviour(tokens=5)) as other:
        made = measured([one, other], ["plain", "fast ✓"], questions, tmp_path / "run", repeats=2)
    rows = made.samples
    assert not made.unfinished and len(rows) == PROMPTS * 2 * 2 and set(rows["status"]) == {"ok"}
    assert set(rows["tokens"][rows["method"] == "plain"]) == {8} and set(rows["counted"]) == {"usage"}
    assert set(rows["tokens"][rows["method"] == "fast ✓"]) == {5} and set(rows["chunks"]) == {5, 8}
    assert (rows["prefill_s"] <= rows["wall_s"]).all()
    assert rows["steps"].isna().all() and rows["accepted_tokens"].isna().all() and rows["drafts"].isna().all()
    asked = [Question(name, "fish", tuple(turns)) for name, turns in TWO_TURNS.items()]
    planned = [(s.question.id, s.turn, s.method, s.repeat) for s in plan(asked, ["plain", "fast ✓"], 2, 0)]
    assert [tuple(row) for row in rows[["question_id", "turn", "method", "repeat"]].itertuples(index=False)] == planned
    # a later turn continues the baseline's answer, anyone who is asked
    later = [body for body in other.behaviour.asked if len(body["messages"]) > 1]
    assert len(later) == 2 and {body["messages"][1]["content"] for body in later} == {
        row.text for row in rows.itertuples() if (row.question_id, row.turn, row.method) == ("a", 0, "plain")
    }
    assert all(
        body["temperature"] == 0 and "seed" not in body and body["max_tokens"] <= 8 for body in one.behaviour.asked
    )


def test_a_server_is_sent_all_that_stands_before_a_question(tmp_path: Path) -> None:
    stated = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one fish"}]
    few = [*stated, {"role": "assistant", "content": "two"}, {"role": "user", "content": "red fish"}]
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps({"messages": few}) + "\n")
    with serving() as one:
        measured([one], ["plain"], file, tmp_path / "run", warmup=1)
    sent = [body["messages"] for body in one.behaviour.asked]
    warm = next(messages for messages in sent if messages[0]["content"] == "brief. Be")
    assert sent[-1] == few and [m["role"] for m in warm] == [m["role"] for m in few]


def test_a_server_is_sent_the_tools_of_a_question(tmp_path: Path) -> None:
    tools, file = [{"type": "function", "function": {"name": "weather"}}], tmp_path / "own.jsonl"
    file.write_text(json.dumps({"prompt": "one fish", "tools": tools}) + "\n" + json.dumps({"prompt": "red fish"}))
    with serving() as one:
        measured([one], ["plain"], file, tmp_path / "run", concurrency=2)
    sent = [(body["messages"][-1]["content"], body.get("tools")) for body in one.behaviour.asked[1:]]
    assert set(map(str, sent)) == {str(("one fish", tools)), str(("red fish", None))} and len(sent) == 4
    call = b'{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"name":"weather","arguments":"{}"}}]}}]}'
    assert [choice.delta and choice.delta.text for choice in event(call).choices or ()] == ["weather{}"]


def test_a_server_that_takes_half_the_time_is_twice_as_fast(
    questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    clocked(monkeypatch, clock)
    with (
        serving(Behaviour(delay=0.02, clock=clock)) as slow,
        serving(Behaviour(delay=0.02, per_chunk=2, drafted=3, metrics="vllm", clock=clock)) as fast,
    ):
        made = measured([slow, fast], ["slow", "fast"], questions, tmp_path / "run")
    table = made.summary(all=True).query("task == 'overall'").set_index("method")
    assert table.loc["fast", "speedup"] == pytest.approx(2.0) and table.loc["fast", "comparison"] == "faster"
    assert table.loc["slow", "comparison"] == "baseline" and set(table["baseline"]) == {"slow"}
    assert table["n_mismatch"].sum() == 0 and table.loc["fast", "n_text_differs"] == PROMPTS


@thorough
def test_the_relative_step_time_of_a_server_is_its_tau_over_its_speedup(
    questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("prometheus_client")
    clocked(monkeypatch, ticking())
    with serving(Behaviour(metrics="vllm")) as one, serving(Behaviour(per_chunk=2, drafted=3, metrics="vllm")) as other:
        made = measured([one, other], ["plain", "drafting"], questions, tmp_path / "run")
        swapped = measured([other, one], ["drafting", "plain"], questions, tmp_path / "swapped")
    table = made.summary(all=True).query("task == 'overall'").set_index("method")
    row = table.loc["drafting"]
    sums = made.samples.groupby("method")[["decode_s", "step_tokens"]].sum()
    per_token = sums["decode_s"] / sums["step_tokens"]
    assert row["decode_speedup"] == pytest.approx(per_token["plain"] / per_token["drafting"]) and per_token.min() > 0
    assert row["relative_step_time"] == pytest.approx(7 / 4 / row["decode_speedup"])
    assert table.loc["plain", "relative_step_time"] == 1
    assert row["speedup"] == pytest.approx(row["decode_speedup"] * row["other_factor"])
    assert swapped.summary()["relative_step_time"].isna().all()  # the baseline's step yields several tokens


def test_the_estimate_after_warm_up_is_the_time_of_equal_answers(
    questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, estimates = Clock(), list[tuple[float, int]]()
    clocked(monkeypatch, clock)
    monkeypatch.setattr(NullCallbacks, "on_estimate", lambda self, *estimate: estimates.append(estimate))
    with serving(Behaviour(delay=0.02, clock=clock)) as one, serving(Behaviour(delay=0.04, clock=clock)) as other:
        made = measured([one, other], ["one", "other"], questions, tmp_path / "run", warmup=1)
    assert estimates == [(pytest.approx(made.samples["wall_s"].sum()), 2 * PROMPTS)]


@thorough
def test_tau_is_what_the_counters_state(questions: Path, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with (
        serving(Behaviour(metrics="vllm")) as plain,
        serving(Behaviour(per_chunk=2, drafted=3, metrics="vllm")) as drafting,
        serving(Behaviour(per_chunk=2, drafted=3, metrics="vllm", other_tokens=50)) as shared,
        serving(Behaviour(metrics="sglang")) as gauge,
    ):
        labels = ["plain", "drafting", "shared", "gauge"]
        made = measured([plain, drafting, shared, gauge], labels, questions, tmp_path / "run", concurrency=2)
    table = made.summary(all=True).query("task == 'overall'").set_index("method")
    # 4 drafts an answer, 1 of 3 accepted each: 7 tokens after the first one
    assert table.loc["drafting", "mean_acceptance_length"] == pytest.approx(7 / 4)
    assert table.loc["drafting", "engine_acceptance_length"] == pytest.approx(2.0)
    assert table.loc["drafting", "acceptance_rate"] == pytest.approx(1 / 3)
    assert table.loc["plain", "mean_acceptance_length"] == 1  # it counts its tokens and has no counters of drafts
    assert table["mean_acceptance_length"].isna()[["shared", "gauge"]].all()  # not measured, and never zero
    own = made.samples.query("method == 'drafting'")
    assert set(own["drafts"]) == {4} and set(own["draft_nodes"]) == {12} and set(own["accepted_tokens"]) == {4}
    at_two = made.concurrency().query("concurrency == 2").set_index("method")["mean_acceptance_length"]
    assert at_two["drafting"] == pytest.approx(7 / 4) and at_two["plain"] == 1
    assert at_two[["shared", "gauge"]].isna().all()
    reported = {entry["label"]: entry["served"]["acceptance"] for entry in made.manifest["methods"]}
    assert "sglang:generation_tokens" in reported["gauge"] and reported["drafting"] == "its counters in /metrics"


def test_a_server_that_answers_repeats_from_memory_is_named(questions: Path, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    kinds = {"plain": Behaviour(metrics="vllm"), "suffix": Behaviour(metrics="vllm", drafted=3, remembers=True)}
    with serving(kinds["plain"]) as plain, serving(kinds["suffix"]) as suffix:
        made = measured([plain, suffix], list(kinds), questions, tmp_path / "run", repeats=2)
    (found,) = [check for check in made.checks if check.name == "memory"]
    assert len(found.lines) == 1 and found.lines[0].startswith("suffix: -50%")  # 4 steps in place of 8


def test_a_server_that_answers_load_levels_from_memory_is_named(questions: Path, tmp_path: Path) -> None:
    kinds = {
        "plain": Behaviour(metrics="llama.cpp"),
        "suffix": Behaviour(metrics="llama.cpp", drafted=3, remembers=True),
    }
    with serving(kinds["plain"]) as plain, serving(kinds["suffix"]) as suffix:
        made = measured([plain, suffix], list(kinds), questions, tmp_path / "run", concurrency=2)
    (found,) = [check for check in made.checks if check.name == "memory"]
    assert len(found.lines) == 1 and found.lines[0].startswith("suffix: -57%")  # 3 steps in place of 7


def test_without_usage_pieces_are_counted_and_the_results_state_so(questions: Path, tmp_path: Path) -> None:
    with serving(Behaviour(mode="strict")) as one, serving(Behaviour(usage=False)) as other:
        made = measured([one, other], ["strict", "silent"], questions, tmp_path / "run")
    assert set(made.samples["counted"]) == {"chunks"} and set(made.samples["tokens"]) == {8}
    found = {check.name: check for check in checks(read_run(made.path), summarise(read_run(made.path)))}
    assert found["tokens"].state == "warning" and "strict, silent" in found["tokens"].sentence
    assert len([body for body in one.behaviour.asked if "stream_options" in body]) == 1  # asked once, then never more


def test_equal_outputs_have_equal_numbers_of_tokens(questions: Path, tmp_path: Path) -> None:
    """A server without usage that joins tokens gets the count of the other one, reported or of pieces."""
    for usage, way in ((True, "usage"), (False, "chunks")):
        one, joined = Behaviour(usage=usage, buffered=1), Behaviour(usage=False, buffered=4)
        with serving(one) as first, serving(joined) as second:
            made = measured([first, second], ["one", "joined"], questions, tmp_path / way, limit=4)
        rows = made.samples.set_index("method")
        assert set(rows.loc["one", "counted"]) == {way} and set(rows.loc["joined", "counted"]) == {"equal output"}
        assert set(rows["tokens"]) == {8} and set(rows.loc["joined", "chunks"]) == {5}
        found = {check.name: check for check in made.checks}
        assert found["tokens"].state == "warning" and "equal output" in found["tokens"].sentence
        assert {row.counted for row in stored(made.path) if row.method == "joined"} == {"chunks"}


def stored(run: Path) -> list[SampleRecord]:
    return [SampleRecord.read(line.encode()) for line in (run / "samples.jsonl").read_text().splitlines()]


def test_servers_that_count_equal_outputs_differently_have_no_ratio(
    questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocked(monkeypatch, ticking())
    with serving() as one, serving(Behaviour(mode="miscount", after=1, counted=6)) as other:
        made = measured([one, other], ["one", "other"], questions, tmp_path / "r")
    row = made.summary(all=True).query("task == 'overall' and method == 'other'").iloc[0]
    assert row["comparison"] == "invalid" and pd.isna(row["speedup"]) and "equal outputs" in " ".join(row["health"])
    assert made.headline.startswith("Unreliable (invalid)")


@pytest.mark.parametrize(("buffered", "known"), [(1, True), (5, True), (8, False)])
def test_tokens_of_the_first_text_are_not_in_the_time_per_token(
    buffered: int, known: bool, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of an answer comes as long after its last piece as a piece after another."""
    clocked(monkeypatch, ticking())
    with serving(Behaviour(buffered=buffered)) as one:
        made = measured([one], ["one"], questions, tmp_path / "r", limit=1)
    for row in made.run.rows:
        assert (row.decode_s is not None) == known and row.first_chunks == 1
        if row.decode_s is not None:
            assert row.decode_s == pytest.approx(7 * 0.01 * (9 - buffered) / (8 - buffered))
            assert (row.prefill_s, row.wall_s) == pytest.approx((0.01, 0.01 * (10 - buffered)))


def test_texts_are_tokenized_after_the_level(questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[bool]()

    def count(text: str) -> int:
        threads.append(threading.current_thread() is threading.main_thread())
        return 5

    monkeypatch.setattr(server_run, "_tokenizer", lambda model: count)
    with serving(Behaviour(usage=False)) as one:
        made = measured([one], ["one"], questions, tmp_path / "r", concurrency=2)
    (level,) = [found for found in made.run.concurrency if found.load.concurrency == 2]
    assert all(threads) and len(threads) >= 2 * PROMPTS and set(made.samples["tokens"]) == {5}
    assert made.concurrency().query("concurrency == 2")["tokens_per_s"].iloc[0] == pytest.approx(
        5 * PROMPTS / level.wall_s
    )


def test_resuming_loses_nothing_and_repeats_nothing(questions: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with serving() as one, serving(Behaviour(mode="drop", after=4)) as other:
        first = measured([one, other], ["one", "other"], questions, out)
        assert Counter(first.samples["status"]) == {"ok": 9, "failed": 3}
        good = {(r.question_id, r.turn, r.method): r.started for r in first.samples.itertuples() if r.status == "ok"}
        before = len(one.behaviour.asked)
        other.behaviour.mode = "ok"
        again = measured([one, other], ["one", "other"], questions, out, resume=True)
        assert set(again.samples["status"]) == {"ok"} and len(again.samples) == 2 * PROMPTS
        assert len(one.behaviour.asked) == before + 1  # the first short question of the session
        now = {(r.question_id, r.turn, r.method): r.started for r in again.samples.itertuples()}
        assert all(now[key] == started for key, started in good.items())
        with pytest.raises(UserError, match="endpoints"):
            measured([one], ["one"], questions, out, resume=True)


def test_a_server_that_goes_away_ends_the_run_which_can_be_resumed(questions: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with serving() as one:
        with serving(Behaviour(mode="gone")) as other:
            other.behaviour.mode = "ok"
            made = measured([one, other], ["one", "other"], questions, out, limit=1)
        with serving(Behaviour(mode="page", after=3)) as broken:
            del made
            with pytest.raises(RunStopped, match="failed 3 times in a row.*--resume") as e:
                gone(broken)
                measured([one, broken], ["one", "broken"], questions, tmp_path / "gone", concurrency=())
            assert "\n" not in str(e.value)
            kept = load_run(tmp_path / "gone")
            assert kept.manifest["status"] == "failed" and "not complete" in kept.unfinished
            assert Counter(kept.samples["status"])["failed"] == 3 and len(broken.behaviour.asked) <= 8


def gone(server: Fake) -> None:
    """Make /v1/models fail as soon as answers do."""
    how = server.behaviour
    send = server.RequestHandlerClass.do_GET

    class Gone(server.RequestHandlerClass):  # type: ignore[name-defined,misc]
        def do_GET(self) -> None:  # noqa: N802
            if len(how.asked) > how.after:
                self._send(503, "gone")
            else:
                how.mode, mode = "ok", how.mode
                send(self)
                how.mode = mode

    server.RequestHandlerClass = Gone


@pytest.mark.parametrize(
    ("mode", "stated"),
    [
        ("stall", "sent no text within 2 s"),
        ("drop", "the connection to .* failed"),
        ("garbage", "event stream"),
        ("html", "answers with text/html"),
        ("empty", "the stream ended before any text"),
        ("error", "the server reports: out of memory"),
        ("nan", "malformed chat completion"),
        ("500", "answers 500 .*a page of HTML"),
    ],
)
def test_an_answer_that_goes_wrong_is_a_row_with_a_status(
    mode: str, stated: str, questions: Path, tmp_path: Path
) -> None:
    timeout = 2.0 if mode == "stall" else 30.0
    with serving() as one, serving(Behaviour(mode=mode, after=1)) as other:
        made = measured([one, other], ["one", "other"], questions, tmp_path / "r", limit=1, endpoint_timeout=timeout)
    failed = made.samples.query("method == 'other'")
    assert set(failed["status"]) == {"failed"} and failed["error"].str.contains(stated).all(), failed["error"].tolist()
    assert failed[["tokens", "wall_s", "text"]].isna().all(axis=None)
    assert set(made.samples.query("method == 'one'")["status"]) == {"ok"} and made.manifest["status"] == "complete"


@pytest.mark.parametrize(
    ("behaviour", "more", "stated"),
    [
        (Behaviour(models=("m", "n")), {}, "has 2 models; choose one with --endpoint-model: m, n"),
        (Behaviour(models=()), {}, "has 0 models"),
        (Behaviour(), {"endpoint_model": "n"}, "does not exist.*it lists no model 'n'"),
        (Behaviour(mode="page"), {}, "answers with text/html instead of a list of models"),
        (Behaviour(mode="html"), {}, "answers with text/html"),
        (Behaviour(mode="empty"), {}, "the stream ended before any text"),
        (Behaviour(key="secret-key"), {}, "requires a key, or another one .401"),
    ],
)
def test_a_server_that_cannot_be_measured_is_one_line(
    behaviour: Behaviour, more: dict[str, Any], stated: str, questions: Path, tmp_path: Path
) -> None:
    with serving(behaviour) as server, pytest.raises(UserError, match=stated) as e:
        measured([server], ["s"], questions, tmp_path / "r", **more)
    assert "\n" not in str(e.value) and not (tmp_path / "r").exists()


def test_no_key_and_no_password_is_written_down(
    questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEY", "secret-key")
    with serving(Behaviour(key="secret-key")) as one:
        url = one.url.replace("http://", "http://somebody:pass-word@")
        given = {"suite": "jsonl", "data": questions, "max_new_tokens": 4, "warmup": 1, "out": tmp_path / "r"}
        monkeypatch.setenv("SOME_KEY", "wrong-key")
        with pytest.raises(UserError) as e:
            run(endpoint=one.url, label="one", api_key_env="SOME_KEY", **given)
        assert "wrong-key" not in str(e.value)
        with pytest.raises(UserError, match="give either credentials"):
            run(endpoint=url, label="one", api_key_env="SOME_KEY", **given)
        one.behaviour.key = ""
        run(endpoint=url, label="one", **given)
        one.behaviour.key = "secret-key"
        monkeypatch.setenv("SOME_KEY", "secret-key")
        run(endpoint=one.url, label="one", api_key_env="SOME_KEY", **{**given, "out": tmp_path / "r" / "key"})
    written = b"".join(file.read_bytes() for file in (tmp_path / "r").rglob("*") if file.is_file())
    assert written and b"secret-key" not in written and b"pass-word" not in written and b"somebody" not in written


def meeting(server: Fake, after: int) -> None:
    """Keep the first request after so many in flight until there is another one."""
    met = threading.Event()

    class Meeting(server.RequestHandlerClass):  # type: ignore[name-defined,misc]
        def _answer(self, body: dict[str, Any], mode: str) -> None:
            if len(self.server.in_flight) > 1:
                met.set()
            elif len(self.how.asked) > after:
                met.wait(30.0)
            super()._answer(body, mode)

    server.RequestHandlerClass = Meeting


@thorough
def test_levels_are_made_once_and_hold_what_was_sent(questions: Path, tmp_path: Path) -> None:
    out = tmp_path / "r"
    with serving(Behaviour(usage=True)) as one, serving(Behaviour(tokens=4)) as other:
        meeting(one, 1 + PROMPTS)
        made = measured([one, other], ["one", "other"], questions, out, concurrency="1,2,4")
        table = made.concurrency().set_index(["concurrency", "method"])
        assert list(table.index) == [(n, m) for n in (1, 2, 4) for m in ("one", "other")]
        assert (table["requests"] == PROMPTS).all() and (table["failed"] == 0).all()
        assert (table["tokens_per_s"] > 0).all() and table["mean_acceptance_length"].isna().all()
        asked = len(one.behaviour.asked)
        assert asked == 1 + 3 * PROMPTS and 2 <= one.behaviour.most_at_once <= 4
        again = measured([one, other], ["one", "other"], questions, out, concurrency=[4, 2], resume=True)
        assert len(one.behaviour.asked) == asked + 1 and again.concurrency().equals(made.concurrency())
        (out / "concurrency.jsonl").write_bytes(
            (out / "concurrency.jsonl").read_bytes()[:-20]
        )  # the last level was not committed
        measured([one, other], ["one", "other"], questions, out, concurrency=(2, 4), resume=True)
    run_ = read_run(out)
    assert len(run_.concurrency) == 4 and len(run_.requests) == 4 * PROMPTS


@thorough
def test_rates_are_levels_of_their_own_with_the_same_arrivals_for_all_servers(questions: Path, tmp_path: Path) -> None:
    out = tmp_path / "r"
    more: dict[str, Any] = {"concurrency": "2", "rate": [200, 50], "repeats": 2, "goodput": "e2el:60000"}
    with serving() as one, serving(Behaviour(tokens=4)) as other:
        made = measured([one, other], ["one", "other"], questions, out, **more)
        asked, levels = len(one.behaviour.asked), out / "concurrency.jsonl"
        levels.write_bytes(levels.read_bytes()[:-20])  # the last level was not committed
        again = measured(
            [one, other], ["one", "other"], questions, out, resume=True, **more | {"goodput": "ttft:60000"}
        )
        with pytest.raises(UserError, match="has rate"):
            measured([one, other], ["one", "other"], questions, out, resume=True, **more | {"rate": 50})
    assert asked == 1 + 2 * 4 * PROMPTS and again.manifest["goodput"] == {"ttft": 60000.0}
    run_ = read_run(out)
    assert Counter(level.load for level in run_.concurrency) == dict.fromkeys(
        [Load(2), Load(None, 50), Load(None, 200)], 4
    )
    assert len(run_.requests) == 3 * 4 * PROMPTS and all(row.ok for row in run_.requests)
    for level in run_.concurrency:
        rows = [r for r in run_.requests if (r.method, r.load, r.repeat) == level.key]
        if level.rate:
            since = [(row.started or 0.0) - level.started for row in rows]
            assert since == pytest.approx(arrivals(PROMPTS, level.rate, 0, level.repeat), abs=1e-4)
    for table in (made.concurrency(), again.concurrency()):
        assert list(table["rate"].fillna(0)) == [0] * 4 + [50] * 2 + [200] * 2 and (table["slo_attainment"] == 1).all()
        assert table["goodput"].tolist() == pytest.approx(table["requests_per_s"].tolist())


def test_times_count_from_the_planned_arrival(questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_run, "arrivals", lambda number, *_: [-5.0] * number)
    with serving() as one:
        measured([one], ["one"], questions, tmp_path / "r", rate="2")
    rows = read_run(tmp_path / "r").requests
    assert len(rows) == PROMPTS and all((row.prefill_s or 0.0) > 5 and (row.wall_s or 0.0) > 5 for row in rows)
    assert all((row.decode_s or 0.0) < 5 for row in rows)  # that is of the server alone


def test_a_request_without_history_moves_no_arrival(
    questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = server_run.ServedConcurrencySweep.prompt

    def first_turns(sweep: Any, sample: Sample) -> Any:
        if sample.turn:
            raise LookupError("no history")
        return prompt(sweep, sample)

    monkeypatch.setattr(server_run.ServedConcurrencySweep, "prompt", first_turns)
    with serving() as one:
        measured([one], ["one"], questions, tmp_path / "r", rate="50")
    run_ = read_run(tmp_path / "r")
    planned, sent = arrivals(PROMPTS, 50, 0, 0), [row for row in run_.requests if row.ok]
    since = [(row.started or 0.0) - run_.concurrency[0].started for row in sent]
    assert 0 < len(sent) < PROMPTS and since == pytest.approx([planned[row.index] for row in sent], abs=1e-4)


def test_a_level_ends_with_its_last_request(questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work of the client after a request, such as a probe of the server, is not time of the level."""
    clock, ended = Clock(), list[str]()
    clocked(monkeypatch, clock)

    def later(_: object, row: SampleRecord) -> None:
        ended.append(row.question_id)
        if len(ended) == PROMPTS:  # the other requests have ended, too
            clock.pass_by(1000.0)

    monkeypatch.setattr(server_run.ServedSession, "ended", later)
    with serving(Behaviour(delay=0.02, clock=clock)) as one:
        measured([one], ["one"], questions, tmp_path / "r", concurrency=2)
    (level,) = read_run(tmp_path / "r").concurrency
    assert len(ended) == PROMPTS and 0 < level.wall_s < 1000
    assert level.ended - level.started == pytest.approx(level.wall_s, abs=0.01)


def test_requests_that_find_no_thread_fail_and_do_not_count_as_failures_of_the_server(
    questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_run, "MOST_THREADS", 1)
    with serving(Behaviour(pause=0.1)) as one, serving() as other:
        made = measured([one, other], ["one", "other"], questions, tmp_path / "r", rate="1000", goodput="e2el:60000")
    row = made.concurrency().query("rate == 1000 and method == 'one'").iloc[0]
    assert (row["requests"], row["failed"]) == (PROMPTS, PROMPTS - 1) and row["slo_attainment"] == pytest.approx(
        1 / PROMPTS
    )
    assert one.behaviour.most_at_once == 1 and not made.unfinished
    assert any("not sent" in warning for warning in made.manifest["warnings"])


@thorough
def test_a_report_and_a_comparison_are_made_of_such_runs(questions: Path, tmp_path: Path) -> None:
    from specbench_ss.cli.report import write_report
    from specbench_ss.cli.run_output import show

    with serving() as one, serving(Behaviour(per_chunk=2)) as other:
        for name in ("a", "b"):
            measured([one, other], ["one", "<b>two</b>"], questions, tmp_path / name, concurrency=2)
    show(load_run(tmp_path / "a"), open_report=False)
    page = write_report(load_run(tmp_path / "a")).read_text()
    assert "&lt;b&gt;two" in page and "<b>two</b>" not in page and "Load levels" in page
    assert "over ar" not in page.lower()
    for form in ("md", "csv", "json", "parquet"):
        assert main(["report", str(tmp_path / "a"), "--format", form]) == 0
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert main(["export", str(tmp_path / "a"), "--form", "specbench", "--out", str(tmp_path / "files")]) == 2
    found = compare(tmp_path / "a", tmp_path / "b")
    assert set(found.table["method"]) == {"one", "<b>two</b>"} and not found.differences["blocking"].any()
    rows = {row.method: row for row in summarise(read_run(tmp_path / "a")) if row.task == OVERALL}
    assert rows["one"].comparison == "baseline" and rows["<b>two</b>"].baseline == "one"
