"""What workers are told and asked: the job, the same for all, and shards, each the missing samples of one question."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from specbench_ss.benchmark.drafts import chosen
from specbench_ss.benchmark.schedule import Sample
from specbench_ss.runs.config import Recording, RunConfig
from specbench_ss.runs.ledger import Ledger
from specbench_ss.runs.rows import Key, Row
from specbench_ss.runs.side_files import read_drafts
from specbench_ss.runs.suite import SuiteData

P = TypeVar("P", Sample, Row)


@dataclass(frozen=True, slots=True)
class Job:
    """What every worker of a run needs. It travels to other machines: paths in it have to be good there as well.

    out: the run directory, for messages; workers do not write to it. command: for the manifest.
    """

    config: RunConfig
    data: SuiteData
    device: str
    dtype: str
    dtype_choice: str
    recording: Recording
    timeout: float | None
    out: Path
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """One question. One worker makes all that is missing of it, so that methods are compared on one device.

    samples: in their order, those that are there too. rows, judged: what is there. drafts: whose drafts are missing.
    """

    question_id: str
    samples: tuple[Sample, ...]
    rows: tuple[Row, ...]
    judged: frozenset[Key]
    drafts: tuple[Sample, ...]


def shards(samples: Sequence[Sample], ledger: Ledger, baseline: str, drafts: str, seed: int) -> Iterator[Shard]:
    """Yield the questions of which something is missing, in order. drafts, seed: as of `drafts.chosen`."""
    wanted = {sample.key for sample in chosen(samples, drafts, seed)}
    wanted -= {one.key for one in read_drafts(ledger.path)} if wanted else set()
    there = _by_question(ledger.rows.values())
    for question_id, own in _by_question(samples).items():  # of all rounds: later repeats are held against the first
        unrecorded = tuple(sample for sample in own if sample.key in wanted)
        if all(_complete(sample, ledger, baseline) for sample in own) and not unrecorded:
            continue
        rows = tuple(there.get(question_id, ()))
        judged = frozenset(row.key for row in rows if row.key in ledger.judged)
        yield Shard(question_id, tuple(own), rows, judged, unrecorded)


def _complete(sample: Sample, ledger: Ledger, baseline: str) -> bool:
    """Say whether a sample is there with its verdict; the reference's first answer has none where it is greedy."""
    greedy = not ledger.manifest["config"]["temperature"]
    first = greedy and sample.method == baseline and sample.repeat == 0
    return sample.key in ledger.rows and (first or sample.key in ledger.judged)


def _by_question(parts: Iterable[P]) -> dict[str, list[P]]:
    """Group samples or rows by their question, in the order in which questions first appear."""
    found: dict[str, list[P]] = {}
    for part in parts:
        found.setdefault(part.key[0], []).append(part)
    return found
