"""Chat templates: the known forms to the letter, and a model without one is reported before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from specbench_ss.bench.build_config import run_config
from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.errors import UserError
from specbench_ss.models import load
from specbench_ss.models.load import NAMES, check_template, template_hash, template_text
from specbench_ss.runs.run_options import RunOptions
from tests.tiny import tiny_model

TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
]
SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
EXPECTED = {
    "plain": "<s>hi\nhello\nbye\n",
    "vicuna": f"<s>{SYSTEM} USER: hi ASSISTANT: hello</s>USER: bye ASSISTANT:",
    "llama-2": "<s>[INST] hi [/INST] hello </s><s>[INST] bye [/INST]",
}


def tokenizer(template: str | None = None, **special: str) -> Any:
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, "a")), **special)
    made.chat_template = template
    return made


@pytest.mark.parametrize("name", NAMES)
def test_the_known_forms_to_the_letter(name: str) -> None:
    known = tokenizer(template_text(name), bos_token="<s>", eos_token="</s>")
    assert known.apply_chat_template(TALK, add_generation_prompt=True, tokenize=False) == EXPECTED[name]
    check_template(tokenizer(template_text(name)), "m")  # without special tokens


@pytest.mark.parametrize(("name", "where"), [("vicuna", "<s>be brief USER: hi"), ("llama-2", "<<SYS>>\nbe brief\n<</")])
def test_a_system_message_takes_its_place(name: str, where: str) -> None:
    known = tokenizer(template_text(name), bos_token="<s>", eos_token="</s>")
    talk = [{"role": "system", "content": "be brief"}, *TALK]
    assert where in known.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)


def test_a_file_is_read_and_what_is_neither_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[-1]['content'] }}")
    assert template_text(str(file)) == file.read_text()
    with pytest.raises(UserError, match="did you mean vicuna"):
        template_text("vicunna")
    file.write_bytes(b"\xff")
    with pytest.raises(UserError, match="cannot read --chat-template"):
        template_text(str(file))


@pytest.mark.parametrize("broken", ["{% for %}", "{{ raise_exception('no') }}", "{{ messages[9].content.x }}"])
def test_a_template_that_does_not_work_is_reported(broken: str) -> None:
    with pytest.raises(UserError, match="the chat template of m does not work"):
        check_template(tokenizer(broken), "m")


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
GROWING = "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "words"),
    [(ENDLESS, "takes more than"), (GROWING, "MemoryError"), ("{{ 'x' * 10**10 }}", "MemoryError")],
)
def test_a_template_that_does_not_end_is_reported(template: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "TEMPLATE_S", 0.5 if template == ENDLESS else 20.0)
    monkeypatch.setattr(load, "TEMPLATE_BYTES", 64 << 20)  # the whole limit takes seconds to fill
    with pytest.raises(UserError, match=words):
        check_template(tokenizer(template), "m")
    monkeypatch.setattr(load, "TEMPLATE_S", 20.0)
    assert check_template(tokenizer(template_text("plain")), "m") is None  # type: ignore[func-returns-value]


def test_templates_are_reported_apart() -> None:
    hashes = {template_hash(tokenizer(template_text(name))) for name in NAMES}
    assert len(hashes) == 3 and None not in hashes
    assert template_hash(tokenizer()) is template_hash(None) is None


def test_loading_sets_the_template(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    plain = load.load_target(str(tmp_path), device="cpu", chat_template="plain")
    assert plain.tokenizer.chat_template == template_text("plain")
    assert load.load_target(str(tmp_path), device="cpu").tokenizer.chat_template is None


def test_a_template_that_leaves_the_question_out_is_refused() -> None:
    with pytest.raises(UserError, match="omits user messages: 'first question' is not in 'hello"):
        check_template(tokenizer("hello"), "m")


SWITCH = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking is false %}Ok.{% endif %}"


def test_variables_of_the_template_are_given_to_it() -> None:
    info = ModelInfo(tiny_model("llama").config, tokenizer(SWITCH), "m", None)
    assert info.chat_text(TALK) == "hihellobye"
    info.template_variables = {"enable_thinking": False}
    assert info.chat_text(TALK) == "hihellobyeOk."
    check_template(info.tokenizer, "m", info.template_variables)
    with pytest.raises(UserError, match="no variable 'thinking_budget'"):
        check_template(info.tokenizer, "m", {"thinking_budget": 3})


def test_variables_are_given_in_the_same_way_to_methods_and_servers() -> None:
    text = '{"enable_thinking": false}'
    local = run_config(RunOptions(methods="pld", chat_template_kwargs=text))
    with pytest.warns(UserWarning, match="--chat-template-kwargs"):
        body = run_config(RunOptions(methods="pld", extra_body=f'{{"chat_template_kwargs": {text}}}'))
    assert local == body and local.chat_template_kwargs == text
    served = run_config(RunOptions(endpoint=["http://h/v1"], chat_template_kwargs=text))
    assert served.extra_body == f'{{"chat_template_kwargs": {text}}}'
    more = '{"chat_template_kwargs": {"a": 1, "enable_thinking": true}}'
    both = run_config(RunOptions(endpoint=["http://h/v1"], chat_template_kwargs=text, extra_body=more))
    assert both.extra_body == '{"chat_template_kwargs": {"a": 1, "enable_thinking": false}}'
