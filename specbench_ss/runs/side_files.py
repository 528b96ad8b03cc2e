"""Files that a run directory may have beside its rows: readings of the machine, and recorded drafts.

telemetry.jsonl  one line for each try at a sample: what was read of the machine meanwhile
drafts.jsonl     one line for each recorded answer: the draft of each of its steps

Both are optional, are appended as the rows are, and lose at most their last line to a killed process.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specbench_ss.files import crash_safe, records
from specbench_ss.runs.rows import OfSample

TELEMETRY, DRAFTS, TRACES = "telemetry.jsonl", "drafts.jsonl", "traces"


@dataclass(slots=True)
class Readings(OfSample):
    """What was read of the machine during one try at a sample.

    attempt: from 0; the last one is the sample's. disturbed: what disturbed it, or ''. started: Unix time of the first
    reading. columns: `t_s`, seconds since then, and the readings by name, each as long as `t_s`, None where one is
    missing.
    """

    attempt: int
    started: float
    disturbed: str = ""
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the readings as JSON-ready data."""
        return asdict(self)


@dataclass(slots=True)
class DraftStep:
    """The draft of one step. Node 0 is the root, which was decided before; parents come before children.

    tokens, parents, text: of every drafted node, [n]. pruned: nodes that the method left out before verification.
    path: accepted nodes, the root first. next: the token that the target put behind them. p: the target's probability
    of each node behind its parent, [n], and None for the root and for pruned nodes. q: the probability with which a
    node was drawn, [n]; None where candidates were not drawn but chosen, as by top-k.
    """

    tokens: list[int]
    parents: list[int]
    text: list[str]
    path: list[int]
    next: int
    next_text: str
    pruned: list[int] = field(default_factory=list)
    p: list[float | None] = field(default_factory=list)
    q: list[float] | None = None


@dataclass(slots=True)
class Drafts(OfSample):
    """The drafts of one answer, from an untimed second pass.

    same_answer: whether this pass gave the tokens that the timed one gave, as far as it went. reason: why there are no
    steps, or why there are not all of them; may be empty.
    """

    same_answer: bool | None = None
    reason: str = ""
    steps: list[DraftStep] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the drafts as JSON-ready data."""
        return asdict(self)


READERS: dict[str, Any] = {TELEMETRY: records.decoder(Readings), DRAFTS: records.decoder(Drafts)}


def recover(path: Path) -> None:
    """Cut off what a killed process left half-written. Raises UserError for a line that is damaged."""
    for name, read in READERS.items():
        crash_safe.cut(path / name, read)


def read_telemetry(path: Path) -> list[Readings]:
    """Return the readings of a run directory; of a try that was recorded twice, the later one."""
    found: Iterable[Readings] = crash_safe.scan(path / TELEMETRY, READERS[TELEMETRY])[0]
    return list({(one.key, one.attempt): one for one in found}.values())


def read_drafts(path: Path) -> list[Drafts]:
    """Return the recorded drafts of a run directory; of an answer that was recorded twice, the later record."""
    found: Iterable[Drafts] = crash_safe.scan(path / DRAFTS, READERS[DRAFTS])[0]
    return list({one.key: one for one in found}.values())
