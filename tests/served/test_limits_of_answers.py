"""Limits on time, bytes and counts of servers that never end an answer, or count what cannot be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specbench_ss import run
from specbench_ss.bench import server_run
from specbench_ss.bench.server_client import Answer, AnswerError, Server, event, payloads
from specbench_ss.errors import UserError
from specbench_ss.time_limit import time_limit
from tests.served.fake_server import Behaviour, Fake, serving

GUARD_S = 60.0  # a test that waits for ever fails then; nothing else is asserted of time
AMPLE_S = 30.0  # a limit that no test reaches
HELLO = [{"role": "user", "content": "Hello"}]
MIB = 1 << 20


@pytest.fixture(autouse=True)
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that never returns; the machine counts as idle."""
    monkeypatch.setattr(server_run, "busy", lambda: "")
    with time_limit(GUARD_S):
        yield


def asked(fake: Fake, most_s: float | None = None, wait_s: float = AMPLE_S, **settings: Any) -> Answer:
    """Return the answer of a server to one request."""
    server = Server("s", fake.url, timeout_s=wait_s)
    server.model = "m"
    try:
        return server.ask(HELLO, {"max_tokens": 8, **settings}, most_s)
    finally:
        server.close()


@pytest.mark.parametrize(
    ("mode", "stated"),
    [
        ("comments", "no text.* 0.3 s"),
        ("drip", "no text.* 0.3 s"),
        ("no headers", "no text.* 0.3 s"),
        ("endless line", "line over 1 MiB"),
        ("endless text", "max_tokens 8"),
    ],
)
def test_an_endless_answer_fails_in_one_line(mode: str, stated: str) -> None:
    with serving(Behaviour(mode=mode)) as fake, pytest.raises(AnswerError, match=stated) as e:
        asked(fake, wait_s=0.3 if "0.3 s" in stated else AMPLE_S)
    assert str(e.value).isprintable()


def test_text_that_comes_slowly_is_ended_by_the_limit_of_the_answer() -> None:
    with (
        serving(Behaviour(mode="slow text")) as fake,
        pytest.raises(AnswerError, match="no complete answer within 0.4 s"),
    ):
        asked(fake, most_s=0.4, max_tokens=10_000)


def test_a_whole_answer_is_kept_though_its_stream_does_not_end() -> None:
    with serving(Behaviour(mode="no end")) as fake:
        assert asked(fake).tokens == 1


@pytest.mark.parametrize(
    ("page", "stated"),
    [("endless", "over 4 MiB"), ("drip", "within 0.3 s"), ("silent", "within 0.3 s"), ("deep", "list of models")],
)
def test_an_endless_list_of_models_is_one_line(page: str, stated: str, questions: Path, tmp_path: Path) -> None:
    with serving(Behaviour(page=page)) as fake, pytest.raises(UserError, match=stated) as e:
        measured([fake], questions, tmp_path / "r", endpoint_timeout=0.3 if "0.3 s" in stated else AMPLE_S)
    assert "\n" not in str(e.value) and not (tmp_path / "r").exists()


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps({"question_id": n, "turns": ["one fish"]}) + "\n" for n in "abcdef"))
    return file


def measured(servers: list[Fake], questions: Path, out: Path, **more: Any) -> Any:
    given: dict[str, Any] = {"suite": "jsonl", "data": questions, "max_new_tokens": 8, "warmup": 0, "out": out, **more}
    labels = [f"s{i}" for i in range(len(servers))]
    return run(endpoint=[server.url for server in servers], label=labels, **given)


def test_an_endless_answer_is_a_failed_sample_of_a_run(questions: Path, tmp_path: Path) -> None:
    with serving() as good, serving(Behaviour(mode="endless text", after=1)) as bad:
        made = measured([good, bad], questions, tmp_path / "r", limit=2, concurrency=2, endpoint_timeout=AMPLE_S)
    rows = made.samples
    assert set(rows[rows["method"] == "s0"]["status"]) == {"ok"} and made.manifest["status"] == "complete"
    assert set(rows[rows["method"] == "s1"]["status"]) == {"failed"}
    assert set(made.concurrency().query("concurrency == 2")["failed"]) == {0, 2}


