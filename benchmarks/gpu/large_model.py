"""Time per token of a large random Llama: `ar` by engine, and transformers' `generate` on weights of the same shapes.

    PYTHONPATH=. python benchmarks/gpu/large_model.py [--size 7b] [--contexts 512 4096] [--new 64] [--compiled]

Of every engine and context: milliseconds per token after the first two, the least of three runs. With --compiled also
transformers with a static cache, which it compiles: several minutes for 7B. Without Triton kernels: SSBENCH_NATIVE=0.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.roofline import SIZES, model_of
from specbench_ss.engine.engines import EAGER, GRAPH, use_engine
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.methods.ar import Autoregressive

SKIPPED, RUNS = 2, 3


def ms_per_token(run: Callable[[int], Any], new: int) -> float:
    """Return the time of a token between the first ones and the last one. run: decodes so many tokens."""

    def seconds(tokens: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        run(tokens)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    seconds(SKIPPED), seconds(new)  # captures and compiles
    return 1e3 * min((seconds(new) - seconds(SKIPPED)) / (new - SKIPPED) for _ in range(RUNS))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="7b")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--compiled", action="store_true")
    given = parser.parse_args()
    longest = max(given.contexts) + given.new
    prompts = {n: [5 + i % 40 for i in range(n)] for n in given.contexts}

    def show(name: str, run: Callable[[list[int], int], Any]) -> None:
        for context, prompt in prompts.items():
            taken = ms_per_token(lambda tokens, prompt=prompt: run(prompt, tokens), given.new)
            print(f"{name:30} {context:6} tokens  {taken:8.3f} ms per token", flush=True)

    for engine in (EAGER, GRAPH):
        target = model_of(given.size, given.dtype, "cuda", longest)
        use_engine(target, engine)
        method = Autoregressive(target)
        print(target.kernel_summary)
        show(f"ar, {engine}", lambda p, n, m=method: generate(m, p, StopParams(n, frozenset()), SamplingParams()))
        del target, method
    model = model_of(given.size, given.dtype, "cuda", longest).model  # layers as the modules compute them
    model.set_attn_implementation("sdpa")
    for name, options in {"": {}, ", compiled static cache": {"cache_implementation": "static"}}.items():
        if options and not given.compiled:
            continue
        settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0} | options
        show(
            f"transformers{name}",
            lambda p, n, s=settings: model.generate(torch.tensor([p], device="cuda"), max_new_tokens=n, **s),
        )


if __name__ == "__main__":
    main()
