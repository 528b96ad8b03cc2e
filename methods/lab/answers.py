"""The base's own greedy answers to training prompts: what drafters learn from (they draft for greedy decoding).

Batched through the model's own generate; knows no drafter.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specbench_ss.suites.lab_text.example import Example


@torch.inference_mode()
def greedy_batch(model: Any, prompts: list[list[int]], pad: int, eos: int, limit: int) -> list[list[int]]:
    """Greedy answers (end token included) to prompts of any length, in one left-padded batch."""
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), pad)
    for i, p in enumerate(prompts):
        ids[i, longest - len(p) :] = torch.tensor(p)
    ids = ids.to(model.device)
    out = model.generate(
        input_ids=ids, attention_mask=(ids != pad).long(), max_new_tokens=limit, do_sample=False,
        eos_token_id=eos, pad_token_id=pad,
    )  # fmt: skip
    answers = []
    for row in out[:, longest:].tolist():
        stop = row.index(eos) + 1 if eos in row else len(row)
        answers.append(row[:stop])
    return answers


def own_conversations(
    model: Any, tokenizer: Any, examples: Iterator[Example], count: int, batch: int = 128, limit: int = 192
) -> Iterator[list[NDArray[np.int32]]]:
    """Conversations in which the model gave every answer, as ids; one list a batch, `count` conversations in all.

    Alike conversations share a batch, so that their answers end together; batches come in random order. An answer that
    did not end within the limit ends its conversation.
    """
    backend = tokenizer.backend_tokenizer
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    pool = sorted(islice(examples, count), key=lambda e: (e.category, len(e.turns[0])))
    order = np.random.default_rng(0).permutation(range(0, len(pool), batch))
    for start in order:
        chosen = pool[start : start + batch]
        texts = [f"<|bos|><|user|>{e.turns[0]}<|assistant|>" for e in chosen]
        talks = [backend.encode(t, add_special_tokens=False).ids for t in texts]
        for turn in range(max(len(e.turns) for e in chosen)):
            going = [i for i, e in enumerate(chosen) if turn < len(e.turns) and (turn == 0 or talks[i][-1] == eos)]
            if not going:
                break
            if turn:
                for i in going:
                    text = f"<|user|>{chosen[i].turns[turn]}<|assistant|>"
                    talks[i] = talks[i] + backend.encode(text, add_special_tokens=False).ids
            for i, answer in zip(going, greedy_batch(model, [talks[i] for i in going], pad, eos, limit), strict=True):
                talks[i] = talks[i] + answer
        yield [np.asarray(t, np.int32) for t in talks]
