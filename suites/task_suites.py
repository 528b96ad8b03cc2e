"""Scored tasks: GSM8K, competition mathematics, HumanEval, and the three applications.

The questions are generated for the lab's models. For other models they are read from the files of Spider, E2E NLG and
DialogSum.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specbench_ss.errors import UserError
from specbench_ss.suite import Question, SuiteData, SuiteRequest
from specbench_ss.suites.base import (
    APP_CATEGORIES,
    FileSuite,
    LabSuite,
    Published,
    check_categories,
    check_limit,
    lab_questions,
    questions_of,
    select,
    text_of,
)
from specbench_ss.suites.scorers import last_boxed
from specbench_ss.user_files import Row, read_rows, read_text

GSM8K_COMMIT = "3101c7d5072418e28b9008a6636bde82a006892c"
GSM8K_URL = (
    f"https://raw.githubusercontent.com/openai/grade-school-math/{GSM8K_COMMIT}/grade_school_math/data/test.jsonl"
)
GSM8K_SHA256 = "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14"
GSM8K_ASK = "Solve this step by step, and end with the final number after ####."


class GSM8K(FileSuite):
    """The suite `gsm8k`."""

    name = "gsm8k"
    title = "GSM8K"
    summary = "GSM8K: word problems of grade school mathematics, scored by the final number (80 of 1,319)"
    categories = ("math_reasoning",)
    files = (Published(GSM8K_URL, GSM8K_SHA256, "gsm8k_test.jsonl"),)
    default_limit = 80
    max_new_tokens = 512
    lab_categories = ("math_reasoning",)
    lab_limit = 8

    def read(self, data: Path) -> tuple[Question, ...]:
        """Return the questions of a JSONL file with `question` and `answer`."""
        return questions_of(self.question_file(data), _gsm8k_question)


def _gsm8k_question(place: str, number: int, row: Row) -> Question:
    prompt = f"{text_of(place, row, 'question')}\n{GSM8K_ASK}"
    return Question(f"gsm8k-{number:04d}", "math_reasoning", (prompt,), ((text_of(place, row, "answer"),),), "numeric")


MATH_ASK = "Solve this step by step, and put the final answer in \\boxed{}."


class CompetitionMath(FileSuite):
    """The suite `math`."""

    name = "math"
    title = "MATH"
    summary = "competition mathematics in the form of MATH and MATH-500, scored by the boxed answer"
    categories = (
        "algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra",
        "precalculus",
    )  # fmt: skip
    needs = "a JSONL file with `problem` and `answer` or `solution`, or hub:HuggingFaceH4/MATH-500"
    default_limit = 20

    def read(self, data: Path) -> tuple[Question, ...]:
        """Return the questions of a JSONL file; `subject` or `type` is the category."""
        return questions_of(data, _math_question)


def _math_question(place: str, number: int, row: Row) -> Question:
    prompt = f"{text_of(place, row, 'problem')}\n{MATH_ASK}"
    name = str(row.get("unique_id") or f"math-{number:04d}")
    return Question(name, _category(row), (prompt,), ((_answer(place, row),),), "boxed")


def _category(row: Row) -> str:
    """Return the subject as a category: 'Intermediate Algebra' is intermediate_algebra."""
    subject = str(row.get("subject") or row.get("type") or "math")
    return re.sub(r"\W+", "_", subject.lower().replace("&", "and")).strip("_")


def _answer(place: str, row: Row) -> str:
    """Return the final answer: `answer`, else what is boxed last in `solution`."""
    given = row.get("answer")
    if isinstance(given, str) and given.strip():
        return given
    boxed = last_boxed(text_of(place, row, "solution"))
    if boxed is None:
        raise UserError(f"{place}: 'solution' has no \\boxed{{}}, and there is no 'answer'")
    return boxed


HUMANEVAL_COMMIT = "6d43fb980f9fee3c892a914eda09951f772ad10d"
HUMANEVAL_URL = f"https://raw.githubusercontent.com/openai/human-eval/{HUMANEVAL_COMMIT}/data/HumanEval.jsonl.gz"
HUMANEVAL_SHA256 = "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef"
HUMANEVAL_ASK = "Complete this Python function. Answer with the whole function."


class HumanEval(FileSuite):
    """The suite `humaneval`."""

    name = "humaneval"
    title = "HumanEval"
    summary = "HumanEval: 164 Python functions to be completed; speed only, since no code is executed"
    categories = ("coding",)
    files = (Published(HUMANEVAL_URL, HUMANEVAL_SHA256),)
    max_new_tokens = 512

    def read(self, data: Path) -> tuple[Question, ...]:
        """Return the questions of a file with `task_id` and `prompt`; `canonical_solution` is kept for readers."""
        return questions_of(self.question_file(data), _humaneval_question)

    def notes(self) -> tuple[str, ...]:
        """Say why there is no quality."""
        return ("no quality: scoring would execute the code that the model wrote",)


def _humaneval_question(place: str, number: int, row: Row) -> Question:
    prompt, solution = text_of(place, row, "prompt"), row.get("canonical_solution")
    references = ((prompt + solution,),) if isinstance(solution, str) and solution else ()
    name = str(row.get("task_id", f"humaneval-{number:04d}"))
    return Question(name, "coding", (f"{HUMANEVAL_ASK}\n```python\n{prompt.rstrip()}\n```",), references)


def read_spider(path: Path) -> tuple[Question, ...]:
    """Read Spider's questions on databases; their schemas are in the `tables.json` next to the file."""
    tables = path.with_name("tables.json")
    schemas = {name: _schema(entry) for name, entry in _spider_tables(tables).items()}
    questions = []
    for index, row in enumerate(_json_list(path)):
        database, question, query = (_text(path, index, row, key) for key in ("db_id", "question", "query"))
        if database not in schemas:
            raise UserError(f"{tables} has no database {database!r}, which {path.name} asks about")
        prompt = f"{schemas[database]}\nWrite one SQL query: {question}"
        questions.append(Question(f"spider-{index:04d}", "sql", (prompt,), ((query,),), "exact_sql"))
    return _some(path, questions)


