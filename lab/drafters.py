"""The drafters that leave the base alone: all learn from the same text, batches and number of steps.

One more of them is one more entry in DRAFTERS. Each has its own checkpoint, so that it can be trained alone and go on.
Learning rates of `medusa`, `hydra`, `dflash`, `peagle` and `draft-2m` are the best of the three that
docs/log.md has for each; those of the others are of earlier probes: docs/log.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from lab.text import APP_WEIGHTS
from lab.training import SIZES, LabTraining, answers_in, drafter_budget, drafter_text, save_model, training_rows
from specbench_ss.engine.target import Target
from specbench_ss.methods._shared.fine_tuned import save_lora
from specbench_ss.methods.block_drafters.dflash import config_of as dflash_config
from specbench_ss.methods.block_drafters.dflash import new_drafter as dflash_drafter
from specbench_ss.methods.block_drafters.peagle import config_of as peagle_config
from specbench_ss.methods.block_drafters.peagle import new_drafter as peagle_drafter
from specbench_ss.methods.block_drafters.train_dflash import DFlashTrainee
from specbench_ss.methods.block_drafters.train_peagle import PEagleTrainee
from specbench_ss.methods.eagle.train import Eagle3Trainee, EagleTrainee
from specbench_ss.methods.hydra.train import HydraTrainee
from specbench_ss.methods.medusa.train import MedusaTrainee
from specbench_ss.methods.sd.train import DraftSize, DraftTrainee, TunedDraft
from specbench_ss.methods.ss.config import StreamConfig
from specbench_ss.methods.ss.train import StreamsTrainee
from specbench_ss.models.checkpoint import belongs_to, write_checkpoint, write_config
from specbench_ss.models.load import load_target
from specbench_ss.training.loop import Budget, TogetherTrainer
from specbench_ss.training.session import mean_accuracies

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


def write_weights(folder: Path, trainee: Any, target: Target, about: dict[str, Any], file: str) -> None:
    """The weights in float16, and a config.json that says what they are."""
    config = trainee.config if isinstance(trainee.config, dict) else {"streams": trainee.config.as_dict()}
    write_checkpoint(folder, trainee.module, {**config, **about}, file)


def write_model(folder: Path, trainee: Any, target: Target, about: dict[str, Any], file: str) -> None:
    """An ordinary model's folder, with the base's tokenizer."""
    trainee.module.config.ssbench = about
    save_model(trainee.module, target.tokenizer, folder)


Write = Callable[[Path, Any, Target, dict[str, Any], str], None]


def as_published(config_of: Callable[[Any, Target], dict[str, Any]]) -> Write:
    """Return what writes a drafter with the config of a published layout."""

    def write(folder: Path, trainee: Any, target: Target, about: dict[str, Any], file: str) -> None:
        write_checkpoint(folder, trainee.module, {**config_of(trainee.module, target), **about}, file)

    return write


def _dflash(target: Target, levels: int, lr: float) -> DFlashTrainee:
    """One layer, as EAGLE's drafters have."""
    return DFlashTrainee(target, dflash_drafter(target, 1, levels + 1, 0, None, False), lr)


def _peagle(target: Target, levels: int, lr: float) -> PEagleTrainee:
    """One layer, and the base's embedding."""
    return PEagleTrainee(target, peagle_drafter(target, levels, 1, EAGLE3_WORDS, None, False), lr)


@dataclass(frozen=True, slots=True)
class Drafter:
    """build: the trainee, with first weights. about: what its config.json says besides its shape and its training.

    ahead: tokens that it looks ahead, 0 = as far as the streams. ranked: whether accuracies are measured, for a static
    tree.
    """

    build: Callable[[Target, int, float], Any]  # the last two: levels to draft, learning rate
    lr: float
    about: dict[str, Any] = field(default_factory=dict)
    ahead: int = 0
    ranked: bool = False
    file: str = "model.safetensors"
    write: Write = write_weights


