"""Training session: check, load, read the text, train, write, publish; one or several drafters."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch

from specbench_ss import registry
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError, os_errors
from specbench_ss.models.checkpoint import belongs_to
from specbench_ss.models.devices import check_one_device, resolve_device, resolve_dtype
from specbench_ss.models.frequent_tokens import write_frequent_tokens
from specbench_ss.models.load import check_template, load_target
from specbench_ss.models.resolve import check_model
from specbench_ss.options import Bounded, MethodSpec, option, option_values, parse_options, split_methods, value_text
from specbench_ss.prompt_files import open_source
from specbench_ss.runs.run_dir import check_place
from specbench_ss.storage import locked, write_json
from specbench_ss.training.batch import base_states
from specbench_ss.training.data import TrainingText, load_rows
from specbench_ss.training.distributed import DistributedContext
from specbench_ss.training.loop import CHECKPOINT, LOG, Budget, DrafterLoop, PackedText
from specbench_ss.training.model_card import base_name, check_repository, push_to_hub, write_card
from specbench_ss.training.self_distill import ResponseCache
from specbench_ss.training.trainer import DrafterTrainer, TrainConfig, Trainer, TrainJob

MAX_WARMUP = 50
EVERY = 20  # steps between progress lines
ACCURACY_BATCHES = 8
DRAFT_VOCAB = "draft_vocab"  # option of methods that read frequent tokens from the drafter's folder


def mean_accuracies(
    target: Target,
    trainer: DrafterTrainer,
    text: PackedText,
    budget: Budget,
    batches: int,
    dist: DistributedContext | None = None,
) -> list[list[float]]:
    """Return top-k accuracies [level][rank] over some batches of text."""
    trainer.module.eval()
    hits, counts = torch.zeros(()), torch.zeros(())
    for step in range(batches):
        batch = text.batch(step, budget, target.device)
        with (dist or DistributedContext(target.device)).autocast(), torch.no_grad():
            states = base_states(target, batch.ids, trainer.aux_hidden_state_layers, target.n_layers, batch.documents)
            new_hits, new_counts = trainer.accuracies(states, batch)
        hits, counts = hits + new_hits.cpu(), counts + new_counts.cpu()
    return [[round(x, 4) for x in row] for row in (hits / counts.clamp_min(1)[:, None]).tolist()]


def run(kind: type[Trainer], options: Any, config: TrainConfig) -> None:
    """Train the trainer's jobs, or measure the existing drafter of the option `measure`.

    User errors are found before the first step. Raises UserError.
    """
    if issubclass(kind, DrafterTrainer) and (weights := getattr(options, "measure", "")):
        measure(kind, weights, config)
        return
    jobs = kind.jobs(options, config)
    dist, target = opened(config)
    about = identity(kind, options, config)
    with locked(config.out) if dist.first else nullcontext():  # one process at a time trains in a folder
        trainers = [job.build(target, config.seed) for job in jobs]
        text = training_text(config, target, dist)
        dist.shard(target, trainers)
        validation = PackedText(text.validation, config.seed)
        loop = DrafterLoop(
            target,
            trainers,
            PackedText(text.train, config.seed),
            _budget(config, max(trainer.ahead for trainer in trainers), len(text.train)),
            config.out,
            dist,
            about,
            validation=validation,
            eval_every=config.eval_every,
            logs=[job.folder / LOG for job in jobs],
        )
        for trainer in trainers:
            dist.print(_opening(trainer, loop, config))
        if not len(validation.rows):
            dist.print("no validation conversations: no validation loss and τ; raise --eval-fraction")
        loop.train(dist.print, EVERY, config.save_every)
        for job, trainer in zip(jobs, trainers, strict=True):
            # in all processes: a base sharded by FSDP runs in all or none
            measured = _accuracies(trainer, loop) if trainer.ranked else {}
            if dist.first:
                _finish(trainer, job.folder, config, loop, text, measured)
        if dist.first and jobs[0].label:
            write_json(config.out / FOLDERS_FILE, {job.label: job.folder.name for job in jobs})
        dist.wait()


def opened(config: TrainConfig) -> tuple[DistributedContext, Target]:
    """Return the processes and the target. User errors are found before it is loaded, if possible."""
    check_one_device(config.device, "training")
    device = resolve_device(config.device)
    if config.load_in_4bit and not device.startswith("cuda"):
        raise UserError("--load-in-4bit needs a CUDA device")
    if config.load_in_4bit and find_spec("bitsandbytes") is None:
        raise UserError("--load-in-4bit needs bitsandbytes: pip install bitsandbytes")
    check_model(config.model)
    open_source(config.data)
    if config.push_to_hub:
        check_repository(config.push_to_hub)
    dist = DistributedContext.launched(device)  # all processes are started now
    if dist.first:
        check_out(config.out)  # creates a folder and removes it, which would disturb the other processes
    dist.check(config.batch_size)
    target = load_target(
        config.model,
        dtype=str(resolve_dtype(config.dtype, device)).removeprefix("torch."),  # not the fastest one for decoding
        device=str(dist.device),
        trust_remote_code=config.trust_remote_code,
        chat_template=config.chat_template,
        nf4=config.load_in_4bit,
    )
    dist.exact = target.dtype == torch.float32
    check_template(target.tokenizer, target.name)
    if config.length > target.context_length:
        raise UserError(f"--length {config.length} exceeds the context of {target.name}, {target.context_length}")
    return dist, target


def check_out(out: Path) -> None:
    """Raise UserError for a folder with other files than a training's, or one that cannot be created."""
    check_place(out)
    with os_errors(f"cannot use --out {out}"):
        foreign = (
            any(path.is_file() for path in out.rglob("*"))  # a training interrupted at its first step leaves folders
            and not any(next(out.glob(mark), None) for mark in (CHECKPOINT, LOG, f"*/{LOG}"))
        )
    if foreign:
        raise UserError(f"--out {out} has files of no training; use another folder")


