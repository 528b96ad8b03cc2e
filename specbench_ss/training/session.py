"""Training session: check, load, read the text, train, write, publish; trainers of drafters and heads.

What they learn from is then equal to the token, and the base runs once a batch for all of them.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol

import torch
from annotated_types import Ge
from torch import Tensor, nn

from specbench_ss import registry
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError, os_reason
from specbench_ss.models.devices import check_one_device, resolve_device, resolve_dtype
from specbench_ss.models.load import check_template, load_target
from specbench_ss.models.resolve import check_model
from specbench_ss.options import Bounded, MethodSpec, parse_options, recorded_values, split_methods, value_text
from specbench_ss.runs.run_dir import check_place
from specbench_ss.storage import locked, write_json
from specbench_ss.training.data import TrainingText, load_rows, open_source
from specbench_ss.training.distributed import LOG, DrafterTraining, PackedText, Processes, Trained
from specbench_ss.training.loop import CHECKPOINT, Budget, Machine, Text
from specbench_ss.training.model_card import base_name, check_repository, push_to_hub, write_card
from specbench_ss.training.self_distill import OwnAnswers
from specbench_ss.training.trainee import Anchors, BaseStates, Batch, Trainee, base_states
from specbench_ss.training.trainer import DrafterRecipe, TrainConfig, Trainer

TOP = 10  # guesses of a level that are looked at


class Guesser(Protocol):
    """A trainee whose guesses can be ranked."""

    @property
    def module(self) -> nn.Module:
        """Return the module that has learnt."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Return the layers of the base whose inputs it needs."""

    def accuracies(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (hits [levels, top], positions [levels]): how often a level's r-th guess is right, out of how many.

        The tokens before the guessed one are those of the text.
        """


def ranked(guesses: Tensor, anchors: Anchors) -> tuple[Tensor, Tensor]:
    """Compare guesses [levels, B*A, top] with the tokens after the next one.

    Return (hits [levels, top], positions [levels]).
    """
    labels = anchors.labels[..., 1 : len(guesses) + 1].flatten(0, 1).T  # [levels, B*A]
    return (guesses == labels[..., None]).sum(1), (labels != -100).sum(1)


def mean_accuracies(
    target: Target, trainee: Guesser, text: Text, budget: Budget, batches: int, machine: Machine | None = None
) -> list[list[float]]:
    """Return top-k accuracies [level][rank] over some batches of held-out text."""
    trainee.module.eval()
    hits, seen = torch.zeros(()), torch.zeros(())
    for step in range(batches):
        batch = text.batch(step, budget, target.device)
        with (machine or Machine(target.device)).autocast(), torch.no_grad():
            states = base_states(target, batch.ids, trainee.taps, target.n_layers, batch.documents)
            new_hits, new_seen = trainee.accuracies(states, batch)
        hits, seen = hits + new_hits.cpu(), seen + new_seen.cpu()
    return [[round(x, 4) for x in row] for row in (hits / seen.clamp_min(1)[:, None]).tolist()]


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


JUDGED_STEPS = 8  # batches of text on which accuracies are measured


class DrafterTrainer(DrafterRecipe):
    """A recipe that `ssbench train` carries out with the common loop."""

    def train(self, config: TrainConfig) -> None:
        """Train the drafter with the common loop."""

        run(self, config)


def measured_accuracies(training: Trained, trainee: Guesser) -> dict[str, Any]:
    """Return top-k accuracies for a folder's config, on held-out text, or on the training text where there is none."""

    text = training.held_out if len(training.held_out.rows) else training.text
    measured = mean_accuracies(training.target, trainee, text, training.budget, JUDGED_STEPS, training.processes)
    return {"accuracies": measured, "accuracies_of": "held-out text" if text is training.held_out else "training text"}


MEASURED = "accuracies.json"


def measure(name: str, heads: str, load: Callable[[Target, str], Guesser], config: TrainConfig) -> None:
    """Write accuracies.json, which the option `tree` of the method `name` takes. Nothing is trained.

    Every row of the text is read once. heads: the weights as the user named them; `load` reads them.
    """
    processes, target = opened(config)
    trainee = load(target, heads)
    text = PackedText(training_text(config, target, processes).train, config.seed)
    batches = math.ceil(len(text.rows) / config.batch_size)
    budget = Budget(batches, config.batch_size, config.anchors, trainee.module.count)  # type: ignore[arg-type]
    found = mean_accuracies(target, trainee, text, budget, batches, processes)
    if not processes.first:
        return
    config.out.mkdir(parents=True, exist_ok=True)
    content = {"base_hash": target.weights_hash, "own_answers": config.own_answers, "accuracies": found}
    path = config.out / MEASURED
    path.write_text(json.dumps(content, indent=1) + "\n")
    for i, row in enumerate(found):
        print(f"head {i}: right {row[0]:.3f}, among the best {len(row)} {sum(row):.3f}")
    chosen = f"--set {name}.weights={shlex.quote(heads)} --set {name}.tree={shlex.quote(str(path))}"
    print(f"use it: ssbench run --model {shlex.quote(config.model)} --methods {name} {chosen}")


@dataclass(frozen=True, slots=True)
class HeadsTraining(Bounded):
    """Options of every trainer of heads."""

    heads: Annotated[int, Ge(1)] = field(
        default=4, metadata={"help": "Number of heads: how many tokens are drafted after the next one."}
    )


@dataclass(frozen=True, slots=True)
class MeasurableHeads(HeadsTraining):
    """Options of trainers that leave the base unchanged. Existing heads can be measured with them, too."""

    measure: str = field(
        default="",
        metadata={
            "help": "Folder or file with heads. Nothing is trained then: how often these heads guess the text is "
            "measured, and a draft tree can be built from that."
        },
    )


class HeadsTrainer(DrafterTrainer):
    """Trains a drafter that consists of heads."""

    weights_file: ClassVar[str]
    Options: ClassVar[type[Any]] = HeadsTraining

    @property
    def ahead(self) -> int:
        """Number of heads, since each head drafts one token."""
        return int(self.options.heads)

    def measured(self, training: Trained) -> dict[str, Any]:
        """Return the accuracies that the tree is built from."""
        trainee: Any = training.trainee
        return measured_accuracies(training, trainee)

    def save(self, training: Trained, folder: Path, about: dict[str, Any]) -> None:
        """Write the heads and their accuracies."""
        from specbench_ss.models.checkpoint import write_checkpoint

        trainee: Any = training.trainee
        config = {**about, **trainee.config}
        write_checkpoint(folder, trainee.module, config, self.weights_file)


class MeasurableHeadsTrainer(HeadsTrainer):
    """Trains heads, or measures the accuracies of existing heads without training."""

    Options: ClassVar[type[Any]] = MeasurableHeads

    @abstractmethod
    def loaded(self, target: Target, weights: str) -> Guesser:
        """Return existing heads. Raises UserError where they cannot be loaded."""

    def train(self, config: TrainConfig) -> None:
        """Train heads, or measure existing ones where the option `measure` names them."""
        if not self.options.measure:
            super().train(config)
            return

        measure(self.method, self.options.measure, self.loaded, config)


LISTED = "together.json"  # which drafter lies in which folder
LR = "lr"  # an option that every drafter has here


@dataclass(frozen=True, slots=True)
class TogetherOptions(Bounded):
    """Options of `ssbench train together`."""

    owner: ClassVar[str] = "together"
    drafters: str = field(
        default="",
        metadata={
            "help": "Drafters to train, separated by commas, each with options of its own and lr, its peak learning "
            "rate, if you like: A[lr=0.01],B. Each gets a folder in --out."
        },
    )


class Together(Trainer):
    """Any number of drafters that are trained by the common loop."""

    name = "together"
    summary = "several drafters side by side: the same answers, batches and budget, and the base computed once for all"
    Options = TogetherOptions

    def train(self, config: TrainConfig) -> None:
        """Train them all, and write a folder for each and the list of them. Raises UserError."""

        orders = self.orders(config)
        if config.push_to_hub:
            raise UserError("together: a repository holds one drafter; publish each folder by itself")
        about = about_training(self, config)
        train(orders, config, about)
        listed = {order.label: order.folder.name for order in orders}
        write_json(config.out / LISTED, listed)

    def orders(self, config: TrainConfig) -> list[Order]:
        """Return what is to be trained. Raises UserError for what is no drafter of the common loop."""
        specs = [MethodSpec.parse(text) for text in split_methods(self.options.drafters)]
        if not specs:
            raise UserError("together: give --drafters, such as --drafters ss,medusa; `ssbench train` lists them all")
        found = [_order(spec, config) for spec in specs]
        for seen in ([order.label for order in found], [order.folder.name for order in found]):
            twice = [name for name, n in Counter(seen).items() if n > 1]
            if twice:
                raise UserError(f"together: {twice[0]} is named twice")
        return found


def _order(spec: MethodSpec, config: TrainConfig) -> Order:

    kind = registry.trainer_class(spec.name)
    if not issubclass(kind, DrafterRecipe):
        raise UserError(f"together: {spec.name} cannot be trained beside others")
    given = dict(spec.options)
    lr = given.pop(LR, None)
    recipe = kind(parse_options(kind.Options, given, f"together: {spec.name}"))
    folder = config.out / re.sub(r"[^A-Za-z0-9.]+", "-", spec.label).strip("-")
    return Order(recipe, folder, _rate(lr, spec) if lr else config.lr or recipe.lr, spec.label)


def _rate(text: str, spec: MethodSpec) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise UserError(f"{spec.label}: lr must be a number above 0, not {text!r}")
    return rate
