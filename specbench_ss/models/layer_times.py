"""How long a few decoder layers of given sizes take on a CPU in a number format, computed as a target computes them.

Products alone would mislead: in bfloat16 what lies between them takes longer than in float32 (docs/log.md).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specbench_ss.decoding.target import Target
from specbench_ss.models.machine_limits import best_time
from specbench_ss.number_formats import HALF_WEIGHTS, arithmetic

PAST = 128  # tokens in the cache
READ = 256 << 20  # bytes of float32 weights in a pass, so that they come from memory and not from the cache
PASS_S = 0.15  # seconds that a pass is repeated
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Sizes:
    """hidden, and inner of the MLP; heads of queries, and of keys and values, and numbers of a head; layers.

    lean: whether layers of the model are computed lean, and their products by copies of the weights.
    """

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    lean: bool = True

    @property
    def parameters(self) -> int:
        """Entries of a layer's matrices."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.inner

    @property
    def measured(self) -> int:
        """Layers to measure: as many as read so much, at most all of them."""
        return max(1, min(self.layers, READ // (4 * self.parameters)))


def few_layers(sizes: Sizes, form: str, weights_bytes: int) -> Target:
    """A Llama of some of these layers with random weights and hardly any words.

    weights_bytes: of the whole model in float32, which decide whether there is room for copies.
    """
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_hidden_layers=sizes.measured,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=512,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    dtype = getattr(torch, arithmetic(form))
    with torch.random.fork_rng(devices=[]):
        model: Any = LlamaForCausalLM(config).to(dtype)
    # what is not lean is computed without copies, as where there is no room for any
    whole = weights_bytes * dtype.itemsize // torch.float32.itemsize if sizes.lean else sys.maxsize
    return Target(model, rounded=form == HALF_WEIGHTS, part_of=whole)


@torch.inference_mode()
def pass_ms(form: str, sizes: Sizes, weights_bytes: int, rows: tuple[int, ...]) -> dict[str, float]:
    """Milliseconds of a pass over so many rows behind some others, by the number of rows."""
    target = few_layers(sizes, form, weights_bytes)
    return {str(count): 1e3 * best_time(a_pass(target, count), CPU, PASS_S) for count in rows}


def a_pass(target: Target, rows: int) -> Callable[[], Tensor]:
    """A pass over so many rows, which leaves the cache as it was."""
    cache = target.new_cache(PAST + rows)
    target.prefill(torch.zeros(1, PAST, dtype=torch.long), cache)
    positions = torch.arange(PAST, PAST + rows)[None]
    x, rotary = target.embed(torch.zeros_like(positions), positions), target.rotary(positions, PAST + rows)
    mask = None if rows == 1 else target.causal_mask(rows, PAST)
    return lambda: target.run(x, 0, target.n_layers, cache, mask, rotary)
