"""Training loops of the experiments: drafters side by side on the same batches, and steps metered part by part."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from specbench_ss.engine.target import Target
from specbench_ss.results.report import Bench, Request
from specbench_ss.stats import FEWEST, Floats, Interval, ratio_interval
from specbench_ss.training.batch import BaseStates, Batch
from specbench_ss.training.distributed import Machine
from specbench_ss.training.loop import Budget, DrafterLoop, Outcome, Text
from specbench_ss.training.session import Together, TogetherOptions, jobs_of, run
from specbench_ss.training.trainer import DrafterTrainer, TrainConfig

T = TypeVar("T")


def train_variants(
    bench: Bench,
    target: Target,
    trainees: Sequence[DrafterTrainer],
    text: Text,
    budget: Budget,
    name: str,
    steps: bool = True,
) -> None:
    """Train variants side by side on the same batches, with checkpoints in the folder `name`.

    steps: False prepares them, which sets their scale, and takes no step.
    """
    trainer = DrafterLoop(target, trainees, text, budget, bench.folder / name)
    if steps:
        trainer.train(bench.log, save_every=20)


def train_drafters(drafters: str, config: TrainConfig) -> list[Path]:
    """Train drafters as `ssbench train together --drafters` does, and return their folders."""
    with redirect_stdout(sys.stderr):
        run(Together, TogetherOptions(drafters), config)
    return [job.folder for job in jobs_of(drafters, config)]


def new_trainees(drafters: dict[str, str], target: Target, bench: Bench) -> list[DrafterTrainer]:
    """Return untrained drafters, {name: as `ssbench train together --drafters` takes it}, under these names."""
    jobs = jobs_of(",".join(drafters.values()), TrainConfig(bench.folder, ()))
    trainees = [job.build(target, bench.request.seed) for job in jobs]
    for trainee, name in zip(trainees, drafters, strict=True):
        trainee.name = name
    return trainees


# -- metered steps ------------------------------------------------------------------------------------------------

WARMUPS = 2
MIB = 1 << 20
BASE = "the base's pass"


class Meter(Protocol):
    """A measurement of some work: of time or of memory."""

    def __call__(self, work: Callable[[], T], device: torch.device) -> tuple[T, float]:
        """Return what the work returns, and the amount."""


def seconds(work: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """Measure the seconds of the process's threads on a CPU, which others disturb less; of the clock on a GPU."""
    if device.type != "cuda":
        start = time.process_time()
        return work(), time.process_time() - start
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    found = work()
    torch.cuda.synchronize(device)
    return found, time.perf_counter() - start


def peak_bytes(work: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """Measure what tensors hold at most, over what they held before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        return work(), torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        found = work()
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    moves = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    return found, max(accumulate((e.nbytes() for e in sorted(moves, key=lambda e: e.start_ns())), initial=0))


class MeteredTrainer(DrafterLoop):
    """A trainer that meters the parts of a step: the base's pass and each drafter's."""

    meter: Meter | None = None
    amounts: dict[str, float]

    def take(self, meter: Meter | None = None) -> dict[str, float]:
        """Take one step; return the amount of each part of it by name: BASE, where a drafter needs it, and drafters."""
        self.meter, self.amounts = meter, {}
        self.advance()
        return self.amounts

    def states(self, batch: Batch) -> BaseStates:
        """Return the base's states, and meter them."""
        make = super().states
        return self._metered(BASE, lambda: make(batch))

    def learn(
        self, trainee: DrafterTrainer, optimizer: torch.optim.Optimizer, states: BaseStates, batch: Batch
    ) -> Outcome:
        """Take one step of a trainee, and meter it."""
        step = super().learn
        return self._metered(trainee.name, lambda: step(trainee, optimizer, states, batch))

    def _metered(self, part: str, work: Callable[[], T]) -> T:
        if self.meter is None:
            return work()
        found, self.amounts[part] = self.meter(work, self.target.device)
        return found


@dataclass(frozen=True, slots=True)
class StepCost:
    """Costs of one drafter, or of the base's pass: seconds [steps]; peak bytes; loss [steps], none of the base."""

    seconds: Floats
    peak: float
    loss: Floats


def timed_steps(request: Request, usual: int) -> int:
    """Return the number of timed steps. Fewer than FEWEST would have no interval."""
    return max(FEWEST, request.limit or usual)


def measure(trainers: Sequence[MeteredTrainer], steps: int, bench: Bench) -> list[dict[str, StepCost]]:
    """Take steps of several trainers in turns: a few to warm up, then timed ones, and one that is watched for memory.

    Returns the costs by part for each trainer.
    """
    for _ in range(WARMUPS):
        for trainer in trainers:
            trainer.take()
    timed = [list(_timed(trainers)) for _ in _progress(steps, bench)]
    peaks = [trainer.take(peak_bytes) for trainer in trainers]
    return [_costs([row[i] for row in timed], peak) for i, peak in enumerate(peaks)]


Step = tuple[dict[str, float], dict[str, float]]  # seconds and losses by part


def _timed(trainers: Sequence[MeteredTrainer]) -> Iterator[Step]:
    for trainer in trainers:
        taken = trainer.take(seconds)
        yield taken, {name: outcome.loss for name, outcome in trainer.outcomes.items()}


def _progress(steps: int, bench: Bench) -> Iterator[int]:
    begin = time.perf_counter()
    for step in range(steps):
        left = (time.perf_counter() - begin) / step * (steps - step) if step else None
        bench.log(f"step {step + 1} of {steps}" + ("" if left is None else f", about {left:.0f} s left"))
        yield step


def _costs(steps: Sequence[Step], peaks: dict[str, float]) -> dict[str, StepCost]:
    def of(part: str, which: int) -> Floats:
        return np.array([step[which][part] for step in steps if part in step[which]], dtype=np.float64)

    return {part: StepCost(of(part, 0), peak, of(part, 1)) for part, peak in peaks.items()}


def share(own: Floats, other: Floats) -> tuple[float, Interval | None]:
    """Return the time of the same steps [n] over another drafter's, with its 95 % interval."""
    return float(own.sum() / other.sum()), ratio_interval((own,), (other,), processes=1)


def machine_of(target: Target) -> Machine:
    """Return the machine that `ssbench train` would compute a step of this target on, in this process."""
    return Machine(target.device, exact=target.dtype == torch.float32)


def machine_note(target: Target) -> str:
    """Return the note on the machine of metered steps, and on their seconds."""
    on_gpu = target.device.type == "cuda"
    count = torch.get_num_threads()
    threads = "one thread" if count == 1 else f"{count} threads together"
    what = "seconds of the clock" if on_gpu else f"seconds of the process's {threads}"
    return f"ours: {target.name}, {str(target.dtype).removeprefix('torch.')}, {target.device}; {what}"
