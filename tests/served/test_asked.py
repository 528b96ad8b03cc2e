"""Addresses, streams and counters of servers, as they are read and written down."""

from __future__ import annotations

from itertools import accumulate

import pytest

from specbench_ss.bench.build_config import Access, address
from specbench_ss.bench.server_client import Answer, AnswerError, event, payloads
from specbench_ss.bench.server_counts import Reading, SpecCounts, read_metrics
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


def test_events_follow_the_standard() -> None:
    """Several data lines are one event, and a line may end in CR; unknown fields are ignored."""
    lines = (b"id", b"note: x", b'data: {"choices":', b"data:  []}", b"", b"data: [DONE]", b"")
    for end in (b"\n", b"\r\n", b"\r"):
        stream = end.join(lines) + end
        for pieces in ([stream], [stream[i : i + 1] for i in range(len(stream))]):
            assert list(payloads(pieces)) == [b'{"choices":\n []}', b"[DONE]"]


def test_events_without_empty_lines_are_read_at_once() -> None:
    pieces = iter([b'data: {"choices": []}\n', b'data: {"usage": null}\ndata: [DONE]\n'])
    events = payloads(pieces)
    assert next(events) == b'{"choices": []}' and next(pieces).startswith(b'data: {"usage"')
    assert list(payloads([b'data: {"choices": []}\ndata: {"usage": null}\ndata: [DONE]\n']))[1:] == [
        b'{"usage": null}',
        b"[DONE]",
    ]


@pytest.mark.parametrize(
    ("gaps", "together"),
    [
        ([0.0005] * 63, 1),  # 2,000 tokens per second, one in each piece
        ([0.0003] * 16 + [0.02] * 30, 17),  # a flush of many pieces, then a piece per step
        ([0.00001] * 63, 64),  # a proxy that sends everything at the end
        ([0.02] * 7, 1),
        ([], 1),
    ],
)
def test_pieces_that_were_sent_with_the_first_one(gaps: list[float], together: int) -> None:
    answer = Answer(max_tokens=64)
    for at_s in accumulate(gaps, initial=0.1):
        answer.add(event(b'{"choices": [{"delta": {"content": "word "}}]}'), at_s)
    answer.add(event(b'{"choices": [{"delta": {}, "finish_reason": "stop"}]}'), at_s)
    assert answer.checked().first == (together, 5 * together, 0)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'{"choices": [{}, {}]}',
        b'{"choices": [{"finish_reason": "' + b"x" * 2000 + b'"}]}',
        b'{"metrics": {"speculative_decoding": {"num_spec_steps": 1, "num_accepted_draft_tokens": 0, '
        b'"num_draft_tokens": 1, "per_step_drafted": [9007199254740992]}}}',
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


def page(model: str, start: int, engine: int = 0, prefix: str = "vllm", generated: str = "generation_tokens") -> str:
    """A page of counters: so many drafts, ten times as many draft tokens, nine times as many accepted ones."""
    values = {generated: 500, "spec_decode_num_drafts": start, "spec_decode_num_draft_tokens": 10 * start}
    values["spec_decode_num_accepted_tokens"] = 9 * start
    label = f'engine="{engine}",model_name="{model}"'
    lines = [f"{prefix}:{name}_total{{{label}}} {value}.0" for name, value in values.items()]
    per_pos = f"{prefix}:spec_decode_num_accepted_tokens_per_pos_total"
    lines += [f'{per_pos}{{{label},position="{i}"}} {start - i}.0' for i in range(3)]
    return "\n".join(lines) + "\n"


def test_counters_are_those_of_the_model_and_of_all_processes() -> None:
    pytest.importorskip("prometheus_client")
    expected = Reading(1000, 7, 70, 63, (7, 5, 3))
    assert read_metrics(page("m", 3) + page("m", 4, engine=1) + page("other", 99), "m") == expected
    assert read_metrics(page("first name", 7), "an alias") == Reading(500, 7, 70, 63, (7, 6, 5))
    llama = page("x", 7, prefix="llamacpp", generated="tokens_predicted")
    assert read_metrics(llama, "m") == Reading(500, 7, 70, 63, (7, 6, 5))
    plain = read_metrics("vllm:generation_tokens_total 500\n", "m")
    assert isinstance(plain, Reading) and plain.since(Reading(100, 0, 0, 0), 3) == SpecCounts(0, 0, 0)
    for text, stated in (
        ("vllm:generation_tokens{b 1", "not in Prometheus format"),
        ("", "has none of"),
        ("sglang:spec_accept_length 2.9\n", "has none of"),
        (page("m", 3).replace("3.0", "NaN"), "not integers"),
        (page("m", 3).replace("30.0", "3.0"), "27 of 3"),
        (page("m", 3).replace('position="2"', 'position="4000000000"'), "draft positions"),
        (page("m", 3) * 2000, "too long"),
    ):
        found = read_metrics(text, "m")
        assert isinstance(found, str) and stated in found


