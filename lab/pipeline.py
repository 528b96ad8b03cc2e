"""Stages of `python -m lab train`, from text to shipped weights: seeded and resumable."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lab import cards
from lab.drafters import (
    CALIBRATION_BATCHES,
    DRAFTERS,
    MEDUSA_NODES,
    SS_ADVICE,
    STREAM_EMBEDDING_LR,
    STREAM_LR,
    draft_apps,
    drafters,
)
from lab.text import APP_CATEGORIES, POLISH_WEIGHTS, conversations
from lab.training import (
    ANSWERED,
    DRAFTER_STEPS,
    DRAFTER_TALKS,
    BaseSize,
    BaseTrainer,
    LabTraining,
    Log,
    answers_by_category,
    answers_in,
    drafter_text,
    new_model,
    own_conversations,
    save_model,
    save_rows,
    train_tokenizer,
    training_rows,
)
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError, did_you_mean
from specbench_ss.methods.medusa.train import JointTraining, Medusa2Trainer
from specbench_ss.methods.rest.datastore import build as build_datastore
from specbench_ss.methods.space.train import MaskOptions, SPACETrainer
from specbench_ss.methods.ss.config import StreamConfig
from specbench_ss.methods.ss.train import SharedTrainer
from specbench_ss.models.checkpoint import belongs_to
from specbench_ss.models.devices import check_one_device, resolve_device
from specbench_ss.models.load import load_target
from specbench_ss.models.resolve import LAB
from specbench_ss.storage import write_json
from specbench_ss.training.data import pack, render, special_ids
from specbench_ss.training.loop import Budget, DrafterLoop, check_same
from specbench_ss.training.session import mean_accuracies
from specbench_ss.training.trainer import DrafterTrainer

POLISH_SHARE = 0.33
CALIBRATION_TALKS = 768
SHARED_STREAMS = StreamConfig(
    gamma=4, n_msa_layers=4, adapter_rank=0, mode="shared", lora_rank=32, main_attends_streams=True
)  # ACL sec. 3: LoRA for main and streams alike, eq. 3
NO_EQ3 = replace(SHARED_STREAMS, main_attends_streams=False)  # the 2024 paper's eq. 1: main rows see main rows alone
SHARED_TOKENS = 2_000_000
SHARED_LR = 1e-3
SHARED_ROWS = 4
SPACE_MASKS = 4  # as many tokens ahead as the streams
DATASTORE_TALKS = 2_000  # 0.34 MB
DATASTORE_DRAFT = 8  # what pays on two CPU cores: see docs/log.md


def tokenizer(lab: LabTraining) -> None:
    """BPE from a sample of the training text: at least as many conversations as entries."""
    count = lab.scaled(24_000, lab.base_size(lab.size).vocab)
    texts = [render(e).replace("<|", "\n<|") for e in islice(conversations("train", lab.seed), count)]
    for marker in ("<|bos|>", "<|user|>", "<|assistant|>", "<|end|>"):
        texts = [t.replace(marker, "") for t in texts]
    made = train_tokenizer(texts, lab.base_size(lab.size).vocab)
    made.model_max_length = lab.base_size(lab.size).context
    made.save_pretrained(lab.folder("tokenizer"))
    lab.log(f"tokenizer: {len(made)} entries")


def _train_base(
    lab: LabTraining, stage: str, size: BaseSize, rows: NDArray[np.int32], start: Path | None = None
) -> None:
    """Train a Llama of this size on these rows, from nothing or from a model on disk."""
    from transformers import AutoModelForCausalLM

    tokenizer = lab.tokenizer()
    special = special_ids(tokenizer)
    model: Any
    if start is None:
        model = new_model(size, special, lab.seed)
    else:
        model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    BaseTrainer(model, size, rows, special, lab.device, lab.folder(stage), lab.compile).train(lab.log)
    if stage == "draft":
        model.config.ssbench = {"trained": {"tokens": size.tokens}}
    save_model(model, tokenizer, lab.folder(stage) / "model")


def base(lab: LabTraining) -> None:
    """The base model on all tasks alike."""
    size = lab.base_size(lab.size)
    _train_base(lab, "base", size, training_rows(lab, size, lab.seed + 1))


def polish(lab: LabTraining) -> None:
    """The base's last part: more of what computes, with arithmetic drills, at a lower learning rate."""
    size = lab.base_size(lab.size)
    size = replace(
        size, tokens=max(int(size.tokens * POLISH_SHARE), size.rows_per_step * size.row_length), lr=size.lr / 2
    )
    start = lab.made("base/model/model.safetensors", "base").parent
    _train_base(lab, "polish", size, training_rows(lab, size, lab.seed + 4, POLISH_WEIGHTS), start)


