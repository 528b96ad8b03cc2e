"""Packed training rows: token ids, completions, and which tokens belong to one document.

This module knows no file and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbench_ss.training.text.rendering import Rendered


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of the conversations on one side of the split, and the number of tokens without padding.

    out_of_order: turns were left out where roles do not alternate. cut: shortened to a row. too_long: no answer begins
    within a row. unanswered: the assistant says nothing.
    """

    conversations: int = 0
    unanswered: int = 0
    too_long: int = 0
    out_of_order: int = 0
    cut: int = 0
    documents: int = 0
    tokens: int = 0
    completion_tokens: int = 0

    def line(self) -> str:
        """Return all counts that are not zero, on one line."""
        said = [f"{self.documents} of {self.conversations} conversations"]
        said += [f"{self.tokens} tokens, {self.completion_tokens} of them in completions"] if self.tokens else []
        lost = {
            "cut to a row": self.cut,
            "with turns out of order left out": self.out_of_order,
            "dropped as too long": self.too_long,
            "dropped without an answer": self.unanswered,
        }
        return ", ".join([*said, *(f"{count} {what}" for what, count in lost.items() if count)])


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """R rows of L tokens with several whole conversations ("documents") each, padded at the end; memory-mapped or not.

    ids: int32 [R, L]. mask: bool [R, L], True in completions, end-of-turn tokens included and padding not; each run of
    True is one completion, since two never touch. documents: int32 [R, L], the number of the document in its row, from
    0; -1 in padding.

    A model that runs a row under a plain causal mask from position 0 on lets a document see those before it in its row;
    the lab's base is trained so. With `visible` and `positions` every document stands alone, as prompts do in decoding.
    """

    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    documents: NDArray[np.int32]
    counts: Counts = Counts()

    def __len__(self) -> int:
        """Return the number of rows, R."""
        return len(self.ids)


def positions(documents: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return each token's position in its own document, [B, L], from 0. documents: [B, L].

    Padding counts from 0 too.
    """
    at = np.broadcast_to(np.arange(documents.shape[1]), documents.shape)
    begins = np.ones(documents.shape, bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    found: NDArray[np.int64] = at - np.maximum.accumulate(np.where(begins, at, 0), axis=1)
    return found


def visible(documents: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return bool [B, L, L]: token q sees token k if k is q or an earlier token of the same document.

    documents: [B, L]. Padding sees padding, so no row of a softmax is empty.
    """
    same: NDArray[np.bool_] = documents[:, :, None] == documents[:, None, :]
    return np.tril(same)


def pack_documents(documents: Sequence[Rendered], length: int, pad: int) -> TrainingRows:
    """Pack whole documents, none longer than `length`, into rows. The counts are left empty."""
    plan = plan_rows([len(d.ids) for d in documents], length)
    ids = np.full((len(plan), length), pad, np.int32)
    mask = np.zeros(ids.shape, bool)
    numbers = np.full(ids.shape, -1, np.int32)
    place = {document: number for row in plan for number, document in enumerate(row)}
    lay_out([d.ids for d in documents], plan, ids)
    lay_out([d.mask for d in documents], plan, mask)
    lay_out([np.full(len(d.ids), place[i], np.int32) for i, d in enumerate(documents)], plan, numbers)
    return TrainingRows(ids, mask, numbers)


def plan_rows(lengths: Iterable[int], length: int, window: int = 64) -> list[list[int]]:
    """Decide which documents share a row: return the numbers of each row's documents, in the order they are laid out.

    A document is never split, and one longer than `length` is left out. A row starts with the oldest document that
    waits; then the longest of the `window` oldest that still fits goes next.
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
    """Write the documents into rows [R, length] as planned. What follows a row's last document is left as it is."""
    for row, numbers in zip(rows, plan, strict=True):
        end = 0
        for number in numbers:
            document = documents[number]
            row[end : end + len(document)] = document
            end += len(document)
