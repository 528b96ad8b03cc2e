"""Read the files of Spider, E2E NLG and DialogSum as questions."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

from specbench_ss.errors import UserError
from specbench_ss.suite import Question
from specbench_ss.user_files import read_rows, read_text


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
