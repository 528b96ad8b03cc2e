"""Stages of `python -m lab train`, from text to shipped weights: seeded and resumable."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lab import cards
from lab.drafters import RECIPES, train_drafter
from lab.text import APP_CATEGORIES, POLISH_WEIGHTS, conversations
from lab.training import (
    BaseSize,
    BaseTrainer,
    LabTraining,
    Log,
    new_model,
    own_conversations,
    pack,
    save_model,
    save_rows,
    special_ids,
    train_tokenizer,
    training_rows,
)
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError, did_you_mean
from specbench_ss.methods.rest.datastore import build as build_datastore
from specbench_ss.models.devices import check_one_device, resolve_device
from specbench_ss.models.resolve import LAB
from specbench_ss.storage import write_json
from specbench_ss.training.loop import CHECKPOINT, check_same

POLISH_SHARE = 0.33
ANSWERED = {"s": 10_000, "m": 200_000}  # training conversations whose answers the base gives itself
CALIBRATION_TALKS = 768
ANSWERED_SEED = 2  # added to the lab's seed
DATASTORE_TALKS = 2_000  # 0.34 MB
DATASTORE_DRAFT = 8  # the best on two CPU cores: docs/log.md


def tokenizer(lab: LabTraining) -> None:
    """Train a BPE tokenizer on a sample of the training text with at least as many conversations as entries."""
    size = lab.base_size(lab.size)
    texts = []
    for example in islice(conversations("train", lab.seed), lab.scaled(24_000, size.vocab)):
        texts.append("\n" + "".join(f"\n{q}\n{a[0]}\n" for q, a in zip(example.turns, example.answers, strict=True)))
    trained = train_tokenizer(texts, size.vocab)
    trained.model_max_length = size.context
    trained.save_pretrained(lab.folder("tokenizer"))
    lab.log(f"tokenizer: {len(trained)} entries")


def _train_base(lab: LabTraining, stage: str, size: BaseSize, rows: NDArray[np.int32], model: Any) -> None:
    """Train a Llama of this size on these rows."""
    tokenizer, folder = lab.tokenizer(), lab.folder(stage)
    trainer = BaseTrainer(model, size, rows, special_ids(tokenizer), lab.device, folder, lab.compile)
    trainer.train(lab.log)
    if stage == "draft":
        model.config.ssbench = {"trained": {"tokens": trainer.counts["tokens"]}}
    save_model(model, tokenizer, folder / "model")


def base(lab: LabTraining, stage: str, name: str) -> None:
    """Train a model of the named size on all tasks: the base, or the small draft of two-model decoding."""
    size = lab.base_size(name)
    rows = training_rows(lab, size.tokens, size.rows_per_step, lab.seed + 1)
    _train_base(lab, stage, size, rows, new_model(size, special_ids(lab.tokenizer()), lab.seed))


def polish(lab: LabTraining) -> None:
    """Train the base's last part: more computing tasks, with arithmetic drills, at a lower learning rate."""
    from transformers import AutoModelForCausalLM

    size = lab.base_size(lab.size)
    tokens = max(int(size.tokens * POLISH_SHARE), size.rows_per_step * size.row_length)
    rows = training_rows(lab, tokens, size.rows_per_step, lab.seed + 4, POLISH_WEIGHTS)
    start = lab.made("base/model/model.safetensors", "base").parent
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    _train_base(lab, "polish", replace(size, tokens=tokens, lr=size.lr / 2), rows, model)


def answers(lab: LabTraining) -> None:
    """Generate the base's own answers to training and calibration prompts, packed like its training text.

    Answers to prompts of the applications are also stored separately, for the datastore.
    """
    target = lab.base_target()
    if not lab.dist.exact:  # half the memory traffic; equal answers except for rare ties
        target = Target(target.model.to(torch.bfloat16), target.tokenizer)
    for split, count in (("train", ANSWERED[lab.size]), ("calibration", CALIBRATION_TALKS)):
        path = lab.folder("answers") / f"{split}.npy"
        if path.exists():
            continue
        docs: list[NDArray[np.int32]] = []
        of_apps: dict[str, list[NDArray[np.int32]]] = {name: [] for name in APP_CATEGORIES}
        examples, longest = conversations(split, lab.seed + ANSWERED_SEED), min(192, lab.scaled(192, 8))
        for batch in own_conversations(target, examples, lab.scaled(count, 64), limit=longest):
            for talk in batch:
                docs.append(np.asarray(talk.ids, np.int32))
                of_apps.get(talk.example.category, []).append(docs[-1])
            lab.log(f"answers {split}: {len(docs)} conversations, {sum(map(len, docs))} tokens")
        if split == "train":
            save_rows(path.with_name("apps.npy"), np.concatenate([doc for app in of_apps.values() for doc in app]))
        save_rows(path, pack(docs, lab.base_size(lab.size).row_length, special_ids(target.tokenizer)["pad"]))