def answers(lab: LabTraining) -> None:
    """The base's own answers to training and calibration prompts, packed like its training text."""
    tokenizer = lab.tokenizer()
    target = lab.base_target()
    if not lab.machine.exact:  # half the traffic; what it says is the same but for rare ties
        target = Target(target.model.to(torch.bfloat16), tokenizer)
    for split, count in (("train", DRAFTER_TALKS[lab.size]), ("calibration", CALIBRATION_TALKS)):
        path = lab.folder("answers") / f"{split}.npy"
        if path.exists():
            continue
        docs: list[NDArray[np.int32]] = []
        examples, longest = conversations(split, lab.seed + ANSWERED), min(192, lab.scaled(192, 8))
        for batch in own_conversations(target, examples, lab.scaled(count, 64), limit=longest):
            docs += batch
            lab.log(f"answers {split}: {len(docs)} conversations, {sum(map(len, docs))} tokens")
        save_rows(path, pack(docs, lab.base_size(lab.size).row_length, special_ids(tokenizer)["pad"]))


def shared(lab: LabTraining) -> None:
    """Shared mode in the forms of both papers, and the same LoRA on next tokens alone: same start, batches, steps."""
    target = lab.base_target()
    forms = (("ss-shared", SHARED_STREAMS, 0.1), ("next-token", NO_EQ3, 0.0), ("ss-shared-eq1", NO_EQ3, 0.1))
    trainers = [shared_trainer(lab, target, *form) for form in forms]
    train_shared(lab, target, trainers, "shared")


def shared_trainer(
    lab: LabTraining, target: Target, name: str, streams: StreamConfig, alpha_j: float, ramp: int = 0
) -> SharedTrainer:
    """A LoRA with its streams; all of a seed start from the same one. ramp: steps in which alpha_j rises to its value.

    alpha_j 0 learns next tokens alone.
    """
    torch.manual_seed(lab.seed + 5)
    rates = (SHARED_LR, STREAM_LR, STREAM_EMBEDDING_LR)
    return SharedTrainer(target, streams, *rates, alpha_j=alpha_j, name=name, ramp=ramp)


def train_shared(lab: LabTraining, target: Target, trainers: Sequence[SharedTrainer], stage: str) -> None:
    """Fine-tunes with LoRA, all on the same batches; each is saved in the folder of its own name."""
    budget = _tune(lab, target, trainers, stage)
    for trainer in trainers:
        rises = {"ramp": trainer.ramp.steps} if trainer.ramp.steps else {}
        trained = {**_trained(lab, budget), "alpha_j": trainer.alpha_j, **rises}
        about = {**belongs_to(target), "trained": trained, "advice": SS_ADVICE}
        trainer.save(lab.folder(trainer.name), about)


def medusa2(lab: LabTraining) -> None:
    """Heads and backbone together, on the batches of stage `shared`; the heads share the backbone's LM head."""
    target = lab.base_target()
    torch.manual_seed(lab.seed + 5)
    options = JointTraining(lora_rank=SHARED_STREAMS.lora_rank, own_unembed=False)
    trainer = Medusa2Trainer(target, options, SHARED_LR)
    budget = _tune(lab, target, [trainer], "medusa2")
    batches = lab.scaled(CALIBRATION_BATCHES, 1)
    accuracies = mean_accuracies(target, trainer, drafter_text(lab, "calibration"), budget, batches, lab.machine)
    config = {
        **belongs_to(target), "trained": _trained(lab, budget), "accuracies": accuracies, "nodes": MEDUSA_NODES,
    }  # fmt: skip
    trainer.save(lab.folder("medusa2/weights"), config)


def _tune(lab: LabTraining, target: Target, trainers: Sequence[DrafterTrainer], stage: str) -> Budget:
    """Train what changes the base, on text of the base's own kind."""
    size = replace(lab.base_size(lab.size), tokens=lab.scaled(SHARED_TOKENS, 4096), rows_per_step=SHARED_ROWS)
    text = answers_in(lab, training_rows(lab, size, lab.seed + 5), lab.seed + 5)
    budget = Budget(lab.scaled(DRAFTER_STEPS, 2), rows_per_step=SHARED_ROWS, warmup=20)
    DrafterLoop(target, trainers, text, budget, lab.folder(stage), lab.machine).train(lab.log)
    return budget


