"""A pass of the target beside its matrix products alone: what attention, norms, rope and the starting of operators add.

    python benchmarks/step_products.py [--model lab] [--dtype auto] [--past 128] [--rows 1 4 8 16] [--times 40]

Both are run in turns in one process; printed are medians and their ratio. The products are those that the layers use,
with the same rows, one after the other, on states of the same shape.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

from specbench_ss.decoding.lean_layers import LeanBlock, products_of
from specbench_ss.decoding.products import Product
from specbench_ss.decoding.target import Target
from specbench_ss.models.loading import load_target


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lab")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--past", type=int, default=128, help="tokens in the cache")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--times", type=int, default=40)
    arguments = parser.parse_args()
    target = load_target(arguments.model, dtype=arguments.dtype)
    print(f"{target.name}, {target.number_format}, {torch.get_num_threads()} threads, {target.computed}")
    print(f"{'rows':>5} {'pass ms':>9} {'products ms':>12} {'ratio':>7}")
    with torch.inference_mode():
        for rows in arguments.rows:
            whole, alone = in_turns(one_pass(target, rows, arguments.past), products(target, rows), arguments.times)
            print(f"{rows:5} {1e3 * whole:9.2f} {1e3 * alone:12.2f} {whole / alone:7.2f}")


def one_pass(target: Target, rows: int, past: int) -> Callable[[], object]:
    """A pass of so many rows behind a cache of so many tokens; it leaves the cache as it was."""
    ids = torch.arange(rows, device=target.device)[None]
    cache = target.new_cache(past + rows)
    target.prefill(torch.arange(past, device=target.device)[None] % target.vocab_size, cache)
    positions = torch.arange(past, past + rows, device=target.device)[None]

    def run() -> object:
        mask = None if rows == 1 else target.causal_mask(rows, past)
        x = target.embed(ids, positions)
        x = target.run(x, 0, target.n_layers, cache, mask, target.rotary(positions, past + rows))
        return target.logits(target.family.norm(x)).argmax(-1)

    return run


def products(target: Target, rows: int) -> Callable[[], object]:
    """All matrix products of such a pass."""
    given = [(product, states(product, rows)) for product in all_products(target)]
    return lambda: [product(x) for product, x in given]


def all_products(target: Target) -> list[Product]:
    """The products of every layer and of the LM head, in order."""
    if not all(isinstance(block, LeanBlock) for block in target.family.blocks):
        raise SystemExit(f"{target.name}: its layers are not lean: their products cannot be run alone")
    return products_of(target.family.blocks, target._head)


def states(product: Product, rows: int) -> torch.Tensor:
    """States [1, rows, in] for a product."""
    weight = product.weight
    return torch.randn(1, rows, weight.shape[1], dtype=weight.dtype, device=weight.device)


def in_turns(first: Callable[[], object], second: Callable[[], object], times: int) -> tuple[float, float]:
    """Median seconds of both, run one after the other so many times."""
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(times + 3):
        for work, kept in zip((first, second), taken, strict=True):
            started = time.perf_counter()
            work()
            kept.append(time.perf_counter() - started)
    return median(taken[0][3:]), median(taken[1][3:])


if __name__ == "__main__":
    main()
