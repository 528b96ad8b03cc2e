"""FLOPs of a training step at a published shape, on the meta device: of the base's pass, and of what a drafter learns.

The drafters and their losses are those that train; only weights and text are missing. FLOPs are what torch's counter
sees, forwards and backwards, what segments compute a second time included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from specbench_ss.engine.target import Target
from specbench_ss.reports.paper.meta_device import META, flops
from specbench_ss.reports.paper.paper_models import meta_target
from specbench_ss.reports.paper.step_costs import drafters
from specbench_ss.results.report import Bench
from specbench_ss.training.batches import Anchors, Batch
from specbench_ss.training.trainee import Trainee, base_states

LENGTH = 512  # tokens of the row
LABELS = 8  # of a position: more than any drafter reads
LEARNT = (0.5, 0.75, 1.0)  # shares of the positions that drafters learn at


@dataclass(frozen=True, slots=True)
class StepFlops:
    """FLOPs of a row's step where a share of its positions is learnt: of the drafter's part, and of the base's pass."""

    drafter: str
    share: float
    own: int
    base: int


def counted_steps(model: str, asked: Mapping[str, str], bench: Bench) -> Iterator[StepFlops]:
    """Count a step of each drafter, {name: as `drafters` takes it}, at each share of LEARNT. All need the base."""
    target = meta_target(model)
    with META:
        made = dict(zip(asked, drafters(",".join(asked.values()), target, bench), strict=True))
    for share in LEARNT:
        for name, trainee in made.items():
            yield _counted(name, share, trainee, target)


def _counted(name: str, share: float, trainee: Trainee, target: Target) -> StepFlops:
    ids = torch.zeros(1, LENGTH, dtype=torch.long, device=META)
    labels = torch.zeros(1, LENGTH, LABELS, dtype=torch.long, device=META)
    learnt = int(share * LENGTH)
    batch = Batch(ids, labels, Anchors(ids[:, :learnt], labels[:, :learnt]))
    states = base_states(target, ids, trainee.taps, trainee.kv_from)
    base = flops(lambda: base_states(target, ids, trainee.taps, trainee.kv_from))
    with META:  # what a loss makes without naming a device
        own = flops(lambda: trainee.loss(states, batch)[0].backward(), learning=True)
    return StepFlops(name, share, own, base)
