"""The same small sweep of learning rates for every drafter of the lab that leaves the base alone.

    python benchmarks/learning_rates.py WORK [--only medusa,hydra] [--steps 70] [--rates 1e-3,3e-3,1e-2]

WORK: a folder of `python -m lab train` with stage `answers` done. Drafters learn side by side with all rates, and
see the same batches whether they are named together or apart. Then each is held against calibration text. Prints, and
writes to found.json in WORK/learning-rates, the shares of right first guesses at the first four places; by their mean a
rate is chosen. Resumable.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lab.drafters import CALIBRATION_BATCHES, DRAFTERS, EAGLE_LEVELS
from lab.lab_training import LabTraining, drafter_budget, drafter_text
from specbench_ss.training.side_by_side import Budget, TogetherTrainer

PLACES = 4
WARMUP = 10


def main() -> None:
    """Train, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--only", default=",".join(DRAFTERS), help="drafters, separated by commas")
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--rates", default="1e-3,3e-3,1e-2")
    arguments = parser.parse_args()
    rates = [float(rate) for rate in arguments.rates.split(",")]
    found = sweep(arguments.work, arguments.only.split(","), arguments.steps, rates)
    for name, by_rate in found.items():
        for rate, shares in by_rate.items():
            mean = sum(shares) / len(shares)
            print(f"{name:10} {rate:6} {mean:.3f}  " + " ".join(f"{share:.3f}" for share in shares))


def sweep(work: Path, names: list[str], steps: int, rates: list[float]) -> dict[str, dict[str, list[float]]]:
    """Shares of right guesses by drafter and rate."""
    lab = LabTraining(work, "s", "cpu", 0, 1.0, lambda line: print(line, flush=True))
    ahead = max([EAGLE_LEVELS, *(DRAFTERS[name].ahead for name in names)])
    budget = replace(drafter_budget(lab), steps=steps, warmup=WARMUP, ahead=ahead)
    target = lab.base_target()
    trainees: dict[tuple[str, str], Any] = {}
    for name in names:
        drafter = DRAFTERS[name]
        for rate in rates:
            torch.manual_seed(lab.seed + 3)
            trainee = drafter.build(target, drafter.ahead or PLACES, rate)
            trainee.name = f"{name} {rate:g}"
            trainees[name, f"{rate:g}"] = trainee
    folder, text = lab.folder(f"learning-rates/{'-'.join(names)}"), drafter_text(lab, "train")
    trainer = TogetherTrainer(target, list(trainees.values()), text, budget, folder, lab.machine)
    trainer.train(lambda line: lab.log(line.split(":")[0]), every=5, save_every=10)
    found: dict[str, dict[str, list[float]]] = {}
    for (name, rate), shares in zip(trainees, held_out(trainer, lab, budget), strict=True):
        found.setdefault(name, {})[rate] = shares
    (folder / "found.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


@torch.no_grad()
def held_out(trainer: TogetherTrainer, lab: LabTraining, budget: Budget) -> list[list[float]]:
    """Of each trainee the shares of right first guesses, place by place, over calibration batches."""
    text, total = drafter_text(lab, "calibration"), torch.zeros(len(trainer.trainees), PLACES)
    for trainee in trainer.trainees:
        trainee.module.eval()
    for step in range(CALIBRATION_BATCHES):
        batch = text.batch(step, budget, trainer.target.device)
        with lab.machine.autocast():
            states = trainer.states(batch)
            for sums, trainee in zip(total, trainer.trainees, strict=True):
                sums += trainee.loss(states, batch)[1][:PLACES].float().cpu()
    return [[round(share, 4) for share in row] for row in (total / CALIBRATION_BATCHES).tolist()]


if __name__ == "__main__":
    main()
