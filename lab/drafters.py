"""The drafters that leave the base alone: all learn from the same text, batches and number of steps.

One more of them is one more entry in DRAFTERS. Each has its own checkpoint, so that it can be trained alone and go on.
Learning rates of `medusa`, `hydra`, `dflash`, `peagle` and `draft-2m` are the best of the three that
docs/log.md has for each; those of the others are of earlier probes: docs/log.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lab.text import APP_WEIGHTS
from lab.training import SIZES, LabTraining, answers_in, drafter_budget, drafter_text, training_rows
from specbench_ss.engine.target import Target
from specbench_ss.methods._shared.fine_tuned import save_lora
from specbench_ss.methods.block_drafters.train import DFlashTrainer, DFlashTraining, PEagleTrainer, PEagleTraining
from specbench_ss.methods.eagle.train import Eagle3Trainer, Eagle3TrainOptions, EagleTrainer
from specbench_ss.methods.hydra.train import HydraTrainer, HydraTraining
from specbench_ss.methods.medusa.train import MedusaTrainer, MedusaTraining
from specbench_ss.methods.sd.train import DraftOptions, DraftTrainer, TunedDraft
from specbench_ss.methods.ss.config import StreamConfig
from specbench_ss.methods.ss.train import StreamsTrainer
from specbench_ss.models.checkpoint import belongs_to, write_config
from specbench_ss.models.load import load_target
from specbench_ss.training.loop import Budget, DrafterLoop
from specbench_ss.training.session import mean_accuracies
from specbench_ss.training.trainer import DrafterTrainer

CALIBRATION_BATCHES = 12
HEADS = 4
# what pays on two CPU cores: see docs/log.md
MEDUSA_NODES, HYDRA_NODES, EAGLE_NODES = 15, 4, 8
EAGLE_ADVICE = {"total_tokens": 8, "depth": 3, "top_k": 2}
SS_ADVICE = {"k": 3, "n_draft": 4, "n_keep": 16}
EAGLE_LEVELS = 6  # one more than the published tree has; what is learnt is the next feature alone
EAGLE3_LEVELS = 4  # of training-time test: with this budget better than the published 7
EAGLE3_WORDS = 2048
BLOCK_LEVELS = 7  # of the drafters that make a block in one pass: DFlash's published block has eight places
KNOWN_RANK = 64  # of the maps by which streams learn tokens that are known
STREAM_LR, STREAM_EMBEDDING_LR = 1.5e-2, 0.1


def streams_of(target: Target) -> StreamConfig:
    """Adapters of a higher rank than published for a small model, whose hidden size is a sixteenth of the papers'."""
    if target.hidden_size > SIZES["s"].hidden:
        return StreamConfig(adapter_rank=32)
    return StreamConfig(gamma=4, n_msa_layers=4, adapter_rank=128, init_rank=64)


def _dflash(target: Target, levels: int, lr: float) -> DFlashTrainer:
    """Return DFlash's drafter of one layer, as EAGLE's drafters have."""
    return DFlashTrainer(target, DFlashTraining(layers=1, block_size=levels + 1), lr)


def _peagle(target: Target, levels: int, lr: float) -> PEagleTrainer:
    """Return P-EAGLE's drafter of one layer, with the base's embedding."""
    return PEagleTrainer(target, PEagleTraining(depths=levels, draft_vocab=EAGLE3_WORDS, embedding="target"), lr)


def _draft(target: Target, levels: int, lr: float) -> DraftTrainer:
    """Return a draft of the shape of the large one, which learns from ten times the text."""
    size = SIZES["draft"]
    return DraftTrainer(target, DraftOptions(size.layers, size.hidden, size.heads, size.ffn, gamma=levels), lr)


@dataclass(frozen=True, slots=True)
class Drafter:
    """build: the trainer, with first weights. about: what its config.json says besides its shape and its training.

    ahead: tokens that it looks ahead, 0 = as far as the streams.
    """

    build: Callable[[Target, int, float], DrafterTrainer]  # the last two: levels to draft, learning rate
    lr: float
    about: dict[str, Any] = field(default_factory=dict)
    ahead: int = 0


