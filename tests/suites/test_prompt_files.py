"""Files of prompts as their publishers write them, and as nobody should."""

from __future__ import annotations

import csv
import json
import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from transformers import AutoConfig, AutoTokenizer

from specbench_ss import prompt_files, registry
from specbench_ss.bench.preflight import prompt_ids, usable_questions
from specbench_ss.cli.main import main
from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.errors import UserError
from specbench_ss.methods.rest.text import file_texts
from specbench_ss.models.resolve import LAB
from specbench_ss.prompt_files import read_rows, usable
from specbench_ss.runs.run_dir import read_run
from specbench_ss.suite import Message, Question, SuiteData, SuiteRequest
from specbench_ss.suites.chat_suites import MASKED
from tests.cli import failing
from tests.tiny import few, thorough

PUBLIC = Path(os.environ.get("SSBENCH_SHARED", Path(__file__).resolve().parents[3] / "shared")) / "data"


def text(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def shared(name: str, value: str) -> dict[str, str]:
    return {"from": name, "value": value}


TWO = [text("user", "Hi?"), text("assistant", "Yes."), text("user", "More?"), text("assistant", "No.")]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "rain"}}
AGENT = [
    text("developer", "Use tools."), text("user", "Bern?"), text("assistant", None) | {"tool_calls": [CALL]},
    text("tool", "7 degrees") | {"tool_call_id": "c1"}, text("user", "Basel?"),
]  # fmt: skip
ASKED, ANSWER = [shared("human", "Hi?")], shared("gpt", "Yes.")
ROWS: dict[str, tuple[dict[str, Any], list[str], str]] = {  # name: (row, turns that are asked, reference)
    "ShareGPT": ({"conversations": [*ASKED, ANSWER, shared("human", "More?")]}, ["More?"], ""),
    "ShareGPT, cut": ({"conversations": [ANSWER, *ASKED, ANSWER]}, ["Hi?"], "Yes."),
    "ShareGPT, tools": (
        {"conversations": [*ASKED, shared("function_call", "{}"), shared("observation", "1"), ANSWER]}, ["Hi?"], ""
    ),
    "MT-Bench of the hub": ({"prompt_id": 81, "prompt": ["Hi?", "More?"], "reference": []}, ["Hi?", "More?"], ""),
    "MT-Bench of FastChat": ({"question_id": 81, "category": "stem", "turns": ["Hi?", "More?"]}, ["Hi?", "More?"], ""),
    "SPEED-Bench": ({"messages": [TWO[0], TWO[2]], "turns": None}, ["Hi?", "More?"], ""),
    "EAGLE": ({"question_id": 0, "category": "", "turns": ["Hi?"], "reference": ["Yes."]}, ["Hi?"], "Yes."),
    "MBPP": ({"task_id": 601, "text": "Hi?", "code": "Yes.", "test_list": ["assert True"]}, ["Hi?"], "Yes."),
    "alpaca": ({"instruction": "Hi?", "input": "a", "output": "Yes.", "text": "Below"}, ["Hi?\n\na"], "Yes."),
    "UltraChat": ({"id": "0", "data": ["Hi?", "Yes.", "More?", "No."]}, ["More?"], "No."),
    "UltraChat 200k": ({"prompt": "Hi?", "prompt_id": "f", "messages": TWO}, ["More?"], "No."),
    "LMSYS": ({"conversation_id": "x", "model": "m", "conversation": TWO, "turn": 2}, ["More?"], "No."),
    "OpenAI batch": ({"custom_id": "r", "url": "/v1/x", "body": {"model": "m", "messages": TWO[:1]}}, ["Hi?"], ""),
    "agent": ({"messages": AGENT}, ["Basel?"], ""),
    "agent, answered": ({"messages": [*AGENT[:4], text("assistant", "Cold.")]}, ["Bern?"], ""),
    "function calls": ({"messages": AGENT[:3]}, ["Bern?"], ""),
    "parts": ({"messages": [text("user", [{"type": "text", "text": "Hi"}, {"text": "?"}])]}, ["Hi?"], ""),
    "OpenOrca": ({"id": "t0", "system_prompt": "Be.", "question": "Hi?", "response": "Yes."}, ["Hi?"], "Yes."),
    "Dolly": ({"instruction": "Hi?", "context": "a", "response": "Yes."}, ["Hi?\n\na"], "Yes."),
    "Magpie": ({"instruction": "Hi?", "response": "Yes.", "conversations": [shared("human", "Hi?")]}, ["Hi?"], ""),
    "WildChat": ({"conversation_hash": "x", "conversation": [TWO[0] | {"country": "x"}]}, ["Hi?"], ""),
    "LongBench": ({"input": "Hi?", "context": "a", "answers": ["Yes."], "_id": "x"}, ["a\n\nHi?"], "Yes."),
    "LongBench, no question": ({"input": "", "context": "a", "answers": ["Yes."]}, ["a\n\n"], "Yes."),
    "SQuAD": ({"context": "a", "question": "Hi?", "answers": {"text": ["Yes."]}}, ["a\n\nHi?"], "Yes."),
    "TriviaQA": ({"question": "Hi?", "answer": {"value": "Yes.", "aliases": []}}, ["Hi?"], "Yes."),
    "MMLU": ({"question": "Hi?", "choices": ["a", "b"], "answer": 1}, ["Hi?"], ""),
    "GSM8K": ({"question": "Hi?", "answer": "Yes."}, ["Hi?"], "Yes."),
    "XSum": ({"document": "Hi?", "summary": "Yes.", "id": "1"}, ["Summarize this text:\nHi?"], "Yes."),
    "CNN": ({"article": "Hi?", "highlights": "Yes.", "id": "1"}, ["Summarize this text:\nHi?"], "Yes."),
    "HumanEval": ({"task_id": "H/0", "prompt": "Hi?", "canonical_solution": "x", "test": "y"}, ["Hi?"], ""),
    "SWE-bench": ({"instance_id": "a", "problem_statement": "Hi?", "patch": "x", "text": "long"}, ["Hi?"], ""),
    "AlpacaEval": ({"instruction": "Hi?", "output": "Yes.", "generator": "g", "dataset": "d"}, ["Hi?"], "Yes."),
    "Arena-Hard": ({"uid": "u", "category": "arena", "cluster": "c", "prompt": "Hi?"}, ["Hi?"], ""),
    "Arena-Hard 0.1": ({"question_id": "u", "cluster": "c", "turns": [{"content": "Hi?"}]}, ["Hi?"], ""),
    "MetaMath": ({"query": "Hi?", "response": "Yes.", "type": "t"}, ["Hi?"], "Yes."),
    "vLLM": ({"prompt": "Hi?"}, ["Hi?"], ""),
    "DeepSpec": ({"turns": ["Hi?", "So?"]}, ["Hi?", "So?"], ""),
    "speculator_benchmarks": ({"question_id": 5, "category": "qa", "prompt": "Hi?"}, ["Hi?"], ""),
    "Vicuna": ({"question_id": 1, "text": "Hi?", "category": "generic"}, ["Hi?"], ""),
}  # fmt: skip


