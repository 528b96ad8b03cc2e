"""The stages of `ssbench lab train`, each a function of the workshop; `pipeline.py` says which run and when."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specbench_ss.decoding.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods._lab import cards
from specbench_ss.methods._lab.answers import own_conversations
from specbench_ss.methods._lab.base_training import BaseSize, BaseTrainer, new_model
from specbench_ss.methods._lab.rivals import CALIBRATION_BATCHES, RIVALS
from specbench_ss.methods._lab.tokenizer import special_ids, train_tokenizer
from specbench_ss.methods._lab.workshop import (
    DRAFTER_STEPS,
    Workshop,
    drafter_budget,
    drafter_text,
    save_model,
    save_rows,
    training_rows,
)
from specbench_ss.methods.medusa.joint_training import Medusa2Trainee, save_joint
from specbench_ss.methods.medusa.training import MedusaTrainee
from specbench_ss.methods.rest.build import build as build_datastore
from specbench_ss.methods.space.model import save as save_space
from specbench_ss.methods.space.training import SPACETrainee
from specbench_ss.methods.ss.shared_training import SharedTrainee, save_shared
from specbench_ss.methods.ss.stream_config import StreamConfig
from specbench_ss.methods.ss.training import StreamsTrainee
from specbench_ss.models.drafter_folder import write_checkpoint
from specbench_ss.models.loading import LAB, load_target
from specbench_ss.suites.lab_text.training_text import POLISH_WEIGHTS, completion_mask, conversations, pack, render
from specbench_ss.training.guess_accuracy import mean_accuracies
from specbench_ss.training.side_by_side import Budget, DrafterText, TogetherTrainer
from specbench_ss.training.trainee import Trainee

POLISH_SHARE = 0.33
DRAFTER_TALKS = {"s": 10_000, "m": 200_000}
CALIBRATION_TALKS = 768
LAB_STREAMS = {
    "s": StreamConfig(gamma=4, n_msa_layers=4, adapter_rank=128, init_rank=64),
    "m": StreamConfig(adapter_rank=32),
}
STREAM_LR = 1.5e-2
STREAM_EMBEDDING_LR = 0.1
SPACE_MASK_LR = 5e-3
SHARED_STREAMS = StreamConfig(
    gamma=4, n_msa_layers=4, adapter_rank=0, mode="shared", lora_rank=32, main_attends_streams=True
)  # ACL sec. 3: LoRA for main and streams alike, eq. 3
SHARED_TOKENS = 2_000_000
SHARED_LR = 1e-3
SHARED_ROWS = 4
SPACE_MASKS = 4  # as many tokens ahead as the streams
DATASTORE_TALKS = 4_000  # 3 MB
# what pays on two CPU cores: see docs/log.md
MEDUSA_NODES = 15
SS_ADVICE = {"k": 3, "n_draft": 4, "n_keep": 16}
DATASTORE_DRAFT = 8


def tokenizer(shop: Workshop) -> None:
    """BPE from a sample of the training text."""
    texts = [
        render(e).replace("<|", "\n<|") for e in islice(conversations("train", shop.seed), shop.scaled(24_000, 4_000))
    ]
    for marker in ("<|bos|>", "<|user|>", "<|assistant|>", "<|end|>"):
        texts = [t.replace(marker, "") for t in texts]
    made = train_tokenizer(texts, shop.base_size(shop.size).vocab)
    made.model_max_length = shop.base_size(shop.size).context
    made.save_pretrained(shop.folder("tokenizer"))
    shop.log(f"tokenizer: {len(made)} entries")


def _train_base(shop: Workshop, stage: str, size: BaseSize, rows: NDArray[np.int32], start: Path | None = None) -> None:
    """Train a Llama of this size on these rows, from nothing or from a model on disk."""
    from transformers import AutoModelForCausalLM

    tokenizer = shop.tokenizer()
    special = special_ids(tokenizer)
    model: Any
    if start is None:
        model = new_model(size, special, shop.seed)
    else:
        model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    BaseTrainer(model, size, rows, special, shop.device, shop.folder(stage), shop.compile).train(shop.log)
    save_model(model, tokenizer, shop.folder(stage) / "model")


def base(shop: Workshop) -> None:
    """The base model on all tasks alike."""
    size = shop.base_size(shop.size)
    _train_base(shop, "base", size, training_rows(shop, size, shop.seed + 1))


def polish(shop: Workshop) -> None:
    """The base's last part: more of what computes, with arithmetic drills, at a lower learning rate."""
    size = shop.base_size(shop.size)
    size = replace(
        size, tokens=max(int(size.tokens * POLISH_SHARE), size.rows_per_step * size.row_length), lr=size.lr / 2
    )
    start = shop.made("base/model/model.safetensors", "base").parent
    _train_base(shop, "polish", size, training_rows(shop, size, shop.seed + 4, POLISH_WEIGHTS), start)


