"""The text that drafters learn from: a user's conversations, or a model's own answers to them, as packed rows.

`load_rows` is all that a trainer needs. Rows are made once and then read from disk. This module knows no method and no
loss.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from specbench_ss.conversations import Conversation, read_conversation
from specbench_ss.errors import UserError
from specbench_ss.models.load import template_hash
from specbench_ss.storage import cache_folder
from specbench_ss.training.text.own_answers import OwnAnswers, own_documents
from specbench_ss.training.text.rendering import Rendered, Renderer
from specbench_ss.training.text.row_cache import Built, cached
from specbench_ss.training.text.rows import Counts, TrainingRows, pack_documents
from specbench_ss.training.text.sources import Source, open_source

FORMAT = 2  # of what is kept on disk, and of how it is made: a change makes all rows anew
EVAL_FRACTION = 0.02

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TrainingText:
    """Rows to learn from, and rows of other conversations to evaluate on (none, [0, L], for an eval_fraction of 0)."""

    train: TrainingRows
    held_out: TrainingRows


def load_rows(
    source: str | Path | Sequence[str | Path],
    tokenizer: Any,
    length: int,
    *,
    eval_fraction: float = EVAL_FRACTION,
    seed: int = 0,
    columns: Mapping[str, str] | None = None,
    own: OwnAnswers | None = None,
    cache: Path | None = None,
    log: Log = print,
) -> TrainingText:
    """Return packed rows of `length` tokens from conversation data. They are made once, then memory-mapped from disk.

    source: files (.jsonl, .json), folders, or the id of a Hugging Face data set, in the forms that
    `conversations.read_conversation` knows. columns: {a form's name of a column: the data's own name}. own: let a model
    give the answers, in place of those in the data. cache: folder to keep rows in, by default the user's cache folder.
    seed: for the order of the conversations in the rows, and for sampled answers. log: is given one line of counts.

    Raises UserError for data that cannot be read, has no completion, or does not fit the chat template.
    """
    recipe = _Recipe(length, eval_fraction, seed, dict(columns or {}), own)
    data = open_source(source)
    about = {
        "format": FORMAT,
        "data": data.digest(),
        "tokenizer": tokenizer_hash(tokenizer),
        "template": template_hash(tokenizer),
        **recipe.about(),
    }
    text = TrainingText(
        *cached(
            cache or cache_folder() / "rows", about, lambda work: _build(recipe, data, Renderer(tokenizer), work, log)
        )
    )
    log(f"training text: {text.train.counts.line()}; held out: {text.held_out.counts.line()}")
    return text


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How rows are made of the data."""

    length: int
    eval_fraction: float
    seed: int
    columns: dict[str, str]
    own: OwnAnswers | None

    def __post_init__(self) -> None:
        if self.length < 2:
            raise UserError(f"the row length must be at least 2, not {self.length}")
        if not 0 <= self.eval_fraction < 1:
            raise UserError(f"the eval fraction must be at least 0 and below 1, not {self.eval_fraction}")
        if self.own is not None and not 0 < self.own.limit < self.length:
            raise UserError(
                f"own answers of up to {self.own.limit} tokens do not fit behind a prompt in a row of {self.length}"
            )

    def about(self) -> dict[str, Any]:
        """Return everything in it that matters for the rows, as JSON-ready data."""
        return {
            "length": self.length,
            "eval_fraction": self.eval_fraction,
            "seed": self.seed,
            "columns": self.columns,
            "own": None if self.own is None else self.own.about(),
        }


def tokenizer_hash(tokenizer: Any) -> str:
    """Return a short sha256 of all that a tokenizer does to text, except its chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    whole = json.dumps(sorted(tokenizer.get_vocab().items())) if backend is None else backend.to_str()
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def _build(recipe: _Recipe, data: Source, renderer: Renderer, work: Path, log: Log) -> Built:
    own = recipe.own
    read = [read_conversation(place, row, recipe.columns, own is not None) for place, row in data.rows()]
    if not read:
        raise UserError("the training data is empty: there is no conversation in it")
    talks = [c for c in read if (c.messages if own else c.has_completion)]
    if not talks:
        raise UserError("the training data has no prompt" if own else "the training data has no completion")
    made: Sequence[Rendered | None]
    if own is None:
        made = [renderer.render(c.answered, c.place) for c in talks]
    else:
        made = own_documents(own, renderer, talks, recipe.length, recipe.seed, work, log)
    pairs = list(zip(talks, made, strict=True))
    train, held_out = (
        _side(
            recipe,
            sum(c.held_out(recipe.eval_fraction) is side for c in read),
            [(c, document) for c, document in pairs if c.held_out(recipe.eval_fraction) is side],
            renderer.pad,
        )
        for side in (False, True)
    )
    if not len(train) and len(held_out):
        raise UserError(
            f"nothing is left to train on: all of the data ({held_out.counts.line()}) falls into the held-out share. "
            "Give more conversations, or hold out fewer: see --eval-fraction"
        )
    if not len(train):
        raise UserError(f"no conversation is left to train on: {train.counts.line()}")
    return train, held_out


def _side(recipe: _Recipe, read: int, made: Sequence[tuple[Conversation, Rendered | None]], pad: int) -> TrainingRows:
    """Return the rows of one side of the split, and count what became of the conversations on that side."""
    fitted = [None if document is None else document.fit(recipe.length) for _, document in made]
    kept = [document for document in fitted if document is not None]
    order = np.random.default_rng(recipe.seed).permutation(len(kept))
    rows = pack_documents([kept[i] for i in order], recipe.length, pad)
    counts = Counts(
        conversations=read,
        unanswered=read - len(made),
        too_long=len(made) - len(kept),
        out_of_order=sum(c.out_of_order for c, _ in made),
        cut=sum(f is not None and d is not None and f.spans != d.spans for (_, d), f in zip(made, fitted, strict=True)),
        documents=len(kept),
        tokens=int((rows.documents >= 0).sum()),
        completion_tokens=int(rows.mask.sum()),
    )
    return replace(rows, counts=counts)