def datastore(lab: LabTraining) -> None:
    """Build the datastore of `rest` from the base's own answers to questions of the applications.

    Spec-Bench's categories are left out: the datastore would contain most of their generators' answers.
    """
    target = lab.base_target()
    ids: NDArray[np.int32] = np.load(lab.made("answers/apps.npy", "answers"))
    talks = np.split(ids, np.flatnonzero(ids == special_ids(target.tokenizer)["bos"])[1:])
    out = lab.folder("rest") / "weights"
    shutil.rmtree(out, ignore_errors=True)
    made_of = f"the base's own answers to training questions of {', '.join(APP_CATEGORIES)}"
    kept = talks[: lab.scaled(DATASTORE_TALKS, 4)]
    header = build_datastore(kept, target, made_of, out, draft=DATASTORE_DRAFT)
    lab.log(f"datastore: {header['tokens']} tokens of {header['documents']} conversations")


def export(lab: LabTraining) -> None:
    """Copy all shipped weights into one folder: base, draft and one folder per drafter."""
    out = lab.folder("export")
    for name in ("base", "draft", "rest", *RECIPES):
        stage, source = {"base": ("polish", "model"), "draft": ("draft", "model")}.get(name, (name, "weights"))
        shutil.rmtree(out / name, ignore_errors=True)  # with the cards of an earlier export
        shutil.copytree(lab.made(f"{stage}/{source}", stage), out / name)
    (out / "lab.json").write_text(json.dumps({"size": lab.size, "seed": lab.seed}) + "\n")
    lab.log(f"export: {sum(f.stat().st_size for f in out.rglob('*') if f.is_file()) / 1e6:.1f} MB in {out}")


def measure(lab: LabTraining) -> None:
    """Measure the exported family and write its cards."""
    cards.measure(lab, lab.made("export/lab.json", "export").parent)


def measure_shipped(lab: LabTraining) -> None:
    """Measure a copy of the package's own weights. Raise UserError if it has none of that size."""
    if json.loads((LAB / "lab.json").read_text())["size"] != lab.size:
        raise UserError(f"no training run in {lab.out}, and the package has no weights of size {lab.size}")
    out = lab.out / "shipped"
    shutil.copytree(LAB, out, dirs_exist_ok=True)
    lab.log(f"cards: no training run in {lab.out}, so the shipped weights are measured, a copy in {out}")
    cards.measure(lab, out)


DONE = "done.json"
# files from which an interrupted stage continues
PARTIAL = (CHECKPOINT, "train.npy", "calibration.npy")
STAGES: dict[str, Callable[[LabTraining], None]] = {
    "tokenizer": tokenizer,
    "base": lambda lab: base(lab, "base", lab.size),
    "polish": polish,
    "answers": answers,
    "draft": lambda lab: base(lab, "draft", "draft"),
    **{name: partial(train_drafter, name=name) for name in RECIPES},
    "rest": datastore,
    "export": export,
    "cards": measure,
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
    """Run the stages in order: all that are not done, or the named ones in any case.

    In a folder without a training run `cards` alone measures the shipped weights.
    Raise UserError for an unknown stage, and for a folder with a run of other settings. The
    KeyboardInterrupt of a Ctrl-C has a message with the command that continues.
    """
    for name in stages:
        if name not in STAGES:
            raise UserError(f"unknown stage {name!r}{did_you_mean(name, STAGES)}; stages: {', '.join(STAGES)}")
    check_one_device(device, "lab train")
    lab = LabTraining(out, size, resolve_device(device), seed, budget_scale, log)
    if stages == ("cards",) and not any((out / name).exists() for name in STAGES):
        measure_shipped(lab)
        return
    settings = {"seed": seed, "size": size, "budget_scale": budget_scale}
    for done in filter(Path.exists, (out / name / DONE for name in STAGES)):
        check_same(f"{done.parent}", json.loads(done.read_text()), settings)
    todo = [name for name in STAGES if not stages or name in stages]
    for place, name in enumerate(todo):
        try:
            _run(lab, name, bool(stages), settings)
        except KeyboardInterrupt as stop:
            saved = f", {stop}" if str(stop) else ""
            left = f" with --stages {','.join(todo[place:])}" if stages else ""  # the others would be run again
            raise KeyboardInterrupt(f"in stage {name}{saved}; to go on: the same command{left}") from None


def _run(lab: LabTraining, name: str, requested: bool, settings: Mapping[str, Any]) -> None:
    """Run one stage. requested: the user named it."""
    done = lab.out / name / DONE
    if done.exists():
        if not requested:
            lab.log(f"{name}: done before")
            return
        lab.log(f"{name}: done before, run again; stages after it stay as they are unless they are named too")
        for file in PARTIAL:
            (done.parent / file).unlink(missing_ok=True)
        done.unlink()  # last: if interrupted from here on, the stage continues
    STAGES[name](lab)
    lab.folder(name)
    write_json(done, settings)