def _trained(lab: LabTraining, budget: Budget) -> dict[str, int]:
    """What a folder's config says of such a training."""
    return {"steps": budget.steps, "tokens": budget.steps * budget.rows_per_step * lab.base_size(lab.size).row_length}


def space(lab: LabTraining) -> None:
    """SPACE's LoRA and mask, on the batches of stage `shared`."""
    target = lab.base_target()
    torch.manual_seed(lab.seed + 5)
    trainer = SPACETrainer(target, MaskOptions(SPACE_MASKS, SHARED_STREAMS.lora_rank), SHARED_LR)
    budget = _tune(lab, target, [trainer], "space")
    about = {**belongs_to(target), "trained": _trained(lab, budget)}
    trainer.save(lab.folder("space/weights"), about)


def datastore(lab: LabTraining) -> None:
    """The base's own answers to questions of the applications, for `rest` to look up.

    Not to questions of the categories that Spec-Bench has: of their generators' answers it would know most by heart.
    """
    known = answers_by_category(lab)
    talks = [talk for name in APP_CATEGORIES for talk in known.get(name, ())][: lab.scaled(DATASTORE_TALKS, 4)]
    out = lab.out / "rest"
    shutil.rmtree(out, ignore_errors=True)
    made_of = f"the base's own answers to training questions of {', '.join(APP_CATEGORIES)}"
    header = build_datastore(talks, lab.base_target(), made_of, out, draft=DATASTORE_DRAFT)
    lab.log(f"datastore: {header['tokens']} tokens of {header['documents']} conversations")


def draft(lab: LabTraining) -> None:
    """The small draft model for two-model speculative decoding, on the same text."""
    size = lab.base_size("draft")
    _train_base(lab, "draft", size, training_rows(lab, size, lab.seed + 1))


def export(lab: LabTraining) -> None:
    """Everything that is shipped, into one folder: base, draft and a folder a drafter."""
    sources = {
        "base": lab.made("polish/model", "polish"),
        "draft": lab.made("draft/model", "draft"),
        "draft-apps": lab.made("draft-apps/weights", "draft-apps"),
        "ss-shared": lab.made("ss-shared", "shared"),
        "next-token": lab.made("next-token", "shared"),
        "ss-shared-eq1": lab.made("ss-shared-eq1", "shared"),
        "medusa2": lab.made("medusa2/weights", "medusa2"),
        **{name: lab.made(name, "drafters") for name in DRAFTERS},
        "rest": lab.made("rest", "datastore"),
        "space": lab.made("space/weights", "space"),
    }
    out = lab.folder("export")
    for name, source in sources.items():
        if (out / name).exists():  # with the cards of what was exported before
            shutil.rmtree(out / name)
        shutil.copytree(source, out / name)
    (out / "lab.json").write_text(json.dumps({"size": lab.size, "seed": lab.seed}) + "\n")
    lab.log(f"export: {sum(f.stat().st_size for f in out.rglob('*') if f.is_file()) / 1e6:.1f} MB in {out}")


def measure(lab: LabTraining) -> None:
    """Measure the exported family and write its cards."""
    _measure(lab, lab.made("export/lab.json", "export").parent)


def measure_shipped(lab: LabTraining) -> None:
    """The same for a copy of the package's own weights. Raises UserError where it brings none of that size."""
    about = json.loads((LAB / "lab.json").read_text()) if (LAB / "lab.json").exists() else {}
    if about.get("size") != lab.size:
        raise UserError(f"no training run in {lab.out}, and the package brings no weights of size {lab.size}")
    out = lab.out / "shipped"
    shutil.copytree(LAB, out, dirs_exist_ok=True)
    lab.log(f"cards: no training run in {lab.out}, so the shipped weights are measured, a copy in {out}")
    _measure(lab, out)


