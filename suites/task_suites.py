"""Scored tasks: GSM8K, competition mathematics, HumanEval, MBPP, and the three applications.

The questions are generated for the lab's models. For other models they are read from the files of Spider, E2E NLG and
DialogSum.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from specbench_ss.errors import UserError
from specbench_ss.prompt_files import Row, read_rows, usable
from specbench_ss.suite import Question
from specbench_ss.suites.base import APP_CATEGORIES, FileSuite, Note, Published, questions_of, text_of
from specbench_ss.suites.code_execution import METRIC, CodeQuestion, called_names, pass_at_1
from specbench_ss.suites.scorers import last_boxed

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
    metrics = MappingProxyType({"math_reasoning": "numeric", "math": "numeric"})  # "math": as EAGLE's file names it

    def question(self, place: str, number: int, row: Row) -> Question:
        """Return the question of a row with `question` and `answer`, or of one with `turns` as in EAGLE's file."""
        if "turns" in row:
            return super().question(place, number, row)
        prompt, answer = f"{text_of(place, row, 'question')}\n{GSM8K_ASK}", text_of(place, row, "answer")
        return Question(f"gsm8k-{number:04d}", "math_reasoning", (prompt,), ((answer,),), "numeric")


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

    def question(self, place: str, number: int, row: Row) -> Question:
        """Return the question of a row; `subject` or `type` is the category."""
        prompt = f"{text_of(place, row, 'problem')}\n{MATH_ASK}"
        name = str(row.get("unique_id") or f"math-{number:04d}")
        return Question(name, _category(row), (prompt,), ((_answer(place, row),),), "boxed")


def _category(row: Row) -> str:
    """Return the subject as a category: 'Intermediate Algebra' is intermediate_algebra."""
    subject = str(row.get("subject") or row.get("type") or "math")
    return re.sub(r"\W+", "_", subject.lower().replace("&", "and")).strip("_")


def _answer(place: str, row: Row) -> str:
    """Return the final answer: `answer`, else the last boxed text in `solution`."""
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
    summary = "HumanEval: 164 Python functions to be completed, scored by their tests with --run-code"
    categories = ("coding",)
    files: ClassVar[tuple[Published, ...]] = (Published(HUMANEVAL_URL, HUMANEVAL_SHA256),)
    max_new_tokens = 512

    def question(self, place: str, number: int, row: Row) -> Question:
        """Return the question of a row with `task_id` and `prompt`, or of one with `turns` as in EAGLE's file.

        With `test` and `entry_point` it has a metric. `canonical_solution` is kept for readers.
        """
        if "turns" in row:
            return super().question(place, number, row)
        prompt, solution = text_of(place, row, "prompt"), row.get("canonical_solution")
        references = ((prompt + solution,),) if isinstance(solution, str) and solution else ()
        name = str(row.get("task_id", f"humaneval-{number:04d}"))
        asked = (f"{HUMANEVAL_ASK}\n```python\n{prompt.rstrip()}\n```",)
        if not (row.get("test") and row.get("entry_point")):
            return Question(name, "coding", asked, references)
        test, function = text_of(place, row, "test"), text_of(place, row, "entry_point")
        tests = f"{test}\ncheck({function})\n"
        return CodeQuestion(name, "coding", asked, references, METRIC, preamble=prompt, tests=tests, names=(function,))

    def score(self, question: Question, turn: int, answer: str) -> float | None:
        """Return pass@1 of an answer; None without `run_code`, and for a question without tests."""
        return pass_at_1(question, answer) if self.run_code and isinstance(question, CodeQuestion) else None

    def notes(self) -> tuple[str, ...]:
        """Return a note on the missing quality."""
        refused = "no quality: scoring executes the code that the model wrote, which --run-code allows"
        return (*super().notes(), *([] if self.run_code else [refused]))


class MBPP(HumanEval):
    """The suite `mbpp`."""

    name = "mbpp"
    title = "MBPP"
    summary = "MBPP: Python functions from a sentence and tests, scored by the tests with --run-code"
    files = ()
    needs = "MBPP's file with `text` (or `prompt`), `code` and `test_list`, or hub:google-research-datasets/mbpp"

    def question(self, place: str, number: int, row: Row) -> Question:
        """Return the question of a row, with its tests in the prompt; `code` is kept for readers."""
        task, code = text_of(place, row, "text" if "text" in row else "prompt"), text_of(place, row, "code")
        listed, setup = _code_lines(place, row, "test_list"), _code_lines(place, row, "test_imports")
        if row.get("test_setup_code"):
            setup.append(text_of(place, row, "test_setup_code"))
        prompt = "\n".join(["Write a Python function that passes these tests.", task, *listed])
        name, tests = f"mbpp-{row.get('task_id', number)}", "\n".join(listed)
        if not tests:
            return Question(name, "coding", (prompt,), ((code,),))
        names, preamble = called_names(tests), "\n".join(setup)
        return CodeQuestion(name, "coding", (prompt,), ((code,),), METRIC, preamble=preamble, tests=tests, names=names)