def load(data: Path, suite: str = "jsonl") -> SuiteData:
    return registry.load_suite(suite).load(SuiteRequest(data=data))


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("form", ["jsonl", "list", "object", "parquet"])
def test_published_rows_in_every_kind_of_file(name: str, form: str, tmp_path: Path) -> None:
    row, turns, reference = ROWS[name]
    path = tmp_path / f"prompts.{'parquet' if form == 'parquet' else 'json'}"
    if form == "parquet":
        parquet.write_table(pa.Table.from_pylist([row]), path)
    else:
        rows = [row] if form == "list" else {"version": "1", "data": [row]}
        path.write_text(json.dumps(row) if form == "jsonl" else json.dumps(rows, indent=2))
    (question,) = load(path).questions
    assert list(question.turns) == turns
    assert question.references == (((reference,),) if reference else ())
    ids = [row[key] for key in ("question_id", "prompt_id", "id", "task_id", "custom_id") if key in row]
    assert question.id == str(ids[0] if ids else 0)


def test_csv_with_named_columns(tmp_path: Path) -> None:
    for suffix, delimiter in ((".csv", ","), (".tsv", "\t")):
        with (tmp_path / f"p{suffix}").open("w", newline="") as file:
            csv.writer(file, delimiter=delimiter).writerows(
                [["prompt", "response", "category", "id"], ["Hi,\nyou?", "Yes.", "a", ""], [], ["More?", "", "", ""]]
            )
        questions = load(tmp_path / f"p{suffix}").questions
        assert [(q.turns, q.references, q.category) for q in questions] == [
            (("Hi,\nyou?",), (("Yes.",),), "a"), (("More?",), (), "prompts"),
        ]  # fmt: skip
        assert [q.place.rpartition(":")[2] for q in questions] == ["2", "5"]
    (tmp_path / "p.csv").write_text("prompt,id\na,b,c\n")
    with pytest.raises(UserError, match=r"p.csv:2: 3 cells"):
        load(tmp_path / "p.csv")


