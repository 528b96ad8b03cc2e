"""Packing documents of any length into rows of one length. Knows numbers of tokens; nothing of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from numpy.typing import NDArray


def plan_rows(lengths: Iterable[int], length: int, window: int = 64) -> list[list[int]]:
    """Which documents share a row: for each row the numbers of its documents, in the order they are laid out.

    A document is never split, and one longer than `length` is left out. A row starts with the oldest document that
    waits, then the longest of the `window` oldest that still fits goes next.
    """
    plan: list[list[int]] = []
    waiting: list[tuple[int, int]] = []  # (document, its length), oldest first
    source = ((i, n) for i, n in enumerate(lengths) if n <= length)
    exhausted = False
    while waiting or not exhausted:
        row: list[int] = []
        room = length
        while True:
            while len(waiting) < window and not exhausted:
                document = next(source, None)
                exhausted = document is None
                if document is not None:
                    waiting.append(document)
            fits = [i for i, (_, n) in enumerate(waiting) if n <= room]
            if not fits:
                break
            # the first of a row is the oldest, so that no long one waits for ever
            best = fits[0] if not row else max(fits, key=lambda i: waiting[i][1])
            taken, n = waiting.pop(best)
            row.append(taken)
            room -= n
        if row:
            plan.append(row)
    return plan


def lay_out(documents: Sequence[NDArray[Any]], plan: Sequence[Sequence[int]], rows: NDArray[Any]) -> None:
    """Write the documents into rows [R, length] as planned; what lies behind a row's last document is left as it is."""
    for row, numbers in zip(rows, plan, strict=True):
        end = 0
        for number in numbers:
            document = documents[number]
            row[end : end + len(document)] = document
            end += len(document)
