"""SPEED-Bench, NVIDIA's questions for speculative decoding, from its data set or from files in its form."""

from __future__ import annotations

from pathlib import Path

from specbench_ss.errors import UserError
from specbench_ss.suite import Question
from specbench_ss.suites.file_suite import FileSuite
from specbench_ss.suites.questions import question_of, questions_of
from specbench_ss.user_files import Row

MASKED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"  # stands where a source's licence forbids a copy
KEPT = ("question_id", "category", "turns")  # its other fields say where a question comes from


class SpeedBench(FileSuite):
    """The suite `speedbench`."""

    name = "speedbench"
    title = "SPEED-Bench"
    summary = "SPEED-Bench's file form: eleven domains, or prompts of 1k to 32k tokens in three classes of entropy"
    categories = (
        "coding", "humanities", "math", "multilingual", "qa", "rag", "reasoning", "roleplay", "stem", "summarization",
        "writing", "low_entropy", "mixed", "high_entropy",
    )  # fmt: skip
    needs = "a JSONL file in SPEED-Bench's form, or hub:nvidia/SPEED-Bench:qualitative"
    default_limit = 80

    def __init__(self) -> None:
        self.left_out = 0

    def read(self, data: Path) -> tuple[Question, ...]:
        """Return the questions whose text is there. Raises UserError where none is."""
        questions = questions_of(data, _question)
        whole = tuple(q for q in questions if not any(turn.startswith(MASKED) for turn in q.turns))
        self.left_out = len(questions) - len(whole)
        if not whole:
            raise UserError(f"{data} holds only masked questions: prepare the data with NVIDIA's specdec_bench first")
        return whole

    def notes(self) -> tuple[str, ...]:
        """Say how many questions are masked, since these are left out."""
        masked = f"{self.left_out} masked questions are left out: NVIDIA's specdec_bench fetches their text"
        return (masked,) if self.left_out else ()


def _question(place: str, number: int, row: Row) -> Question:
    return question_of(place, {key: row.get(key) for key in KEPT}, {})
