"""The lab's training text: conversations of its generators, and rows of tokens in the lab's chat form.

The generators are the folder `lab` of a checkout (docs/design/lab.md). The package never imports it; `python -m lab
text` in another process writes the conversations. A completion mask follows from the lab's markers; text of other
origin has a stored one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import specbench_ss
from specbench_ss.errors import UserError
from specbench_ss.training.text.rows import lay_out, plan_rows

CHECKOUT = Path(specbench_ss.__file__).parents[1]


class LabText(Protocol):
    """A conversation with its acceptable answers."""

    @property
    def turns(self) -> tuple[str, ...]:
        """Return the user's messages."""

    @property
    def answers(self) -> tuple[tuple[str, ...], ...]:
        """Return the acceptable answers of each turn."""


@dataclass(frozen=True, slots=True)
class LabConversation:
    """One conversation: the user's messages, and for each the acceptable answers, the one to train on first."""

    turns: tuple[str, ...]
    answers: tuple[tuple[str, ...], ...]


def conversations(split: str, seed: int) -> Iterator[LabConversation]:
    """Yield conversations of a split without end, the same ones for the same seed.

    Raises UserError where there are no generators: a wheel does not contain them.
    """
    if not (CHECKOUT / "lab" / "__main__.py").is_file():
        raise UserError("the lab's training text needs the generators in lab/: run ssbench from a checkout")
    command = [sys.executable, "-m", "lab", "text", "--split", split, "--seed", str(seed)]
    with subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True, encoding="utf-8") as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                row = json.loads(line)
                yield LabConversation(tuple(row["turns"]), tuple(map(tuple, row["answers"])))
        finally:
            process.kill()
    raise UserError(f"`python -m lab text` ended with exit code {process.returncode}")


def special_ids(tokenizer: Any) -> dict[str, int]:
    """Return the ids of the lab's special tokens by role."""
    ids = {role: tokenizer.convert_tokens_to_ids(f"<|{role}|>") for role in ("pad", "bos", "user", "assistant")}
    return {**ids, "eos": tokenizer.eos_token_id}


def render(example: LabText) -> str:
    """Return the conversation as one string, in the form of the chat template."""
    parts = [
        f"<|user|>{turn}<|assistant|>{answers[0]}<|end|>"
        for turn, answers in zip(example.turns, example.answers, strict=True)
    ]
    return "<|bos|>" + "".join(parts)


def completion_mask(ids: NDArray[np.int32], special: Mapping[str, int]) -> NDArray[np.bool_]:
    """Return True for each token of an answer, its end token included; an answer may lack its end."""
    at = np.arange(len(ids))
    opened = np.maximum.accumulate(np.where(ids == special["assistant"], at, -1))
    closes = np.where((ids == special["bos"]) | (ids == special["pad"]), at, -1)
    closes[1:] = np.maximum(closes[1:], np.where(ids[:-1] == special["eos"], at[1:], -1))
    closed = np.maximum.accumulate(closes)
    mask: NDArray[np.bool_] = (opened >= 0) & (opened >= closed) & (ids != special["assistant"])
    return mask


def tokenize(tokenizer: Any, texts: list[str]) -> list[NDArray[np.int32]]:
    """Return the token ids of rendered conversations."""
    return [
        np.asarray(e.ids, np.int32) for e in tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    ]


def pack(docs: list[NDArray[np.int32]], length: int, pad: int) -> NDArray[np.int32]:
    """Pack whole conversations into rows [R, length]. Those of one row see each other, as in the lab's own training."""
    plan = plan_rows(map(len, docs), length)
    rows = np.full((len(plan), length), pad, np.int32)
    lay_out(docs, plan, rows)
    return rows