def answers(shop: Workshop) -> None:
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
        save_rows(path, pack(docs, shop.base_size(shop.size).row_length, special_ids(tokenizer)["pad"]))


def drafters(shop: Workshop) -> None:
    """Medusa heads and streams side by side: same batches, same steps, same frozen base."""
    target = shop.base_target()
    torch.manual_seed(shop.seed + 3)
    medusa = MedusaTrainee(target, heads=4)
    streams = StreamsTrainee(target, LAB_STREAMS[shop.size], lr=STREAM_LR, embedding_lr=STREAM_EMBEDDING_LR)
    budget, text = drafter_budget(shop), drafter_text(shop, "train")
    TogetherTrainer(target, [medusa, streams], text, budget, shop.folder("drafters")).train(shop.log)
    batches = shop.scaled(CALIBRATION_BATCHES, 1)
    accuracies = mean_accuracies(target, medusa, drafter_text(shop, "calibration"), budget, batches)
    about = {"base_hash": target.weights_hash, "base_dtype": str(target.dtype), "trained": {"steps": budget.steps}}
    heads = {**about, "medusa_num_heads": 4, "medusa_num_layers": 1, "accuracies": accuracies, "nodes": MEDUSA_NODES}
    write_checkpoint(shop.folder("medusa"), medusa.module, heads, "medusa_lm_head.safetensors")
    config = {**about, "streams": LAB_STREAMS[shop.size].as_dict(), "advice": SS_ADVICE}
    write_checkpoint(shop.folder("ss"), streams.module, config)


def shared(shop: Workshop) -> None:
    """Shared mode, and what it is held against: the same LoRA on next tokens alone, same batches, same steps."""
    target = shop.base_target()
    torch.manual_seed(shop.seed + 5)
    ours = SharedTrainee(target, SHARED_STREAMS, SHARED_LR, STREAM_LR, STREAM_EMBEDDING_LR)
    plain = replace(SHARED_STREAMS, main_attends_streams=False)
    tuned = SharedTrainee(target, plain, SHARED_LR, alpha_j=0.0, name="next-token")
    train_shared(shop, target, [ours, tuned], "shared")


def train_shared(shop: Workshop, target: Target, trainees: Sequence[SharedTrainee], stage: str) -> None:
    """Fine-tunes with LoRA, all on the same batches; each is saved in the folder of its own name."""
    budget = _tune(shop, target, trainees, stage)
    about = {"base_hash": target.weights_hash, "base_dtype": str(target.dtype)}
    for trainee in trainees:
        trained = {"steps": budget.steps, "alpha_j": trainee.alpha_j}
        save_shared(shop.folder(trainee.name), trainee, {**about, "trained": trained, "advice": SS_ADVICE})


def medusa2(shop: Workshop) -> None:
    """Heads and backbone together, on the batches of stage `shared`; the heads share the backbone's LM head."""
    target = shop.base_target()
    torch.manual_seed(shop.seed + 5)
    trainee = Medusa2Trainee(target, 4, SHARED_STREAMS.lora_rank, own_unembed=False, lr=SHARED_LR)
    budget = _tune(shop, target, [trainee], "medusa2")
    batches = shop.scaled(CALIBRATION_BATCHES, 1)
    accuracies = mean_accuracies(target, trainee, drafter_text(shop, "calibration"), budget, batches)
    config = {
        "base_hash": target.weights_hash, "base_dtype": str(target.dtype), "trained": {"steps": budget.steps},
        "accuracies": accuracies, "nodes": MEDUSA_NODES,
    }  # fmt: skip
    save_joint(shop.folder("medusa2/weights"), trainee, config)


def _tune(shop: Workshop, target: Target, trainees: Sequence[Trainee], stage: str) -> Budget:
    """Train what changes the base, on text of the base's own kind."""
    size = replace(shop.base_size(shop.size), tokens=shop.scaled(SHARED_TOKENS, 4096), rows_per_step=SHARED_ROWS)
    special = special_ids(shop.tokenizer())
    rows = training_rows(shop, size, shop.seed + 5)
    text = DrafterText(rows, lambda row: completion_mask(row, special), special["eos"], shop.seed + 5)
    budget = Budget(shop.scaled(DRAFTER_STEPS, 2), rows_per_step=SHARED_ROWS, warmup=20)
    TogetherTrainer(target, trainees, text, budget, shop.folder(stage)).train(shop.log)
    return budget