@thorough
def test_columns_of_any_name_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.csv").write_text("ask,expected,note\nHi?,Yes.,x\n")
    words = f"run --methods ar --suite jsonl:{tmp_path}/p.csv --max-new-tokens 2 --warmup 0".split()
    assert "none of the known columns" in failing([*words, "--dry-run"], capsys)
    named = ["--columns", "prompt=ask", "--columns", "response=expected", "--out", str(tmp_path / "r")]
    assert main([*words, *named]) == 0 and main([*words, *named, "--resume"]) == 0
    (question,) = read_run(tmp_path / "r").questions
    assert (question.turns, question.references) == (("Hi?",), (("Yes.",),))
    assert "no column 'other'; there are ask" in failing([*words, "--columns", "prompt=other", "--dry-run"], capsys)
    assert "--columns requires --data" in failing(["run", "--methods", "ar", "--columns", "prompt=ask"], capsys)


def test_files_of_a_folder_are_tasks(tmp_path: Path) -> None:
    lines(tmp_path / "gsm8k.jsonl", {"turns": ["1?"]}, {"turns": ["2?"], "category": "sums"})
    lines(tmp_path / "alpaca.jsonl", {"turns": ["Hi?"]})
    assert [(q.category, q.id) for q in load(tmp_path).questions] == [("alpaca", "0"), ("gsm8k", "1"), ("sums", "2")]


def test_the_suites_read_other_forms_of_their_data_sets(tmp_path: Path) -> None:
    turns = {"question_id": 0, "turns": ["1 + 1?"], "reference": ["2\n#### 2"]}
    (question,) = load(lines(tmp_path / "q.jsonl", turns | {"category": "math"}), "gsm8k").questions
    assert question.metric == "numeric" and question.turns == ("1 + 1?",)
    for suite in ("specbench", "mtbench", "humaneval", "gsm8k", "speedbench", "jsonl"):
        data = load(lines(tmp_path / "q.jsonl", turns | {"category": ""}), suite)
        assert [q.turns for q in data.questions] == [("1 + 1?",)]
    hub = {"prompt_id": 101, "category": "reasoning", "prompt": ["A?", "B?"], "reference": ["a", "b"]}
    (question,) = load(lines(tmp_path / "q.jsonl", hub), "mtbench").questions
    assert (question.id, question.category, question.references) == ("101", "reasoning", (("a",), ("b",)))
    parquet.write_table(
        pa.Table.from_pylist([turns | {"category": "qa", "multiturn": False}]), tmp_path / "test.parquet"
    )
    (tmp_path / "q.jsonl").unlink()
    assert len(load(tmp_path, "speedbench").questions) == 1


@few(3)
@pytest.mark.parametrize("name", ["mt_bench/question.jsonl", "specbench/question.jsonl", "gsm8k/train.jsonl",
    "dialogsum/dialogsum.dev.jsonl", "humaneval/HumanEval.jsonl.gz", "prompts/train_prompts.jsonl"])  # fmt: skip
def test_public_files_are_read_whole(name: str) -> None:
    if not (PUBLIC / name).exists():
        pytest.skip(f"no public data at {PUBLIC / name}")
    data = load(PUBLIC / name)
    assert len(data.questions) == sum(1 for _ in read_rows(PUBLIC / name))
    assert not any("left out" in note for note in data.notes)


