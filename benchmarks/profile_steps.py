"""Where the time of a method's steps goes, operator by operator: shares of one profiled run, and calls a step.

    python benchmarks/profile_steps.py "lookahead;sd;hydra" [--model lab] [--prompts 13] [--new 64] [--rows 12]

Printed beside each operator: its calls a step of `ar` on the same prompts. The profiler itself takes time, and small
operators seem larger than they are: for ratios of times there is `benchmarks/variants.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from torch.profiler import ProfilerActivity, profile

from lab.text import SPECBENCH_CATEGORIES, questions
from specbench_ss.decoding.decoder import Decoder
from specbench_ss.decoding.loop import Limits, generate
from specbench_ss.decoding.sampling import Sampling
from specbench_ss.method_spec import MethodSpec
from specbench_ss.models.loading import load_target
from specbench_ss.registry import load_method

Profile = dict[str, tuple[float, float]]  # operator -> (share of the time of all, calls a step)


def main() -> None:
    """Profile and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", help="methods or variants, separated by semicolons")
    parser.add_argument("--model", default="lab")
    parser.add_argument("--prompts", type=int, default=1, help="per category")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rows", type=int, default=12)
    arguments = parser.parse_args()
    target = load_target(arguments.model)
    asked = questions(SPECBENCH_CATEGORIES, "calibration", arguments.prompts)
    prompts = [target.encode_chat([{"role": "user", "content": q.turns[0]}]) for q in asked]
    limits = Limits(arguments.new, target.eos_ids)
    plain = profiled(load_method(MethodSpec("ar"), target), prompts, limits)
    for spec in map(MethodSpec.parse, arguments.methods.split(";")):
        found = profiled(load_method(spec, target), prompts, limits)
        print(f"\n{spec.label:44} {'share':>6} {'calls a step':>13} {'of ar':>7}")
        for name in sorted(found, key=lambda n: -found[n][0])[: arguments.rows]:
            share, calls = found[name]
            print(f"  {name:42} {share:6.3f} {calls:13.1f} {plain.get(name, (0.0, 0.0))[1]:7.1f}")


def profiled(decoder: Decoder, prompts: Sequence[Sequence[int]], limits: Limits) -> Profile:
    """Self times of all operators over these prompts, prefill included."""
    generate(decoder, prompts[0], limits, Sampling())
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        steps = sum(len(generate(decoder, prompt, limits, Sampling()).steps) for prompt in prompts)
    rows = watched.key_averages()
    total = sum(row.self_cpu_time_total for row in rows)
    return {row.key: (row.self_cpu_time_total / total, row.count / steps) for row in rows}


if __name__ == "__main__":
    main()
