"""What telemetry costs: the same request with the sampler on and off in turn, within one process.

    python benchmarks/telemetry_cost.py [--model lab] [--method ar] [--new 256] [--pairs 40] [--interval 0.1]

Prints the processor time of one reading as a share of the interval, and the geometric mean of the ratios of time per
token, on over off, of neighbouring pairs, with a 95 % interval that resamples pairs. The order within a pair
alternates. `--null`: the sampler is off on both sides.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time

import torch

from specbench_ss import load_method, load_model
from specbench_ss.benchmark.quiet_timing import frozen_heap, quiet_collector
from specbench_ss.benchmark.telemetry.sampler import sampler_for
from specbench_ss.benchmark.telemetry.seen import Seen
from specbench_ss.decoding.decoder import Decoder
from specbench_ss.decoding.loop import Limits, generate
from specbench_ss.decoding.sampling import Sampling

RESAMPLES = 10_000


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lab")
    parser.add_argument("--method", default="ar")
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--interval", type=float, default=0.1)
    parser.add_argument("--null", action="store_true")
    arguments = parser.parse_args()
    target = load_model(arguments.model)
    decoder = load_method(arguments.method, target)
    prompt = target.encode_chat([{"role": "user", "content": "Write a short story about a lighthouse."}])
    logs = ratios(decoder, prompt, arguments.new, arguments.pairs, 0.0 if arguments.null else arguments.interval)
    took = reading_s(target.device)
    print(f"one reading: {1e3 * took:.3f} ms of the processor, {took / arguments.interval:.2%} of the interval")
    rng = random.Random(0)
    means = sorted(statistics.fmean(rng.choices(logs, k=len(logs))) for _ in range(RESAMPLES))
    low, high = (means[int(share * RESAMPLES)] for share in (0.025, 0.975))
    print(
        f"{arguments.method}, {arguments.pairs} pairs of {arguments.new} tokens, a reading each {arguments.interval} s"
    )
    print(f"on over off: {math.exp(statistics.fmean(logs)):.4f} [{math.exp(low):.4f}, {math.exp(high):.4f}]")


def reading_s(device: torch.device, times: int = 200) -> float:
    """Seconds of this thread's processor time that a reading takes: what it may hold the interpreter for at most."""
    sampler = sampler_for(device, 60.0)
    assert sampler is not None
    seen = Seen()
    started = time.thread_time()
    for _ in range(times):
        sampler._read(seen)
    sampler.close()
    return (time.thread_time() - started) / times


def ratios(decoder: Decoder, prompt: list[int], new: int, pairs: int, interval: float) -> list[float]:
    """Logarithms of seconds per token, with the sampler over without it, pair by pair."""
    sampler = sampler_for(decoder.target.device, interval or 0.1)
    assert sampler is not None

    def seconds(on: bool) -> float:
        with quiet_collector():
            if not on:
                return generate(decoder, prompt, Limits(new), Sampling()).wall_s
            with sampler.watch():
                return generate(decoder, prompt, Limits(new), Sampling()).wall_s

    found = []
    with frozen_heap():
        for _ in range(3):
            seconds(False)
        for pair in range(pairs):
            order = (True, False) if pair % 2 else (False, True)
            time_of = {on: seconds(on and interval > 0) for on in order}
            found.append(math.log(time_of[True] / time_of[False]))
    sampler.close()
    return found


if __name__ == "__main__":
    main()
