"""Recipes of the lab's drafters: training text, trainer of `ssbench train`, and learning rate.

A new drafter is a new entry of RECIPES, whose name is a training stage. Learning rates of `medusa`, `hydra`, `dflash`,
`peagle` and `draft-2m` are the best of the three in docs/log.md; the others, and the sizes of trees for two CPU cores,
are from earlier experiments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from lab.text import APP_WEIGHTS, WEIGHTS
from lab.training import SIZES, LabTraining, answers_in, drafter_text, training_rows
from specbench_ss.engine.target import Target
from specbench_ss.methods._shared.fine_tuned import save_lora
from specbench_ss.methods.sd.train import TunedDraft
from specbench_ss.models.checkpoint import belongs_to, write_config
from specbench_ss.models.load import load_target
from specbench_ss.options import make_options
from specbench_ss.registry import trainer_class
from specbench_ss.training.loop import Budget, DrafterLoop, PackedText
from specbench_ss.training.session import mean_accuracies
from specbench_ss.training.trainer import DrafterTrainer


@dataclass(frozen=True, slots=True)
class Course:
    """Training text and budget shared by several drafters.

    seed: of text and initial weights, added to the lab's. weights: of the categories of generated text; None = the
    base's own answers. tokens: of that text.
    """

    steps: int
    rows: int
    seed: int
    warmup: int
    weights: Mapping[str, float] | None = None
    tokens: int = 0

    def text(self, lab: LabTraining) -> PackedText:
        """Return the training text."""
        if self.weights is None:
            return drafter_text(lab, "train")
        seed, two_steps = lab.seed + self.seed, 2 * self.rows * lab.base_size(lab.size).row_length
        return answers_in(
            lab, training_rows(lab, lab.scaled(self.tokens, two_steps), self.rows, seed, self.weights), seed
        )


CALIBRATION_BATCHES = 12
OWN_ANSWERS = Course(900, 5, 3, 50)
BASE_TEXT = Course(900, 4, 5, 20, WEIGHTS, 2_000_000)
APPS_TEXT = Course(600, 8, 6, 20, APP_WEIGHTS, 600 * 8 * 512)


class AppsDraft(TunedDraft):
    """One LoRA of the small draft for the three applications, so that one run of `sd` can draft for all.

    The papers (2024 sec. 4; EMNLP table 5, caption) tune one draft for each.
    """

    @classmethod
    def build(cls, target: Target, options: Any, lr: float) -> AppsDraft:
        """Return the trainer with an initial LoRA, which changes nothing."""
        return cls(target, 32, lr)

    def save(self, folder: Path, about: dict[str, Any]) -> None:
        """Write the LoRA in the format of `sd`."""
        write_config(folder, about)
        save_lora(folder, self.tuned)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Recipe of a drafter's training.

    trainer, options: of `ssbench train`. beyond: trainer attributes without an option. large: options for a larger base
    than the shipped one. about: additional fields of its config.json. what: text of its card. methods: methods of its
    card, the drafter's own first.
    """

    trainer: str
    course: Course
    lr: float
    options: dict[str, Any] = field(default_factory=dict)
    beyond: dict[str, float] = field(default_factory=dict)
    large: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    what: str = ""
    methods: tuple[str, ...] = ()

    def built(self, target: Target) -> DrafterTrainer:
        """Return the trainer with initial weights."""
        kind: Any = AppsDraft if self.trainer == AppsDraft.name else trainer_class(self.trainer)
        larger = self.large if target.hidden_size > SIZES["s"].hidden else {}
        trainer = kind.build(target, make_options(kind.Options, self.options | larger, self.trainer), self.lr)
        for name, value in self.beyond.items():
            setattr(trainer, name, value)
        return cast(DrafterTrainer, trainer)


# Adapters of a higher rank than published for a small model, whose hidden size is a sixteenth of the papers'.
_STREAMS = {"adapter_rank": 128, "init_rank": 64, "embedding_lr": 0.1}
_LARGE_STREAMS = {"adapter_rank": 32, "init_rank": 0}
_STREAM_ADVICE = {"advice": {"k": 3, "n_draft": 4}}
_STREAM_LR = 1.5e-2
# EMNLP sec. 3: LoRA for main and stream rows. The 2024 paper's main rows attend to main rows only (eq. 1).
_SHARED = {"mode": "shared", "lora_rank": 32, "embedding_lr": 0.1}
_EQ1 = {**_SHARED, "main_attends_streams": False}
_TREE = {"total_tokens": 8, "depth": 3, "top_k": 2}

