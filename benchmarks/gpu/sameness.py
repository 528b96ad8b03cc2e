"""Every lossless method against autoregressive decoding on this device, in float32 and bfloat16.

    PYTHONPATH=. python benchmarks/gpu/sameness.py [--device cuda] [--engine graph] [--methods "medusa;ss[k=1]"]

Every method that has weights for the lab unless --methods says which; each against its own reference. Prints, for each
dtype and method, how many answers are identical, how many part at a near-tie, how many mismatch.
Exit code 1 if anything differs in float32, or for another reason than a near-tie in bfloat16.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

import torch

from specbench_ss.benchmark.asked import with_all
from specbench_ss.decoding.decoder import Decoder
from specbench_ss.decoding.engines import ENGINES
from specbench_ss.decoding.loop import Limits, generate
from specbench_ss.decoding.sampling import Sampling
from specbench_ss.errors import UserError
from specbench_ss.method_spec import MethodSpec
from specbench_ss.models.loading import load_target
from specbench_ss.registry import load_method
from specbench_ss.runs.rows import Row
from specbench_ss.runs.sameness import judge
from specbench_ss.runs.suite import Question
from specbench_ss.suites.lab_text.catalog import SPECBENCH_CATEGORIES, questions

HARMLESS = {"float32": {"identical"}, "bfloat16": {"identical", "near-tie"}}


def answer(decoder: Decoder, question: Question, prompt: list[int]) -> Row:
    """The first turn's greedy answer."""
    row = Row(question.id, 0, decoder.name, 0, question.category, 0, 0, 0, "lab", "", "ok")
    row.fill(generate(decoder, prompt, Limits(192, decoder.target.eos_ids), Sampling()))
    return row


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--engine", choices=ENGINES, default="eager")
    parser.add_argument("--prompts", type=int, default=2, help="per category")
    parser.add_argument("--methods", default="all;ss[prune=off];ss[mode=chain];sd[form=tree]")
    arguments = parser.parse_args()
    print(torch.__version__, torch.cuda.get_device_name() if arguments.device.startswith("cuda") else "cpu")
    asked = questions(SPECBENCH_CATEGORIES, "eval", arguments.prompts)
    bad = 0
    for dtype, harmless in HARMLESS.items():
        target = load_target("lab", dtype=dtype, device=arguments.device, engine=arguments.engine)
        prompts = [target.encode_chat([{"role": "user", "content": q.turns[0]}]) for q in asked]
        kept: dict[str, tuple[Decoder, list[Row]]] = {}
        for text in with_all(arguments.methods.split(";")):
            try:
                method = load_method(MethodSpec.parse(text), target)
            except UserError as error:
                print(f"{dtype} {text}: left out: {error}", flush=True)
                continue
            if not method.lossless:
                continue
            spec = method.reference_for(method.options)
            if spec.label not in kept:
                reference = load_method(spec, target)
                kept[spec.label] = reference, [answer(reference, q, p) for q, p in zip(asked, prompts, strict=True)]
            reference, rows = kept[spec.label]
            verdicts = Counter(
                judge(reference, p, row, answer(method, q, p)).verdict
                for q, p, row in zip(asked, prompts, rows, strict=True)
            )
            bad += sum(count for verdict, count in verdicts.items() if verdict not in harmless)
            print(f"{dtype} {text}: {dict(verdicts)}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
