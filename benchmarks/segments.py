"""Peak memory and time of a training step of shared mode: segment attention (ACL appendix I) against the naive form.

    python benchmarks/segments.py [--lengths 512,1024,2048] [--segments 128,256,512] [--gamma 4] [--device cpu]

A Llama of the lab's size with random weights and a longer context; one row a step, the first eighth of it a prompt,
which carries no streams. Every row of the table is one step in a fresh process. Peak: over what was there before the
step (CPU: resident memory, large freed blocks going back to the system at once; CUDA: the allocator's). cpu s: seconds
of the process's threads, which other work on the machine disturbs less than it does s. Naive: all streams at once,
nothing computed twice. Ratios are to the naive form of the same length, in this very run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import torch

from specbench_ss.methods.lab.base import SIZES, new_model
from specbench_ss.methods.ss.config import StreamConfig
from specbench_ss.methods.ss.shared_training import SharedTrainee
from specbench_ss.methods.training import Anchors, BaseStates, Batch, future_labels
from specbench_ss.target import Target

MIB = 1 << 20
ANCHORS = 128  # of the pruning map's loss, as in training
NAIVE = 0  # as SharedTrainee takes it
SHOWN = (("peak", 0), ("wall", 2), ("cpu", 2))
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(MIB), "MALLOC_TRIM_THRESHOLD_": str(MIB)}  # glibc; others do as they do


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
    print("tokens  segment  peak MiB           s              cpu s              loss")
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
    """peak (MiB), wall and cpu (seconds), loss of one step, from a fresh process."""
    asked = json.dumps({"length": length, "segment": segment, "gamma": gamma, "device": device})
    command = [sys.executable, __file__, "--child", asked]
    done = subprocess.run(command, env=os.environ | GIVE_BACK, capture_output=True, text=True)
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
    before = _memory(target.device, reset=True)
    wall, cpu = time.perf_counter(), time.process_time()
    loss = _step(trainee, whole)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"peak": (_memory(target.device) - before) / MIB, "wall": wall, "cpu": cpu, "loss": loss}


def _batch(length: int, gamma: int, vocab: int) -> Batch:
    """Random tokens [1, T]; answers from T/8 on, which no end token ends."""
    ids = torch.randint(3, vocab, (1, length), generator=torch.Generator().manual_seed(length))
    answer = torch.arange(length)[None] >= length // 8
    labels = torch.from_numpy(future_labels(ids.numpy(), answer.numpy(), 2, gamma))
    at = torch.linspace(length // 8, length - 3, ANCHORS).long()[None]
    return Batch(ids, labels, Anchors(at, labels[:, at[0]]))


def _step(trainee: SharedTrainee, batch: Batch) -> float:
    """Loss and gradients; the optimizer's memory is the same in every form."""
    trainee.module.zero_grad(set_to_none=True)
    loss, _ = trainee.loss(BaseStates(torch.empty(0), {}, {}), batch)
    loss.backward()
    return float(loss.detach())


def _memory(device: torch.device, reset: bool = False) -> int:
    """Bytes at the peak since the last reset; at a reset, bytes now."""
    if device.type == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats(device)
            return torch.cuda.memory_allocated(device)
        return torch.cuda.max_memory_allocated(device)
    if reset:
        import psutil

        return int(psutil.Process().memory_info().rss)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


if __name__ == "__main__":
    main()