DRAFTERS = {
    "medusa": Drafter(
        lambda target, levels, lr: MedusaTrainer(target, MedusaTraining(HEADS, own_unembed=False), lr),
        1e-2,
        {"nodes": MEDUSA_NODES},
    ),
    "ss": Drafter(
        lambda target, levels, lr: StreamsTrainer(target, streams_of(target), lr, embedding_lr=STREAM_EMBEDDING_LR),
        STREAM_LR,
        {"advice": SS_ADVICE},
    ),
    "ss-parent": Drafter(  # beyond the papers
        lambda target, levels, lr: StreamsTrainer(
            target,
            replace(streams_of(target), root_rank=KNOWN_RANK, parent_rank=KNOWN_RANK),
            lr,
            embedding_lr=STREAM_EMBEDDING_LR,
        ),
        STREAM_LR,
        {"advice": SS_ADVICE},
    ),
    "hydra": Drafter(  # Hydra++; one block a head, as `medusa` has: with this budget as good as the published four
        lambda target, levels, lr: HydraTrainer(target, HydraTraining(HEADS, own_unembed=False, layers=1), lr),
        1e-2,
        {"nodes": HYDRA_NODES},
    ),
    "eagle": Drafter(
        lambda target, levels, lr: EagleTrainer(target, None, lr, levels),
        3e-3,
        {"nodes": EAGLE_NODES, "advice": EAGLE_ADVICE},
        ahead=EAGLE_LEVELS,
    ),
    "eagle3": Drafter(
        lambda target, levels, lr: Eagle3Trainer(target, Eagle3TrainOptions(levels, EAGLE3_WORDS), lr),
        3e-3,
        {"advice": EAGLE_ADVICE},
        ahead=EAGLE3_LEVELS,
    ),
    "dflash": Drafter(_dflash, 3e-3, ahead=BLOCK_LEVELS),
    "peagle": Drafter(_peagle, 3e-3, ahead=BLOCK_LEVELS),
    "draft-2m": Drafter(_draft, 3e-3),
}


def drafters(lab: LabTraining) -> None:
    """All of them, one after the other."""
    target = lab.base_target()
    for name in DRAFTERS:
        train_drafter(lab, target, name)


def train_drafter(lab: LabTraining, target: Target, name: str) -> None:
    """One of them, into the folder of its name; goes on from its checkpoint."""
    drafter, budget = DRAFTERS[name], drafter_budget(lab)
    budget = replace(budget, ahead=drafter.ahead or budget.ahead)
    torch.manual_seed(lab.seed + 3)
    trainer = drafter.build(target, budget.ahead, drafter.lr)
    text, folder = drafter_text(lab, "train"), lab.folder(f"drafters/{name}")
    DrafterLoop(target, [trainer], text, budget, folder, lab.machine).train(lab.log)
    tokens = budget.steps * budget.rows_per_step * text.rows.shape[1]
    trained = {"steps": budget.steps, "lr": drafter.lr, "tokens": tokens}
    about: dict[str, Any] = {**belongs_to(target), "trained": trained}
    if trainer.ranked:
        held_out, batches = drafter_text(lab, "calibration"), lab.scaled(CALIBRATION_BATCHES, 1)
        about["accuracies"] = mean_accuracies(target, trainer, held_out, budget, batches, lab.machine)
    trainer.save(lab.folder(name), {**about, **drafter.about})


# stage `draft-apps`: one LoRA of the small draft for the three applications, where the papers (2024 sec. 4; ACL table
# 5, caption) tune one draft for each, so that one run of `sd` can draft for all
APP_RANK, APP_LR = 32, 3e-3
APP_STEPS, APP_ROWS = 600, 8
APP_SEED = 6  # of the text, beside the lab's own


def draft_apps(lab: LabTraining) -> None:
    """The draft's LoRA on next tokens of the applications' training answers."""
    draft = load_target(str(lab.made("draft/model", "draft")), dtype="float32", device=lab.device)
    torch.manual_seed(lab.seed + APP_SEED)
    tuned = TunedDraft(draft, APP_RANK, APP_LR)
    budget = Budget(lab.scaled(APP_STEPS, 2), rows_per_step=APP_ROWS, warmup=20)
    length = lab.base_size(lab.size).row_length
    tokens = budget.steps * APP_ROWS * length
    size = replace(lab.base_size(lab.size), tokens=tokens, rows_per_step=APP_ROWS)
    text = answers_in(lab, training_rows(lab, size, lab.seed + APP_SEED, APP_WEIGHTS), lab.seed + APP_SEED)
    DrafterLoop(draft, [tuned], text, budget, lab.folder("draft-apps"), lab.machine).train(lab.log)
    before: dict[str, Any] = getattr(draft.model.config, "ssbench", {}).get("trained", {})
    trained = {"steps": budget.steps, "lr": APP_LR, "tokens": tokens + before.get("tokens", 0)}
    folder = lab.folder("draft-apps/weights")
    write_config(folder, {**belongs_to(draft), "trained": trained})
    save_lora(folder, tuned.tuned)
