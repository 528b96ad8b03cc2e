"""Redaction of secrets in what is stored or printed."""

from __future__ import annotations

import json

import pytest

from specbench_ss.redaction import redacted, redacted_text, redacted_words
from specbench_ss.runs.config import RunConfig


@pytest.mark.parametrize(
    "words",
    [
        ["--api-key", "s3cret"],
        ["--hub-token=s3cret"],
        ["-H", "Authorization: Basic s3cret"],
        ["--header", "X-Api-Key: s3cret"],
        ["--endpoint", "https://me:s3cret@host/v1"],
        ["--endpoint", "https://me:a@s3cret@host/v1"],
        ["env", "GITHUB_PAT=s3cret", "vllm"],
        ["bash", "-c", "DB_PASS=s3cret vllm serve --auth-token 's3cret' --port 1"],
        ["curl", "https://host/x?api_key=s3cret&y=1"],
        ["--extra", '{"auth": {"user": "s3cret"}, "x": [{"cookie": "s3cret"}]}'],
        ["--passwd", "s3cret"],
        ["--pat", "s3cret"],
        ["token: 's3cret'", "x", "token: s3cret"],
        ["vllm", "{'token': 's3cret', 'x': 1}"],
        ["invalid token: 's3cret-0123456789' was refused"],
        ["error: non-default args: {'api_key': ['s3cret']}"],
    ],
)
def test_secrets_are_hidden_by_their_names(words: list[str]) -> None:
    shown = redacted_words(words)
    assert "s3cret" not in " ".join(shown) and "***" in " ".join(shown) and len(shown) == len(words)


@pytest.mark.parametrize(
    "name",
    [
        "AUTH",
        "DB_PASS",
        "PASSWD",
        "BEARER",
        "COOKIE",
        "GH_PAT",
        "HF_TOKEN",
        "API_TOKENS",
        "hubToken",
        "token_2",
        "bearer_token",
        "AWS_ACCESS_KEY_ID",
        "mypassword",
    ],
)
def test_variables_are_hidden_by_their_names(name: str) -> None:
    assert redacted("s3cret", name) == "***" and redacted_text(f"x {name}=s3cret y") == f"x {name}=*** y"


@pytest.mark.parametrize(
    "words",
    [
        ["--max-tokens", "4", "--tokenizer", "/t", "--path", "/p", "--author", "me", "--api-key-env", "NAME"],
        ["--hf-overrides", '{"num_key_value_heads": 8, "eos_token": "</s>", "stop_token_ids": [1]}'],
        ["--compilation-config", '{"pass_config": {"fuse": "all"}}', "--token-budget", "5k", "--mask-token", "<mask>"],
        ["--speculative-token-map", "/map.pt", "--max-num-batched-tokens", "8k", "--draft-token=x", "--keyboard", "de"],
        ["token: 'abc' is not in vocabulary", "error: unknown token: '<|im_end|>' at 3", "key: 'layers' is missing"],
        ["eagle3[weights=DIR,total_tokens=5]", "KeyError: 'layers'", "http://host:8000/v1", "jsonl:/a/b.jsonl"],
    ],
)
def test_other_words_stay(words: list[str]) -> None:
    assert redacted_words(words) == words


def test_a_key_in_the_fields_of_requests_is_sent_and_not_stored() -> None:
    config = RunConfig((), extra_body=json.dumps({"api_key": "s3cret", "ignore_eos": True}))
    assert "s3cret" in str(config.extra_body) and "s3cret" not in json.dumps(config.as_dict())
    assert json.loads(config.as_dict()["extra_body"]) == {"api_key": "***", "ignore_eos": True}