def _draft(target: Target, levels: int, lr: float) -> DraftTrainee:
    """Of the shape of the large draft, which learns from ten times the text."""
    size = SIZES["draft"]
    return DraftTrainee(target, DraftSize(size.layers, size.hidden, size.heads, size.ffn), lr, levels)


DRAFTERS = {
    "medusa": Drafter(
        lambda target, levels, lr: MedusaTrainee(target, HEADS, lr, own_unembed=False),
        1e-2,
        {"nodes": MEDUSA_NODES},
        ranked=True,
        file="medusa_lm_head.safetensors",
    ),
    "ss": Drafter(
        lambda target, levels, lr: StreamsTrainee(target, streams_of(target), lr, embedding_lr=STREAM_EMBEDDING_LR),
        STREAM_LR,
        {"advice": SS_ADVICE},
    ),
    "ss-parent": Drafter(  # beyond the papers
        lambda target, levels, lr: StreamsTrainee(
            target,
            replace(streams_of(target), root_rank=KNOWN_RANK, parent_rank=KNOWN_RANK),
            lr,
            embedding_lr=STREAM_EMBEDDING_LR,
        ),
        STREAM_LR,
        {"advice": SS_ADVICE},
    ),
    "hydra": Drafter(  # Hydra++; one block a head, as `medusa` has: with this budget as good as the published four
        lambda target, levels, lr: HydraTrainee(target, HEADS, layers=1, own_unembed=False, lr=lr),
        1e-2,
        {"nodes": HYDRA_NODES},
        ranked=True,
        file="hydra_lm_head.safetensors",
    ),
    "eagle": Drafter(
        lambda target, levels, lr: EagleTrainee(target, lr, levels),
        3e-3,
        {"nodes": EAGLE_NODES, "advice": EAGLE_ADVICE},
        ahead=EAGLE_LEVELS,
        ranked=True,
    ),
    "eagle3": Drafter(
        lambda target, levels, lr: Eagle3Trainee(target, lr, levels, EAGLE3_WORDS),
        3e-3,
        {"advice": EAGLE_ADVICE},
        ahead=EAGLE3_LEVELS,
    ),
    "dflash": Drafter(_dflash, 3e-3, ahead=BLOCK_LEVELS, write=as_published(dflash_config)),
    "peagle": Drafter(_peagle, 3e-3, ahead=BLOCK_LEVELS, write=as_published(peagle_config)),
    "draft-2m": Drafter(_draft, 3e-3, write=write_model),
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
    trainee = drafter.build(target, budget.ahead, drafter.lr)
    text, folder = drafter_text(lab, "train"), lab.folder(f"drafters/{name}")
    TogetherTrainer(target, [trainee], text, budget, folder, lab.machine).train(lab.log)
    tokens = budget.steps * budget.rows_per_step * text.rows.shape[1]
    trained = {"steps": budget.steps, "lr": drafter.lr, "tokens": tokens}
    about: dict[str, Any] = {**belongs_to(target), "trained": trained}
    if drafter.ranked:
        held_out, batches = drafter_text(lab, "calibration"), lab.scaled(CALIBRATION_BATCHES, 1)
        about["accuracies"] = mean_accuracies(target, trainee, held_out, budget, batches, lab.machine)
    drafter.write(lab.folder(name), trainee, target, {**about, **drafter.about}, drafter.file)


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
    TogetherTrainer(draft, [tuned], text, budget, lab.folder("draft-apps"), lab.machine).train(lab.log)
    before: dict[str, Any] = getattr(draft.model.config, "ssbench", {}).get("trained", {})
    trained = {"steps": budget.steps, "lr": APP_LR, "tokens": tokens + before.get("tokens", 0)}
    folder = lab.folder("draft-apps/weights")
    write_config(folder, {**belongs_to(draft), "trained": trained})
    save_lora(folder, tuned.tuned)
