"""Packed training rows: token ids, completions, which tokens are of one document. Knows no file and no tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specbench_ss.methods.train.packing import lay_out, plan_rows
from specbench_ss.methods.train.rendering import Rendered


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of the conversations of one side of the split, and how many tokens there are (padding apart).

    out_of_order: turns left out where roles do not alternate; cut: shortened to a row; too_long: no answer begins
    within a row; unanswered: nothing the assistant says.
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
        """All of it that is not nothing, on one line."""
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
    """R rows of L tokens, several whole conversations ("documents") in one, padded at the end; memory-mapped or not.

    ids int32 [R, L]. mask bool [R, L]: completions, end-of-turn tokens included, padding not. A run of True is one
    completion: two never touch. documents int32 [R, L]: the number of the document in its row, from 0; -1 in padding.

    A model that runs a row under a plain causal mask from position 0 on lets a document see those before it in its row;
    the lab's base is trained so. With `visible` and `positions` every document stands alone, as prompts do in decoding.
    """

    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    documents: NDArray[np.int32]
    counts: Counts = Counts()

    def __len__(self) -> int:
        """R."""
        return len(self.ids)


def positions(documents: NDArray[np.int32]) -> NDArray[np.int64]:
    """documents [B, L] -> the position of each token in its own document [B, L], from 0; padding counts from 0 too."""
    at = np.broadcast_to(np.arange(documents.shape[1]), documents.shape)
    begins = np.ones(documents.shape, bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    found: NDArray[np.int64] = at - np.maximum.accumulate(np.where(begins, at, 0), axis=1)
    return found


def visible(documents: NDArray[np.int32]) -> NDArray[np.bool_]:
    """documents [B, L] -> [B, L, L]: token q sees token k, itself or an earlier one, in its own document alone.

    Padding sees padding, so no row of a softmax is empty.
    """
    same: NDArray[np.bool_] = documents[:, :, None] == documents[:, None, :]
    return np.tril(same)


def pack_documents(documents: Sequence[Rendered], length: int, pad: int) -> TrainingRows:
    """Whole documents, none longer than `length`, into rows; counts are left empty."""
    plan = plan_rows([len(d.ids) for d in documents], length)
    ids = np.full((len(plan), length), pad, np.int32)
    mask = np.zeros(ids.shape, bool)
    numbers = np.full(ids.shape, -1, np.int32)
    place = {document: number for row in plan for number, document in enumerate(row)}
    lay_out([d.ids for d in documents], plan, ids)
    lay_out([d.mask for d in documents], plan, mask)
    lay_out([np.full(len(d.ids), place[i], np.int32) for i, d in enumerate(documents)], plan, numbers)
    return TrainingRows(ids, mask, numbers)
