"""Variants of the methods side by side on calibration prompts of the lab, never the evaluation ones.

    python benchmarks/variants.py "medusa[nodes=7];medusa[nodes=15];ss[n_draft=10,n_keep=6]" [--prompts 2] [--repeats 2]
        [--model smollm2] [--dtype bfloat16]

Prints for each: tau, step time over an autoregressive step, speedup over autoregressive decoding, where the step goes.
"""

from __future__ import annotations

import argparse
from collections import defaultdict

from lab.text import SPECBENCH_CATEGORIES, questions
from specbench_ss.decoding.generation import Generation
from specbench_ss.decoding.loop import Limits, generate
from specbench_ss.decoding.sampling import Sampling
from specbench_ss.method_spec import MethodSpec
from specbench_ss.models.loading import load_target
from specbench_ss.registry import load_method


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", help="variants, separated by semicolons")
    parser.add_argument("--model", default="lab")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=int, default=1, help="per category")
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    target = load_target(arguments.model, dtype=arguments.dtype)
    specs = [MethodSpec("ar"), *map(MethodSpec.parse, arguments.methods.split(";"))]
    decoders = {spec.label: load_method(spec, target) for spec in specs}
    asked = questions(SPECBENCH_CATEGORIES, "calibration", arguments.prompts)
    prompts = [target.encode_chat([{"role": "user", "content": q.turns[0]}]) for q in asked]
    found: dict[str, list[Generation]] = defaultdict(list)
    for repeat in range(-1, arguments.repeats):  # the first round warms up
        for prompt in prompts:
            for label, decoder in decoders.items():
                done = generate(decoder, prompt, Limits(128, target.eos_ids), Sampling())
                if repeat >= 0:
                    found[label].append(done)
    base_step, base_token = _step(found["ar"]), _token(found["ar"])
    print(f"an autoregressive step: {1e3 * base_step:.2f} ms")
    print(f"{'variant':42} {'tau':>5} {'step':>5} {'speedup':>7}   draft verify accept host, ms")
    for label, runs in found.items():
        steps = [s for r in runs for s in r.steps]
        tau = sum(s.tokens for s in steps) / len(steps)
        parts = [
            1e3 * sum(getattr(s, p) for s in steps) / len(steps) for p in ("draft_s", "verify_s", "accept_s", "host_s")
        ]
        shown = " ".join(f"{p:5.2f}" for p in parts)
        print(
            f"{label:42} {tau:5.2f} {_step(runs) / base_step:5.2f} {base_token / _token(runs):7.2f}   {shown}",
            flush=True,
        )


def _step(runs: list[Generation]) -> float:
    steps = [s for r in runs for s in r.steps]
    return sum(s.total_s for s in steps) / len(steps)


def _token(runs: list[Generation]) -> float:
    return sum(r.wall_s for r in runs) / sum(len(r.tokens) for r in runs)


if __name__ == "__main__":
    main()
