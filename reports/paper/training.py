"""Training of the experiments: the lab's text, drafters side by side on the same batches, and metered steps."""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch.profiler import ProfilerActivity, profile

from specbench_ss import storage
from specbench_ss.engine.target import Target
from specbench_ss.options import MethodSpec
from specbench_ss.reports.paper.experiment import TrainingExperiment, config_for, measured, overall
from specbench_ss.results.analysis import Results
from specbench_ss.results.report import Bench, Request, Result, Value
from specbench_ss.runs.config import RunConfig
from specbench_ss.stats.intervals import FEWEST
from specbench_ss.training.batch import BaseStates, Batch
from specbench_ss.training.chat_format import Renderer
from specbench_ss.training.data import lab_conversations, pack_documents
from specbench_ss.training.distributed import DistributedContext
from specbench_ss.training.loop import Budget, DrafterLoop, Outcome, PackedText
from specbench_ss.training.session import jobs_of
from specbench_ss.training.trainer import DrafterTrainer, TrainConfig

ROW = 256  # default length of a packed row in tokens
How = Literal["train", "prepare", "meter"]


def lab_text(target: Target, split: str, talks: int, seed: int = 0, length: int = ROW) -> PackedText:
    """Return this many conversations of a split with their true answers, packed in rows of `length` tokens.

    The same arguments always generate the same ones.
    """
    renderer = Renderer(target.tokenizer)
    documents = [renderer.render(messages) for messages in islice(lab_conversations(split, seed), talks)]
    return PackedText(pack_documents(documents, length, renderer.pad), seed, plain=True)


def write_conversations(path: Path, count: int, seed: int = 0) -> None:
    """Write this many of the lab's training conversations, one JSON object a line, unless they are there."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with storage.replacing(path) as file:
        for messages in islice(lab_conversations("train", seed), count):
            file.write(json.dumps({"messages": messages}).encode() + b"\n")


def new_trainees(drafters: Mapping[str, str], target: Target, bench: Bench) -> list[Any]:
    """Return untrained drafters, {name: as `ssbench train together --drafters` takes it}, under these names."""
    jobs = jobs_of(",".join(drafters.values()), TrainConfig(bench.folder, ()))
    trainees = [job.build(target, bench.request.seed) for job in jobs]
    for trainee, name in zip(trainees, drafters, strict=True):
        trainee.name = name
    return trainees


def train_variants(
    bench: Bench,
    target: Target,
    variants: Mapping[str, str] | Sequence[DrafterTrainer],
    text: PackedText,
    budget: Budget,
    folder: str,
    how: How = "train",
) -> MeteredTrainer:
    """Train variants side by side on the same batches; return their trainer, whose `trainers` are the variants.

    Args:
        variants: drafters as `new_trainees` takes them, or trainers.
        folder: name of the folder of the checkpoint, from which an interrupted training is resumed.
        how: train takes all steps of the budget. prepare takes none; it sets the scale of the variants. meter takes
            none either; `measure` takes them, in the number format of `ssbench train`.
    """
    trainees = new_trainees(variants, target, bench) if isinstance(variants, Mapping) else variants
    machine = machine_of(target) if how == "meter" else None
    trainer = MeteredTrainer(target, trainees, text, budget, bench.folder / folder, machine)
    if how == "train":
        trainer.train(bench.log, save_every=20)
    return trainer


class VariantsExperiment(TrainingExperiment):
    """A figure of drafters that are trained here, and then decode the same prompts in one run."""

    trains = True
    settings: ClassVar[dict[str, Any]]  # of the run; its `limit` is the default

    def run_of(self, request: Request, specs: Sequence[MethodSpec]) -> RunConfig:
        """Return the run of these methods, the reference first."""
        config = config_for(replace(request, settings=()), [], **self.settings)
        return replace(config, methods=(*config.methods, *specs))

    def make(self, bench: Bench) -> Result:
        """Train all variants, then decode with all of them."""
        variants = self.train(bench)
        run = bench.measure(self.run_of(bench.request, [spec for spec, _ in variants]), "run")
        decoded = overall(run)
        return self.show([{**cells, **measured(decoded[spec.label])} for spec, cells in variants], run)

    @abstractmethod
    def train(self, bench: Bench) -> list[tuple[MethodSpec, dict[str, Value]]]:
        """Train every variant; return the method with its weights, and the cells that the training gives, by title."""

    @abstractmethod
    def show(self, rows: Sequence[dict[str, Value]], run: Results) -> Result:
        """Return tables, figures and notes. rows: of each variant, the cells of `train` and those of MEASURED."""


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
