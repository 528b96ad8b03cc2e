"""HumanEval: Python functions to be completed. What the model writes is not executed, so there is no quality."""

from __future__ import annotations

from pathlib import Path

from specbench_ss.suite import Question
from specbench_ss.suites.file_suite import FileSuite, Published
from specbench_ss.suites.questions import questions_of, text_of
from specbench_ss.user_files import Row

COMMIT = "6d43fb980f9fee3c892a914eda09951f772ad10d"
URL = f"https://raw.githubusercontent.com/openai/human-eval/{COMMIT}/data/HumanEval.jsonl.gz"
SHA256 = "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef"
ASK = "Complete this Python function. Answer with the whole function."


class HumanEval(FileSuite):
    """The suite `humaneval`."""

    name = "humaneval"
    title = "HumanEval"
    summary = "HumanEval: 164 Python functions to be completed; speed only, since no code is executed"
    categories = ("coding",)
    files = (Published(URL, SHA256),)
    max_new_tokens = 512

    def read(self, data: Path) -> tuple[Question, ...]:
        """Return the questions of a file with `task_id` and `prompt`; `canonical_solution` is kept for readers."""
        return questions_of(self.question_file(data), _question)

    def notes(self) -> tuple[str, ...]:
        """Say why there is no quality."""
        return ("no quality: scoring would execute the code that the model wrote",)


def _question(place: str, number: int, row: Row) -> Question:
    prompt, solution = text_of(place, row, "prompt"), row.get("canonical_solution")
    references = ((prompt + solution,),) if isinstance(solution, str) and solution else ()
    name = str(row.get("task_id", f"humaneval-{number:04d}"))
    return Question(name, "coding", (f"{ASK}\n```python\n{prompt.rstrip()}\n```",), references)
