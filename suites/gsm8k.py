"""GSM8K: grade school mathematics in words, scored by the final number."""

from __future__ import annotations

from pathlib import Path

from specbench_ss.suite import Question
from specbench_ss.suites.file_suite import FileSuite, Published
from specbench_ss.suites.questions import questions_of, text_of
from specbench_ss.user_files import Row

COMMIT = "3101c7d5072418e28b9008a6636bde82a006892c"
URL = f"https://raw.githubusercontent.com/openai/grade-school-math/{COMMIT}/grade_school_math/data/test.jsonl"
SHA256 = "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14"
ASK = "Solve this step by step, and end with the final number after ####."


class GSM8K(FileSuite):
    """The suite `gsm8k`."""

    name = "gsm8k"
    title = "GSM8K"
    summary = "GSM8K: word problems of grade school mathematics, scored by the final number (80 of 1,319)"
    categories = ("math_reasoning",)
    files = (Published(URL, SHA256, "gsm8k_test.jsonl"),)
    default_limit = 80
    max_new_tokens = 512
    lab_categories = ("math_reasoning",)
    lab_limit = 8

    def read(self, data: Path) -> tuple[Question, ...]:
        """Return the questions of a JSONL file with `question` and `answer`."""
        return questions_of(self.question_file(data), _question)


def _question(place: str, number: int, row: Row) -> Question:
    prompt = f"{text_of(place, row, 'question')}\n{ASK}"
    return Question(f"gsm8k-{number:04d}", "math_reasoning", (prompt,), ((text_of(place, row, "answer"),),), "numeric")
