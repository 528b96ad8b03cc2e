"""`ssbench lab train`: every stage from text to shipped weights, seeded, resumable, on CPU or CUDA.

A stage that is done leaves its files in the work folder and is skipped the next time; one that was cut off goes on
from its checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specbench_ss.errors import UserError
from specbench_ss.methods.checkpoint import write_checkpoint
from specbench_ss.methods.lab import base as base_stage
from specbench_ss.methods.lab import cards
from specbench_ss.methods.lab.answers import own_conversations
from specbench_ss.methods.lab.text import (
    POLISH_WEIGHTS,
    WEIGHTS,
    completion_mask,
    conversations,
    pack,
    render,
    tokenize,
)
from specbench_ss.methods.lab.tokenizer import train_tokenizer
from specbench_ss.methods.medusa.training import MedusaTrainee, mean_accuracies
from specbench_ss.methods.ss.config import StreamConfig
from specbench_ss.methods.ss.training import StreamsTrainee
from specbench_ss.methods.training import Budget, TogetherTrainer, Trainee
from specbench_ss.models import hash_weights, load_target, resolve_device
from specbench_ss.target import Target

Log = Callable[[str], None]

POLISH_SHARE = 0.33
DRAFTER_TALKS = {"s": 10_000, "m": 200_000}
CALIBRATION_TALKS = 768
CALIBRATION_BATCHES = 12
DRAFTER_STEPS = 900
LAB_STREAMS = {
    "s": StreamConfig(gamma=4, n_msa_layers=4, adapter_rank=128, init_rank=64),
    "m": StreamConfig(adapter_rank=32),
}
STREAM_LR = 1.5e-2
STREAM_EMBEDDING_LR = 0.1
DRAFTER_ROWS = 5
# what pays on two CPU cores: see docs/log.md
MEDUSA_NODES = 15
SS_ADVICE = {"k": 3, "n_draft": 8, "n_keep": 16}


@dataclass(frozen=True, slots=True)
class Workshop:
    """What all stages share."""

    out: Path
    size: str
    device: str
    seed: int
    scale: float
    log: Log

    def scaled(self, count: int, least: int) -> int:
        """A count of examples or steps under the budget."""
        return max(least, int(count * self.scale))

    @property
    def compile(self) -> bool:
        """Whether compiling pays: not for a trial run, and on a CPU only with a C++ compiler at hand."""
        return self.scale >= 0.1 and (self.device != "cpu" or any(map(shutil.which, ("g++", "clang++", "c++"))))

    def folder(self, stage: str) -> Path:
        """The work folder of a stage."""
        path = self.out / stage
        path.mkdir(parents=True, exist_ok=True)
        return path

    def base_size(self, name: str) -> base_stage.BaseSize:
        """The named size, with its budget scaled."""
        size = base_stage.SIZES[name]
        return replace(size, tokens=self.scaled(size.tokens, size.rows_per_step * size.row_length))

    def tokenizer(self) -> Any:
        """The tokenizer that the first stage made."""
        from transformers import AutoTokenizer

        path = self.out / "tokenizer"
        if not (path / "tokenizer.json").exists():
            raise UserError(f"no tokenizer in {self.out}: run stage 'tokenizer' first")
        return AutoTokenizer.from_pretrained(path)

    def base_target(self) -> Target:
        """The base as it will be shipped: float16 weights, computed in float32 (bfloat16 on CUDA trains as well)."""
        from transformers import AutoModelForCausalLM

        path = self.out / "polish" / "model"
        if not (path / "model.safetensors").exists():
            raise UserError(f"no base model in {self.out}: run stage 'polish' first")
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        model = model.to(self.device)
        target = Target(model, self.tokenizer(), "lab", path)
        target.weights_hash = hash_weights(model)
        return target


def special_ids(tokenizer: Any) -> dict[str, int]:
    """Ids of the special tokens by role."""
    ids = {role: tokenizer.convert_tokens_to_ids(f"<|{role}|>") for role in ("pad", "bos", "user", "assistant")}
    return {**ids, "eos": tokenizer.eos_token_id}


def stage_tokenizer(shop: Workshop) -> None:
    """BPE from a sample of the training text."""
    texts = [
        render(e).replace("<|", "\n<|") for e in islice(conversations("train", shop.seed), shop.scaled(24_000, 4_000))
    ]
    for marker in ("<|bos|>", "<|user|>", "<|assistant|>", "<|end|>"):
        texts = [t.replace(marker, "") for t in texts]
    tokenizer = train_tokenizer(texts, shop.base_size(shop.size).vocab)
    tokenizer.model_max_length = shop.base_size(shop.size).context
    tokenizer.save_pretrained(shop.folder("tokenizer"))
    shop.log(f"tokenizer: {len(tokenizer)} entries")


def training_rows(
    shop: Workshop, size: base_stage.BaseSize, seed: int, weights: Mapping[str, float] = WEIGHTS
) -> NDArray[np.int32]:
    """Packed rows [R, length], enough for the size's budget; made once, then read from disk."""
    path = shop.folder("text") / f"rows-{size.tokens}-{size.row_length}-{seed}.npy"
    if path.exists():
        return np.load(path, mmap_mode="r")  # type: ignore[no-any-return]
    tokenizer = shop.tokenizer()
    docs: list[NDArray[np.int32]] = []
    tokens, source = 0, conversations("train", seed, weights)
    while tokens < size.tokens:
        new = tokenize(tokenizer, [render(e) for e in islice(source, min(2_000, 16 + size.tokens // 200))])
        docs += new
        tokens += sum(map(len, new))
    rows = pack(docs, size.row_length, special_ids(tokenizer)["pad"])
    rows = rows[: -(len(rows) % size.rows_per_step) or None]  # whole steps
    np.save(path, rows)
    shop.log(f"text: {len(docs)} conversations, {tokens} tokens, {len(rows)} rows of {size.row_length}")
    return rows


def _train_base(
    shop: Workshop, stage: str, size: base_stage.BaseSize, rows: NDArray[np.int32], start: Path | None = None
) -> None:
    """Train a Llama of this size on these rows, from nothing or from a model on disk."""
    from transformers import AutoModelForCausalLM

    tokenizer = shop.tokenizer()
    special = special_ids(tokenizer)
    model: Any
    if start is None:
        model = base_stage.new_model(size, special, shop.seed)
    else:
        model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    trainer = base_stage.BaseTrainer(model, size, rows, special, shop.device, shop.folder(stage), shop.compile)
    trainer.train(shop.log)
    save_model(model, tokenizer, shop.folder(stage) / "model")


def save_model(model: Any, tokenizer: Any, path: Path) -> None:
    """A float16 safetensors checkpoint with its tokenizer, as any Hugging Face model has it."""
    import copy

    half = copy.deepcopy(model).to("cpu", torch.float16)
    half.save_pretrained(path, safe_serialization=True)
    tokenizer.save_pretrained(path)


def stage_base(shop: Workshop) -> None:
    """The base model on all tasks alike."""
    size = shop.base_size(shop.size)
    _train_base(shop, "base", size, training_rows(shop, size, shop.seed + 1))


def stage_polish(shop: Workshop) -> None:
    """The base's last part: more of what computes, with arithmetic drills, at a lower learning rate."""
    size = shop.base_size(shop.size)
    size = replace(
        size, tokens=max(int(size.tokens * POLISH_SHARE), size.rows_per_step * size.row_length), lr=size.lr / 2
    )
    rows = training_rows(shop, size, shop.seed + 4, POLISH_WEIGHTS)
    _train_base(shop, "polish", size, rows, shop.out / "base" / "model")


def stage_answers(shop: Workshop) -> None:
    """The base's own answers to training and calibration prompts, packed like its training text."""
    tokenizer = shop.tokenizer()
    model = shop.base_target().model.to(torch.bfloat16)  # half the traffic; what it says is the same but for rare ties
    for split, count in (("train", DRAFTER_TALKS[shop.size]), ("calibration", CALIBRATION_TALKS)):
        path = shop.folder("answers") / f"{split}.npy"
        if path.exists():
            continue
        docs: list[NDArray[np.int32]] = []
        examples, longest = conversations(split, shop.seed + 2), min(192, shop.scaled(192, 8))
        for batch in own_conversations(model, tokenizer, examples, shop.scaled(count, 64), limit=longest):
            docs += batch
            shop.log(f"answers {split}: {len(docs)} conversations, {sum(map(len, docs))} tokens")
        rows = pack(docs, shop.base_size(shop.size).row_length, special_ids(tokenizer)["pad"])
        np.save(path, rows)


def _together(shop: Workshop, target: Target, trainees: list[Trainee], split: str, steps: int) -> TogetherTrainer:
    special = special_ids(shop.tokenizer())
    rows = np.load(shop.out / "answers" / f"{split}.npy", mmap_mode="r")
    return TogetherTrainer(
        target,
        trainees,
        rows,
        lambda row: completion_mask(row, special),
        special["eos"],
        Budget(shop.scaled(steps, 2), rows_per_step=DRAFTER_ROWS),
        shop.folder(f"drafters-{split}"),
        shop.seed + 3,
    )


def stage_drafters(shop: Workshop) -> None:
    """Medusa heads and streams side by side: same batches, same steps, same frozen base."""
    target = shop.base_target()
    torch.manual_seed(shop.seed + 3)
    medusa = MedusaTrainee(target, heads=4)
    streams = StreamsTrainee(target, LAB_STREAMS[shop.size], lr=STREAM_LR, embedding_lr=STREAM_EMBEDDING_LR)
    trainer = _together(shop, target, [medusa, streams], "train", DRAFTER_STEPS)
    trainer.train(shop.log)
    steps = trainer.budget.steps
    calibration = _together(shop, target, [medusa, streams], "calibration", steps)
    accuracies = mean_accuracies(calibration, medusa, shop.scaled(CALIBRATION_BATCHES, 1))
    base = {"base_hash": target.weights_hash, "base_dtype": str(target.dtype), "trained": {"steps": steps}}
    heads = {**base, "medusa_num_heads": 4, "medusa_num_layers": 1, "accuracies": accuracies, "nodes": MEDUSA_NODES}
    write_checkpoint(shop.folder("medusa"), medusa.module, heads, "medusa_lm_head.safetensors")
    config = {**base, "streams": LAB_STREAMS[shop.size].as_dict(), "advice": SS_ADVICE}
    write_checkpoint(shop.folder("ss"), streams.module, config)


def stage_draft(shop: Workshop) -> None:
    """The small draft model for two-model speculative decoding, on the same text."""
    size = shop.base_size("draft")
    _train_base(shop, "draft", size, training_rows(shop, size, shop.seed + 1))


def stage_export(shop: Workshop) -> None:
    """Everything that is shipped, into one folder: base, draft and a folder a drafter."""
    out = shop.folder("export")
    for name, source in (("base", "polish/model"), ("draft", "draft/model"), ("medusa", "medusa"), ("ss", "ss")):
        shutil.copytree(shop.out / source, out / name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("done.json"))
    (out / "lab.json").write_text(json.dumps({"size": shop.size, "seed": shop.seed}) + "\n")
    shop.log(f"export: {sum(f.stat().st_size for f in out.rglob('*') if f.is_file()) / 1e6:.1f} MB in {out}")


def stage_cards(shop: Workshop) -> None:
    """Measure the family and write its cards."""
    out = shop.out / "export"
    base, draft = (load_target(str(out / n), dtype="float32", device=shop.device) for n in ("base", "draft"))
    special, longest = special_ids(base.tokenizer), min(256, shop.scaled(256, 8))
    losses = [cards.held_out_loss(t.model, t.tokenizer, special, shop.scaled(400, 8)) for t in (base, draft)]
    shop.log(f"cards: held-out loss {losses[0]:.4f}, of the draft {losses[1]:.4f}")
    scores = cards.task_scores(base, shop.scaled(60, 1), longest)
    shop.log("cards: " + ", ".join(f"{c} {m} {v:.3f}" for c, (m, v, _) in scores.items()))
    taus = cards.taus(base, shop.scaled(3, 1), longest)
    shop.log("cards: " + ", ".join(f"{name} tau {value:.2f}" for name, value in taus.items()))
    cards.write_cards(out, base, draft, cards.Measured(losses[0], losses[1], scores, taus))


STAGES: dict[str, Callable[[Workshop], None]] = {
    "tokenizer": stage_tokenizer,
    "base": stage_base,
    "polish": stage_polish,
    "answers": stage_answers,
    "drafters": stage_drafters,
    "draft": stage_draft,
    "export": stage_export,
    "cards": stage_cards,
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
    shop = Workshop(out, size, resolve_device(device), seed, budget_scale, log)
    for name, run in STAGES.items():
        done = shop.folder(name) / "done.json"
        if stages and name not in stages:
            continue
        if done.exists():
            log(f"{name}: done before")
            continue
        run(shop)
        done.write_text(json.dumps({"seed": seed, "size": size, "budget_scale": budget_scale}))
