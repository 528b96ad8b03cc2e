"""Stage `draft-apps` of `ssbench lab train`: a LoRA that tunes the small draft for the applications.

The papers' draft model is fine-tuned on each application, by LoRA alone (2024 sec. 4; ACL table 5, caption). This is
one LoRA for the three of them together, at their rank, so that one run of `sd` can draft for all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from lab.lab_training import LabTraining, answers_in, training_rows
from lab.text import APP_WEIGHTS
from specbench_ss.methods._shared.lora import save_lora
from specbench_ss.methods.sd.training import TunedDraft
from specbench_ss.models.drafter_folder import belongs_to, write_config
from specbench_ss.models.loading import load_target
from specbench_ss.training.side_by_side import Budget, TogetherTrainer

RANK, LR = 32, 3e-3
STEPS, ROWS = 600, 8
SEED = 6  # of the text, beside the lab's own


def draft_apps(lab: LabTraining) -> None:
    """The draft's LoRA on next tokens of the applications' training answers."""
    draft = load_target(str(lab.made("draft/model", "draft")), dtype="float32", device=lab.device)
    torch.manual_seed(lab.seed + SEED)
    tuned = TunedDraft(draft, RANK, LR)
    budget = Budget(lab.scaled(STEPS, 2), rows_per_step=ROWS, warmup=20)
    length = lab.base_size(lab.size).row_length
    tokens = budget.steps * ROWS * length
    size = replace(lab.base_size(lab.size), tokens=tokens, rows_per_step=ROWS)
    text = answers_in(lab, training_rows(lab, size, lab.seed + SEED, APP_WEIGHTS), lab.seed + SEED)
    TogetherTrainer(draft, [tuned], text, budget, lab.folder("draft-apps"), lab.machine).train(lab.log)
    before: dict[str, Any] = getattr(draft.model.config, "ssbench", {}).get("trained", {})
    trained = {"steps": budget.steps, "lr": LR, "tokens": tokens + before.get("tokens", 0)}
    folder = lab.folder("draft-apps/weights")
    write_config(folder, {**belongs_to(draft), "trained": trained})
    save_lora(folder, tuned.tuned)
