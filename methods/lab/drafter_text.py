"""What the lab's drafters learn from: the base's own answers, in the same batches for all of them."""

from __future__ import annotations

import numpy as np

from specbench_ss.methods.lab.text import completion_mask
from specbench_ss.methods.lab.tokenizer import special_ids
from specbench_ss.methods.lab.workshop import Workshop
from specbench_ss.methods.together import Budget, DrafterText

DRAFTER_STEPS = 900
DRAFTER_ROWS = 5


def drafter_text(shop: Workshop, split: str) -> DrafterText:
    """Rows of the split 'train' or 'calibration'."""
    special = special_ids(shop.tokenizer())
    rows = np.load(shop.made(f"answers/{split}.npy", "answers"), mmap_mode="r")
    return DrafterText(rows, lambda row: completion_mask(row, special), special["eos"], shop.seed + 3)


def drafter_budget(shop: Workshop) -> Budget:
    """Steps and rows of every drafter."""
    return Budget(shop.scaled(DRAFTER_STEPS, 2), rows_per_step=DRAFTER_ROWS)
