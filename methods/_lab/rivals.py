"""The rivals that leave the base alone, each trained by itself on the batches of stage `drafters`.

One more of them is one more entry in RIVALS. Each has its own checkpoint, so that it can be trained alone and go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from specbench_ss.decoding.target import Target
from specbench_ss.methods._lab.lab_training import LabTraining, drafter_budget, drafter_text
from specbench_ss.methods.eagle.training import Eagle3Trainee, EagleTrainee
from specbench_ss.methods.hydra.training import HydraTrainee
from specbench_ss.models.drafter_folder import belongs_to, write_checkpoint
from specbench_ss.training.guess_accuracy import mean_accuracies
from specbench_ss.training.side_by_side import TogetherTrainer

CALIBRATION_BATCHES = 12
HYDRA_NODES = 4
HYDRA_LR = 3e-3  # learns faster than 1e-3 over the first 60 steps
EAGLE_NODES = 8
EAGLE_LR = 3e-3  # over 100 steps better than 1e-3, for either drafter
EAGLE_LEVELS = 6  # one more than the published tree has; what is learnt is the next feature alone
EAGLE3_LEVELS = 4  # of training-time test: with this budget better than the published 7
EAGLE_ADVICE = {"total_tokens": 8, "depth": 3, "top_k": 2}
EAGLE3_WORDS = 2048


@dataclass(frozen=True, slots=True)
class Rival:
    """build: the trainee, with first weights. about: what its config.json says besides its shape and its training.

    ahead: tokens that it looks ahead, 0 = as far as the streams. ranked: whether accuracies are measured, for a static
    tree.
    """

    build: Callable[[Target, int], Any]  # the last: levels to draft
    about: dict[str, Any] = field(default_factory=dict)
    ahead: int = 0
    ranked: bool = False
    file: str = "model.safetensors"


RIVALS = {
    "hydra": Rival(  # Hydra++; one block a head, as `medusa` has: with this budget as good as the published four
        lambda target, levels: HydraTrainee(target, levels, layers=1, lr=HYDRA_LR),
        {"nodes": HYDRA_NODES},
        ranked=True,
        file="hydra_lm_head.safetensors",
    ),
    "eagle": Rival(
        lambda target, levels: EagleTrainee(target, EAGLE_LR, levels),
        {"nodes": EAGLE_NODES, "advice": EAGLE_ADVICE},
        ahead=EAGLE_LEVELS,
        ranked=True,
    ),
    "eagle3": Rival(
        lambda target, levels: Eagle3Trainee(target, EAGLE_LR, levels, EAGLE3_WORDS),
        {"advice": EAGLE_ADVICE},
        ahead=EAGLE3_LEVELS,
    ),
}


def rivals(lab: LabTraining) -> None:
    """All of them, one after the other."""
    target = lab.base_target()
    for name in RIVALS:
        train_rival(lab, target, name)


def train_rival(lab: LabTraining, target: Target, name: str) -> None:
    """One of them, into the folder of its name; goes on from its checkpoint."""
    rival, budget = RIVALS[name], drafter_budget(lab)
    budget = replace(budget, ahead=rival.ahead or budget.ahead)
    torch.manual_seed(lab.seed + 3)
    trainee = rival.build(target, budget.ahead)
    text = drafter_text(lab, "train")
    TogetherTrainer(target, [trainee], text, budget, lab.folder(f"rivals/{name}")).train(lab.log)
    about: dict[str, Any] = {**belongs_to(target), "trained": {"steps": budget.steps}}
    if rival.ranked:
        batches = lab.scaled(CALIBRATION_BATCHES, 1)
        measured = mean_accuracies(target, trainee, drafter_text(lab, "calibration"), budget, batches)
        about["accuracies"] = measured
    write_checkpoint(lab.folder(name), trainee.module, {**trainee.config, **about, **rival.about}, rival.file)
