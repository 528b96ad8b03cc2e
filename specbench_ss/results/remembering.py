"""Whether a method answers from what it answered before: its steps then change between repeats of the same prompt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from specbench_ss.runs.rows import Row, Run
from specbench_ss.runs.steps import COUNTS, StepColumns

HALF = ("float16", "bfloat16")  # where two drafted tokens may be equally likely, and one repeat takes the other one
NOISE = 0.1  # share of its steps that a method must save in half precision


def remembering(run: Run, label: str) -> list[str]:
    """Report a greedy method whose steps differ between repeats with the same prompt and the same answer.

    Nothing in such a repeat is new but what the method kept from the one before. A method that `remembers` by its own
    word is left out. So are samples that were made again
    since the machine was disturbed: the method was asked them twice. In half precision a step or two may differ by a
    tie of the drafter: only fewer steps in all later repeats are told.
    """
    several = comparable(run, label)
    differ = [same for same in several if len({_counts(run.steps.of(row.key)) for row in same}) > 1]
    if not differ or (run.manifest["model"]["dtype"] in HALF and not _fewer(several)):
        return []
    first = differ[0][0]
    return [
        f"void: the steps of {len(differ)} of {len(several)} prompts differ between repeats with the same answer "
        f"(first {first.question_id} turn {first.turn + 1}): the method remembers earlier answers and does not say so"
    ]


def comparable(run: Run, label: str) -> list[list[Row]]:
    """Return the repeats with the same prompt and answer, of a greedy method that says it remembers nothing."""
    if _entry(run, label).get("remembers", True) or run.manifest["config"]["temperature"]:
        return []
    repeats: dict[Any, list[Row]] = defaultdict(list)
    own = (row for row in run.rows if row.method == label and row.ok and not row.remade)
    for row in sorted(own, key=lambda row: row.repeat):
        repeats[row.question_id, row.turn, _history(run, row), tuple(row.token_ids or ())].append(row)
    return [same for same in repeats.values() if len(same) > 1]


def says_so(run: Run, label: str) -> bool:
    """Whether a method remembers by its own word."""
    return bool(_entry(run, label).get("remembers", False))


def _counts(steps: StepColumns) -> bytes:
    """Return what can be compared of the counts of every step."""
    return b"".join(getattr(steps, name).tobytes() for name in COUNTS)


def _fewer(several: Sequence[Sequence[Row]]) -> bool:
    """Whether the later repeats together take clearly fewer steps than the first ones."""
    first = sum(same[0].steps or 0 for same in several)
    later = sum(sum(row.steps or 0 for row in same[1:]) / (len(same) - 1) for same in several)
    return later < (1 - NOISE) * first


def _history(run: Run, row: Row) -> tuple[str | None, ...]:
    """The method's own earlier answers, where they are part of the prompt."""
    if run.manifest["config"].get("history") != "own" or not row.turn:
        return ()
    place = (row.question_id, row.method, row.repeat)
    before = [r for r in run.rows if (r.question_id, r.method, r.repeat) == place and r.turn < row.turn]
    return tuple(r.text for r in sorted(before, key=lambda r: r.turn))


def _entry(run: Run, label: str) -> Mapping[str, Any]:
    return next((m for m in run.manifest["methods"] if m["label"] == label), {})
