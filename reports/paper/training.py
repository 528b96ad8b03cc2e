"""Training of the experiments: the lab's text, drafters side by side on the same batches, and metered steps."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from specbench_ss import storage
from specbench_ss.engine.target import Target
from specbench_ss.results.report import Bench, Request
from specbench_ss.results.text import interval
from specbench_ss.stats.intervals import FEWEST, Floats, ratio_interval
from specbench_ss.training.batch import BaseStates, Batch
from specbench_ss.training.data import completion_mask, conversations, pack, render, special_ids, tokenize
from specbench_ss.training.distributed import DistributedContext
from specbench_ss.training.loop import Budget, DrafterLoop, DrafterText, Outcome, Text
from specbench_ss.training.session import jobs_of
from specbench_ss.training.trainer import DrafterTrainer, TrainConfig

ROW = 256  # default length of a packed row in tokens


def lab_text(target: Target, split: str, talks: int, seed: int = 0, length: int = ROW) -> DrafterText:
    """Return this many conversations of a split with their true answers, packed in rows of `length` tokens.

    The same arguments always generate the same ones.
    """
    special = special_ids(target.tokenizer)
    texts = [render(example) for example in islice(conversations(split, seed), talks)]
    rows = pack(tokenize(target.tokenizer, texts), length, special["pad"])
    return DrafterText(rows, lambda row: completion_mask(row, special), special["eos"], seed)


def write_conversations(path: Path, count: int, seed: int = 0) -> None:
    """Write this many of the lab's training conversations, one JSON object a line, unless they are there."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with storage.replacing(path) as file:
        for example in islice(conversations("train", seed), count):
            messages = [
                {"role": role, "content": text}
                for turn, answers in zip(example.turns, example.answers, strict=True)
                for role, text in (("user", turn), ("assistant", answers[0]))
            ]
            file.write(json.dumps({"messages": messages}).encode() + b"\n")


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


def new_trainees(drafters: Mapping[str, str], target: Target, bench: Bench) -> list[Any]:
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
Meter = Callable[[Callable[[], Any], torch.device], tuple[Any, float]]  # what the work returns, and an amount


def seconds(work: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """Measure the seconds of the process's threads on a CPU, which others disturb less; of the clock on a GPU."""
    if device.type != "cuda":
        start = time.process_time()
        return work(), time.process_time() - start
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    found = work()
    torch.cuda.synchronize(device)
    return found, time.perf_counter() - start


def peak_bytes(work: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """Measure the peak tensor memory above its initial value."""
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
        found: BaseStates = self._metered(BASE, lambda: make(batch))
        return found

    def learn(
        self, trainee: DrafterTrainer, optimizer: torch.optim.Optimizer, states: BaseStates, batch: Batch
    ) -> Outcome:
        """Take one step of a trainee, and meter it."""
        step = super().learn
        outcome: Outcome = self._metered(trainee.name, lambda: step(trainee, optimizer, states, batch))
        return outcome

    def _metered(self, part: str, work: Callable[[], Any]) -> Any:
        if self.meter is None:
            return work()
        found, self.amounts[part] = self.meter(work, self.target.device)
        return found


@dataclass(slots=True)
class StepCost:
    """Costs of one drafter, or of the base's pass: seconds and loss of each step, none of the base; peak bytes."""

    seconds: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    peak: float = 0.0


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
    costs: list[dict[str, StepCost]] = [{} for _ in trainers]
    on_prefill = time.perf_counter()
    for step in range(steps):
        left = (time.perf_counter() - on_prefill) / step * (steps - step) if step else None
        bench.log(f"step {step + 1} of {steps}" + ("" if left is None else f", about {left:.0f} s left"))
        for trainer, found in zip(trainers, costs, strict=True):
            for part, amount in trainer.take(seconds).items():
                cost = found.setdefault(part, StepCost())
                cost.seconds.append(amount)
                cost.loss += [trainer.outcomes[part].loss] if part in trainer.outcomes else []
    for trainer, found in zip(trainers, costs, strict=True):
        for part, amount in trainer.take(peak_bytes).items():
            found[part].peak = amount
    return costs


def share(own: Sequence[float] | Floats, other: Sequence[float] | Floats) -> tuple[float, str | None]:
    """Return the time of the same steps over another drafter's, with its 95 % interval as text."""
    mine, theirs = np.asarray(own, np.float64), np.asarray(other, np.float64)
    around = ratio_interval((mine,), (theirs,), processes=1)
    return float(mine.sum() / theirs.sum()), interval(around) or None


def machine_of(target: Target) -> DistributedContext:
    """Return the machine that `ssbench train` would compute a step of this target on, in this process."""
    return DistributedContext(target.device, exact=target.dtype == torch.float32)


def machine_note(target: Target) -> str:
    """Return the note on the machine of metered steps, and on their seconds."""
    on_gpu = target.device.type == "cuda"
    count = torch.get_num_threads()
    threads = "one thread" if count == 1 else f"{count} threads together"
    what = "seconds of the clock" if on_gpu else f"seconds of the process's {threads}"
    return f"ours: {target.name}, {str(target.dtype).removeprefix('torch.')}, {target.device}; {what}"
