"""The application tasks, generated and read from small files written here and from the real ones."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from specbench_ss.errors import UserError
from specbench_ss.suite import SuiteData, SuiteRequest
from specbench_ss.suites.task_suites import Apps

SHARED = Path(os.environ.get("SSBENCH_SHARED", Path(__file__).resolve().parents[3] / "shared")) / "data"
REAL = ("spider/dev.json", "e2e/devset.csv", "dialogsum/dialogsum.dev.jsonl")
needs_real = pytest.mark.skipif(
    not all((SHARED / name).is_file() for name in REAL), reason="the data sets of the applications are not here"
)

TABLES = [
    {
        "db_id": "zoo",
        "table_names_original": ["Animal", "Cage"],
        "column_names_original": [[-1, "*"], [0, "Name"], [0, "Age"], [1, "Id"]],
        "column_types": ["text", "text", "number", "number"],
    }
]
SPIDER = [{"db_id": "zoo", "question": "How many animals?", "query": "SELECT count(*) FROM Animal"}]
E2E = 'mr,ref\n"name[A], food[B]","A, with ""B""."\nname[C],C.\n"name[A], food[B]",B at A.\n'
DIALOGUE = {
    "dialogue": "#Person1#: Hi.\n#Person2#: Bye.",
    "summary1": "Short talk.",
    "summary2": "A talk.",
    "topic1": "x",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "spider").mkdir()
    (tmp_path / "spider" / "tables.json").write_text(json.dumps(TABLES))
    (tmp_path / "spider" / "dev.json").write_text(json.dumps(SPIDER))
    (tmp_path / "devset.csv").write_text(E2E)
    (tmp_path / "dialogsum.test.jsonl").write_text(json.dumps(DIALOGUE) + "\n")
    return tmp_path


def counts(data: SuiteData) -> dict[str, int]:
    return dict(Counter(question.category for question in data.questions))


def load(data: Path, limit: int | None = None, categories: tuple[str, ...] = ()) -> SuiteData:
    return Apps().load(SuiteRequest(data=data, limit=limit, categories=categories))


def test_generated_for_the_lab() -> None:
    whole = Apps().load(SuiteRequest(lab=True, limit=0))
    default = Apps().load(SuiteRequest(lab=True))
    assert counts(whole) == dict.fromkeys(Apps.categories, Apps.default_limit)
    assert counts(default) == dict.fromkeys(Apps.categories, Apps.lab_limit)
    assert set(default.questions) < set(whole.questions) and whole.edition == "generated"
    question = default.questions[0]
    assert Apps().score(question, 0, question.references[0][0]) == 1.0
    assert Apps().score(question, 0, "SELECT nothing FROM nowhere;") == 0.0


def test_files_of_a_folder(folder: Path) -> None:
    data = load(folder)
    sql, metadata, other, dialogue = data.questions
    assert sql.turns == (
        "CREATE TABLE Animal (Name TEXT, Age INTEGER); CREATE TABLE Cage (Id INTEGER);\n"
        "Write one SQL query: How many animals?",
    )
    assert Apps().score(sql, 0, "select COUNT(*) from animal;") == 1.0
    descriptions = {metadata.references[0], other.references[0]}
    assert descriptions == {('A, with "B".', "B at A."), ("C.",)}
    assert dialogue.turns == ("Summarize this dialogue:\n#Person1#: Hi.\n#Person2#: Bye.",)
    assert dialogue.references == (("Short talk.", "A talk."),) and dialogue.metric == "rouge_l"
    assert data.edition == "files" and "sql: spider/dev.json" in data.notes


def test_one_file_or_one_category(folder: Path) -> None:
    assert counts(load(folder / "devset.csv")) == {"meaning_representation": 2}
    assert counts(load(folder, limit=1)) == dict.fromkeys(Apps.categories, 1)
    assert counts(load(folder, categories=("sql",))) == {"sql": 1}
    with pytest.raises(UserError, match="the data has no task 'sql'"):
        load(folder / "devset.csv", categories=("sql",))


@needs_real
def test_the_real_files() -> None:
    data = load(SHARED, limit=0)
    assert counts(data) == {"sql": 1034, "meaning_representation": 547, "dialogue_summary": 500}
    assert len({question.id for question in data.questions}) == len(data.questions)
    assert sum(len(q.references[0]) for q in data.questions if q.category == "meaning_representation") == 4672
    default = load(SHARED)
    assert counts(default) == dict.fromkeys(Apps.categories, Apps.default_limit)
    databases = {question.turns[0].partition("\n")[0] for question in default.questions if question.category == "sql"}
    assert len(databases) >= 15  # a limit does not stay with the first databases of the file
    for question in default.questions[::16]:
        assert Apps().score(question, 0, question.references[0][0]) == pytest.approx(1.0)
