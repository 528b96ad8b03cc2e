"""The lab's text as the papers' training experiments need it: packed conversations with their true answers."""

from __future__ import annotations

from itertools import islice

from specbench_ss.engine.target import Target
from specbench_ss.training.data import completion_mask, conversations, pack, render, special_ids, tokenize
from specbench_ss.training.loop import DrafterText

ROW = 256  # tokens a packed row, unless another length is asked for


def lab_text(target: Target, split: str, talks: int, seed: int = 0, length: int = ROW) -> DrafterText:
    """Return this many conversations of a split, packed in rows of `length` tokens.

    The same arguments always generate the same ones.
    """
    special = special_ids(target.tokenizer)
    texts = [render(example) for example in islice(conversations(split, seed), talks)]
    rows = pack(tokenize(target.tokenizer, texts), length, special["pad"])
    return DrafterText(rows, lambda row: completion_mask(row, special), special["eos"], seed)