def training_text(config: TrainConfig, target: Target, dist: DistributedContext) -> TrainingText:
    """Return the training text; the first process builds it and the others read it."""
    own = ResponseCache(target, config.answer_limit, config.answer_temperature) if config.regenerate_responses else None
    source = config.data[0] if len(config.data) == 1 else config.data
    if not dist.first:
        dist.wait()
    text = load_rows(
        source,
        target.tokenizer,
        config.length,
        eval_fraction=config.eval_fraction,
        seed=config.seed,
        columns=dict(config.columns),
        own=own,
        log=dist.print,
    )
    if dist.first:
        dist.wait()
    return text


def _budget(config: TrainConfig, ahead: int, rows: int) -> Budget:
    steps = config.steps or math.ceil(config.epochs * rows / config.batch_size)
    tenth = MAX_WARMUP if config.cooldown else max(1, steps // 10)  # independent of steps if it can be extended
    warmup = config.warmup or min(MAX_WARMUP, tenth)
    return Budget(steps, config.batch_size, config.anchors, ahead, warmup, config.cooldown)


def identity(kind: type[Trainer], options: Any, config: TrainConfig) -> dict[str, Any]:
    """Return the user's options, which must equal those of a checkpoint, JSON-ready."""
    given = config.as_dict() | option_values(options)
    return {"trainer": kind.name, "options": {name: value_text(value) for name, value in given.items()}}


def _opening(trainer: DrafterTrainer, loop: DrafterLoop, config: TrainConfig) -> str:
    start = f"resumes at step {loop.step} of" if loop.resumed else "takes"
    shared = f", {loop.dist.count} processes" if loop.dist.count > 1 else ""
    return (
        f"{trainer.name}: {trainer.n_learning:,} trainable parameters; {start} {loop.total} steps of "
        f"{config.batch_size} rows of at most {config.length} tokens{shared}"
    )


def _accuracies(trainer: DrafterTrainer, loop: DrafterLoop) -> dict[str, Any]:
    """Return top-k accuracies for a folder's config, on the validation text, else on the training text."""
    validation = loop.validation if loop.validation is not None and len(loop.validation.rows) else None
    text = validation or loop.text
    accuracies = mean_accuracies(loop.target, trainer, text, loop.budget, ACCURACY_BATCHES, loop.dist)
    return {"accuracies": accuracies, "accuracies_of": "validation text" if validation else "training text"}


def _finish(
    trainer: DrafterTrainer,
    folder: Path,
    config: TrainConfig,
    loop: DrafterLoop,
    text: TrainingText,
    measured: Mapping[str, Any],
) -> None:
    """Write a drafter's folder and its card, publish it, and print its usage."""
    target, options = loop.target, trainer.options
    loss = {"loss": options.loss} if hasattr(options, "loss") else {}
    about = {
        **measured,
        "base": base_name(target),
        **belongs_to(target),
        **({"base_dtype": "nf4"} if config.load_in_4bit else {}),
        "trained": {
            "steps": loop.total, **loop.trained_on(trainer), "lr": trainer.lr,
            "anchors": config.anchors, "parameters": trainer.n_learning,
            "cooldown": config.cooldown, "batch_size": config.batch_size, "length": config.length, "seed": config.seed,
            "regenerate_responses": config.regenerate_responses, **loss,
        },
    }  # fmt: skip
    trainer.save(folder, about)
    if any(f.name == DRAFT_VOCAB for f in fields(registry.method_class(trainer.method).Options)):
        write_frequent_tokens(folder, text.train.completion_counts(target.vocab_size))
    write_card(trainer, config, loop, text, folder)
    print(f"written: {folder}")
    if config.push_to_hub:
        print(f"published: {push_to_hub(folder, config.push_to_hub)}")
    print(f"use it: {usage(trainer.method, folder, config.model)}")
    if target.device_type == "cpu" and registry.method_class(trainer.method).node_options:
        print("on a CPU few drafted nodes are faster: add --nodes 4, or find the settings with `ssbench tune`")


def usage(method: str, folder: Path, model: str) -> str:
    """Return the shell command that decodes with the folder."""
    weights = f"{method}.weights={folder}"
    return shlex.join(["ssbench", "run", "--model", model, "--methods", method, "--set", weights])


ACCURACIES_FILE = "accuracies.json"


def measure(kind: type[DrafterTrainer], weights: str, config: TrainConfig) -> None:
    """Write accuracies.json for the method's option `tree`, without training.

    Every row of the text is read once. weights: path or id of the drafter.
    """
    dist, target = opened(config)
    trainer = kind.loaded(target, weights)
    text = PackedText(training_text(config, target, dist).train, config.seed)
    batches = math.ceil(len(text.rows) / config.batch_size)
    budget = Budget(batches, config.batch_size, config.anchors, trainer.ahead)
    accuracies = mean_accuracies(target, trainer, text, budget, batches, dist)
    if not dist.first:
        return
    config.out.mkdir(parents=True, exist_ok=True)
    content = {
        "base_hash": target.weights_hash,
        "regenerate_responses": config.regenerate_responses,
        "accuracies": accuracies,
    }
    write_json(path := config.out / ACCURACIES_FILE, content)
    for i, row in enumerate(accuracies):
        print(f"head {i + 1}: top-1 {row[0]:.3f}, top-{len(row)} {sum(row):.3f}")
    name = kind.method
    settings = f"--set {name}.weights={shlex.quote(weights)} --set {name}.tree={shlex.quote(str(path))}"
    print(f"use it: ssbench run --model {shlex.quote(config.model)} --methods {name} {settings}")


FOLDERS_FILE = "together.json"  # folder of each drafter
LR = "lr"  # an option of every drafter here


@dataclass(frozen=True, slots=True)
class TogetherOptions(Bounded):
    """Options of `ssbench train together`."""

    owner: ClassVar[str] = "together"
    drafters: str = option(
        "",
        "Drafters to train, separated by commas, each with options of its own and lr, its peak learning "
        "rate, if you like: A[lr=0.01],B. Each gets a folder in --out.",
    )


class MultiDrafterTrainer(Trainer):
    """Any number of drafters, trained on the same batches."""

    name = "together"
    summary = "several drafters side by side: the same answers, batches and budget, and the base computed once for all"
    Options = TogetherOptions

    @classmethod
    def jobs(cls, options: TogetherOptions, config: TrainConfig) -> list[TrainJob]:
        """Return the jobs of the drafters in the options, each with its own folder."""
        jobs = jobs_of(options.drafters, config)
        if config.push_to_hub:
            raise UserError("together: --push-to-hub takes one drafter; publish each folder separately")
        return jobs


def jobs_of(drafters: str, config: TrainConfig) -> list[TrainJob]:
    """Return the jobs of `--drafters`. Raises UserError for unsupported ones."""
    specs = [MethodSpec.parse(text) for text in split_methods(drafters)]
    if not specs:
        raise UserError("together: add --drafters, such as --drafters ss,medusa (`ssbench train` lists them)")
    jobs = [_job(spec, config) for spec in specs]
    for names in ([job.label for job in jobs], [job.folder.name for job in jobs]):
        duplicates = [name for name, n in Counter(names).items() if n > 1]
        if duplicates:
            raise UserError(f"together: {duplicates[0]} is listed twice")
    return jobs


def _job(spec: MethodSpec, config: TrainConfig) -> TrainJob:
    kind = registry.trainer_class(spec.name)
    if not issubclass(kind, DrafterTrainer):
        raise UserError(f"together: {spec.name} cannot be trained with others")
    given = dict(spec.options)
    lr = given.pop(LR, None)
    options = parse_options(kind.Options, given, f"together: {spec.name}")
    folder = config.out / re.sub(r"[^A-Za-z0-9.]+", "-", spec.label).strip("-")
    return TrainJob(kind, options, folder, _rate(lr, spec) if lr else config.lr or kind.lr, spec.label)


def _rate(text: str, spec: MethodSpec) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise UserError(f"{spec.label}: lr must be a number above 0, not {text!r}")
    return rate