RECIPES = {
    "medusa": Recipe(
        "medusa", OWN_ANSWERS, 1e-2, {"own_unembed": False}, about={"nodes": 15, "advice": {"cpu": {"nodes": 4}}},
        what="Four Medusa-1 heads", methods=("medusa",),
    ),
    "ss": Recipe(
        "ss", OWN_ANSWERS, _STREAM_LR, _STREAMS, large=_LARGE_STREAMS, about=_STREAM_ADVICE,
        what="Lossless streams and the pruning map", methods=("ss",),
    ),
    "ss-parent": Recipe(
        "ss", OWN_ANSWERS, _STREAM_LR, {**_STREAMS, "root_rank": 64, "parent_rank": 64}, large=_LARGE_STREAMS,
        about=_STREAM_ADVICE, methods=("ss[parent=on]",),
        what="Streams conditioned on root and parent tokens (an extension), for `ss[parent=on]`,",
    ),
    "hydra": Recipe(  # Hydra++; one block a head, as `medusa` has: with this budget as good as the published four
        "hydra", OWN_ANSWERS, 1e-2, {"layers": 1, "own_unembed": False}, about={"nodes": 4},
        what="Hydra++, four sequential heads behind one more layer,", methods=("hydra",),
    ),
    "eagle": Recipe(  # accuracies of one level more than the published tree has
        "eagle", OWN_ANSWERS, 3e-3, beyond={"ahead": 6}, about={"nodes": 8, "advice": {**_TREE, "cpu": {"nodes": 4}}},
        what="EAGLE's drafter, which eagle2 uses too,", methods=("eagle", "eagle2"),
    ),
    "eagle3": Recipe(  # four levels of training-time test: with this budget better than the published seven
        "eagle3", OWN_ANSWERS, 3e-3, {"levels": 4, "draft_vocab": 2048}, about={"advice": _TREE},
        what="EAGLE-3's drafter", methods=("eagle3",),
    ),
    "dflash": Recipe(
        "dflash", OWN_ANSWERS, 3e-3, {"layers": 1},
        what="DFlash's drafter of one layer and a block of eight", methods=("dflash",),
    ),
    "peagle": Recipe(
        "peagle", OWN_ANSWERS, 3e-3, {"depths": 7, "draft_vocab": 2048, "embedding": "target"},
        what="P-EAGLE's drafter of one layer and seven depths", methods=("peagle",),
    ),
    "dspark": Recipe(  # distributions alone: with this budget better than the published loss
        "dspark", OWN_ANSWERS, 3e-3, {"layers": 1, "markov_rank": 16, "loss": "kl"},
        what="DSpark's drafter of one layer and a block of seven", methods=("dspark",),
    ),
    "uno": Recipe(
        "uno", OWN_ANSWERS, 3e-3, {"rank": 8, "scale": 2.0}, what="UNO's LoRA of rank 8 with blocks of five",
        methods=("uno",),
    ),
    "draft-2m": Recipe(  # of the shape of the large draft, which learns from ten times the text
        "draft", OWN_ANSWERS, 3e-3, {"layers": 2, "hidden": 96, "n_heads": 2, "ffn": 256},
        what="It learnt from the base's own greedy answers: 900 steps of 5 rows of 512 tokens, at most 2.3 million in "
        "all, the very batches of the other drafters.", methods=("sd[weights=draft-2m]",),
    ),
    "ss-shared": Recipe(
        "ss", BASE_TEXT, 1e-3, _SHARED, {"stream_lr": _STREAM_LR}, about=_STREAM_ADVICE, methods=("ss-shared",),
        what="LoRA and streams, learnt together (eq. 6; main rows see their streams), which change the model,",
    ),
    "ss-shared-eq1": Recipe(
        "ss", BASE_TEXT, 1e-3, _EQ1, {"stream_lr": _STREAM_LR}, about=_STREAM_ADVICE,
        what="LoRA and streams, learnt together as the 2024 paper has it (eq. 1: main rows do not see streams), which "
        "change the model,", methods=("ss-shared[weights=ss-shared-eq1]",),
    ),
    # the same LoRA on next tokens alone
    "next-token": Recipe("ss", BASE_TEXT, 1e-3, _EQ1, {"stream_lr": _STREAM_LR, "alpha_j": 0.0}, about=_STREAM_ADVICE),
    "medusa2": Recipe(
        "medusa2", BASE_TEXT, 1e-3, {"own_unembed": False}, about={"nodes": 15, "advice": {"cpu": {"nodes": 6}}},
        what="LoRA and four Medusa heads, learnt together, which change the model,", methods=("medusa2",),
    ),
    "space": Recipe(
        "space", BASE_TEXT, 1e-3, {"masks": 4}, methods=("space",),
        what="LoRA and masks, learnt together, which change the model,",
    ),
    "draft-apps": Recipe("draft-apps", APPS_TEXT, 3e-3),
}  # fmt: skip


def train_drafter(lab: LabTraining, name: str) -> None:
    """Train a drafter, from its checkpoint if there is one, and write its folder."""
    recipe, course, folder = RECIPES[name], RECIPES[name].course, lab.folder(name)
    target, before = lab.base_target(), 0
    if course is APPS_TEXT:
        target = load_target(str(lab.made("draft/model", "draft")), dtype="float32", device=lab.device)
        before = target.model.config.ssbench["trained"]["tokens"]
    torch.manual_seed(lab.seed + course.seed)
    trainer, dist = recipe.built(target), lab.dist
    budget = Budget(lab.scaled(course.steps, 2), course.rows, ahead=trainer.ahead, warmup=course.warmup)
    settings = {"options": {**recipe.options, **recipe.beyond}}  # a checkpoint of another recipe is rejected
    loop = DrafterLoop(target, [trainer], course.text(lab), budget, folder, dist, settings)
    loop.train(lab.log)
    trained = {"steps": budget.steps, "lr": recipe.lr, **loop.trained_on(trainer)}
    trained["tokens"] += before
    if hasattr(trainer, "alpha_j"):
        trained["alpha_j"] = trainer.alpha_j
    trained["parameters"] = trainer.n_learning
    about: dict[str, Any] = {**belongs_to(target), "trained": trained, **recipe.about}
    if trainer.ranked:
        batches = lab.scaled(CALIBRATION_BATCHES, 1)
        calibration = drafter_text(lab, "calibration")
        about["accuracies"] = mean_accuracies(target, trainer, calibration, budget, batches, dist)
    trainer.save(lab.folder(f"{name}/weights"), about)