def read_e2e(path: Path) -> tuple[Question, ...]:
    """Read E2E NLG's restaurant attributes. Rows with equal attributes become one question with several references."""
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""))
    columns = {str(name).strip().lower(): name for name in reader.fieldnames or ()}
    if not {"mr", "ref"} <= set(columns):
        raise UserError(f"{path} has no columns 'mr' and 'ref'")
    texts: dict[str, list[str]] = {}
    for row in reader:
        data, text = row[columns["mr"]], row[columns["ref"]]
        if not data or not text:
            raise UserError(f"{path}:{reader.line_num}: 'mr' or 'ref' is empty")
        texts.setdefault(data, []).append(text)
    return _some(path, [_e2e_question(index, *item) for index, item in enumerate(texts.items())])


def read_dialogsum(path: Path) -> tuple[Question, ...]:
    """Read DialogSum's dialogues, each with one `summary` or with `summary1`, `summary2` and so on."""
    questions = []
    for index, (place, row) in enumerate(read_rows(path)):
        dialogue = row.get("dialogue")
        texts = [row[key] for key in sorted(row) if re.fullmatch(r"summary\d*", key)]
        summaries = tuple(text for text in texts if isinstance(text, str) and text)
        if not isinstance(dialogue, str) or not dialogue or not summaries:
            raise UserError(f"{place}: expected 'dialogue' and 'summary'")
        prompt = f"Summarize this dialogue:\n{dialogue}"
        questions.append(Question(f"dialogsum-{index:04d}", "dialogue_summary", (prompt,), (summaries,), "rouge_l"))
    return _some(path, questions)


def _some(path: Path, questions: list[Question]) -> tuple[Question, ...]:
    if not questions:
        raise UserError(f"{path} holds no questions")
    return tuple(questions)


def _e2e_question(index: int, data: str, texts: list[str]) -> Question:
    prompt = f"Write a short description from these attributes: {data}"
    return Question(f"e2e-{index:04d}", "meaning_representation", (prompt,), (tuple(texts),), "rouge_l")


def _json_list(path: Path) -> list[Any]:
    try:
        rows = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError):
        raise UserError(f"{path} is not valid JSON") from None
    if not isinstance(rows, list):
        raise UserError(f"{path} is not a list of questions or tables")
    return rows


def _text(path: Path, index: int, row: Any, key: str) -> str:
    value = row.get(key) if isinstance(row, dict) else None
    if not isinstance(value, str) or not value:
        raise UserError(f"{path}: entry {index} has no text {key!r}")
    return value


def _spider_tables(path: Path) -> dict[str, Any]:
    entries = _json_list(path)
    return {_text(path, index, entry, "db_id"): entry for index, entry in enumerate(entries)}


