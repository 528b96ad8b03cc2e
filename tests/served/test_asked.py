"""What may be asked of servers: every mistake is one line, before any of them is contacted."""

from __future__ import annotations

from pathlib import Path

import pytest

from specbench_ss.bench.build_config import Access, access_of, address, in_flight
from specbench_ss.bench.server_client import AnswerError, Counters, event, message_of, payloads
from specbench_ss.errors import UserError
from tests.cli import failing

URL = "http://127.0.0.1:9/v1"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"--endpoint {URL} --methods ss", "--methods is of a model in this process"),
        (f"--endpoint {URL} --dtype float32", "--dtype is of a model"),
        (f"--endpoint {URL} --device cpu", "--device is of a model"),
        (f"--endpoint {URL} --model lab", "--model is of a model"),
        (f"--endpoint {URL} --preset a.yaml", "--preset is of a model"),
        (f"--endpoint {URL} --set ss.k=1", "--set is of a model"),
        (f"--endpoint {URL} --top-k 4", "--top-k is of a model"),
        (f"--endpoint {URL} --trace", "--trace is of a model"),
        ("--methods pld --label a", "--label needs --endpoint"),
        ("--methods pld --concurrency 2", "--concurrency needs --endpoint"),
        ("--limit 1", "give --methods NAME,NAME, or --endpoint URL"),
        ("--endpoint localhost:8000/v1", "begins with http:// or https://"),
        ("--endpoint http://", "begins with http:// or https://"),
        ("--endpoint http://x:port/v1", "Port could not be cast"),
        ("--endpoint ftp://x/v1", "begins with http:// or https://"),
        ("--endpoint http://x/v1?key=abc", "an address has no ?"),
        ("--endpoint http://x\ny/v1", "no spaces and no control characters"),
        ("--endpoint http://x/v1\tz", "no spaces and no control characters"),
        ("--endpoint http://x/\x01", "no spaces and no control characters"),
        (f"--endpoint {URL}\n --suite jsonl:QUESTIONS", "cannot reach http://127.0.0.1:9/v1"),
        ("--endpoint http://a..b/v1 --suite jsonl:QUESTIONS", "is no address of a server"),
        ("--endpoint http://é..b/v1 --suite jsonl:QUESTIONS", "is no address of a server"),
        (f"--endpoint {URL} --label a --label b", "1 --endpoint and 2 --label"),
        (f"--endpoint {URL} --endpoint {URL} --label a --label a", "is given twice"),
        (f"--endpoint {URL} --label a,b", "has no comma"),
        (f"--endpoint {URL} --label a\x1b[31m", "a label is printable text"),
        (f"--endpoint {URL} --endpoint {URL} --endpoint {URL} --endpoint-model a --endpoint-model b", "given 2 times"),
        (f"--endpoint {URL} --api-key-env NO_SUCH_VARIABLE_HERE", "there is no such variable"),
        (f"--endpoint {URL} --concurrency 0", "--concurrency must be from 1 to"),
        (f"--endpoint {URL} --concurrency 1,x", "a list of whole numbers"),
        (f"--endpoint {URL} --endpoint-timeout 0", "--endpoint-timeout"),
        (f"--endpoint {URL} --endpoint-timeout nan", "--endpoint-timeout"),
        (f"--endpoint {URL} --suite jsonl:QUESTIONS", "cannot reach http://127.0.0.1:9/v1"),
        (f"--endpoint {URL} --suite jsonl:QUESTIONS --dry-run", "cannot reach http://127.0.0.1:9/v1"),
    ],
)
def test_a_mistake_is_one_line(line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "q.jsonl").write_text('{"question_id": "a", "turns": ["hi"]}\n')
    words = line.replace("QUESTIONS", str(tmp_path / "q.jsonl")).split(" ")
    assert said in failing(["run", *words, "--out", str(tmp_path / "out")], capsys)
    assert not (tmp_path / "out").exists()


