"""MT-Bench: 80 questions of two turns. Its answers are graded by a judge after the run: `ssbench judge`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from specbench_ss.errors import UserError
from specbench_ss.suite import Question
from specbench_ss.suites.file_suite import FileSuite, Published
from specbench_ss.suites.questions import MT_BENCH_CATEGORIES, read_questions
from specbench_ss.suites.rows import is_hub
from specbench_ss.user_files import Row, read_rows

COMMIT = "587d5cfa1609a43d192cedb8441cac3c17db105d"
FOLDER = f"https://raw.githubusercontent.com/lm-sys/FastChat/{COMMIT}/fastchat/llm_judge/data"
QUESTIONS = Published(
    f"{FOLDER}/mt_bench/question.jsonl", "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7"
)
REFERENCES = Published(
    f"{FOLDER}/mt_bench/reference_answer/gpt-4.jsonl",
    "f957a5bc977badb66885ec970e6cd08527845780313f0995764260e5777b9b3f",
    "reference_answer_gpt-4.jsonl",
)
PROMPTS = Published(f"{FOLDER}/judge_prompts.jsonl", "fd283293406d024f44c174b094ef48031d0687a4682fd3a56b29b138f80281b6")


class MTBench(FileSuite):
    """The suite `mtbench`."""

    name = "mtbench"
    title = "MT-Bench"
    summary = "MT-Bench: 80 questions of two turns in eight categories, graded by a judge (`ssbench judge`)"
    categories = MT_BENCH_CATEGORIES
    files = (QUESTIONS, REFERENCES, PROMPTS)
    lab_categories = MT_BENCH_CATEGORIES

    def read(self, data: Path) -> tuple[Question, ...]:
        """Return the questions, with the reference answers of the file beside them where there is one."""
        file = self.question_file(data)
        questions = read_questions(file, {})
        beside = file.parent / REFERENCES.name
        if is_hub(data) or not beside.is_file():
            return questions
        answers = dict(_answer(place, row) for place, row in read_rows(beside))
        return tuple(replace(q, references=answers[q.id]) if q.id in answers else q for q in questions)

    def judge_prompts(self, data: Path | None) -> Path | None:
        """Return MT-Bench's own prompts for a judge: beside the data, else those that were fetched."""
        beside = None if data is None or is_hub(data) else self.question_file(data).with_name(PROMPTS.name)
        return next((path for path in (beside, self._cached(PROMPTS)) if path is not None and path.is_file()), None)


def _answer(place: str, row: Row) -> tuple[str, tuple[tuple[str, ...], ...]]:
    """Return a question's id and the reference answer of each of its turns."""
    try:
        turns = row["choices"][0]["turns"]
        return str(row["question_id"]), tuple((str(turn),) for turn in turns)
    except (KeyError, IndexError, TypeError):
        raise UserError(f"{place}: expected 'question_id' and 'choices' with 'turns'") from None