# -- rows that cannot be used --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ({"conversations": []}, "'conversations' is empty"),
        ({"messages": [text("king", "a")]}, "has role 'king'"),
        ({"messages": [text("user", "a"), text("user", "b"), *TWO[1:3]]}, "two user messages in a row"),
        ({"messages": [text("user", [{"type": "image_url"}])]}, "part of type 'image_url'"),
        ({"messages": [text("user", "a") | {"name": 3}]}, "'name' texts that can be encoded"),
        ({"prompt": "\ud800"}, "half of a surrogate pair"),
        ({"id": "0", "prompt": "again"}, "the id '0' occurs twice"),
        ({"prompt": "a", "category": "\x1b[31m"}, "'category' must be a text"),
    ],
)
def test_a_bad_row_is_left_out_counted_and_named(bad: dict[str, Any], problem: str, tmp_path: Path) -> None:
    good = [{"id": str(i), "prompt": f"Question {i}?"} for i in range(19)]
    path = lines(tmp_path / "p.jsonl", good[0], bad, *good[1:])
    path.write_text("\n" + path.read_text())  # a blank line counts
    data = load(path)
    assert len(data.questions) == 19
    (note,) = [note for note in data.notes if "left out" in note]
    assert note.startswith("1 of 20 rows left out: ") and "p.jsonl:3: " in note
    assert problem in note and note.isprintable()
    with pytest.raises(UserError, match="3 of 22 rows cannot be used, more than 10%"):
        load(lines(path, *good, *[bad] * 3))


def test_bad_rows_of_the_applications_are_named(tmp_path: Path) -> None:
    rows = [{"dialogue": f"Hi {i}.", "summary": "Short."} for i in range(19)]
    data = load(lines(tmp_path / "d.jsonl", *rows, {"dialogue": 3, "summary": "a"}), "apps")
    assert len(data.questions) == 19 and "d.jsonl:20: 'dialogue' must be a text" in data.notes[-1]
    (tmp_path / "e.csv").write_text("MR,ref\na,b\n,c\na,d\n")
    data = load(tmp_path / "e.csv", "apps")
    assert data.questions[0].references == (("b", "d"),) and "e.csv:3: 'mr' is empty" in data.notes[-1]


def test_masked_text_is_left_out(tmp_path: Path) -> None:
    rows = [{"question_id": i, "category": "qa", "turns": [f"{MASKED} a" if i == 5 else "b?"]} for i in range(20)]
    data = load(lines(tmp_path / "s.jsonl", *rows), "speedbench")
    assert len(data.questions) == 19 and "s.jsonl:6: the text is masked" in data.notes[-1]
    with pytest.raises(UserError, match="20 of 20 rows .* more than 10%"):
        load(lines(tmp_path / "s.jsonl", *[r | {"turns": [MASKED]} for r in rows]), "speedbench")


def test_a_tenth_of_the_rows_and_always_one() -> None:
    def used(bad: int, total: int) -> list[str]:
        def use(place: str, row: int) -> int:
            if row < bad:
                raise UserError(f"{place}: no")
            return row

        notes: list[str] = []
        rows = ((f"f:{i}", i) for i in range(total))
        assert list(usable(rows, use, notes.append)) == list(range(bad, total))
        return notes

    assert used(0, 5) == []
    assert used(1, 2) == ["1 of 2 rows left out: f:0: no"]
    assert used(5, 50) == ["5 of 50 rows left out: f:0: no; f:1: no; f:2: no; and 2 more"]
    for bad, total in ((2, 19), (6, 59), (1, 1)):
        with pytest.raises(UserError, match="^f:0: no"):
            used(bad, total)


@thorough
def test_a_prompt_beyond_the_context_is_left_out_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = lines(tmp_path / "p.jsonl", {"prompt": "Hello."}, {"prompt": "lorem ipsum " * 3000}, {"prompt": "A river?"})
    asked = ["run", "--methods", "ar", "--suite", f"jsonl:{path}", "--out", str(tmp_path / "run"), "--warmup", "0"]
    assert main([*asked, "--max-new-tokens", "2"]) == 0
    run = read_run(tmp_path / "run")
    assert [q.id for q in run.questions] == ["0", "2"]
    for where in (capsys.readouterr().err, *run.manifest["suite"]["notes"]):
        assert (
            "1 of 3 questions left out" in where and "p.jsonl:2 has " in where and "too long for the context" in where
        )
    lines(path, *[{"prompt": "lorem ipsum " * 3000}] * 2)
    assert "2 of 2 questions cannot be used" in failing([*asked, "--dry-run", "--out", str(tmp_path / "other")], capsys)


