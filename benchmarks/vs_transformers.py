"""`ar` beside `model.generate` on the same model, prompts and threads, alternating; prints the ratio of their times.

Also the harness's own share of a decoding step: what is not spent in the target's forward pass.

    python benchmarks/vs_transformers.py [--model lab] [--prompts 12] [--new 96]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from specbench_ss.generate import Limits, generate
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.models import load_target
from specbench_ss.sampling import Sampling
from specbench_ss.suite import SuiteRequest
from specbench_ss.suites.specbench import SpecBench


def theirs(target: object, prompt: list[int], new: int) -> tuple[float, int]:
    """Seconds and tokens of transformers' greedy generate."""
    ids = torch.tensor([prompt], device=target.device)  # type: ignore[attr-defined]
    started = time.perf_counter()
    out = target.model.generate(  # type: ignore[attr-defined]
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0
    )
    if out.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started, out.shape[1] - len(prompt)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lab")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    target = load_target(arguments.model)
    questions = SpecBench().load(SuiteRequest(limit=1, lab=True)).questions[: arguments.prompts]
    prompts = [target.encode_chat([{"role": "user", "content": q.turns[0]}]) for q in questions]
    decoder, limits = Autoregressive(target), Limits(arguments.new, target.eos_ids)
    ours_s = theirs_s = forward_s = step_s = 0.0
    theirs_over_ours, same = [], 0
    for repeat in range(-1, arguments.repeats):  # the first round warms up
        for prompt in prompts:
            started = time.perf_counter()
            result = generate(decoder, prompt, limits, Sampling())
            mine = time.perf_counter() - started
            other, tokens = theirs(target, prompt, arguments.new)
            if repeat < 0:
                same += tokens == len(result.tokens)
                continue
            ours_s, theirs_s = ours_s + mine, theirs_s + other
            theirs_over_ours.append(other / mine)
            forward_s += sum(s.verify_s for s in result.steps)
            step_s += sum(s.total_s for s in result.steps)
    print(f"device {target.device}, {torch.get_num_threads()} threads, {len(prompts)} prompts, {same} of equal length")
    median = statistics.median(theirs_over_ours)
    print(f"seconds, transformers' generate over ar: {theirs_s / ours_s:.2f} (median of pairs {median:.2f})")
    print(f"harness's share of a step (outside the target's forward): {100 * (1 - forward_s / step_s):.1f} %")


if __name__ == "__main__":
    main()
