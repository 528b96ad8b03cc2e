"""What is to be known of served engines, and of several requests at a time, before numbers are believed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from specbench_ss.results.concurrency import level_rows, missing
from specbench_ss.results.number_text import interval, times
from specbench_ss.runs.rows import Run

State = Literal["wrong", "warning", "not checked", "ok"]
Found = tuple[str, State, str, tuple[str, ...]]  # name, state, sentence, lines


def served_findings(run: Run) -> Iterator[Found]:
    """Yield the checks that only such runs have; nothing for another one."""
    if run.manifest["config"].get("endpoints"):
        yield from _tokens(run)
        yield from _acceptance(run)
    if turned := tuple(_turned(run)):
        said = "With several requests at a time some verdicts are others than those of one at a time."
        yield "levels of requests", "warning", said, turned
    if lacking := tuple(missing(run)):
        yield "levels", "wrong", "Not every number of requests at a time was measured; --resume goes on.", lacking


def _turned(run: Run) -> Iterator[str]:
    """Say which methods have another verdict with several requests at a time than with one."""
    found = level_rows(run)
    alone = {row.method: row.comparison for row in found if row.concurrency == 1}
    for row in found:
        if row.concurrency > 1 and row.comparison in ("faster", "slower") and row.comparison != alone[row.method]:
            how = f"{times(row.speedup)} ({interval(row.speedup_interval)})"
            yield f"{row.method} with {row.concurrency} at a time: {how} by single requests, {row.comparison}"


def _tokens(run: Run) -> Iterator[Found]:
    """Say where pieces of text were counted in place of tokens, and whether servers were counted in one way."""
    ways: dict[str, set[str]] = {label: set() for label in run.labels}
    for row in run.rows:
        if row.counted:
            ways[row.method].add(row.counted)
    known = {label: way for label, way in ways.items() if way}
    by_pieces = [label for label, way in known.items() if way != {"usage"}]
    names = ", ".join(by_pieces)
    if by_pieces and len(by_pieces) < len(known):
        said = (
            f"Tokens were counted in two ways: {names} told no number of tokens, so that pieces of text were counted."
        )
        yield "tokens", "wrong", f"{said} Times per token do not compare with those of the others.", ()
    elif by_pieces:
        said = f"No server told its number of tokens: pieces of text were counted of {names}."
        yield "tokens", "warning", f"{said} A piece may hold several tokens, above all where drafts are accepted.", ()
    elif known:
        yield "tokens", "ok", "Every server told how many tokens its answers have.", ()


def _acceptance(run: Run) -> Iterator[Found]:
    """Say of which servers nobody knows how many drafted tokens they accepted."""
    lacking = []
    for entry in run.manifest["methods"]:
        own = [row for row in run.rows if row.method == entry["label"] and row.ok]
        known = sum(row.accepted is not None for row in own)
        if known < len(own):
            told = str(entry.get("served", {}).get("acceptance", ""))
            why = told.removeprefix("not measured: ") if told.startswith("not measured") else OTHERS
            lacking.append(f"{entry['label']}, {len(own) - known:,} of {len(own):,} answers: {why}")
    if lacking:
        yield "acceptance", "not checked", f"Acceptance was not measured: {'; '.join(lacking)}.", tuple(lacking)


OTHERS = "it answered somebody else meanwhile, or did not tell its counts every time"
