"""Peak memory and time of a training step of shared mode: segment attention (ACL appendix I) against the naive form.

    python benchmarks/segments.py [--lengths 512,1024,2048] [--segments 128,256,512] [--gamma 4] [--device cpu]

A Llama of the lab's size with random weights and a longer context; one row a step, the first eighth of it a prompt,
which carries no streams. Every line of the table is a fresh process: one step for the times and the resident memory,
one more for the peak. peak: what tensors hold at most, over what they hold before the step (CPU: torch's profiler;
CUDA: max_memory_allocated). resident: what the process holds at most (CUDA: what torch reserves), which an allocator's
habits are part of. cpu s: seconds of the process's threads, which other work on the machine disturbs less than it does
s. Naive: all streams at once, nothing computed twice. Ratios are to the naive form of the same length, in this very
run.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import psutil
import torch
from torch.profiler import ProfilerActivity, profile

from specbench_ss.decoding.target import Target
from specbench_ss.methods._lab.base_training import SIZES, new_model
from specbench_ss.methods.ss.shared_training import SharedTrainee
from specbench_ss.methods.ss.stream_config import StreamConfig
from specbench_ss.training.batches import Anchors, Batch, future_labels
from specbench_ss.training.trainee import BaseStates

MIB = 1 << 20
ANCHORS = 128  # of the pruning map's loss, as in training
NAIVE = 0  # as SharedTrainee takes it
SHOWN = (("peak", 0), ("resident", 0), ("wall", 2), ("cpu", 2))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=_numbers, default=[512, 1024, 2048], help="tokens of the row")
    parser.add_argument("--segments", type=_numbers, default=[128, 256, 512], help="positions alive at once")
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(_child(json.loads(given.child))))
        return
    print(
        f"{given.device}, {torch.get_num_threads()} threads, gamma {given.gamma}: one step, and its share of the naive"
    )
    print("tokens  segment  peak MiB           resident MiB       s                  cpu s                  loss")
    for length in given.lengths:
        naive: dict[str, Any] = {}
        for segment in (NAIVE, *(s for s in given.segments if s < length)):
            found = _measured(length, segment, given.gamma, given.device)
            naive = naive or found
            cells = [f"{found[what]:8.{digits}f} {found[what] / naive[what]:5.2f}x" for what, digits in SHOWN]
            print(f"{length:6} {segment or 'naive':>8}  {'    '.join(cells)}  {found['loss']:8.4f}", flush=True)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _measured(length: int, segment: int, gamma: int, device: str) -> dict[str, float]:
    """peak and resident (MiB), wall and cpu (seconds), loss of one step, from a fresh process."""
    asked = json.dumps({"length": length, "segment": segment, "gamma": gamma, "device": device})
    command = [sys.executable, __file__, "--child", asked]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{asked}: {done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _child(asked: dict[str, Any]) -> dict[str, float]:
    """What `_measured` reads."""
    size = replace(SIZES["s"], context=asked["length"] + asked["gamma"])
    target = Target(new_model(size, {"pad": 0, "bos": 1, "eos": 2}, seed=0).to(asked["device"]))
    shape = StreamConfig(asked["gamma"], adapter_rank=0, mode="shared", lora_rank=32, main_attends_streams=True)
    trainee = SharedTrainee(target, shape, segment=asked["segment"])
    trainee.module.to(target.device)
    small, whole = (_batch(t, asked["gamma"], size.vocab).to(target.device) for t in (64, asked["length"]))
    _step(trainee, small)  # libraries load, kernels are chosen
    before = _resident(target.device)
    wall, cpu = time.perf_counter(), time.process_time()
    loss = _step(trainee, whole)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    resident = _resident(target.device, peak=True) - before
    peak = _peak(lambda: _step(trainee, whole), target.device)
    return {"peak": peak / MIB, "resident": resident / MIB, "wall": wall, "cpu": cpu, "loss": loss}


def _batch(length: int, gamma: int, vocab: int) -> Batch:
    """Random tokens [1, T]; answers from T/8 on, which no end token ends."""
    ids = torch.randint(3, vocab, (1, length), generator=torch.Generator().manual_seed(length))
    answer = torch.arange(length)[None] >= length // 8
    labels = torch.from_numpy(future_labels(ids.numpy(), answer.numpy(), 2, gamma))
    at = torch.linspace(length // 8, length - 3, ANCHORS).long()[None]
    return Batch(ids, labels, Anchors(at, labels[:, at[0]]))


def _step(trainee: SharedTrainee, batch: Batch) -> float:
    """Loss and gradients; the optimizer's memory is the same in every form."""
    loss, _ = trainee.loss(BaseStates(torch.empty(0), {}, {}), batch)
    loss.backward()
    trainee.module.zero_grad(set_to_none=True)
    return float(loss.detach())


def _resident(device: torch.device, peak: bool = False) -> int:
    """Bytes that the process has of the system, now or at most so far; on CUDA those that torch has of the device."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) if peak else torch.cuda.memory_reserved(device)
    if not peak:
        return int(psutil.Process().memory_info().rss)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


def _peak(run: Callable[[], object], device: torch.device) -> int:
    """Bytes that tensors made by `run` hold at most at a time."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    moves = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(e.nbytes() for e in sorted(moves, key=lambda e: e.start_ns())))


if __name__ == "__main__":
    main()