def _measure(lab: LabTraining, family: Path) -> None:
    names = [name for name in ("base", *cards.DRAFTS) if (family / name).is_dir()]  # an older family has fewer
    models = {name: load_target(str(family / name), dtype="float32", device=lab.device) for name in names}
    base, longest = models["base"], min(256, lab.scaled(256, 8))
    special, count = special_ids(base.tokenizer), lab.scaled(400, 8)
    losses = {name: cards.held_out_loss(t.model, t.tokenizer, special, count) for name, t in models.items()}
    lab.log("cards: held-out loss " + ", ".join(f"of {name} {loss:.4f}" for name, loss in losses.items()))
    scores = cards.task_scores(base, lab.scaled(60, 1), longest)
    lab.log("cards: " + ", ".join(f"{c} {m} {v:.3f}" for c, (m, v, _) in scores.items()))
    taus = cards.taus(base, lab.scaled(3, 1), longest)
    lab.log("cards: " + ", ".join(f"{name} tau {value:.2f}" for name, value in taus.items()))
    apps = cards.on_the_applications(base, special, count, lab.scaled(20, 1), longest)
    said = ", ".join(f"{name} loss {loss:.4f} tau {value:.2f}" for name, (loss, value) in apps.items())
    lab.log(f"cards: on the applications {said or 'no draft of their own'}")
    cards.write_cards(family, models, cards.Measured(losses, scores, taus, apps))


DONE = "done.json"


@dataclass(frozen=True, slots=True)
class Stage:
    """run fills the stage's folder; partial: the files there that it goes on from when it was cut off."""

    run: Callable[[LabTraining], None]
    partial: tuple[str, ...] = ()


CHECKPOINTED = ("checkpoint.pt",)
STAGES: dict[str, Stage] = {
    "tokenizer": Stage(tokenizer),
    "base": Stage(base, CHECKPOINTED),
    "polish": Stage(polish, CHECKPOINTED),
    "answers": Stage(answers, ("train.npy", "calibration.npy")),
    "drafters": Stage(drafters, tuple(f"{name}/checkpoint.pt" for name in DRAFTERS)),
    "shared": Stage(shared, CHECKPOINTED),
    "medusa2": Stage(medusa2, CHECKPOINTED),
    "space": Stage(space, CHECKPOINTED),
    "datastore": Stage(datastore),
    "draft": Stage(draft, CHECKPOINTED),
    "draft-apps": Stage(draft_apps, CHECKPOINTED),
    "export": Stage(export),
    "cards": Stage(measure),
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
    """Run the stages in order: all that are not done, or the named ones, done before or not.

    In a folder without a training run `cards` alone measures the shipped weights.
    Raises UserError for an unknown stage or size, and for a folder that holds a run with other settings. The
    KeyboardInterrupt of a Ctrl-C says how to go on.
    """
    for name in stages:
        if name not in STAGES:
            raise UserError(f"unknown stage {name!r}{did_you_mean(name, STAGES)}; stages: {', '.join(STAGES)}")
    if size not in ("s", "m"):
        raise UserError(f"unknown size {size!r}; sizes: s, m")
    check_one_device(device, "lab train")
    lab = LabTraining(out, size, resolve_device(device), seed, budget_scale, log)
    if stages == ("cards",) and not any((out / name).exists() for name in STAGES):
        measure_shipped(lab)
        return
    settings = {"seed": seed, "size": size, "budget_scale": budget_scale}
    for name in STAGES:
        _check_settings(out / name / DONE, settings)
    todo = [name for name in STAGES if not stages or name in stages]
    for place, name in enumerate(todo):
        try:
            _run(lab, name, bool(stages), settings)
        except KeyboardInterrupt as stop:
            saved = f", {stop}" if str(stop) else ""
            left = f" with --stages {','.join(todo[place:])}" if stages else ""  # the others would be run again
            raise KeyboardInterrupt(f"in stage {name}{saved}; to go on: the same command{left}") from None


def _check_settings(done: Path, settings: Mapping[str, Any]) -> None:
    if done.exists():
        check_same(f"{done.parent}", json.loads(done.read_text()), settings)


def _run(lab: LabTraining, name: str, asked: bool, settings: Mapping[str, Any]) -> None:
    """One stage. asked: the user named it."""
    done = lab.out / name / DONE
    if done.exists():
        if not asked:
            lab.log(f"{name}: done before")
            return
        lab.log(f"{name}: done before, run again; stages after it stay as they are unless they are named too")
        for file in STAGES[name].partial:
            (done.parent / file).unlink(missing_ok=True)
        done.unlink()  # last: cut off from here on, the stage goes on rather than begins again
    STAGES[name].run(lab)
    lab.folder(name)
    write_json(done, settings)
