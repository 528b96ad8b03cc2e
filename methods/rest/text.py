"""Documents for a datastore: text files, chats in the model's template, its own answers, lab conversations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbench_ss.conversations import read_conversation
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.models.load import check_template
from specbench_ss.prompt_files import Row, open_source, usable
from specbench_ss.training.chat_format import apply
from specbench_ss.training.data import lab_conversations, load_rows
from specbench_ss.training.self_distill import ResponseCache
from specbench_ss.user_files import read_text

BATCH = 256  # texts tokenized in one call
LAB_SEED = 2  # seed of the conversations that the lab's base answered for the drafters


def documents(tokenizer: Any, texts: Iterator[str]) -> Iterator[NDArray[np.int32]]:
    """Yield the ids of each nonempty text, int32 [n]."""
    while batch := list(islice(texts, BATCH)):
        for ids in tokenizer(batch, add_special_tokens=False)["input_ids"]:
            if ids:
                yield np.asarray(ids, np.int32)


def file_texts(tokenizer: Any, names: Sequence[str | Path]) -> Iterator[str]:
    """Yield text files (.txt, one document each), and chat files, folders or hub data sets as in `ssbench train`.

    A row with only a 'text' is a document too. Raise UserError for unreadable data.
    """
    for name in names:
        if Path(name).suffix == ".txt":
            yield read_text(Path(name))
            continue
        yield from filter(None, usable(open_source(name).rows(), partial(_text, tokenizer), print))


def _text(tokenizer: Any, place: str, row: Row) -> str:
    """Return the text of a row: a document, or a conversation in the model's template."""
    if set(row) == {"text"} and isinstance(row["text"], str):
        return row["text"]
    messages = read_conversation(place, row).messages
    return apply(_with_template(tokenizer), messages, place, False) if messages else ""


def lab_texts(tokenizer: Any, count: int, seed: int = LAB_SEED) -> Iterator[str]:
    """Yield generated training conversations in the model's chat template."""
    for number, messages in enumerate(islice(lab_conversations("train", seed), count)):
        yield apply(_with_template(tokenizer), messages, f"conversation {number}", False)


def regenerate_responses(target: Target, data: Sequence[str], limit: int, length: int) -> Iterator[NDArray[np.int32]]:
    """Yield the target's own greedy answers to the data's questions, int32 [n] each, with their EOS.

    They are the answers of `ssbench train --regenerate-responses`: generated once and cached.
    length: of prompt and answer. Raise UserError for unreadable data.
    """
    check_template(target.tokenizer, target.name)
    text = load_rows(list(data), target.tokenizer, length, own=ResponseCache(target, limit))
    for rows in (text.train, text.validation):
        for ids, mask in zip(rows.ids, rows.mask, strict=True):
            edges = np.flatnonzero(np.diff(np.pad(mask.astype(np.int8), 1)))  # begin, end, begin, end ..
            for begin, end in edges.reshape(-1, 2):
                yield np.asarray(ids[begin:end], np.int32)


def _with_template(tokenizer: Any) -> Any:
    if tokenizer.chat_template is None:
        raise UserError("conversations need a chat template, but the tokenizer has none; use --chat-template")
    return tokenizer
