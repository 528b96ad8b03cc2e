"""Prompts of one's own: every message reaches the model as it was given, or is refused with its line."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from specbench_ss import registry
from specbench_ss.bench.judge import Asked
from specbench_ss.bench.judge import Prompts as JudgePrompts
from specbench_ss.bench.preflight import check_history, prompt_ids
from specbench_ss.bench.schedule import warm_messages
from specbench_ss.cli.main import main
from specbench_ss.conversations import read_conversation
from specbench_ss.engine.architectures import Outline
from specbench_ss.errors import UserError
from specbench_ss.models.resolve import LAB, packaged_model
from specbench_ss.reports.html.report import page as page_of
from specbench_ss.results.analysis import analyse
from specbench_ss.runs.run_dir import read_run
from specbench_ss.suite import Message, SuiteData, SuiteRequest
from specbench_ss.user_files import read_rows
from tests.cli import failing
from tests.conftest import MakeRun

SYSTEM, ASKED, SAID, AGAIN = (
    {"role": "system", "content": "Answer in French."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Un."},
    {"role": "user", "content": "Two?"},
)
ANSWER = {"role": "assistant", "content": "Deux."}
SHOTS = [SYSTEM, ASKED, SAID, AGAIN]
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


def outline(folder: Path, template: str | None = None) -> Outline:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template or tokenizer.chat_template
    return Outline(AutoConfig.from_pretrained(folder), tokenizer, "small")


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


def test_prompts_with_answers_beside_them(tmp_path: Path) -> None:
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
    assert plain.messages(["Un."]) == [ASKED, SAID, AGAIN]
    assert spoken.turns == ("A?",) and spoken.history == (Message("system", "Be brief."),)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": []}, "'messages' holds no message of the user"),
        ({"messages": [SYSTEM]}, "no message of the user"),
        ({"messages": [ANSWER]}, "no message of the user"),
        ({"messages": [ASKED, SAID, SAID]}, "'messages' ends with assistant, assistant"),
        ({"messages": [ASKED, SYSTEM]}, "ends with user, system"),
        ({"messages": [{"role": "user", "content": " "}]}, "last message is empty"),
        ({"messages": [{"role": "tool", "content": "7"}, ASKED]}, r"messages\[0\] has role 'tool'"),
        ({"messages": [ASKED, {"role": "wizard", "content": "7"}]}, r"messages\[1\] has role 'wizard'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "type 'image_url'"),
        ({"messages": [ASKED], "turns": ["One?"]}, "both 'messages' and 'turns'"),
        ({"messages": [ASKED], "prompt": "Other?"}, "both 'messages' and 'prompt'"),
        ({"messages": SHOTS, "system": "Be brief."}, "both 'system' and a system message"),
        ({"messages": [ASKED, SAID], "reference": ["Un."]}, "both 'reference' and an answer"),
        ({"turns": []}, "'turns' must be"),
        ({"turns": ["One?", " "]}, "'turns' must be"),
        ({"turns": "One?"}, "'turns' must be"),
        ({"text": "One?"}, "none of the known columns"),
    ],
)
def test_a_row_that_cannot_be_kept_is_refused(row: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"own\.jsonl:2: .*{words}"):
        load(tmp_path, {"prompt": "Hi"}, row)


def test_what_is_not_read_is_named_once(tmp_path: Path) -> None:
    row = {"messages": [{**ASKED, "name": "Ann", "weight": 0}], "tools": [{"name": "sum"}], "score": None, "id": 1}
    assert load(tmp_path, row, {**row, "id": 2}).notes == (
        "columns that are not read: tools",
        "keys of messages that are not read: name",
    )
    assert load(tmp_path, {"messages": SHOTS}).notes == ()


def test_a_run_says_what_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "own.jsonl", {"prompt": "One?", "source": "web"})
    asked = ["run", "--methods", "ar", "--suite", f"jsonl:{file}", "--out", str(tmp_path / "run"), "--dry-run"]
    assert main(asked) == 0 and "columns that are not read: source" in capsys.readouterr().out


# -- the model's template -----------------------------------------------------------------------------------------


def test_a_given_system_message_replaces_the_models_own(tmp_path: Path) -> None:
    model = packaged_model("smollm2")
    if not model.fetched:
        pytest.skip("the model was not fetched: ssbench models fetch smollm2")
    real = outline(model.folder)
    (question,) = load(tmp_path, {"messages": SHOTS}).questions
    check_history(real, SuiteData("jsonl", "custom", (question,)))
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
    ("template", "words"), [(NO_SYSTEM, "question 'a': .*System role not"), (SILENT, "question 'a': .*leaves out")]
)
def test_a_template_without_a_system_role_is_one_line(template: str, words: str, tmp_path: Path) -> None:
    data = load(tmp_path, {"id": "a", "messages": SHOTS})
    with pytest.raises(UserError, match=words):
        check_history(outline(LAB / "base", template), data)
    check_history(outline(LAB / "base", template), load(tmp_path, {"messages": SHOTS[1:]}))


def test_a_run_that_the_template_refuses_begins_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, template = write(tmp_path / "own.jsonl", {"messages": SHOTS}), tmp_path / "t.jinja"
    template.write_text(NO_SYSTEM)
    asked = ["run", "--methods", "ar", "--suite", f"jsonl:{file}", "--chat-template", str(template)]
    assert "System role not supported" in failing([*asked, "--out", str(tmp_path / "run")], capsys)
    assert not (tmp_path / "run").exists()


# -- where else a question is read --------------------------------------------------------------------------------


def test_a_changed_history_is_a_changed_suite(tmp_path: Path) -> None:
    one, other = (load(tmp_path, {"messages": [said, *SHOTS[1:]]}) for said in (SYSTEM, {**SYSTEM, "content": "No."}))
    assert one.content_hash != other.content_hash and one.questions[0].mark != other.questions[0].mark
    plain = load(tmp_path, {"messages": [ASKED]})
    assert "history" not in plain.questions[0].content()  # other suites keep the hash that they had without one


def test_a_warm_up_keeps_roles_and_asks_nothing_of_the_run(tmp_path: Path) -> None:
    (warm,) = warm_messages(load(tmp_path, {"messages": SHOTS}).questions, 1)
    assert [m["role"] for m in warm] == [m["role"] for m in SHOTS]
    assert warm[0]["content"] == "French. in Answer" and warm[-1]["content"] != "Two?"


def test_a_judge_and_the_page_show_what_stands_before_the_question(make_run: MakeRun, tmp_path: Path) -> None:
    asked = Asked("qa", ("Two?",), ("Deux.",), (), (("system", "Answer in French."),))
    sent = JudgePrompts().messages(asked)
    assert sent is not None and sent[1]["content"].startswith("<system>\nAnswer in French.\n</system>\n\n<user>\nTwo?")
    run = read_run(make_run(questions=1))
    run.questions = [replace(q, history=(Message("system", "Answer in French."),)) for q in run.questions]
    packed = page_of(analyse(run))["samples"]
    text = packed["texts"][packed["prompts"]["asked"][0]]
    assert text == f"system: Answer in French.\n\nuser: {run.questions[0].turns[0]}"


def test_a_run_directory_keeps_the_history(tmp_path: Path) -> None:
    file = write(tmp_path / "own.jsonl", {"id": "a", "messages": [*SHOTS, ANSWER]})
    asked = ["run", "--methods", "ar", "--suite", f"jsonl:{file}", "--out", str(tmp_path / "run"), "--warmup", "0"]
    assert main([*asked, "--max-new-tokens", "2"]) == 0
    (question,) = read_run(tmp_path / "run").questions
    assert [asdict(m) for m in question.history] == SHOTS[:3]
    assert main(["suites", "show", f"jsonl:{file}", "--sample", "1"]) == 0
