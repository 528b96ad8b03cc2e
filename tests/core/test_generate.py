"""The loop: every token counted once, stops honoured to the token, the cache what a fresh prefill would hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.generate import StopChecker, StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Output, Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.engine.verify import VerifyResult, verify
from specbench_ss.errors import UserError
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.models.resolve import find_folder
from tests.tiny import ARCHITECTURES, few, tiny_model

PROMPT = [5, 6, 7, 8, 9, 10, 11]


class Oracle(Decoder):
    """Drafts the right answer, with wrong siblings around it: blocks of up to four tokens are accepted."""

    name, summary = "oracle", "knows the answer"

    def __init__(self, target: Target, answer: list[int]) -> None:
        super().__init__(target)
        self.answer = answer
        self.caches: list[tuple[list[int], torch.Tensor]] = []

    def propose(self, state: DecodeState) -> DraftTree:
        n = len(state.ids)
        tokens, parents, right = [int(state.root)], [-1], 0
        for token in self.answer[n : n + 3]:
            tokens += [(token + 1) % 61, token, (token + 2) % 61]
            parents += [right] * 3
            right = len(tokens) - 2
        return DraftTree.from_parents(torch.tensor(tokens), parents)

    def update(self, state: DecodeState, result: VerifyResult, output: Output) -> None:
        layers = [
            torch.stack((k[:, :, :n], v[:, :, :n]))
            for k, v, n in zip(state.cache.keys, state.cache.values, state.cache.lengths, strict=True)
            if k is not None and v is not None
        ]
        self.caches.append((list(state.ids), torch.stack(layers).clone()))


def oracle(target: Target, tokens: int = 40) -> Oracle:
    return Oracle(
        target, PROMPT + generate(Autoregressive(target), PROMPT, StopParams(tokens), SamplingParams()).tokens
    )


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_cache_after_every_step_is_that_of_a_fresh_prefill(kind: str) -> None:
    target = Target(tiny_model(kind))
    decoder = oracle(target)
    result = generate(decoder, PROMPT, StopParams(30), SamplingParams())
    assert max(s.accepted_tokens for s in result.steps) == 3
    with torch.inference_mode():
        for ids, kept_here in decoder.caches:
            fresh = target.new_cache(200)
            target.prefill(torch.tensor([ids[:-1]]), fresh)
            n = len(ids) - 1
            expected = torch.stack(
                [torch.stack((k[:, :, :n], v[:, :, :n])) for k, v in zip(fresh.keys, fresh.values, strict=True)]
            )  # type: ignore[index]
            torch.testing.assert_close(kept_here, expected, atol=2e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("qwen3", seed=3))


@pytest.mark.parametrize("limit", range(1, 12))
def test_max_new_tokens_is_exact_and_what_is_cut_is_tokens_past_stop(target: Target, limit: int) -> None:
    decoder = oracle(target)
    result = generate(decoder, PROMPT, StopParams(limit), SamplingParams())
    assert result.tokens == decoder.answer[len(PROMPT) : len(PROMPT) + limit]
    assert result.finish == "length"
    assert len(result.tokens) == result.prefill_tokens + sum(s.tokens for s in result.steps)
    made = 1 + sum(s.accepted_tokens + 1 for s in result.steps)
    assert result.tokens_past_stop == made - limit


@pytest.mark.parametrize("at", range(0, 10))
def test_an_end_token_inside_a_block_ends_the_answer_there(target: Target, at: int) -> None:
    decoder = oracle(target)
    answer = decoder.answer[len(PROMPT) :]
    end = answer[at]
    result = generate(decoder, PROMPT, StopParams(40, frozenset({end})), SamplingParams())
    assert result.finish == "eos"
    assert result.tokens == answer[: answer.index(end) + 1]


class Letters:
    """A tokenizer of one character a token."""

    eos_token_id = None
    chat_template = None

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("0") + i) for i in ids)


def test_a_stop_string_ends_the_answer_with_the_token_that_completes_it() -> None:
    target = Target(tiny_model("qwen3", seed=3), Letters())
    decoder = oracle(target)
    answer = decoder.answer[len(PROMPT) :]
    stop = target.decode_text(answer[4:7])
    result = generate(decoder, PROMPT, StopParams(40, stop_strings=(stop,)), SamplingParams())
    text = target.decode_text(answer)
    assert result.finish == "stop"
    assert target.decode_text(result.tokens) == text[: text.index(stop) + len(stop)]


@pytest.mark.parametrize("stop", ["日本語", "Grüße, 🌍!", "\n\n"])
@pytest.mark.parametrize("at_once", [1, 5])
def test_a_stop_string_of_many_bytes_is_found_at_the_token_that_completes_it(stop: str, at_once: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(find_folder("lab"))  # byte-level: these characters are many tokens
    target: Any = SimpleNamespace(context_length=10_000, decode_text=tokenizer.decode)
    cutter = StopChecker(target, StopParams(9_000, stop_strings=("zz", stop)), 1)
    tokens = tokenizer(f"äöü 🌍 before {stop} after", add_special_tokens=False)["input_ids"]
    answer: list[int] = []
    finish = None
    while finish is None and len(answer) < len(tokens):
        new = tokens[len(answer) : len(answer) + at_once]
        kept, finish = cutter.cut(answer, new)
        answer += new[:kept]
    assert finish == "stop"
    assert stop in tokenizer.decode(answer)
    assert stop not in tokenizer.decode(answer[:-1])


@few(5)
@pytest.mark.parametrize("kind", ["llama", "opt"])
@pytest.mark.parametrize("length", [1, 2, 120, 126, 127])
def test_the_end_of_the_context(kind: str, length: int) -> None:
    target = Target(tiny_model(kind))  # context of 128
    prompt = [3 + i % 50 for i in range(length)]
    reference = generate(Autoregressive(target), prompt, StopParams(1000), SamplingParams())
    decoder = Oracle(target, prompt + reference.tokens + [1, 1, 1])
    result = generate(decoder, prompt, StopParams(1000), SamplingParams())
    assert result.tokens == reference.tokens
    assert (result.finish, len(prompt) + len(result.tokens)) == ("context", 128)


def test_a_prompt_that_does_not_fit_is_one_line(target: Target) -> None:
    with pytest.raises(UserError, match="128 tokens, the context of"):
        generate(Autoregressive(target), [3] * 128, StopParams(5), SamplingParams())
    with pytest.raises(UserError, match="empty"):
        generate(Autoregressive(target), [], StopParams(5), SamplingParams())


def test_each_part_of_a_step_is_timed_as_what_it_is(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only the parts themselves move on."""
    now = 0.0

    def lasting(seconds: float, part: Any) -> Any:
        def slow(*arguments: Any) -> Any:
            nonlocal now
            now += seconds
            return part(*arguments)

        return slow

    decoder: Any = oracle(target)
    for seconds, part in ((1.0, "propose"), (10.0, "forward"), (100.0, "update")):
        setattr(decoder, part, lasting(seconds, getattr(decoder, part)))
    for place in ("decoder", "generate"):  # of a step, of the prompt
        monkeypatch.setattr(f"specbench_ss.engine.{place}.verify", lasting(1000.0, verify))
    for module in ("timing", "generate"):
        monkeypatch.setattr(f"specbench_ss.engine.{module}.now", lambda: now)
    result = generate(decoder, PROMPT, StopParams(9), SamplingParams())
    parts = [(s.draft_s, s.verify_s, s.accept_s, s.host_s, s.total_s) for s in result.steps]
    # the last step ends the answer, so nothing is left to observe
    assert parts == [(101.0, 10.0, 1000.0, 0.0, 1111.0)] * (len(parts) - 1) + [(1.0, 10.0, 1000.0, 0.0, 1011.0)]
    assert len(parts) > 1 and result.prefill_s == 1000.0


def test_same_seed_same_tokens_other_seed_others(target: Target) -> None:
    def tokens(seed: int) -> list[int]:
        return generate(Autoregressive(target), PROMPT, StopParams(20), SamplingParams(1.5, seed=seed)).tokens

    assert tokens(1) == tokens(1)
    assert len({tuple(tokens(s)) for s in range(5)}) > 1
