"""What `ssbench suites show` prints of a suite's questions."""

from __future__ import annotations

import textwrap
from collections import Counter

from specbench_ss.results.number_text import counted
from specbench_ss.runs.suite import Question, SuiteData

LINES, WIDTH = 6, 110  # of a text that is not shown whole


def print_data(data: SuiteData, sample: int, whole: bool) -> None:
    """Print a suite's edition, hash, notes and counts, and the first `sample` questions of each category."""
    turns = sum(len(question.turns) for question in data.questions)
    print(f"{data.name} ({data.edition}), {data.content_hash[:12]}")
    asked = f"{counted(len(data.questions), 'question')}, {counted(turns, 'prompt')}"
    print(f"{asked}, answers of at most {data.max_new_tokens} tokens")
    for note in data.notes:
        print(f"note: {note}")
    for category, count in Counter(question.category for question in data.questions).items():
        of_one = [question for question in data.questions if question.category == category]
        print(f"\n{category}: {count}, scored by {_metrics(of_one)}")
        for question in of_one[:sample]:
            _print_question(question, whole)


def _metrics(questions: list[Question]) -> str:
    return ", ".join(sorted({question.metric or "nothing" for question in questions}))


def _print_question(question: Question, whole: bool) -> None:
    for message in question.history:
        print(f"  {question.id}, before: {message.role}")
        print(_shown(message.content, whole))
    for number, turn in enumerate(question.turns):
        print(f"  {question.id}, turn {number + 1}")
        print(_shown(turn, whole))
        for reference in question.references[number] if question.references else ():
            print(f"  reference\n{_shown(reference, whole)}")


def _shown(text: str, whole: bool) -> str:
    """Return the text, indented; its first lines alone unless it is to be whole."""
    wrapped = [part for line in text.splitlines() or [""] for part in textwrap.wrap(line, WIDTH - 4) or [""]]
    kept = wrapped if whole else wrapped[:LINES]
    more = [f"... {len(wrapped) - len(kept)} more lines"] if len(wrapped) > len(kept) else []
    return textwrap.indent("\n".join([*kept, *more]), "    ", lambda _: True)