def test_tool_messages_reach_the_template_as_published(tmp_path: Path) -> None:
    data = load(lines(tmp_path / "p.jsonl", {"messages": AGENT}, {"prompt": "Hi?"}))
    question = data.questions[0]
    assert question.messages() == AGENT and question.history[2] == Message("assistant", None, [CALL])
    assert "weather" in question.history[2].text
    tokenizer = AutoTokenizer.from_pretrained(LAB / "base")
    info = ModelInfo(AutoConfig.from_pretrained(LAB / "base"), tokenizer, "small")
    kept = usable_questions(info, data)  # the lab's template has no tools
    assert [q.id for q in kept.questions] == ["1"] and "omits the assistant message or its tool calls" in kept.notes[-1]
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}{{ m.content or '' }}{% for c in m.tool_calls %}{{ c.function.name }}"
        "{% endfor %}{{ m.tool_call_id }}{% endfor %}"
    )
    assert usable_questions(info, data) is data
    escaped = [*AGENT[:3], {**AGENT[3], "content": '{"degrees": 7}\nrain'}, *AGENT[4:]]
    tokenizer.chat_template = tokenizer.chat_template.replace("m.content or ''", "(m.content or '') | tojson")
    assert usable_questions(info, own := load(lines(tmp_path / "e.jsonl", {"messages": escaped}))) is own
    tokenizer.chat_template = tokenizer.chat_template.replace("(m.content or '') | tojson", "m.content or ''")
    assert "assistantweathertool7 degreesc1user" in info.chat_text(question.messages())
    tokenizer.chat_template = "{{ raise_exception('not supported') if messages[0].role == 'developer' }}x"
    assert re.search(r"p.jsonl:1: .*roles developer, .*not supported", usable_questions(info, data).notes[-1])


def test_tools_reach_the_template_or_are_refused(tmp_path: Path) -> None:
    rows = [{"messages": AGENT, "tools": [TOOL]}, {"prompt": "Hi?", "tools": json.dumps([TOOL])}, {"prompt": "So?"}]
    data = load(lines(tmp_path / "p.jsonl", *rows))
    assert [q.tools for q in data.questions] == [(TOOL,), (TOOL,), ()] and not data.notes
    tokenizer = AutoTokenizer.from_pretrained(LAB / "base")
    info = ModelInfo(AutoConfig.from_pretrained(LAB / "base"), tokenizer, "small")
    with pytest.raises(UserError, match=r"p.jsonl:1: the chat template omits tools; .*2 of 3 questions"):
        usable_questions(info, data)
    tokenizer.chat_template = "{% for m in messages %}{{ m | tojson }}{% endfor %}{{ tools | tojson if tools }}"
    assert usable_questions(info, data) is data
    assert all('"description": "rain"' in tokenizer.decode(prompt_ids(info, q)) for q in data.questions[:2])
    with pytest.raises(UserError, match="p.jsonl:1: 'tools' must be a list of objects, or its JSON"):
        load(lines(tmp_path / "p.jsonl", {"prompt": "Hi?", "tools": "[1]"}))


def test_a_row_with_wrong_tool_calls_is_left_out(tmp_path: Path) -> None:
    bad = [text("user", None) | {"tool_calls": [CALL]}, *AGENT[2:]]
    data = load(lines(tmp_path / "p.jsonl", *[{"prompt": f"Hi {i}?"} for i in range(20)], {"messages": bad}))
    assert len(data.questions) == 20 and "p.jsonl:21" in data.notes[-1] and "1 of 21" in data.notes[-1]


def test_a_single_row_with_a_list_of_objects_is_one_question(tmp_path: Path) -> None:
    (question,) = load(lines(tmp_path / "p.jsonl", {"question": "Hi?", "documents": [{"text": "a"}]})).questions
    assert question.turns == ("Hi?",)


