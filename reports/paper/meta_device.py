"""Count parameters and FLOPs on the meta device, with real modules and decoding code but without weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from specbench_ss.engine.decoder import State
from specbench_ss.engine.sampling import Sampling
from specbench_ss.engine.target import FINAL, Target

META = torch.device("meta")
HEADS = 4  # of Medusa and Hydra (ACL N.1)
CONTEXT = 512  # tokens in the cache; the papers do not give theirs


@dataclass(frozen=True, slots=True)
class Overhead:
    """parameters: those beyond the base's. passes: forward passes of the drafter per draft.

    flops: those of all passes. one_node: those of a chain, which has one node on each level and nothing to prune.
    """

    parameters: int
    passes: int
    flops: int
    one_node: int


def count(module: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(p.numel() for p in module.parameters())


def flops(work: Callable[[], Any], learning: bool = False) -> int:
    """Return the FLOPs that torch's counter sees while `work` runs. learning: it computes gradients."""
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(learning):
        work()
    return int(counter.get_total_flops())


def meta_state(target: Target, rows: int = 256) -> State:
    """Return the state of a request that has reached CONTEXT tokens, with room for this many rows."""
    cache = target.new_cache(CONTEXT + rows)
    cache.advance(CONTEXT)
    root = torch.empty(1, dtype=torch.long, device=META)
    final = torch.empty(1, 1, target.hidden_size, device=META, dtype=target.dtype)
    return State([0] * (CONTEXT + 1), CONTEXT, root, cache, Sampling(), {FINAL: final})
