"""Exactly what the assistant states is a completion, whatever the template and however the tokenizer cuts words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lab.training import completion_mask, special_ids
from specbench_ss.errors import UserError
from specbench_ss.training.chat_format import Rendered, Renderer, completion_places, fill
from tests.methods.train.tokenizers_made import TEMPLATES, made_tokenizer

TALK = [
    {"role": "user", "content": "Hello there, how are you?"},
    {"role": "assistant", "content": "I am well; thank you."},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "a\n\nyes  no"},
]
SYSTEM = {"role": "system", "content": "a chat"}
STATED = ("I am well; thank you.", "a\n\nyes  no")
CLOSED = {  # template: what closes an answer; what opens it behind the generation prompt is added where it differs
    "chatml": "<|im_end|>", "two-ends": "<|end|>", "late-system": "</s>", "plain": "\n", "vicuna": "</s>",
    "llama-2": " </s>",
}  # fmt: skip
OPENED = {"late-system": " ", "vicuna": " ", "llama-2": " "}


def words(rendered: Rendered, tokenizer: Any) -> list[str]:
    """The completions as text, to the character (a tokenizer of SentencePiece's kind drops a first space)."""
    return [tokenizer.decode(rendered.ids[a:b].tolist()) for a, b in rendered.spans]


@pytest.mark.parametrize("talk", [TALK, [SYSTEM, *TALK]], ids=["talk", "system"])
@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_completions_to_the_token(kind: str, name: str, talk: list[dict[str, str]]) -> None:
    tokenizer = made_tokenizer(kind, name)
    rendered = Renderer(tokenizer).render(talk)
    opened = "" if kind == "llama" else OPENED.get(name, "")
    assert words(rendered, tokenizer) == [opened + text + CLOSED[name] for text in STATED]
    whole = tokenizer.apply_chat_template(talk, tokenize=False)
    assert rendered.ids.tolist() == tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert rendered.ids.dtype == np.int32
    assert np.flatnonzero(rendered.mask).tolist() == [i for a, b in rendered.spans for i in range(a, b)]


@pytest.mark.parametrize("name", ["vicuna", "llama-2", "chatml", "plain"])
@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_what_stands_before_a_completion_is_the_prompt_of_decoding(kind: str, name: str) -> None:
    tokenizer = made_tokenizer(kind, name)
    rendered = Renderer(tokenizer).render(TALK)
    for (first, _), turn in zip(rendered.spans, (1, 3), strict=True):
        prompt = tokenizer.apply_chat_template(TALK[:turn], add_generation_prompt=True, tokenize=False)
        assert rendered.ids[:first].tolist() == tokenizer(prompt, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", sorted(set(TEMPLATES) - {"shouting"}))
@pytest.mark.parametrize("kind", ["llama", "gpt", "lab"])
def test_both_ways_of_finding_completions_agree(kind: str, name: str) -> None:
    tokenizer = made_tokenizer(kind, name)
    renderer = Renderer(tokenizer)
    for talk in (TALK, [SYSTEM, *TALK], TALK[:2]):
        filled = fill(tokenizer, talk)
        places = completion_places(tokenizer, talk, filled.text)
        assert places is not None
        by_offsets = renderer._by_offsets(filled.text, places)
        by_prefixes = renderer._by_prefixes(filled)
        assert by_offsets is not None
        if by_prefixes is not None:
            assert by_offsets.spans == by_prefixes.spans
        elif len(talk) == 2:
            assert name in ("thought", "two-ends", "space")


def test_a_token_that_is_partly_prompt_is_not_of_the_completion() -> None:
    for kind, opened in (("llama", ""), ("gpt", " ")):
        tokenizer = made_tokenizer(kind, "space")
        rendered = Renderer(tokenizer).render(TALK)
        assert words(rendered, tokenizer) == [f"{opened}am well; thank you.</s>", "\n\nyes  no</s>"]


def test_an_opening_that_only_the_last_turn_has_is_stated_by_the_model() -> None:
    tokenizer = made_tokenizer("gpt", "thought")
    rendered = Renderer(tokenizer).render(TALK)
    assert words(rendered, tokenizer) == [STATED[0] + "<|im_end|>", f"<think>\n\n</think>\n\n{STATED[1]}<|im_end|>"]


def test_words_that_also_stand_elsewhere_are_not_mistaken() -> None:
    talk = [
        {"role": "user", "content": "assistant"},
        {"role": "assistant", "content": "user"},
        {"role": "user", "content": "user assistant user"},
        {"role": "assistant", "content": "assistant"},
    ]
    for kind in ("llama", "gpt"):
        tokenizer = made_tokenizer(kind, "two-ends")
        rendered = Renderer(tokenizer).render(talk)
        assert words(rendered, tokenizer) == ["user<|end|>", "assistant<|end|>"]


def test_the_lab_s_mask_read_off_its_markers_is_the_same() -> None:
    tokenizer = made_tokenizer("lab", "")
    for talk in (TALK, TALK[:2], TALK[:3]):
        rendered = Renderer(tokenizer).render(talk)
        assert rendered.mask.any()
        assert np.array_equal(rendered.mask, completion_mask(rendered.ids, special_ids(tokenizer)))


def test_a_marker_in_what_the_user_states_moves_no_completion() -> None:
    tokenizer = made_tokenizer("lab", "")
    talk = [{"role": "user", "content": "say <|assistant|> or <|end|> now"}, *TALK[1:]]
    rendered = Renderer(tokenizer).render(talk)
    assert words(rendered, tokenizer) == [text + "<|end|>" for text in STATED]
    assert not np.array_equal(rendered.mask, completion_mask(rendered.ids, special_ids(tokenizer)))


@pytest.mark.parametrize("name", ["chatml", "two-ends"])
def test_a_marker_in_what_the_assistant_states_does_not_end_it(name: str) -> None:
    tokenizer = made_tokenizer("gpt", name)
    answer = "yes<|endoftext|>no"
    rendered = Renderer(tokenizer).render([TALK[0], {"role": "assistant", "content": answer}, *TALK[2:]])
    assert words(rendered, tokenizer) == [text + CLOSED[name] for text in (answer, STATED[1])]


def test_a_prompt_has_the_completions_before_it() -> None:
    tokenizer = made_tokenizer("gpt", "chatml")
    rendered = Renderer(tokenizer).render(TALK[:3], generation_prompt=True)
    assert words(rendered, tokenizer) == [STATED[0] + "<|im_end|>"]
    assert tokenizer.decode(rendered.ids.tolist()).endswith("<|im_start|>assistant\n")


def test_a_template_not_understood_is_one_line_with_the_place() -> None:
    with pytest.raises(UserError, match="^data:3: the chat template hides which tokens"):
        Renderer(made_tokenizer("gpt", "shouting")).render(TALK, "data:3")
    tokenizer = made_tokenizer("gpt", "chatml")
    tokenizer.chat_template = "{{ raise_exception('no system here') }}"
    with pytest.raises(UserError, match="^data:3: the chat template rejects this conversation: no system here$"):
        Renderer(tokenizer).render(TALK, "data:3")


def test_without_offsets_an_unstable_template_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = made_tokenizer("gpt", "two-ends")
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    with pytest.raises(UserError, match="hides which tokens"):
        Renderer(tokenizer).render(TALK, "data:3")


def test_cut_at_a_turn_where_one_ends_in_time_else_inside_the_first() -> None:
    document = Rendered(np.arange(20, dtype=np.int32), ((4, 9), (13, 17)))
    for length, size, spans in (
        (20, 17, ((4, 9), (13, 17))),  # nothing behind the last completion is of use
        (17, 17, ((4, 9), (13, 17))),
        (16, 9, ((4, 9),)),
        (9, 9, ((4, 9),)),
        (8, 8, ((4, 8),)),
        (6, 6, ((4, 6),)),
    ):
        found = document.fit(length)
        assert found is not None
        assert (found.ids.tolist(), found.spans) == (list(range(size)), spans)
    assert document.fit(5) is None
    assert Rendered(document.ids, ()).fit(20) is None
