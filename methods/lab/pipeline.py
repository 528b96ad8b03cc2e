"""`ssbench lab train`: every stage from text to shipped weights, seeded, resumable, on CPU or CUDA.

A stage that is done leaves its files in the work folder and is skipped the next time; one that was cut off goes on
from its checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specbench_ss.errors import UserError
from specbench_ss.methods.lab import base as base_stage
from specbench_ss.methods.lab.text import conversations, pack, render, tokenize
from specbench_ss.methods.lab.tokenizer import train_tokenizer

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Workshop:
    """What all stages share."""

    out: Path
    size: str
    device: str
    seed: int
    scale: float
    log: Log

    def folder(self, stage: str) -> Path:
        """The work folder of a stage."""
        path = self.out / stage
        path.mkdir(parents=True, exist_ok=True)
        return path

    def base_size(self, name: str) -> base_stage.BaseSize:
        """The named size, with its budget scaled."""
        size = base_stage.SIZES[name]
        return replace(size, tokens=int(size.tokens * self.scale))

    def tokenizer(self) -> Any:
        """The tokenizer that the first stage made."""
        from transformers import AutoTokenizer

        path = self.out / "tokenizer"
        if not (path / "tokenizer.json").exists():
            raise UserError(f"no tokenizer in {self.out}: run stage 'tokenizer' first")
        return AutoTokenizer.from_pretrained(path)


def special_ids(tokenizer: Any) -> dict[str, int]:
    """Ids of the special tokens by role."""
    ids = {role: tokenizer.convert_tokens_to_ids(f"<|{role}|>") for role in ("pad", "bos", "user", "assistant")}
    return {**ids, "eos": tokenizer.eos_token_id}


def stage_tokenizer(shop: Workshop) -> None:
    """BPE from a sample of the training text."""
    texts = [render(e).replace("<|", "\n<|") for e in islice(conversations("train", shop.seed), 24_000)]
    for marker in ("<|bos|>", "<|user|>", "<|assistant|>", "<|end|>"):
        texts = [t.replace(marker, "") for t in texts]
    tokenizer = train_tokenizer(texts, shop.base_size(shop.size).vocab)
    tokenizer.model_max_length = shop.base_size(shop.size).context
    tokenizer.save_pretrained(shop.folder("tokenizer"))
    shop.log(f"tokenizer: {len(tokenizer)} entries")


def training_rows(shop: Workshop, name: str, seed: int) -> NDArray[np.int32]:
    """Packed rows [R, length] for a base of this size, enough for its budget; made once, then read from disk."""
    size = shop.base_size(name)
    path = shop.folder("text") / f"rows-{size.tokens}-{size.row_length}-{seed}.npy"
    if path.exists():
        return np.load(path, mmap_mode="r")  # type: ignore[no-any-return]
    tokenizer = shop.tokenizer()
    docs: list[NDArray[np.int32]] = []
    tokens, source = 0, conversations("train", seed)
    while tokens < size.tokens:
        new = tokenize(tokenizer, [render(e) for e in islice(source, 2_000)])
        docs += new
        tokens += sum(map(len, new))
    rows = pack(docs, size.row_length, special_ids(tokenizer)["pad"])
    np.save(path, rows)
    shop.log(f"text: {len(docs)} conversations, {tokens} tokens, {len(rows)} rows of {size.row_length}")
    return rows


def _train_base(shop: Workshop, name: str, stage: str, seed: int) -> None:
    tokenizer = shop.tokenizer()
    special = special_ids(tokenizer)
    size = shop.base_size(name)
    rows = training_rows(shop, name, seed)
    model = base_stage.new_model(size, special, shop.seed)
    trainer = base_stage.BaseTrainer(model, size, rows, special, shop.device, shop.folder(stage))
    trainer.train(shop.log)
    save_model(model, tokenizer, shop.folder(stage) / "model")


def save_model(model: Any, tokenizer: Any, path: Path) -> None:
    """A float16 safetensors checkpoint with its tokenizer, as any Hugging Face model has it."""
    import copy

    half = copy.deepcopy(model).to("cpu", torch.float16)
    half.save_pretrained(path, safe_serialization=True)
    tokenizer.save_pretrained(path)


def stage_base(shop: Workshop) -> None:
    """The base model."""
    _train_base(shop, shop.size, "base", shop.seed + 1)


STAGES: dict[str, Callable[[Workshop], None]] = {
    "tokenizer": stage_tokenizer,
    "base": stage_base,
}


def train(
    out: Path,
    size: str = "s",
    stages: tuple[str, ...] = (),
    device: str = "cpu",
    seed: int = 0,
    budget_scale: float = 1.0,
    log: Log = print,
) -> None:
    """Run the stages (all by default) in order. Raises UserError for an unknown stage or size."""
    for name in stages:
        if name not in STAGES:
            raise UserError(f"unknown stage {name!r}; stages: {', '.join(STAGES)}")
    if size not in ("s", "m"):
        raise UserError(f"unknown size {size!r}; sizes: s, m")
    shop = Workshop(out, size, device, seed, budget_scale, log)
    for name, run in STAGES.items():
        done = shop.folder(name) / "done.json"
        if stages and name not in stages:
            continue
        if done.exists():
            log(f"{name}: done before")
            continue
        run(shop)
        done.write_text(json.dumps({"seed": seed, "size": size, "budget_scale": budget_scale}))
