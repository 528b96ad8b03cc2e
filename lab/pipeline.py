"""`python -m lab train`: every stage from text to shipped weights, seeded, resumable, on CPU or CUDA.

A stage that is done leaves its files in the work folder and is skipped the next time; one that was cut off goes on
from its checkpoint; one that is named is run again. A work folder is for one size, seed and budget.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab import stages as work
from lab.drafters import DRAFTERS, draft_apps, drafters
from lab.lab_training import LabTraining, Log
from specbench_ss.errors import UserError, did_you_mean
from specbench_ss.models.devices import check_one_device, resolve_device
from specbench_ss.storage import write_json
from specbench_ss.training.resumable import check_same

DONE = "done.json"


@dataclass(frozen=True, slots=True)
class Stage:
    """run fills the stage's folder; partial: the files there that it goes on from when it was cut off."""

    run: Callable[[LabTraining], None]
    partial: tuple[str, ...] = ()


CHECKPOINTED = ("checkpoint.pt",)
STAGES: dict[str, Stage] = {
    "tokenizer": Stage(work.tokenizer),
    "base": Stage(work.base, CHECKPOINTED),
    "polish": Stage(work.polish, CHECKPOINTED),
    "answers": Stage(work.answers, ("train.npy", "calibration.npy")),
    "drafters": Stage(drafters, tuple(f"{name}/checkpoint.pt" for name in DRAFTERS)),
    "shared": Stage(work.shared, CHECKPOINTED),
    "medusa2": Stage(work.medusa2, CHECKPOINTED),
    "space": Stage(work.space, CHECKPOINTED),
    "datastore": Stage(work.datastore),
    "draft": Stage(work.draft, CHECKPOINTED),
    "draft-apps": Stage(draft_apps, CHECKPOINTED),
    "export": Stage(work.export),
    "cards": Stage(work.measure),
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
        work.measure_shipped(lab)
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