def _code_lines(place: str, row: Row, key: str) -> list[str]:
    """Return a column with a list of texts. Raise UserError for a text: that of a list would pass as a test."""
    value = row.get(key) or []
    if not isinstance(value, list) or not all(isinstance(line, str) for line in value):
        raise UserError(f"{place}: {key!r} must be a list of texts")
    return list(value)


def read_spider(path: Path, note: Note) -> tuple[Question, ...]:
    """Read Spider's questions on databases; their schemas are in the `tables.json` next to the file."""
    tables = path.with_name("tables.json")
    schemas = {text_of(place, entry, "db_id"): _schema(entry) for place, entry in read_rows(tables)}

    def question(place: str, number: int, row: Row) -> Question:
        database, asked, query = (text_of(place, row, key) for key in ("db_id", "question", "query"))
        if database not in schemas:
            raise UserError(f"{place}: {tables} has no database {database!r}")
        prompt = f"{schemas[database]}\nWrite one SQL query: {asked}"
        return Question(f"spider-{number:04d}", "sql", (prompt,), ((query,),), "exact_sql")

    return questions_of(path, question, note)


def read_e2e(path: Path, note: Note) -> tuple[Question, ...]:
    """Read E2E NLG's restaurant attributes. Rows with equal attributes become one question with several references."""
    texts: dict[str, list[str]] = {}
    for data, text in usable(read_rows(path), _attributes, note):
        texts.setdefault(data, []).append(text)
    ask = "Write a short description from these attributes"
    return tuple(
        Question(f"e2e-{i:04d}", "meaning_representation", (f"{ask}: {data}",), (tuple(of),), "rouge_l")
        for i, (data, of) in enumerate(texts.items())
    )


def _attributes(place: str, row: Row) -> tuple[str, str]:
    columns = {name.lower(): value for name, value in row.items()}  # some files have MR and ref
    return text_of(place, columns, "mr"), text_of(place, columns, "ref")


def read_dialogsum(path: Path, note: Note) -> tuple[Question, ...]:
    """Read DialogSum's dialogues, each with one `summary` or with `summary1`, `summary2` and so on."""
    return questions_of(path, _dialogue, note)


def _dialogue(place: str, number: int, row: Row) -> Question:
    texts = [row[key] for key in sorted(row) if re.fullmatch(r"summary\d*", key)]
    summaries = tuple(text for text in texts if isinstance(text, str) and text)
    if not summaries:
        raise UserError(f"{place}: expected 'dialogue' and 'summary'")
    prompt = f"Summarize this dialogue:\n{text_of(place, row, 'dialogue')}"
    return Question(f"dialogsum-{number:04d}", "dialogue_summary", (prompt,), (summaries,), "rouge_l")


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


READERS: dict[str, tuple[Callable[[Path, Note], tuple[Question, ...]], tuple[str, ...]]] = {
    # with file names: in a folder, the first file of the first pattern with a match
    "sql": (read_spider, ("dev.json", "test.json", "train_spider.json")),
    "meaning_representation": (read_e2e, ("devset.csv", "testset*.csv", "trainset.csv")),
    "dialogue_summary": (read_dialogsum, ("dialogsum.dev.jsonl", "dialogsum*.jsonl")),
}
SUFFIXES = {".json": "sql", ".csv": "meaning_representation", ".jsonl": "dialogue_summary"}


class Apps(FileSuite):
    """The suite `apps`. Its data sets have their own terms and are not fetched."""

    name = "apps"
    title = "Spider, E2E NLG and DialogSum"
    summary = "three applications: SQL from questions, text from attributes, dialogue summaries"
    categories = APP_CATEGORIES
    needs = "a folder or file of Spider, E2E NLG or DialogSum"
    default_limit = 80
    max_new_tokens = 256
    lab_categories = APP_CATEGORIES
    lab_limit = 8

    def read(self, data: Path) -> tuple[Question, ...]:
        """Return the questions of a file, or of all files of a folder."""
        self.left_out = []
        read = [READERS[name][0](path, self.left_out.append) for name, path in _find(data).items()]
        questions = tuple(question for of_one in read for question in _mixed(of_one))
        if not questions:
            raise UserError(f"{data} has no questions; download the data set again")
        return questions

    def edition(self, data: Path) -> tuple[str, tuple[str, ...]]:
        """Return the name of the edition, and a note on its files."""
        return "files", tuple(f"{name}: {path.parent.name}/{path.name}" for name, path in _find(data).items())


def _find(data: Path) -> dict[str, Path]:
    """Return the file of each available category."""
    if data.is_dir():
        found = {name: path for name, (_, files) in READERS.items() if (path := _first(data, files)) is not None}
        if not found:
            names = ", ".join(files[0] for _, files in READERS.values())
            raise UserError(f"{data} and its folders have none of {names}")
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
    """Shuffle the questions deterministically.

    Neighbours in the files resemble each other, and a limit takes the first ones.
    """
    return sorted(questions, key=lambda question: hashlib.sha256(question.turns[0].encode()).digest())
