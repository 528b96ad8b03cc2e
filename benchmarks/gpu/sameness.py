"""Every lossless method against autoregressive decoding on this device, in float32 and bfloat16.

    PYTHONPATH=. python benchmarks/gpu/sameness.py [--device cuda] [--prompts 24]

Prints, for each dtype and method, how many answers are identical, how many part at a near-tie, how many mismatch.
Exit code 1 if anything differs in float32 or mismatches in bfloat16.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

import torch

from specbench_ss.config import MethodSpec
from specbench_ss.generate import Limits, generate
from specbench_ss.models import load_target
from specbench_ss.registry import load_method
from specbench_ss.sameness import first_difference, gap_between, near_tie_drop
from specbench_ss.sampling import Sampling
from specbench_ss.suites.lab_text.catalog import SPECBENCH_CATEGORIES, questions


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompts", type=int, default=2, help="per category")
    parser.add_argument("--methods", default="medusa;ss;ss[prune=off];ss[mode=chain]")
    arguments = parser.parse_args()
    print(torch.__version__, torch.cuda.get_device_name() if arguments.device.startswith("cuda") else "cpu")
    bad = 0
    for dtype in ("float32", "bfloat16"):
        target = load_target("lab", dtype=dtype, device=arguments.device)
        reference = load_method(MethodSpec("ar"), target)
        prompts = [
            target.encode_chat([{"role": "user", "content": q.turns[0]}])
            for q in questions(SPECBENCH_CATEGORIES, "eval", arguments.prompts)
        ]
        limits = Limits(192, target.eos_ids)
        expected = [generate(reference, p, limits, Sampling()).tokens for p in prompts]
        for text in arguments.methods.split(";"):
            method, verdicts = load_method(MethodSpec.parse(text), target), Counter[str]()
            for prompt, answer in zip(prompts, expected, strict=True):
                got = generate(method, prompt, limits, Sampling()).tokens
                at = first_difference(answer, got)
                if at is None:
                    verdicts["identical"] += 1
                    continue
                gap = gap_between(target.next_logits(prompt + answer[:at]), answer[at], got[at])
                verdicts["near-tie" if gap.drop <= near_tie_drop(dtype) else "mismatch"] += 1
            bad += verdicts["mismatch"] + (dtype == "float32") * verdicts["near-tie"]
            print(f"{dtype} {text}: {dict(verdicts)}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
