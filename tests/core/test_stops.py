"""Stop texts: those that are special tokens end an answer as ids, because decoded text does not hold them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from specbench_ss.bench.preflight import limits, special_tokens
from specbench_ss.engine.generate import StopChecker, StopParams
from specbench_ss.errors import UserError
from specbench_ss.models.resolve import find_folder


@pytest.fixture(scope="module")
def target() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(find_folder("lab"))
    tokenizer.add_tokens(["<call>"])  # a token of its own, but one that has a text

    def decode_text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    ends = frozenset({tokenizer.eos_token_id})
    return SimpleNamespace(tokenizer=tokenizer, decode_text=decode_text, eos_ids=ends, context_length=1000)


def test_special_tokens_are_those_that_decoding_leaves_out(target: Any) -> None:
    found = special_tokens(target.tokenizer)
    silent = {i for i in range(len(target.tokenizer)) if target.decode_text([i]) == "" != target.tokenizer.decode([i])}
    assert set(found.values()) == silent and len(found) >= 5
    assert special_tokens(None) == {}


@pytest.mark.parametrize("stop", ["<|bos|>", "<|user|>", "<call>", "Q:"])
def test_an_answer_ends_with_its_stop_text_special_or_not(target: Any, stop: str) -> None:
    made = limits(target, 100, ("never", stop))
    tokens = target.tokenizer(f"before {stop} after", add_special_tokens=False)["input_ids"]
    kept, why = StopChecker(target, made, 1).cut([], tokens)
    assert why == ("eos" if stop in special_tokens(target.tokenizer) else "stop")
    assert target.tokenizer.decode(tokens[:kept]).endswith(stop)
    assert kept < len(tokens)


def test_the_targets_own_end_tokens_stay(target: Any) -> None:
    bos = target.tokenizer.bos_token_id
    assert limits(target, 7) == StopParams(7, target.eos_ids)
    assert limits(target, 7, ("a", "<|bos|>")) == StopParams(7, target.eos_ids | {bos}, ("a",))
    assert limits(SimpleNamespace(tokenizer=None, eos_ids=frozenset({2})), 7, ("a",)) == StopParams(
        7, frozenset({2}), ("a",)
    )


@pytest.mark.parametrize("text", ["\n<|bos|>", "<|user|>Hello", "<|end|><|end|>"])
def test_a_special_token_among_other_text_is_refused(target: Any, text: str) -> None:
    with pytest.raises(UserError, match="contains the special token"):
        limits(target, 7, (text,))
