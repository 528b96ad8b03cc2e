"""Files that a run directory may have beside its rows: readings of the machine, and recorded drafts.

telemetry.jsonl  one line for each try at a sample: what was read of the machine meanwhile
drafts.jsonl     one line for each recorded answer: the draft of each of its steps

Both are optional, are appended as the rows are, and lose at most their last line to a killed process.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from specbench_ss.errors import os_reason
from specbench_ss.files import crash_safe, records
from specbench_ss.runs.rows import Key, OfSample

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


class SideFiles:
    """The side files of an open run directory. They are worth less than the run: no failure here is raised."""

    def __init__(self, path: Path) -> None:
        self.path, self.files, self._given_up = path, dict[str, BinaryIO](), dict[str, str]()

    def append(self, name: str, line: dict[str, Any]) -> str:
        """Append a line. Returns why it could not, or ''.

        After a failure nothing more is written to that file in this session: no line is put behind half of one.
        """
        if name in self._given_up:
            return self._given_up[name]
        try:
            if name not in self.files:
                self.files[name] = (self.path / name).open("ab", buffering=0)
            crash_safe.append(self.files[name], [line])
        except ValueError as e:  # a number that is not finite: nothing of the line was written
            return f"a line of {name} could not be written: {e}"
        except OSError as e:
            self._given_up[name] = f"{name} could not be written any further: {os_reason(e)}"
        return self._given_up.get(name, "")

    def close(self) -> None:
        """Close the files. What was appended is already on the disk."""
        for file in self.files.values():
            file.close()


READERS: dict[str, Any] = {TELEMETRY: records.decoder(Readings), DRAFTS: records.decoder(Drafts)}


def recover(path: Path) -> None:
    """Cut off the half of a line that a killed process may have left. Raises UserError for a line that is damaged."""
    for name, read in READERS.items():
        crash_safe.cut(path / name, read)


def read_telemetry(path: Path) -> list[Readings]:
    """Return the readings of a run directory; of a sample that was made again after a kill, the later tries."""
    found: dict[Key, list[Readings]] = {}
    for one in crash_safe.scan(path / TELEMETRY, READERS[TELEMETRY])[0]:
        found[one.key] = [*(found.get(one.key, ()) if one.attempt else ()), one]
    return [one for tries in found.values() for one in tries]


def read_drafts(path: Path) -> list[Drafts]:
    """Return the recorded drafts of a run directory; of an answer that was recorded twice, the later record."""
    found: Iterable[Drafts] = crash_safe.scan(path / DRAFTS, READERS[DRAFTS])[0]
    return list({one.key: one for one in found}.values())
