"""Competition mathematics in the form of MATH and MATH-500: LaTeX problems, scored by the boxed answer."""

from __future__ import annotations

import re
from pathlib import Path

from specbench_ss.errors import UserError
from specbench_ss.suite import Question
from specbench_ss.suites.file_suite import FileSuite
from specbench_ss.suites.questions import questions_of, text_of
from specbench_ss.suites.scorers import last_boxed
from specbench_ss.user_files import Row

ASK = "Solve this step by step, and put the final answer in \\boxed{}."


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
        return questions_of(data, _question)


def _question(place: str, number: int, row: Row) -> Question:
    prompt = f"{text_of(place, row, 'problem')}\n{ASK}"
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