def space(shop: Workshop) -> None:
    """SPACE's LoRA and mask, on the batches of stage `shared`."""
    target = shop.base_target()
    torch.manual_seed(shop.seed + 5)
    trainee = SPACETrainee(target, SPACE_MASKS, SHARED_STREAMS.lora_rank, SHARED_LR, mask_lr=SPACE_MASK_LR)
    budget = _tune(shop, target, [trainee], "space")
    trained = {"steps": budget.steps}
    about = {"base_hash": target.weights_hash, "base_dtype": str(target.dtype), "trained": trained}
    save_space(shop.folder("space/weights"), trainee.mask, trainee.tuned, about)


def datastore(shop: Workshop) -> None:
    """The text of the drafters, for `rest` to look up: the base's own answers."""
    special = special_ids(shop.tokenizer())
    ids = np.load(shop.made("answers/train.npy", "answers")).reshape(-1)
    ids = ids[ids != special["pad"]]
    talks = np.split(ids, np.flatnonzero(ids == special["bos"])[1:])[: shop.scaled(DATASTORE_TALKS, 4)]
    out = shop.out / "rest"
    shutil.rmtree(out, ignore_errors=True)
    header = build_datastore(talks, shop.base_target(), "the base's own answers", out, draft=DATASTORE_DRAFT)
    shop.log(f"datastore: {header['tokens']} tokens of {header['documents']} conversations")


def draft(shop: Workshop) -> None:
    """The small draft model for two-model speculative decoding, on the same text."""
    size = shop.base_size("draft")
    _train_base(shop, "draft", size, training_rows(shop, size, shop.seed + 1))


def export(shop: Workshop) -> None:
    """Everything that is shipped, into one folder: base, draft and a folder a drafter."""
    sources = {
        "base": shop.made("polish/model", "polish"),
        "draft": shop.made("draft/model", "draft"),
        "medusa": shop.made("medusa", "drafters"),
        "ss": shop.made("ss", "drafters"),
        "ss-shared": shop.made("ss-shared", "shared"),
        "medusa2": shop.made("medusa2/weights", "medusa2"),
        **{name: shop.made(name, "rivals") for name in RIVALS},
        "rest": shop.made("rest", "datastore"),
        "space": shop.made("space/weights", "space"),
    }
    out = shop.folder("export")
    for name, source in sources.items():
        if (out / name).exists():  # with the cards of what was exported before
            shutil.rmtree(out / name)
        shutil.copytree(source, out / name)
    (out / "lab.json").write_text(json.dumps({"size": shop.size, "seed": shop.seed}) + "\n")
    shop.log(f"export: {sum(f.stat().st_size for f in out.rglob('*') if f.is_file()) / 1e6:.1f} MB in {out}")


def measure(shop: Workshop) -> None:
    """Measure the exported family and write its cards."""
    _measure(shop, shop.made("export/lab.json", "export").parent)


def measure_shipped(shop: Workshop) -> None:
    """The same for a copy of the package's own weights. Raises UserError where it brings none of that size."""
    about = json.loads((LAB / "lab.json").read_text()) if (LAB / "lab.json").exists() else {}
    if about.get("size") != shop.size:
        raise UserError(f"no training run in {shop.out}, and the package brings no weights of size {shop.size}")
    out = shop.out / "shipped"
    shutil.copytree(LAB, out, dirs_exist_ok=True)
    shop.log(f"cards: no training run in {shop.out}, so the shipped weights are measured, a copy in {out}")
    _measure(shop, out)


def _measure(shop: Workshop, family: Path) -> None:
    base, draft = (load_target(str(family / n), dtype="float32", device=shop.device) for n in ("base", "draft"))
    special, longest = special_ids(base.tokenizer), min(256, shop.scaled(256, 8))
    losses = [cards.held_out_loss(t.model, t.tokenizer, special, shop.scaled(400, 8)) for t in (base, draft)]
    shop.log(f"cards: held-out loss {losses[0]:.4f}, of the draft {losses[1]:.4f}")
    scores = cards.task_scores(base, shop.scaled(60, 1), longest)
    shop.log("cards: " + ", ".join(f"{c} {m} {v:.3f}" for c, (m, v, _) in scores.items()))
    taus = cards.taus(base, shop.scaled(3, 1), longest)
    shop.log("cards: " + ", ".join(f"{name} tau {value:.2f}" for name, value in taus.items()))
    cards.write_cards(family, base, draft, cards.Measured(losses[0], losses[1], scores, taus))