@thorough
def test_a_run_with_tool_messages_is_read_again(tmp_path: Path) -> None:
    messages = [AGENT[1], text("tool", "7") | {"name": "w"}, AGENT[4]]
    path = lines(tmp_path / "p.jsonl", {"messages": messages, "tools": [TOOL]})
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | tojson if tools }}")
    asked = ["run", "--methods", "ar", "--suite", f"jsonl:{path}", "--out", str(tmp_path / "run"), "--warmup", "1"]
    assert main([*asked, "--max-new-tokens", "2", "--chat-template", str(tmp_path / "t.jinja")]) == 0
    (question,) = read_run(tmp_path / "run").questions
    assert question.history[1] == Message("tool", "7", name="w") and question.tools == (TOOL,)
    assert "tool" not in json.dumps(Question("a", "b", ("c",), history=(Message("user", "d"),)).content())


def test_train_and_datastore_read_the_same_files(tmp_path: Path) -> None:
    path = tmp_path / "share.json"
    rows = [{"conversations": [shared("human", f"Hi {i}?"), shared("gpt", "Yes.")]} for i in range(11)]
    path.write_text(json.dumps([*rows, {"conversations": [{"from": "king", "value": "a"}]}]))
    texts = list(file_texts(AutoTokenizer.from_pretrained(LAB / "base"), [path]))
    assert len(texts) == 11 and texts[0] == "<|bos|><|user|>Hi 0?<|assistant|>Yes.<|end|>"


# -- hostile files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"prompt": ' + b"9" * 6000 + b"}", "p.jsonl:1: .*too many digits"),
        (b'\n{"prompt": ' + b"[" * 100_000, "p.jsonl:2: .*nested too deeply"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"prompt": "Hi"}\n{"prompt": "H', "p.jsonl:2: not valid JSON: Unterminated"),
        (b'[{"prompt": "Hi"}', "the list does not end"),
        (b'[{"prompt": "Hi"}] x', "text after the list"),
        (b'{"prompt": "Hi"}x', "p.jsonl:1: not valid JSON"),
        (b"\0" * 5000, "p.jsonl:1: not valid JSON"),
        ("\ufeff{}".encode("utf-16"), "not a UTF-8 text file"),
        (b"PAR1" + b"\0" * 50, "cannot read"),
        (b'{"\x1b[31mcolumn": 1}'.replace(b"\x1b", b"\\u001b"), r"there are \\x1b\[31mcolumn"),
        (b'{"translation": {"de": "a"}}', "none of the known columns: .*; there are translation; rename"),
        (b"plain text", "not valid JSON: Expecting value; give JSON lines"),
    ],
)
def test_hostile_files_are_one_line(
    content: bytes, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.jsonl").write_bytes(content)
    assert re.search(problem, failing(["suites", "show", f"jsonl:{tmp_path / 'p.jsonl'}"], capsys))


def test_a_row_may_not_be_endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_files, "MOST_CHARS", 1 << 21)
    rows = [{"prompt": "a" * (1 << 20)} for _ in range(3)]  # longer together than a row may be
    (tmp_path / "p.json").write_text(json.dumps(rows, indent=1))
    assert [row for _, row in read_rows(tmp_path / "p.json")] == rows
    (tmp_path / "p.json").write_text('{"prompt": "' + "a" * (1 << 23))
    with pytest.raises(UserError, match=r"p.json:1: .*a row of over 2,097,152 characters"):
        list(read_rows(tmp_path / "p.json"))


def test_what_is_shown_is_printable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines(tmp_path / "p.jsonl", {"prompt": "a\x1b[2Jb\x07\u202e\n\tc" + " d" * 4000, "\x1b]0;x": 1, "id": 5})
    lines(tmp_path / "h.jsonl", {"prompt": "def f():", "task_id": "\x1b[31m"})
    assert main(["suites", "show", f"humaneval:{tmp_path / 'h.jsonl'}"]) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert main(["suites", "show", f"jsonl:{tmp_path / 'p.jsonl'}"]) == 0
    shown = capsys.readouterr().out
    assert all(line.isprintable() for line in shown.split("\n")) and "a\\x1b[2Jb\\x07\\u202e" in shown
    assert "... of 8," in shown