def test_a_page_of_other_names_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser, which is slow, gets the lines of the engine alone."""
    parser = pytest.importorskip("prometheus_client.parser")
    parsed, parse = list[str](), parser.text_string_to_metric_families
    monkeypatch.setattr(parser, "text_string_to_metric_families", lambda text: parse(parsed.append(text) or text))
    assert isinstance(read_metrics("".join(f"x{i} 1\n" for i in range(50_000)) + page("m", 3), "m"), Reading)
    assert parsed[0].count("\n") < 10


def test_counts_between_readings_of_an_engine_that_counts_every_step() -> None:
    pytest.importorskip("prometheus_client")
    names = "sglang:generation_tokens_total {} \nsglang:spec_verify_calls_total {}\n"
    before, after = (read_metrics(names.format(*values), "m") for values in ((100, 10), (140, 25)))
    assert isinstance(before, Reading) and isinstance(after, Reading)
    counts = after.since(before, outputs=2)  # 40 tokens: 2 of prefill, 15 of steps, 23 accepted ones
    assert counts == SpecCounts(15, None, 23) and counts.steps(later=38) == 15
    assert before.since(after, outputs=2) is None  # it was restarted


@pytest.mark.parametrize(
    ("counts", "later", "steps"),
    [
        (SpecCounts(78, 200, 44), 208, 164),  # n-gram drafts: 164 steps, 78 of which had a draft
        (SpecCounts(4, 20, 20), 22, 4),  # accepted tokens past the end: never fewer steps than drafts
        (SpecCounts(None, 120, 43), 215, 172),  # an engine that does not count its drafts
        (SpecCounts(0, 0, 0), 30, 30),
        (SpecCounts(0, 0, 0), 0, 0),
        (SpecCounts(1, 5, 3), 2, 1),
    ],
)
def test_steps_of_an_output(counts: SpecCounts, later: int, steps: int) -> None:
    assert counts.steps(later) == steps


@pytest.mark.parametrize(
    ("last", "counts"),
    [
        (
            '"metrics": {"speculative_decoding": {"num_spec_steps": 6, "num_accepted_draft_tokens": 17, '
            '"num_draft_tokens": 23, "acceptance_histogram": [1, 1, 1, 0, 1, 2], '
            '"per_step_drafted": [5, 5, 5, 3, 3, 2], "mean_acceptance_length": 3.8}}',
            SpecCounts(6, 23, 17, (5, 4, 3, 3, 2), (6, 6, 5, 3, 3)),
        ),
        (
            '"sglext": {"spec_tokens_details": {"spec_verify_ct": 6, "spec_num_correct_drafts": 9, '
            '"spec_num_proposed_drafts": 18, "spec_correct_drafts_histogram": [2, 1, 1, 2]}}',
            SpecCounts(6, 18, 9, (4, 3, 2)),
        ),
        ('"timings": {"predicted_n": 8, "draft_n": 12, "draft_n_accepted": 5}', SpecCounts(None, 12, 5)),
        ('"timings": {"predicted_n": 8}', SpecCounts(0, 0, 0)),  # llama.cpp leaves out counts of 0
        (
            '"choices": [{"index": 0, "delta": {}, "speculative_decoding": {"num_spec_steps": 3, '
            '"total_accepted_draft_tokens": 4, "total_draft_tokens": 9, "acceptance_histogram": [1, 1, 0, 1]}}]',
            SpecCounts(3, 9, 4, (2, 1, 1)),
        ),
        ('"metrics": {"time_to_first_token_ms": 3.1}', None),
    ],
    ids=["vllm", "sglang", "llama.cpp", "llama.cpp without a draft", "tensorrt-llm", "nothing"],
)
def test_every_engine_reports_the_counts_of_a_request_in_its_way(last: str, counts: SpecCounts | None) -> None:
    answer = Answer(max_tokens=40)
    answer.add(event(b'{"choices": [{"delta": {"content": "' + b"word " * 30 + b'"}, "token_ids": [5, 6]}]}'), 1.0)
    answer.add(event(b'{"choices": [{"delta": {}, "finish_reason": "stop", "token_ids": [7]}]}'), 2.0)
    answer.add(event(b'{"usage": {"completion_tokens": 24}, ' + last.encode() + b"}"), 2.0)
    assert answer.checked().spec == counts and answer.token_ids == [5, 6, 7]
