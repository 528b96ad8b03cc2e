"""What in shared mode costs quality: the lab's ss-shared trained again with one thing changed at a time.

    python benchmarks/shared_ablations.py work/lab [--only eq1] [--device cuda]

work/lab: a folder of `ssbench lab train` with its first stages done. Same batches, steps and start as stage `shared`;
each variant goes into a folder of its own name there, resumable. Their quality, as their plain decoding has it:

    ssbench run --suite apps --limit 0 --methods "ss-shared-ar[weights=work/lab/shared-eq1],..."
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from specbench_ss.methods._lab import stages
from specbench_ss.methods._lab.lab_training import LabTraining
from specbench_ss.methods.ss.shared_training import SharedTrainee
from specbench_ss.methods.ss.stream_config import StreamConfig
from specbench_ss.models.devices import resolve_device

WHOLE = stages.SHARED_STREAMS
VARIANTS: dict[str, tuple[StreamConfig, float]] = {  # what differs from ss-shared: (streams, alpha_j)
    "eq1": (replace(WHOLE, main_attends_streams=False), 0.1),
    "alpha-0.01": (WHOLE, 0.01),
}


def main() -> None:
    """Train the variants, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=list(VARIANTS), help="this one alone")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--budget-scale", type=float, default=1.0)
    given = parser.parse_args()
    lab = LabTraining(given.folder, "s", resolve_device(given.device), 0, given.budget_scale, print)
    target = lab.base_target()
    for name, (config, alpha) in VARIANTS.items():
        if given.only in (None, name):
            torch.manual_seed(lab.seed + 5)
            trainee = SharedTrainee(
                target,
                config,
                stages.SHARED_LR,
                stages.STREAM_LR,
                stages.STREAM_EMBEDDING_LR,
                alpha_j=alpha,
                name=f"shared-{name}",
            )
            stages.train_shared(lab, target, [trainee], f"shared-{name}-run")


if __name__ == "__main__":
    main()
