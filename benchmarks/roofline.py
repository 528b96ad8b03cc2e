"""Time of a step by its width and context, compared with an autoregressive step and a lower bound of the device.

    python benchmarks/roofline.py [--models lab smollm2 1b 7b 13b] [--methods verify medusa eagle ss ss-pruned]
        [--widths 1 2 4 8 16 32 64 128] [--contexts 512 2048] [--engine eager] [--dtype auto] [--steps 10]
        [--out roofline.jsonl]

Steps are measured as by `ssbench plan`, with untrained drafters (Medusa's heads have LM heads of their own); models
that are named by their size are random (Llama's shapes). A line has the medians and their ratio (before
2026-11-29: steps of both in turn, one by one, and the median of the ratios).
`verify` is a chain without a drafter: the cost of width alone. `ss` has four streams at each verified row;
`ss-pruned` drafts 120 nodes, as the papers do, and its width is what stays of them where the streams begin.

The least time is the larger one of: bytes of all weights, the drafter's too, and of the context over the measured
bandwidth; operations of verifying, without those of drafting and of streams, over the measured peak (`ssbench doctor
--calibrate`). `eagle` drafts as many levels as `--nodes` gives EAGLE-2 for its width. Lines
are appended to OUT as they are measured; existing lines are not measured again. Models that are refused or do not
fit into memory are reported and left out; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specbench_ss.bench.timed_sample import OutOfMemory, memory_given_back
from specbench_ss.engine.costs import drafter_shape, model_shape
from specbench_ss.engine.decoder import Decoder
from specbench_ss.engine.engines import ENGINES, check_engine, use_engine
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError, first_line
from specbench_ss.methods._plan.step_cost import STREAMS, Chain, step_cost, untrained
from specbench_ss.methods.ss.config import SSOptions, StreamConfig
from specbench_ss.methods.ss.decode import SpeculativeStreaming
from specbench_ss.methods.ss.layers import Streams
from specbench_ss.models.devices import resolve_device, resolve_dtype
from specbench_ss.models.limits import MachineLimits, device_name, known_limits
from specbench_ss.models.load import load_target

SIZES = {  # hidden, layers, heads, heads of keys and values, MLP, vocabulary: TinyLlama 1.1B, Llama-2 7B and 13B
    "1b": (2048, 22, 32, 4, 5632, 32000),
    "7b": (4096, 32, 32, 32, 11008, 32000),
    "13b": (5120, 40, 40, 40, 13824, 32000),
}
DRAFTED = 120  # nodes of a tree that is pruned: three candidates of each stream
KEY = ("model", "dtype", "device", "engine", "method", "width", "context")  # what is not measured twice


def decoder_of(method: str, target: Target, width: int) -> Decoder | None:
    """Return a method with random weights that verifies `width` rows; None if it cannot."""
    if method == "verify":
        return Chain(target, width - 1)
    if width < 2:
        return None
    if method in ("medusa", "eagle", "ss"):
        return untrained(method, target, width - 1, own_heads=True)
    if method == "ss-pruned":
        torch.manual_seed(0)
        config = StreamConfig(gamma=STREAMS, n_msa_layers=min(4, target.n_layers - 1), adapter_rank=8, prune_rank=8)
        options = SSOptions(k=3, n_draft=DRAFTED, n_keep=width)
        return SpeculativeStreaming(target, options, Streams(config, target.hidden_size))
    raise SystemExit(f"no method {method!r}: verify, medusa, eagle, ss, ss-pruned")


def model_of(name: str, dtype: str, device: str, context: int) -> Target:
    """Return a model by its name, or a random one of this size. context: the longest one that is measured."""
    if name not in SIZES:
        return load_target(name, dtype=dtype, device=device)
    hidden, layers, heads, kv_heads, inner, vocab = SIZES[name]
    config = LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        intermediate_size=inner, vocab_size=vocab, max_position_embeddings=2 * context,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(resolve_dtype(dtype, device))
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return Target(model, None, name)


def least_ms(
    target: Target, decoder: Decoder | None, width: int, context: int, limits: MachineLimits | None
) -> float | None:
    """Return the larger of the times for bytes and for operations; None without limits or shapes."""
    shape = model_shape(target)
    peak = None if limits is None else limits.flops_per_s.get(str(target.dtype).removeprefix("torch."))
    if limits is None or peak is None or shape["weight_bytes"] is None:
        return None
    drafter = None if decoder is None else drafter_shape(decoder.drafter_weights(), target)
    layers = len(shape["windows"])
    moved = shape["weight_bytes"] + shape["kv_bytes"] * layers * context + (drafter or {}).get("weight_bytes", 0)
    flops = width * (2 * shape["matrix_parameters"] + shape["attention_flops"] * layers * context)
    return 1e3 * float(max(moved / limits.read_bytes_per_s, flops / peak))


def lines_of(
    target: Target, name: str, arguments: argparse.Namespace, there: set[tuple[Any, ...]], log: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Measure missing lines. Width: verified rows, with the root; times in ms; least_ms None without limits."""
    limits = known_limits(target.device)
    for context, method, width in product(arguments.contexts, arguments.methods, arguments.widths):
        engine, device = arguments.engine, device_name(target.device)
        key = (name, target.number_format, device, engine, method, width, context)
        if key in there or context + 4 * width >= target.context_length:
            continue
        decoder = decoder_of(method, target, width)
        if decoder is None:
            continue
        try:
            with memory_given_back(decoder):
                found: dict[str, Any] = asdict(step_cost(decoder, context, arguments.steps))
                del found["nodes"]
        except OutOfMemory as error:
            log(f"{method:8} {width:4} rows {context:6} tokens: left out, {str(error).partition(':')[0]}")
            continue
        if target.graphs is not None:
            target.graphs.evict()  # recordings hold the caches that they were made over
        found["least_ms"] = least_ms(target, decoder, width, context, limits)
        found["ar_least_ms"] = least_ms(target, None, 1, context, limits)
        yield dict(zip(KEY, key, strict=True)) | found | {"torch": torch.__version__}


def main(log: Callable[[str], None] = print) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["lab"])
    parser.add_argument("--methods", nargs="+", default=["verify", "medusa", "eagle", "ss"])
    parser.add_argument("--widths", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 2048])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--engine", choices=ENGINES, default="eager")
    parser.add_argument("--out", type=Path, default=Path("roofline.jsonl"))
    arguments = parser.parse_args()
    device = resolve_device(arguments.device)
    check_engine(arguments.engine, device)
    refused = 0
    for name in arguments.models:
        try:
            target = model_of(name, arguments.dtype, device, max(arguments.contexts))
            use_engine(target, arguments.engine)
        except (UserError, torch.OutOfMemoryError) as error:  # the next model is measured anyway
            log(f"{name}: left out, {first_line(error)}")
            refused += 1
            continue
        log(
            f"{name}: {target.parameter_count / 1e6:,.0f} M parameters, {target.number_format}, {target.kernel_summary}"
        )
        known = arguments.out.read_text().splitlines() if arguments.out.is_file() else []
        there = {tuple(line[part] for part in KEY) for line in map(json.loads, known)}
        for line in lines_of(target, name, arguments, there, log):
            with arguments.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            what = f"{line['method']:8} {line['width']:4} rows {line['context']:6} tokens"
            share = "" if line["least_ms"] is None else f"  {line['step_ms'] / line['least_ms']:5.2f} times the least"
            log(f"{what} {line['step_ms']:9.2f} ms {line['ratio']:6.2f} steps{share}")
    sys.exit(bool(refused))


if __name__ == "__main__":
    main()
