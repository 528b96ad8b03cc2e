"""What in shared mode costs quality: the lab trained with one thing changed at a time, by several seeds.

    python benchmarks/shared_ablations.py work/lab [--seeds 0 1 2] [--only alpha-0.1 next-token] [--steps 900]

work/lab: a folder of `python -m lab train` with its first stages done. All variants of a seed learn side by side from
the same batches; each goes into a folder of its own name there, shared-VARIANT-SEED. With the same --only and --steps
it goes on where it was cut off. A seed decides the text, its order, and what weights start from. Their quality, as
their plain decoding has it:

    ssbench run --suite apps --limit 0 --methods "ss-shared-ar[weights=work/lab/shared-alpha-0.1-0],..."
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from lab.lab_training import DRAFTER_STEPS, LabTraining
from lab.stages import NO_EQ3, SHARED_STREAMS, shared_trainee, train_shared
from specbench_ss.decoding.target import Target
from specbench_ss.methods.ss.shared_training import SharedTrainee
from specbench_ss.methods.ss.stream_config import StreamConfig
from specbench_ss.models.devices import resolve_device


@dataclass(frozen=True)
class Variant:
    """The streams, the weight of their losses, and the share of the steps in which it rises from nothing."""

    streams: StreamConfig
    alpha_j: float
    ramp: float = 0.0


VARIANTS = {
    "alpha-0.1": Variant(SHARED_STREAMS, 0.1),  # as ss-shared ships
    "eq1": Variant(NO_EQ3, 0.1),
    "alpha-0.01": Variant(SHARED_STREAMS, 0.01),
    "alpha-0.01-ramp": Variant(SHARED_STREAMS, 0.01, 0.3),
    "next-token": Variant(NO_EQ3, 0.0),
}


def main() -> None:
    """Train the variants of each seed side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), help="these alone")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=DRAFTER_STEPS, help="of training; the text becomes as much less")
    given = parser.parse_args()
    for seed in given.seeds:
        scale = given.steps / DRAFTER_STEPS + 1e-9  # or rounding would take a step away
        lab = LabTraining(given.folder, "s", resolve_device(given.device), seed, scale, print)
        target = lab.base_target()
        trainees = [trainee(lab, target, name, given.steps) for name in given.only]
        train_shared(lab, target, trainees, "-".join(["shared-run", *given.only, str(given.steps), str(seed)]))


def trainee(lab: LabTraining, target: Target, name: str, steps: int) -> SharedTrainee:
    """One variant, to be saved in the folder of its own name."""
    v = VARIANTS[name]
    return shared_trainee(lab, target, f"shared-{name}-{lab.seed}", v.streams, v.alpha_j, int(v.ramp * steps))


if __name__ == "__main__":
    main()