@pytest.mark.parametrize(
    ("counted", "settings", "stated"),
    [
        (4000, {}, "4000 tokens.*max_tokens 8"),
        (600, {"max_tokens": 1024}, "600 tokens.* 88 bytes"),
        (0, {}, "0 tokens in an answer of 8 pieces"),
        (-4, {}, "malformed chat completion"),
        (True, {}, "malformed chat completion"),
    ],
)
def test_an_impossible_count_of_tokens_is_an_error(counted: Any, settings: dict[str, Any], stated: str) -> None:
    with serving(Behaviour(mode="miscount", counted=counted)) as fake, pytest.raises(AnswerError, match=stated):
        asked(fake, **settings)


@pytest.mark.parametrize(
    ("timings", "stated"),
    [
        ({"draft_n": 3, "draft_n_accepted": 4}, "4 of 3 drafted tokens"),
        ({"draft_n": 90, "draft_n_accepted": 80}, "80 .*8 tokens"),
        ({"draft_n": -1, "draft_n_accepted": -1}, "malformed chat completion"),
        ({"draft_n": 2**53, "draft_n_accepted": 0}, "drafted tokens in an answer of 8 tokens"),
    ],
)
def test_an_impossible_count_of_drafts_is_an_error(timings: dict[str, Any], stated: str) -> None:
    with serving(Behaviour(metrics="llama.cpp", timings=timings)) as fake, pytest.raises(AnswerError, match=stated):
        asked(fake)


@pytest.mark.parametrize(
    ("last", "stated"),
    [
        ({"num_spec_steps": 2**53, "num_draft_tokens": 2**53}, "steps"),
        ({"num_spec_steps": 10, "num_draft_tokens": 10}, "10 steps in an answer of 8 tokens"),
        ({"acceptance_histogram": [0, 2**53]}, "by position"),
        ({"per_step_drafted": [1024] * 100}, "by position"),
    ],
)
def test_counts_are_bounded_by_the_answer(last: dict[str, Any], stated: str) -> None:
    counts = {"num_spec_steps": 4, "num_accepted_draft_tokens": 4, "num_draft_tokens": 8, **last}
    answer = Answer(max_tokens=8)
    for content in (
        {"choices": [{"delta": {"content": "some text"}, "finish_reason": "length"}]},
        {"usage": {"completion_tokens": 8}, "metrics": {"speculative_decoding": counts}},
    ):
        answer.add(event(json.dumps(content).encode()), 1.0)
    with pytest.raises(AnswerError, match=stated):
        answer.checked()


@pytest.mark.parametrize("finish", ["length", "stop"])
def test_tokens_without_text_are_output(finish: str) -> None:
    """They fill an output up to max_tokens, or were requested, as by `ignore_eos`."""
    for tokens, silent in ((200, False), (150, True)):
        answer = Answer(max_tokens=200, silent=silent)
        text = {"choices": [{"delta": {"content": "a b"}, "finish_reason": finish}]}
        for content in (text, {"usage": {"completion_tokens": tokens}}):
            answer.add(event(json.dumps(content).encode()), 1.0)
        if silent or finish == "length":
            assert answer.checked().tokens == tokens
        else:
            with pytest.raises(AnswerError, match="bytes"):
                answer.checked()


def test_an_encoding_that_was_not_requested_is_not_read() -> None:
    with serving(Behaviour(page="gzip")) as fake, pytest.raises(AnswerError, match="encoding"):
        Server("s", fake.url).get(f"{fake.url}/models")


def test_a_line_may_have_one_mib_and_no_more() -> None:
    whole = b"data: " + b"x" * (MIB - 6)
    assert [len(data) for data in payloads([whole[:70_000], whole[70_000:] + b"\n"])] == [MIB - 6]
    for pieces in ([whole + b"x\n"], [whole, b"x"], [whole + b"x"], [b": " + b"x" * MIB + b"\ndata: 1\n"]):
        with pytest.raises(AnswerError, match="line over 1 MiB"):
            list(payloads(pieces))
