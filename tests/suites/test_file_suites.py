"""Suites that read files: small ones written here, and the real ones where they are."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specbench_ss import registry
from specbench_ss.conformance.suite_checks import check_suite
from specbench_ss.errors import UserError
from specbench_ss.suite import SuiteData, SuiteRequest
from specbench_ss.suites.base import FileSuite
from specbench_ss.suites.chat_suites import MTBench
from specbench_ss.suites.task_suites import GSM8K, HumanEval
from tests.tiny import few

SHARED = Path(os.environ.get("SSBENCH_SHARED", Path(__file__).resolve().parents[3] / "shared")) / "data"
REAL = ("mt_bench/question.jsonl", "gsm8k/train.jsonl")
needs_real = pytest.mark.skipif(
    not all((SHARED / name).is_file() for name in REAL), reason="the files of MT-Bench and GSM8K are not here"
)

TALK = {"question_id": 81, "category": "writing", "turns": ["Write a poem.", "Now make it rhyme."]}
SUM = {"question": "Ann has 3 apples and buys 4. How many has she?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"}
CODE = {
    "task_id": "Own/0",
    "prompt": 'def twice(x):\n    """Return two times x."""\n',
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(f):\n    assert f(2) == 4\n",
    "entry_point": "twice",
}
PROBLEM = {
    "problem": "What is $1/4+1/4$?",
    "solution": "It is $\\boxed{\\frac{1}{2}}$.",
    "type": "Counting & Probability",
}
SPEED = {
    "question_id": "ab12",
    "category": "low_entropy",
    "sub_category": "sorting",
    "turns": ["Sort these: b, a."],
    "source": "own",
    "src_id": "0",
    "difficulty": "n/a",
    "multiturn": False,
}
SMALL: dict[str, list[dict[str, Any]]] = {
    "mtbench": [TALK, {**TALK, "question_id": 111, "category": "math"}, {**TALK, "question_id": 112}],
    "gsm8k": [SUM, {"question": "Two and two?", "answer": "#### 4"}, SUM],
    "humaneval": [CODE, {**CODE, "task_id": "Own/1"}],
    "mbpp": [
        {
            "task_id": 601,
            "text": "Write a function to add.",
            "code": "def f(a, b): ...",
            "test_list": ["assert f(1, 2) == 3"],
        },
        {"task_id": 602, "prompt": "Write h.", "code": "def h(): ...", "test_list": []},
    ],
    "math": [PROBLEM, {"problem": "One and one?", "answer": "2", "subject": "Algebra", "unique_id": "a/1.json"}],
    "speedbench": [SPEED, {**SPEED, "question_id": "cd34", "category": "coding"}],
    "jsonl": [
        {"prompt": "Hello"},
        {"id": "b", "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]},
        {"turns": ["One?", "Two?"], "category": "two", "reference": ["1", "2"], "metric": "contains"},
    ],
}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SSBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(name: str, data: Path, **asked: Any) -> SuiteData:
    return registry.load_suite(name).load(SuiteRequest(data=data, **asked))


@pytest.mark.parametrize("name", SMALL)
def test_every_suite_passes_the_checks_on_a_small_file(name: str, tmp_path: Path) -> None:
    check_suite(type(registry.load_suite(name)), data=write(tmp_path / "small.jsonl", *SMALL[name]))


@few(1)
@pytest.mark.parametrize("name", ["gsm8k", "apps"])
def test_generated_questions_passes_the_checks(name: str) -> None:
    check_suite(type(registry.load_suite(name)), lab=True)


@needs_real
def test_real_files_passes_the_checks() -> None:
    check_suite(MTBench, data=SHARED / "mt_bench")
    data = MTBench().load(SuiteRequest(data=SHARED / "mt_bench"))
    assert data.edition == "official" and len(data.questions) == 80
    assert {
        q.category for q in data.questions if q.category in ("math", "reasoning", "coding") and not q.references
    } == set()
    train = load("gsm8k", SHARED / "gsm8k" / "train.jsonl")
    assert train.edition == "custom" and len(train.questions) == 80
    assert all(
        GSM8K().score(q, 0, f"so #### {q.references[0][0].rpartition('#### ')[2]}.00") == 1 for q in train.questions
    )


def test_a_reference_file_next_to_mt_bench_gives_the_references(tmp_path: Path) -> None:
    file = write(tmp_path / "question.jsonl", *SMALL["mtbench"])
    answers = {"question_id": 111, "choices": [{"turns": ["first", "second"]}]}
    write(tmp_path / "reference_answer_gpt-4.jsonl", answers)
    for data in (file, tmp_path):
        by_id = {q.id: q for q in load("mtbench", data).questions}
        assert by_id["111"].references == (("first",), ("second",)) and not by_id["81"].references
    write(tmp_path / "reference_answer_gpt-4.jsonl", {"question_id": 111})
    with pytest.raises(UserError, match=r"gpt-4.jsonl:1: expected 'question_id' and 'choices'"):
        load("mtbench", file)


def test_code_is_shown_and_never_executed(tmp_path: Path) -> None:
    evil = {**CODE, "prompt": "def f():\n    pass\n", "test": "raise SystemExit"}
    data = load("humaneval", write(tmp_path / "h.jsonl", evil))
    assert data.questions[0].turns[0].endswith("```python\ndef f():\n    pass\n```")
    assert HumanEval().score(data.questions[0], 0, "import os; os._exit(1)") is None
    assert data.notes[-1].startswith("no quality: ")


def test_math_answers_come_from_answer_or_solution(tmp_path: Path) -> None:
    data = load("math", write(tmp_path / "m.jsonl", *SMALL["math"]))
    assert [(q.category, q.references) for q in data.questions] == [
        ("counting_and_probability", (("\\frac{1}{2}",),)),
        ("algebra", (("2",),)),
    ]
    with pytest.raises(UserError, match=r"m.jsonl:1: 'solution' has no"):
        load("math", write(tmp_path / "m.jsonl", {"problem": "?", "solution": "none"}))


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress])
def test_a_compressed_file_is_read(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "h.jsonl.gz" if compress is gzip.compress else tmp_path / "h.jsonl"
    path.write_bytes(compress(json.dumps(CODE).encode()))
    assert load("humaneval", path).questions[0].id == "Own/0"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(UserError, match="the compressed file is damaged"):
        load("humaneval", path)
    path.write_bytes(b"not compressed at all")
    with pytest.raises(UserError, match="cannot read|h.jsonl:1"):
        load("humaneval", path)


def test_data_sets_of_the_hub_are_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    class Fake:
        @staticmethod
        def load_dataset(path: str, split: str, name: str | None = None, revision: str | None = None) -> list[Any]:
            asked.append((path, name, split, revision))
            return [SUM]

    monkeypatch.setitem(sys.modules, "datasets", Fake)
    data = load("gsm8k", Path("hub:openai/gsm8k:main:train@abc"))
    assert data.edition == "hub" and data.notes == ("questions from hub:openai/gsm8k:main:train@abc",)
    load("gsm8k", Path("hub:openai/gsm8k"))
    assert asked == [("openai/gsm8k", "main", "train", "abc"), ("openai/gsm8k", None, "test", None)]
    with pytest.raises(UserError, match="cannot read 'hub:': expected hub:OWNER/NAME"):
        load("gsm8k", Path("hub:"))


def test_published_files_are_pinned() -> None:
    for suite in registry.load_all(registry.SUITES).values():
        for file in suite.files if issubclass(suite, FileSuite) else ():
            assert len(file.sha256) == 64 and len(file.url.split("/")[5]) == 40, file
