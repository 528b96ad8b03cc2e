"""Prompts of one's own: every message reaches the model as it was given, or is refused with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from specbench_ss import registry
from specbench_ss.bench.preflight import prompt_ids, usable_questions
from specbench_ss.cli.main import main
from specbench_ss.conversations import read_conversation
from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.errors import UserError
from specbench_ss.models.catalog import fetchable_model
from specbench_ss.models.resolve import LAB
from specbench_ss.prompt_files import read_rows
from specbench_ss.runs.run_dir import read_run
from specbench_ss.suite import Message, SuiteData, SuiteRequest
from tests.tiny import thorough

SYSTEM, ASKED, STATED, AGAIN = (
    {"role": "system", "content": "Answer in French."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Un."},
    {"role": "user", "content": "Two?"},
)
ANSWER = {"role": "assistant", "content": "Deux."}
SHOTS = [SYSTEM, ASKED, STATED, AGAIN]
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{{ m['content'] }}{% endfor %}"
)
SILENT = "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['content'] }}{% endif %}{% endfor %}"


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(tmp_path: Path, *rows: dict[str, Any]) -> SuiteData:
    return registry.load_suite("jsonl").load(SuiteRequest(data=write(tmp_path / "own.jsonl", *rows)))


def outline(folder: Path, template: str | None = None) -> ModelInfo:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template or tokenizer.chat_template
    return ModelInfo(AutoConfig.from_pretrained(folder), tokenizer, "small")


def sharegpt(*messages: dict[str, str]) -> list[dict[str, str]]:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    return [{"from": names[m["role"]], "value": m["content"]} for m in messages]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": SHOTS},
        {"conversations": sharegpt(*SHOTS)},
        {"prompt": SHOTS},
        {"system": SYSTEM["content"], "messages": SHOTS[1:]},
        {"messages": [*SHOTS[:3], {"role": "user", "content": [{"type": "text", "text": "Two?"}]}]},
        {"messages": SHOTS, "prompt": "One?"},  # as UltraChat repeats it
    ],
)
def test_the_last_user_message_is_asked_after_all_others(row: dict[str, Any], tmp_path: Path) -> None:
    (question,) = load(tmp_path, row).questions
    assert question.messages() == SHOTS and question.turns == ("Two?",) and question.references == ()


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [*SHOTS, ANSWER]},
        {"conversations": sharegpt(*SHOTS, ANSWER)},
        {"prompt": SHOTS, "completion": [ANSWER]},
    ],
)
def test_an_answer_at_the_end_is_the_reference_and_is_not_shown(row: dict[str, Any], tmp_path: Path) -> None:
    (question,) = load(tmp_path, {**row, "metric": "contains"}).questions
    assert question.messages() == SHOTS
    assert question.references == (("Deux.",),) and question.metric == "contains"
    file = tmp_path / "own.jsonl"  # what `train` reads of the same file
    assert [read_conversation(place, one).messages for place, one in read_rows(file)] == [(*SHOTS, ANSWER)]


def test_prompts_with_answers_next_to_them(tmp_path: Path) -> None:
    rows = [{"prompt": "One?", "response": "Un."}, {"instruction": "Add.", "input": "1", "output": "Un."}]
    found = load(tmp_path, *rows, {"prompt": "One?", "completion": ""}).questions
    assert [(q.turns, q.references, q.history) for q in found] == [
        (("One?",), (("Un.",),), ()),
        (("Add.\n\n1",), (("Un.",),), ()),
        (("One?",), (), ()),
    ]


def test_turns_are_answered_in_order(tmp_path: Path) -> None:
    plain, spoken = load(tmp_path, {"turns": ["One?", "Two?"]}, {"turns": ["A?"], "system": "Be brief."}).questions
    assert plain.turns == ("One?", "Two?") and plain.history == ()
    assert plain.messages(["Un."]) == [ASKED, STATED, AGAIN]
    assert spoken.turns == ("A?",) and spoken.history == (Message("system", "Be brief."),)


# -- the model's template -----------------------------------------------------------------------------------------


def test_a_given_system_message_replaces_the_models_own(tmp_path: Path) -> None:
    model = fetchable_model("smollm2")
    if not model.fetched:
        pytest.skip("the model was not fetched: ssbench models fetch smollm2")
    real = outline(model.folder)
    (question,) = load(tmp_path, {"messages": SHOTS}).questions
    usable_questions(real, SuiteData("jsonl", "custom", (question,)))
    expected = real.tokenizer.apply_chat_template(SHOTS, add_generation_prompt=True, tokenize=False)
    own = real.chat_text([ASKED])
    assert real.chat_text(question.messages()) == expected
    assert real.tokenizer.decode(prompt_ids(real, question)) == expected
    assert "You are a helpful AI assistant" in own and "You are a helpful AI assistant" not in expected
    assert expected.startswith("<|im_start|>system\nAnswer in French.<|im_end|>\n")


def test_the_lab_model_is_asked_with_all_roles(tmp_path: Path) -> None:
    (question,) = load(tmp_path, {"messages": SHOTS}).questions
    assert outline(LAB / "base").chat_text(question.messages()) == (
        "<|bos|><|system|>Answer in French.<|user|>One?<|assistant|>Un.<|end|><|user|>Two?<|assistant|>"
    )


@pytest.mark.parametrize(
    ("template", "words"),
    [(NO_SYSTEM, "own.jsonl:1: .*system, user.*System role not"), (SILENT, "own.jsonl:1: .*omits the system")],
)
def test_a_template_without_a_system_role_is_one_line(template: str, words: str, tmp_path: Path) -> None:
    data = load(tmp_path, {"id": "a", "messages": SHOTS})
    with pytest.raises(UserError, match=words):
        usable_questions(outline(LAB / "base", template), data)
    usable_questions(outline(LAB / "base", template), load(tmp_path, {"messages": SHOTS[1:]}))


# -- where else a question is read --------------------------------------------------------------------------------


@thorough
def test_a_run_directory_keeps_the_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "own.jsonl", {"id": "a", "messages": [*SHOTS, ANSWER]})
    asked = ["run", "--methods", "ar", "--suite", f"jsonl:{file}", "--out", str(tmp_path / "run"), "--warmup", "0"]
    assert main([*asked, "--max-new-tokens", "2"]) == 0
    (question,) = read_run(tmp_path / "run").questions
    assert [m.as_dict() for m in question.history] == SHOTS[:3]
    capsys.readouterr()
    assert main(["suites", "show", f"jsonl:{file}", "--sample", "1"]) == 0
    shown = capsys.readouterr().out
    assert all(message["content"] in shown for message in SHOTS) and "which the model answers" in shown
