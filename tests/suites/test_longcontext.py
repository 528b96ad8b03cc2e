"""Prompts of a chosen length: cut at words, within the context, with a word where there is less than was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specbench_ss.conformance.suite_checks import check_suite
from specbench_ss.errors import UserError
from specbench_ss.suite import SuiteData, SuiteRequest
from specbench_ss.suites.chat_suites import LENGTHS, MAX_NEW_TOKENS, TEMPLATE_TOKENS, LongContext

WORDS = 34_000


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(" ".join(f"word{i}" for i in range(WORDS)))
    return path


def words(text: str) -> int:
    return len(text.split())


def request(data: Path, context: int | None = None, limit: int | None = None) -> SuiteRequest:
    return SuiteRequest(data=data, limit=limit, context_length=context, count_tokens=words)


def test_prompts_have_the_asked_length_and_follow_one_another(book: Path) -> None:
    data = LongContext().load(request(book, limit=0))
    by_length = {name: [q for q in data.questions if q.category == name] for name in LENGTHS}
    for name, size in LENGTHS.items():
        assert len(by_length[name]) == WORDS // (size - 7)
        assert all(size - 2 <= words(q.turns[0]) <= size for q in by_length[name])
    text = " ".join(q.turns[0].rpartition("\n\n")[0] for q in by_length["1k"])
    assert text == " ".join(f"word{i}" for i in range(words(text)))  # whole words, each once, none left out
    assert not data.notes


def test_the_context_cuts_with_a_word(book: Path) -> None:
    data = LongContext().load(request(book, context=3000, limit=1))
    assert [q.category for q in data.questions] == ["1k", "2k", "context"]
    room = 3000 - MAX_NEW_TOKENS - TEMPLATE_TOKENS
    assert room - 2 <= words(data.questions[-1].turns[0]) <= room
    assert data.notes[0].startswith("4k, 8k, 16k, 32k left out: the model's context of 3,000")
    assert data.notes[1].startswith(f"context: prompts of {room:,} tokens")
    roomy = LongContext().load(request(book, context=40_000, limit=1))
    assert [q.category for q in roomy.questions] == list(LENGTHS) and not roomy.notes
    with pytest.raises(UserError, match="context of 300 tokens leaves no room"):
        LongContext().load(request(book, context=300))


def test_a_length_that_was_asked_for_is_that_length_or_left_out(book: Path) -> None:
    def load(*categories: str, context: int | None = 3000) -> SuiteData:
        return LongContext().load(SuiteRequest(categories, 1, book, context_length=context, count_tokens=words))

    assert [q.category for q in load("1k", "8k").questions] == ["1k"]
    assert [q.category for q in load("context").questions] == ["context"]
    with pytest.raises(UserError, match="8k left out: .* fits at most 2,680 .*; task 'context'"):
        load("8k")
    with pytest.raises(UserError, match="context length is unknown"):
        load("context", context=None)


def test_files_folders_and_json_lines(book: Path, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    half = book.read_text().split()
    (folder / "b.md").write_text(" ".join(half[600:]))
    (folder / "a.txt").write_text(" ".join(half[:600]))
    lines = tmp_path / "texts.jsonl"
    lines.write_text("".join(json.dumps({"text": (folder / name).read_text()}) + "\n" for name in ("a.txt", "b.md")))
    one, two = (LongContext().load(request(data, limit=1)) for data in (folder, lines))
    assert one.content_hash == two.content_hash and "word599\n\nword600" in one.questions[0].turns[0]
    lines.write_text('{"prompt": "?"}\n')
    for data, stated in ((lines, "jsonl:1: no column 'text'"), (tmp_path / "none", "cannot read")):
        with pytest.raises(UserError, match=stated):
            LongContext().load(request(data))
    with pytest.raises(UserError, match="needs --data"):
        LongContext().load(SuiteRequest())


def test_it_passes_the_checks_also_where_there_is_no_tokenizer(book: Path) -> None:
    check_suite(LongContext, data=book)
    assert LongContext().load(SuiteRequest(data=book, limit=1)).notes[0].startswith("lengths are estimates")
