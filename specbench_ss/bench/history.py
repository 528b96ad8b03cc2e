"""Answers that later turns of a conversation continue: measured ones, or stored ones of a served baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from specbench_ss.runs.records import Key, Run, SampleRecord
from specbench_ss.runs.run_dir import read_baseline_answers


@dataclass(frozen=True, slots=True)
class HistorySource:
    """Answers that later turns of a run continue.

    own: a method continues its own answers, else those of the baseline. rows: samples by key. baseline_answers: texts
    by question and turn, which the baseline gave before its measurement.
    """

    baseline: str
    own: bool
    rows: Mapping[Key, SampleRecord]
    baseline_answers: dict[tuple[str, int], str] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Run) -> HistorySource:
        """Return the source of a stored run. Raises UserError if its stored answers are damaged."""
        own = run.manifest["config"].get("history") == "own"
        return cls(run.baseline, own, {row.key: row for row in run.rows}, read_baseline_answers(run.path))

    def is_precomputed(self, block: int | None) -> bool:
        """Return True if later turns of a block of questions continue stored answers: the baseline runs last there."""
        return not self.own and bool((block or 0) % 2)

    def answers(self, key: Key, block: int | None = None) -> list[str]:
        """Return the answers that a sample continues. Raises LookupError if one of them is missing or failed.

        block: of its question, if servers take turns.
        """
        question_id, turn, method, repeat = key
        label, repeat = (method, repeat) if self.own else (self.baseline, 0)
        answers = list[str]()
        for earlier in range(turn):
            text = self._answer((question_id, earlier, label, repeat), block)
            if text is None:
                raise LookupError(f"no answer to turn {earlier + 1} of {label} to continue: it failed")
            answers.append(text)
        return answers

    def _answer(self, key: Key, block: int | None) -> str | None:
        if self.is_precomputed(block):
            return self.baseline_answers.get(key[:2])
        row = self.rows.get(key)
        return row.text if row is not None and row.ok else None