def test_addresses_and_commands_are_written_down_without_secrets() -> None:
    assert address("https://me:word@host:8000/v1/") == "https://host:8000/v1"
    access = Access(("https://me:word@host/v1",), ("k-123",))
    assert access.hidden(["--endpoint", "https://me:word@host/v1", "k-123"]) == [
        "--endpoint",
        "https://***@host/v1",
        "***",
    ]
    for url in ("me:word@host/v1", "ftp://me:word@host/v1", "http://me:word@host/v1?key=secret"):
        with pytest.raises(UserError) as e:
            address(url)
        assert "word" not in str(e.value) and "secret" not in str(e.value)


@pytest.mark.parametrize("key", ["sec\nret", "sec\u00c0ret"])
def test_a_key_that_no_header_holds_is_refused_unseen(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", key)
    with pytest.raises(UserError, match="printable ASCII") as e:
        access_of({"endpoint": URL, "api_key_env": "SOME_KEY", "endpoint_timeout": None})
    assert "ret" not in str(e.value)


def test_one_in_flight_is_measured_in_any_case() -> None:
    assert in_flight("1,2,4") == in_flight([4, 2]) == in_flight("4,2,2") == (2, 4) and in_flight(2) == (2,)
    assert in_flight(None) == in_flight("1") == in_flight(()) == ()


def test_a_stream_may_come_in_any_pieces() -> None:
    text = (
        b': note\r\n\r\nevent: x\ndata: {"choices": []}\r\n\r\n'
        b'data:{"usage": {"completion_tokens": 3}}\n\ndata: [DONE]\n'
    )
    whole = list(payloads([text]))
    assert whole == [b'{"choices": []}', b'{"usage": {"completion_tokens": 3}}', b"[DONE]"]
    assert list(payloads([text[i : i + 1] for i in range(len(text))])) == whole
    usage = event(whole[1]).usage
    assert usage is not None and usage.completion_tokens == 3


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[1]",
        b'{"choices": 3}',
        b'{"usage": {"completion_tokens": "3"}}',
        b'{"usage": {"completion_tokens": 3, "prompt_tokens": true}}',
        b"\xff",
        b'{"error": ' + b"[" * 200_000,
    ],
)
def test_what_is_no_event_is_told(data: bytes) -> None:
    with pytest.raises(AnswerError) as e:
        event(data)
    assert str(e.value).isprintable()


def test_what_a_server_says_is_one_printable_line() -> None:
    assert message_of(b'{"error": {"message": "no\\n\\u001b[31mroom"}}') == "no ?[31mroom"
    assert message_of(b'{"detail": [{"loc": 1}]}') == '[{"loc":1}]' and message_of(b"") == "nothing"
    assert message_of(b'{"error": ' + b"[" * 200_000).startswith('{"error": [[[')
    assert message_of(b"<!doctype html><html>x") == "a page of HTML" and len(message_of(b"x" * 9999)) < 200


def test_counters_that_fall_are_not_measured() -> None:
    before, after = Counters(4, 12, 5, 100), Counters(6, 18, 9, 130)
    assert after.since(before) == Counters(2, 6, 4, 30) and before.since(after) is None
    assert after.since(Counters(4, 12, 5)) == Counters(2, 6, 4, None)


def test_counters_are_those_of_the_model_and_of_all_engines() -> None:
    pytest.importorskip("prometheus_client")
    from specbench_ss.bench.server_client import read

    def line(name: str, engine: int, model: str, value: str) -> str:
        return f'vllm:spec_decode_num_{name}_total{{engine="{engine}",model_name="{model}"}} {value}\n'

    names = ("drafts", "accepted_tokens", "draft_tokens")
    text = "".join(line(n, e, "m", f"{10 * i + e}.0") for i, n in enumerate(names) for e in (0, 1))
    assert read(text + "".join(line(n, 0, "other", "999.0") for n in names), "m") == Counters(1, 41, 21)
    bare = "".join(f"vllm:spec_decode_num_{n} {i}\n" for i, n in enumerate(names))
    assert read(bare, "m") == Counters(0, 2, 1)
    for text, said in (
        ("a{b 1", "no text that Prometheus reads"),
        ("", "has no vllm:spec_decode"),
        (bare.replace("2", "NaN"), ""),
    ):
        found = read(text, "m")
        assert isinstance(found, str) and said in found