def _schema(entry: dict[str, Any]) -> str:
    """Return a database's schema as CREATE TABLE statements."""
    try:
        columns: list[list[str]] = [[] for _ in entry["table_names_original"]]
        for (table, name), kind in zip(entry["column_names_original"], entry["column_types"], strict=True):
            if table >= 0:
                columns[table].append(f"{name} {'INTEGER' if kind == 'number' else 'TEXT'}")
        tables = zip(entry["table_names_original"], columns, strict=True)
        return " ".join(f"CREATE TABLE {name} ({', '.join(names)});" for name, names in tables)
    except (KeyError, TypeError, ValueError, IndexError):
        raise UserError(f"tables.json: cannot read the schema of database {entry['db_id']!r}") from None


LAB_LIMIT = 8
FILE_LIMIT = 80  # the default number of questions from files

# In a folder: the first file, by name, that fits the first pattern that any fits.
PATTERNS: dict[str, tuple[str, ...]] = {
    "sql": ("dev.json", "test.json", "train_spider.json"),
    "meaning_representation": ("devset.csv", "testset*.csv", "trainset.csv"),
    "dialogue_summary": ("dialogsum.dev.jsonl", "dialogsum*.jsonl"),
}
READERS: dict[str, Callable[[Path], tuple[Question, ...]]] = {
    "sql": read_spider,
    "meaning_representation": read_e2e,
    "dialogue_summary": read_dialogsum,
}
SUFFIXES = {".json": "sql", ".csv": "meaning_representation", ".jsonl": "dialogue_summary"}


class Apps(LabSuite):
    """The suite `apps`."""

    name = "apps"
    summary = "three applications: SQL from questions, text from attributes, dialogue summaries"
    categories = APP_CATEGORIES

    def fetch(self, source: str | None = None) -> Path:
        """Raise UserError, because each data set has its own terms and cannot be fetched."""
        raise UserError("suite 'apps' has no download: get Spider, E2E NLG or DialogSum and give --data")

    def questions_of(self, split: str, request: SuiteRequest) -> SuiteData:
        """Return generated questions for lab models unless files are given; for other models read the given files."""
        check_limit(request.limit)
        check_categories(request.categories, self.categories, f"suite {self.name!r}")
        if request.data is not None:
            return self._from_files(_find(request.data), request)
        if request.lab:
            return self._generated(request, split)
        raise UserError("suite 'apps' needs --data: a folder or file of Spider, E2E NLG or DialogSum")

    def _generated(self, request: SuiteRequest, split: str) -> SuiteData:
        limit = LAB_LIMIT if request.limit is None else request.limit
        asked = tuple(name for name in self.categories if name in (request.categories or self.categories))
        questions = tuple(question for name in asked for question in lab_questions(name, split, limit))
        return SuiteData(self.name, "generated", questions, notes=("questions generated by the lab",))

    def _from_files(self, files: dict[str, Path], request: SuiteRequest) -> SuiteData:
        wanted = {name: path for name, path in files.items() if name in (request.categories or self.categories)}
        questions = [question for name, path in wanted.items() for question in _mixed(READERS[name](path))]
        limit = FILE_LIMIT if request.limit is None else request.limit
        notes = tuple(f"{name}: {path.parent.name}/{path.name}" for name, path in wanted.items())
        return SuiteData(self.name, "files", select(questions, request.categories, limit), notes=notes)


def _find(data: Path) -> dict[str, Path]:
    """Return the file of each category that is there."""
    if data.is_dir():
        found = {name: path for name in PATTERNS if (path := _first(data, PATTERNS[name])) is not None}
        if not found:
            names = ", ".join(patterns[0] for patterns in PATTERNS.values())
            raise UserError(f"{data} holds none of {names}, nor do the folders in it")
        return found
    if data.suffix not in SUFFIXES:
        raise UserError(f"{data} is neither a folder nor a .json, .csv or .jsonl file")
    return {SUFFIXES[data.suffix]: data}


def _first(folder: Path, patterns: tuple[str, ...]) -> Path | None:
    for pattern in patterns:
        matches = sorted(folder.glob(pattern)) or sorted(folder.glob(f"*/{pattern}"))
        if matches:
            return matches[0]
    return None


def _mixed(questions: tuple[Question, ...]) -> list[Question]:
    """Shuffle the questions, always alike.

    Neighbours in the files resemble each other, and a limit takes the first ones.
    """
    return sorted(questions, key=lambda question: hashlib.sha256(question.turns[0].encode()).digest())
