"""Every form of conversation data states the same conversation; wrong rows are one line with their place."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from specbench_ss.conversations import Conversation, read_conversation
from specbench_ss.errors import UserError
from specbench_ss.prompt_files import FileSource, HubSource, open_source

TALK = ({"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."})
LONGER = (*TALK, {"role": "user", "content": "More?"}, {"role": "assistant", "content": "No."})


def stated(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": list(TALK)},
        {"messages": [stated("user", [{"type": "text", "text": "Hi"}, {"type": "text", "text": "?"}]), TALK[1]]},
        {"id": "x_0", "conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hello."}]},
        {"prompt": "Hi?", "completion": "Hello."},
        {"prompt": [TALK[0]], "completion": [TALK[1]]},
        {"prompt": "Hi?", "response": "Hello.", "messages": None},
        {"instruction": "Hi?", "input": "", "output": "Hello.", "text": "Below is an instruction"},
        {"conversation": [{"role": "human", "content": "Hi?"}, {"role": "bing", "content": "Hello."}]},
        {"id": "0", "data": ["Hi?", "Hello."]},
        {"question": "Hi?", "answers": {"text": ["Hello.", "Hi."], "answer_start": [0, 1]}},
    ],
)
def test_all_forms_are_one_conversation(row: dict[str, Any]) -> None:
    assert read_conversation("f:1", row) == Conversation("f:1", TALK)


def test_system_inputs_and_own_column_names() -> None:
    row = {"messages": [stated("system", "Be brief."), *TALK]}
    assert read_conversation("f:1", row).messages == (stated("system", "Be brief."), *TALK)
    alpaca = {"instruction": "Add.", "input": "1, 2", "output": "3"}
    assert read_conversation("f:1", alpaca).messages[0]["content"] == "Add.\n\n1, 2"
    columns = {"prompt": "question", "completion": "answer"}
    assert read_conversation("f:1", {"question": "Hi?", "answer": "Hello."}, columns).messages == TALK


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({}, "none of the known columns: 'messages', .*; there are none"),
        ({"texts": "a"}, "there are texts"),
        ({"prompt": "a"}, "has no answers, no column 'completion', .*; there are prompt"),
        ({"prompt": "a", "completion": 3}, "'completion' must be a text, not int"),
        ({"instruction": "a"}, "no column 'output'"),
        ({"text": "a", "title": "b"}, "'text' has no answers"),
        ({"messages": [stated("user", "a"), "b"]}, r"messages\[1\] is not a message"),
        ({"messages": [stated("king", "a")]}, r"messages\[0\] has role 'king'; known roles: system, developer, user"),
        *(
            (
                {"messages": [{**stated("assistant", None), "tool_calls": c}]},
                "'tool_calls' must be a list of objects",
            )
            for c in ("a", ["x"], [{"function": "x"}])
        ),
        ({"messages": [{**stated("user", None), "tool_calls": [{"name": "x"}]}]}, "'content' must be a text"),
        (
            {"messages": [stated("user", [{"type": "image_url"}])]},
            "a part of type 'image",
        ),
        ({"messages": [stated("user", "\ud800")]}, "half of a surrogate pair"),
        ({"message_tree_id": "a", "role": "prompter", "text": "b"}, "OpenAssistant"),
        ({"messages": [stated("user", None)]}, r"messages\[0\]: 'content' must be a text, not nothing"),
        ({"messages": "hi"}, "'messages' must be a list, not a text"),
        ({"conversations": None}, "none of the known columns"),
        ({"conversations": [{"value": "a"}]}, r"conversations\[0\] has role None"),
        ({"conversations": [{"from": ["human"], "value": "a"}]}, r"has role \['human'\]"),
        ({"turns": ["a"]}, "'turns' has no answers"),
        ({"prompt": ["a", "b"], "reference": []}, "has no answers"),
    ],
)
def test_a_wrong_row_is_one_line_with_its_place(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=rf"^data\.jsonl:7: [^\n]*{problem}[^\n]*$"):
        read_conversation("data.jsonl:7", row)


def test_a_missing_renamed_column_is_reported() -> None:
    with pytest.raises(UserError, match="f:1: no column 'query'; there are question, answer"):
        read_conversation("f:1", {"question": "a", "answer": "b"}, {"prompt": "query"})


@pytest.mark.parametrize(
    ("messages", "kept"),
    [
        ([TALK[1], *LONGER], LONGER),  # ShareGPT cut in the middle
        ([*TALK, TALK[1], *TALK], TALK),
        ([*TALK, stated("user", "More?"), stated("assistant", " ")], (*TALK, stated("user", "More?"))),
        ([stated("user", ""), TALK[1]], ()),
        ([*TALK, stated("system", "Be brief."), *TALK], TALK),
    ],
)
def test_what_is_out_of_order_is_left_out_and_reported(messages: list[Any], kept: tuple[Any, ...]) -> None:
    found = read_conversation("f:1", {"messages": messages})
    assert (found.messages, found.out_of_order) == (kept, True)


def test_for_own_answers_only_questions_count() -> None:
    system = stated("system", "Be brief.")
    found = read_conversation("f:1", {"messages": [system, *LONGER]}, prompts_only=True)
    assert found.messages == found.questions == (system, LONGER[0], LONGER[2])
    for row in ({"turns": ["Hi?", "More?"]}, {"messages": [LONGER[0], LONGER[2]]}):
        assert read_conversation("f:1", row, prompts_only=True).messages == (LONGER[0], LONGER[2])
    for row in ({"prompt": "Hi?"}, {"instruction": "Hi?"}):
        assert read_conversation("f:1", row, prompts_only=True).messages == TALK[:1]


def asking(question: str, answer: str = "b") -> Conversation:
    return Conversation("f:1", (stated("user", question), stated("assistant", answer)))


def test_the_split_goes_by_what_is_asked() -> None:
    talks = [asking(f"question {i}") for i in range(2_000)]
    small, large = ({i for i, t in enumerate(talks) if t.in_validation(f)} for f in (0.05, 0.2))
    assert 60 < len(small) < 140 and 320 < len(large) < 480
    assert small < large
    assert not any(t.in_validation(0.0) for t in talks)
    for i in range(50):
        other = asking(f"question {i}", "another answer")
        alone = Conversation("g:2", talks[i].questions)
        assert talks[i].in_validation(0.2) == other.in_validation(0.2) == alone.in_validation(0.2)


# -- where it lies ------------------------------------------------------------------------------------------------


def write(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def test_files_folders_lists_and_their_places(tmp_path: Path) -> None:
    one = write(tmp_path / "d" / "one.jsonl", {"a": 1}, {"a": "\u2028"})
    two = tmp_path / "d" / "sub" / "two.json"
    two.parent.mkdir()
    two.write_text("\ufeff\n [\n{" + '"a": 3}, {"a": 4}]')
    lines = write(tmp_path / "d" / "three.json", {"a": 5})
    (tmp_path / "d" / "notes.txt").write_text("no data")
    whole = list(open_source(tmp_path / "d").rows())
    assert [row["a"] for _, row in whole] == [1, "\u2028", 3, 4, 5]
    assert [place for place, _ in whole] == [
        f"{one}:1", f"{one}:2", f"{two}:3, entry 1", f"{two}:3, entry 2", f"{lines}:1",
    ]  # fmt: skip
    assert [row["a"] for _, row in open_source([str(two), str(one)]).rows()] == [3, 4, 1, "\u2028"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"a": 1}\n{"a"', ":2: not valid JSON"),
        ("[1]\n", ":1, entry 1: expected a JSON object"),
        ("\xff", "not a UTF-8 text"),
    ],
)
def test_a_line_that_cannot_be_read_is_reported(content: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=problem):
        list(open_source(path).rows())


@pytest.mark.parametrize(
    ("content", "problem"), [("[\n{", ":2: not valid JSON"), ("[{}, 3]", ":1, entry 2: expected a")]
)
def test_a_list_that_cannot_be_read_is_reported(content: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(content)
    with pytest.raises(UserError, match=rf"data\.json{problem}"):
        list(open_source(path).rows())


def test_the_digest_is_the_content(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", 1), write(tmp_path / "b.jsonl", 2)
    copy = write(tmp_path / "c.jsonl", 1)
    assert FileSource((a,)).digest() == FileSource((copy,)).digest()
    assert len({FileSource(p).digest() for p in ((a,), (b,), (a, b), (b, a), (a, a))}) == 5


def test_what_is_no_data_is_reported_without_asking_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HubSource, "_load", lambda self: pytest.fail("the hub was asked"))
    for given in ("missing.jsonl", "folder/missing.json", "/data/x/y", "./own/data", "plain", [tmp_path / "a", "b/c"]):
        with pytest.raises(UserError, match="neither a file, a folder nor a hub id"):
            open_source(given)
    with pytest.raises(UserError, match=r"has no file that ends in \.jsonl"):
        open_source(tmp_path)
    with pytest.raises(UserError, match="no training data given"):
        open_source([])
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "org" / "name" / "x.jsonl", {"a": 1})
    assert isinstance(open_source("org/name"), FileSource)  # a folder comes first


def test_a_hub_id_without_datasets_states_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"^no file or folder 'org/name'; .*: pip install datasets$"):
        list(open_source("org/name").rows())


def test_a_hub_data_set_is_read_through_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        rows: list[Any] = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]

        @classmethod
        def load_dataset(cls, name: str, split: str) -> list[Any]:
            if name == "org/none":
                raise FileNotFoundError("no such data set\nat all")
            assert (name, split) == ("org/name", "train")
            return cls.rows

    monkeypatch.setitem(sys.modules, "datasets", Fake)
    source = open_source("org/name")
    assert [place for place, _ in source.rows()] == ["org/name, row 1", "org/name, row 2"]
    before = source.digest()
    monkeypatch.setattr(Fake, "rows", Fake.rows[::-1])
    assert source.digest() != before
    with pytest.raises(UserError, match="^cannot load data set 'org/none': FileNotFoundError: no such data set$"):
        list(open_source("org/none").rows())
