"""Addresses, streams and counters of servers, as they are read and written down."""

from __future__ import annotations

import pytest

from specbench_ss.bench.build_config import Access, address
from specbench_ss.bench.server_client import AnswerError, Counters, event, payloads
from specbench_ss.errors import UserError


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
def test_what_is_no_event_is_reported(data: bytes) -> None:
    with pytest.raises(AnswerError) as e:
        event(data)
    assert str(e.value).isprintable()


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
    for text, stated in (
        ("a{b 1", "not in Prometheus format"),
        ("", "has no vllm:spec_decode"),
        (bare.replace("2", "NaN"), ""),
    ):
        found = read(text, "m")
        assert isinstance(found, str) and stated in found
