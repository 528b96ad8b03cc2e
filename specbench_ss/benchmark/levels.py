"""The suite with several requests at a time, one method at a time, the methods in the schedule's order.

Later turns continue the answers of the measurement with one request at a time, so that all prompts are known beforehand
and are the same at every level.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Generic, TypeVar

from specbench_ss.benchmark.schedule import Sample, method_order
from specbench_ss.benchmark.session import Session
from specbench_ss.errors import error_text
from specbench_ss.runs.level import LevelKey
from specbench_ss.runs.levels import read_levels
from specbench_ss.runs.rows import Row
from specbench_ss.runs.run_directory import RunDir

Prompt = TypeVar("Prompt")


class Levels(ABC, Generic[Prompt]):
    """Makes the levels that a run lacks."""

    def __init__(self, session: Session, run_dir: RunDir) -> None:
        self.session, self.run_dir = session, run_dir

    @abstractmethod
    def prompt(self, sample: Sample) -> Prompt:
        """Return what is asked. Raises LookupError where the history is missing."""

    @abstractmethod
    def level(self, label: str, concurrency: int, repeat: int) -> None:
        """Make one level and commit it."""

    def make(self) -> None:
        """Ask the suite with every number of requests at a time that was asked for and is not there yet."""
        done = {level.key for level in read_levels(self.run_dir.path)[0]}
        todo = [place for place in self._planned() if place not in done]
        if todo:
            prompts = sum(len(q.turns) for q in self.session.data.questions)
            self.session.events.on_start(len(self.run_dir.rows) + len(todo) * prompts)
        for place in todo:
            self.level(*place)

    def _planned(self) -> Iterator[LevelKey]:
        """Yield every level: repeat by repeat, and the methods of each in an order of the Williams squares."""
        config, block = self.session.config, 0
        repeats = self.run_dir.manifest.get("repeats_made") or config.repeats
        for repeat in range(repeats):
            for concurrency in config.concurrency:
                for label in method_order(self.session.labels, block, config.seed):
                    if label not in self.session.dropped:
                        yield label, concurrency, repeat
                block += 1

    def asked(self, label: str, concurrency: int, repeat: int) -> Iterator[tuple[Row, Prompt | None]]:
        """Yield every prompt of the suite, with the row that its answer will fill; a failed one without history."""
        prompts = [(question, turn) for question in self.session.data.questions for turn in range(len(question.turns))]
        for index, (question, turn) in enumerate(prompts):
            sample = Sample(question, turn, repeat, label, 0, index)
            row = replace(self.session.blank(sample), concurrency=concurrency)
            try:
                yield row, self.prompt(sample)
            except LookupError as e:
                yield replace(row, status="failed", error=error_text(e)), None
