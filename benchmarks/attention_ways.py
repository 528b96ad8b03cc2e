"""Attention of a few rows over many keys by each way there is: which one a device is fast at.

    python benchmarks/attention_ways.py [--device auto] [--dtype bfloat16] [--heads 32 8 128] [--rows 1 8 32 64]
        [--keys 256 1024 4096 16384] [--times 50] [--flex]

Printed is each way's time over that of the first one, medians of calls made in turns in one process; with it, which one
a target of such heads takes (`decoding/attention_ways.py` measures a few of these cases when a model is loaded).
--flex: also flex attention, compiled, with the mask as what is added to a score. It is compiled anew for numbers that
it has not seen, which takes seconds each time, and steps have a new number of keys each time: so it is measured here
and is no way of a target's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import lru_cache, partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from specbench_ss.decoding.attention_ways import WAYS, Heads, way_of
from specbench_ss.models.devices import resolve_device, resolve_dtype

if TYPE_CHECKING:
    from specbench_ss.decoding.attention_ways import Way

FLEX = "flex attention"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--heads", type=int, nargs=3, default=[32, 8, 128], metavar=("HEADS", "KV_HEADS", "SIZE"))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--keys", type=int, nargs="+", default=[256, 1024, 4096, 16384])
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--flex", action="store_true")
    given = parser.parse_args()
    device = resolve_device(given.device)
    of = Heads(device, resolve_dtype(given.dtype, device), *given.heads)
    ways = WAYS | ({FLEX: by_flex} if given.flex else {})
    print(f"{device}, {of.dtype}, {of.heads} heads over {of.kv_heads} of {of.d} numbers, torch {torch.__version__}")
    print(f"{'rows':>5} {'keys':>6}  " + "  ".join(ways) + "  taken by a target")
    with torch.inference_mode():
        for rows in given.rows:
            for keys in given.keys:
                times = measured(of, ways, rows, keys, given.times)
                ratios = "  ".join(f"{t / times[0]:{len(name)}.2f}" for name, t in zip(ways, times, strict=True))
                taken = way_of(of, rows == 1, rows > 1, keys) if of.ways else "torch's own choice"
                print(f"{rows:5} {keys:6}  {ratios}  {taken}", flush=True)


def measured(of: Heads, ways: dict[str, Way], rows: int, keys: int, times: int) -> list[float]:
    """Median seconds of a call of each way, made in turns."""
    like = torch.zeros(0, dtype=of.dtype, device=of.device)
    query, key, value = (
        like.new_empty(1, h, n, of.d).normal_() for h, n in ((of.heads, rows), *2 * [(of.kv_heads, keys)])
    )
    mask = None if rows == 1 else like.new_zeros(1, 1, rows, keys)
    taken: list[list[float]] = [[] for _ in ways]
    for turn in range(times + 3):
        for way, seen in zip(ways.values(), taken, strict=True):
            seconds = timed(partial(way, query, key, value, mask, None), query.is_cuda)
            if turn >= 3:  # libraries choose their kernels first
                seen.append(seconds)
    return [median(seen) for seen in taken]


def timed(call: Callable[[], Any], on_cuda: bool) -> float:
    """Seconds of a call, with what it takes the host to start it."""
    wait = torch.cuda.synchronize if on_cuda else int
    wait()
    begun = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - begun


@lru_cache
def compiled() -> Any:
    """Flex attention for any number of keys."""
    return torch.compile(flex_attention, dynamic=True)


def by_flex(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """The same as the other ways, compiled, with the mask added score by score."""

    def masked(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, place: Tensor) -> Tensor:
        return score if mask is None else score + mask[0, 0, row, place]

    out: Tensor = compiled()(query, key, value, score_mod=masked, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).contiguous()


if __name__ == "__main__":
    main()
