"""What `ssbench train` does for a drafter: check, load, read the text, train, write, publish."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError, os_reason
from specbench_ss.models.devices import check_one_device, resolve_device, resolve_dtype
from specbench_ss.models.load import check_template, load_target
from specbench_ss.models.resolve import check_model
from specbench_ss.options import recorded_values, value_text
from specbench_ss.runs.run_dir import check_place
from specbench_ss.storage import locked
from specbench_ss.training.drafter_recipe import DrafterRecipe
from specbench_ss.training.drafter_training import LOG, DrafterTraining, Trained
from specbench_ss.training.processes import Processes
from specbench_ss.training.publishing import base_name, check_repository, push_to_hub, write_card
from specbench_ss.training.resumable import CHECKPOINT
from specbench_ss.training.side_by_side import Budget
from specbench_ss.training.text.loading import TrainingText, load_rows
from specbench_ss.training.text.own_answers import OwnAnswers
from specbench_ss.training.text.packed_batches import PackedText
from specbench_ss.training.text.sources import open_source
from specbench_ss.training.trainee import Trainee
from specbench_ss.training.trainer import TrainConfig, Trainer

MOST_WARMUP = 50
EVERY = 20  # steps between progress lines


@dataclass(frozen=True, slots=True)
class Order:
    """A drafter that is to be trained. folder: for its weights. label: its name beside others; '' where it is alone."""

    recipe: DrafterRecipe
    folder: Path
    lr: float
    label: str = ""

    def build(self, target: Target, seed: int) -> Trainee:
        """Return what is trained, with the initial weights that it would have alone."""
        torch.manual_seed(seed)
        trainee = self.recipe.build(target, self.lr)
        trainee.name = self.label or trainee.name
        return trainee


def run(trainer: DrafterRecipe, config: TrainConfig) -> None:
    """Train a drafter and write its folder. Mistakes of the user are found before anything is learnt."""
    train([Order(trainer, config.out, config.lr or trainer.lr)], config, about_training(trainer, config))


def train(orders: Sequence[Order], config: TrainConfig, about: Mapping[str, Any]) -> None:
    """Train drafters on the same batches and write their folders. about: what a checkpoint has to agree in.

    Raises UserError where another process trains in config.out.
    """
    processes, target = opened(config)
    with locked(config.out) if processes.first else nullcontext():
        _train(orders, config, about, processes, target)


def _train(
    orders: Sequence[Order], config: TrainConfig, about: Mapping[str, Any], processes: Processes, target: Target
) -> None:
    trainees = {order.folder: order.build(target, config.seed) for order in orders}
    text = training_text(config, target, processes)
    budget = _budget(config, max(order.recipe.ahead for order in orders), len(text.train))
    processes.shard(target, list(trainees.values()))
    train, held_out = PackedText(text.train, config.seed), PackedText(text.held_out, config.seed)
    training = DrafterTraining(
        target, trainees, train, held_out, budget, config.out, processes, config.eval_every, about
    )
    for part in training.parts:
        _say(processes, _opening(part, training, config))
    if not len(held_out.rows):
        _say(processes, "nothing is held out: no held-out loss and no estimate of tau; see --eval-fraction")
    training.train(lambda line: _say(processes, line), EVERY, config.save_every)
    for order, part in zip(orders, training.parts, strict=True):
        measured = order.recipe.measured(part)  # with all processes: a base that is shared out runs in all or in none
        if processes.first:
            _finish(order, config, part, text, measured)
    processes.wait()


def opened(config: TrainConfig) -> tuple[Processes, Target]:
    """Return the processes and the target. Mistakes of the user are found before it is loaded, where possible."""
    check_one_device(config.device, "training")
    device = resolve_device(config.device)
    if config.load_in_4bit:
        check_four_bits(device)
    check_model(config.model)
    open_source(config.data)
    if config.push_to_hub:
        check_repository(config.push_to_hub)
    processes = Processes(device)  # all of them are here now
    if processes.first:
        check_out(config.out)  # makes a folder and removes it again, under which others would stumble
    processes.check(config.batch_size)
    target = load_base(config, str(processes.device))
    processes.exact = target.dtype == torch.float32
    check_template(target.tokenizer, target.name)
    if config.length > target.context_length:
        raise UserError(f"--length {config.length} is beyond the context of {target.name}, {target.context_length}")
    return processes, target


def check_out(out: Path) -> None:
    """Raise UserError for a folder that holds something other than a training, or cannot be made. None is made."""
    check_place(out)
    try:
        strange = (
            out.exists()
            and any(out.iterdir())
            and not any(next(out.glob(mark), None) for mark in (CHECKPOINT, LOG, f"*/{LOG}"))
        )
    except OSError as error:
        raise UserError(f"cannot use --out {out}: {os_reason(error)}") from None
    if strange:
        raise UserError(f"--out {out} holds files that belong to no training: give another folder")


def training_text(config: TrainConfig, target: Target, processes: Processes) -> TrainingText:
    """Have the first process make the text; the others then find it made."""
    own = OwnAnswers(target, config.answer_limit, config.answer_temperature) if config.own_answers else None
    source = config.data[0] if len(config.data) == 1 else config.data
    if not processes.first:
        processes.wait()
    text = load_rows(
        source,
        target.tokenizer,
        config.length,
        eval_fraction=config.eval_fraction,
        seed=config.seed,
        columns=dict(config.columns),
        own=own,
        log=lambda line: _say(processes, line),
    )
    if processes.first:
        processes.wait()
    return text


def _budget(config: TrainConfig, ahead: int, rows: int) -> Budget:
    steps = config.steps or math.ceil(config.epochs * rows / config.batch_size)
    tenth = MOST_WARMUP if config.cooldown else max(1, steps // 10)  # one that can be made longer starts as it will
    warmup = config.warmup or min(MOST_WARMUP, tenth)
    return Budget(steps, config.batch_size, config.anchors, ahead, warmup, config.cooldown)


def about_training(trainer: Trainer, config: TrainConfig) -> dict[str, Any]:
    """Return what a checkpoint has to agree in, as the user gave it, as JSON-ready data."""
    given = config.as_dict() | recorded_values(trainer.options)
    return {"trainer": trainer.name, "options": {name: value_text(value) for name, value in given.items()}}


def _say(processes: Processes, line: str) -> None:
    if processes.first:
        print(line, flush=True)


def _opening(part: Trained, training: DrafterTraining, config: TrainConfig) -> str:
    start = f"goes on from step {training.step} of" if training.resumed else "takes"
    shared = f", {part.processes.count} processes" if part.processes.count > 1 else ""
    return (
        f"{part.trainee.name}: {_learnt(part):,} parameters learn; {start} {part.total} steps of {config.batch_size} "
        f"rows of {config.length} tokens{shared}"
    )


def _targets(recipe: Any) -> dict[str, str]:
    """What was learnt at a drafted place, of trainers that have a choice."""
    targets = getattr(recipe.options, "targets", None)
    return {} if targets is None else {"targets": targets}


def _learnt(part: Trained) -> int:
    """Return how many parameters learn."""
    return sum(p.numel() for p in part.trainee.module.parameters() if p.requires_grad)


def _finish(order: Order, config: TrainConfig, part: Trained, text: TrainingText, measured: Mapping[str, Any]) -> None:
    target, recipe, folder = part.target, order.recipe, order.folder
    about = {
        **measured,
        "base": base_name(target),
        "base_hash": target.weights_hash,
        "base_dtype": "nf4" if config.load_in_4bit else str(target.dtype),
        "trained": {
            "steps": part.total, "tokens": part.total * part.tokens_per_step, "lr": order.lr,
            "anchors": config.anchors, "parameters": _learnt(part),
            "cooldown": config.cooldown, "batch_size": config.batch_size, "length": config.length, "seed": config.seed,
            "own_answers": config.own_answers, **_targets(recipe),
        },
    }  # fmt: skip
    recipe.save(part, folder, about)
    write_card(recipe, config, order.lr, part, text, folder)
    print(f"written: {folder}")
    if config.push_to_hub:
        print(f"published: {push_to_hub(folder, config.push_to_hub)}")
    print(f"use it: {recipe.usage(folder, config.model)}")


def check_four_bits(device: str) -> None:
    """Raise UserError where a base cannot be held in NF4."""
    if not device.startswith("cuda"):
        raise UserError("--load-in-4bit needs a CUDA device")
    if find_spec("bitsandbytes") is None:
        raise UserError("--load-in-4bit needs bitsandbytes: pip install bitsandbytes")


def load_base(config: TrainConfig, device: str) -> Target:
    """Return the target of the training on this device."""
    if config.load_in_4bit:
        check_four_bits(device)
    return load_target(
        config.model,
        dtype=str(resolve_dtype(config.dtype, device)).removeprefix("torch."),  # not the one that decodes faster
        device=device,
        trust_remote_code=config.trust_remote_code,
        chat_template=config.chat_template,
        nf4=config.load_in_4bit,
    )
