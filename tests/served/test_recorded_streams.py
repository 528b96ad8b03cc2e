"""Streams of vLLM 0.32, serving the lab with its EAGLE-3 drafter (four tokens) under two names."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from specbench_ss.bench.server_client import DONE, Answer, event, payloads
from specbench_ss.bench.server_counts import Reading, read_metrics
from specbench_ss.bench.server_proof import sampled_tokens
from specbench_ss.bench.server_run import _chosen, _read_models

RECORDED = Path(__file__).with_name("recorded")


def answer_of(name: str, max_tokens: int) -> Answer:
    """Return the answer of a recorded stream."""
    answer = Answer(max_tokens=max_tokens)
    for number, data in enumerate(payloads([(RECORDED / name).read_bytes()])):
        if data == DONE:
            break
        answer.add(event(data), float(number))
    return answer.checked()


def test_counts_of_a_request_add_up() -> None:
    answer = answer_of("vllm-eagle3.sse", 24)
    spec = answer.spec
    assert spec is not None and spec.drafts and spec.drafted == 4 * spec.drafts
    assert answer.counted == "usage" and answer.tokens == len(answer.token_ids)
    assert sum(spec.accepted_per_pos) == spec.accepted and set(spec.drafted_per_pos) == {spec.drafts}
    assert spec.steps(answer.tokens - 1) == answer.chunks - 1  # one chunk for each step, the first is the prefill's


def test_counters_have_the_first_name_of_the_model() -> None:
    pytest.importorskip("prometheus_client")
    page = (RECORDED / "vllm-metrics.txt").read_text()
    reading = read_metrics(page, "alias")
    assert reading == read_metrics(page, "lab") and isinstance(reading, Reading)
    assert reading.drafted == 4 * reading.drafts and sum(reading.accepted_per_pos) == reading.accepted


def test_two_names_of_one_model_need_no_choice() -> None:
    models = _read_models((RECORDED / "vllm-models.json").read_bytes())
    assert _chosen(models) == "lab"


def test_log_probabilities_come_for_every_token_of_a_step() -> None:
    answer = answer_of("vllm-logprobs.sse", 8)
    assert [one.token for one in answer.logprobs] == [f"token_id:{token}" for token in answer.token_ids]
    assert all(len(one.top_logprobs or ()) == 5 for one in answer.logprobs)
    found = sampled_tokens(answer.logprobs, 1.0, 0)
    assert found.tokens + found.tail == answer.tokens and math.isfinite(found.surplus)
