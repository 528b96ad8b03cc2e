"""Medusa heads (residual blocks and a vocabulary projection each) and their checkpoint layouts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.layers.linear import PrepackedLinear
from specbench_ss.errors import UserError, prefixed
from specbench_ss.methods._shared.drafting import Read
from specbench_ss.models.checkpoint import load_into, read_config, read_shapes, weights_in
from specbench_ss.models.resolve import weight_files


class MedusaHeads(nn.Module):
    """n heads of L residual blocks, stacked so that all heads are computed in one matmul.

    weight [n, L, h, h], bias [n, L, h]; unembed [n, V, h], or None if the heads share the base's LM head.
    """

    def __init__(self, heads: int, layers: int, hidden: int, vocab: int, own_unembed: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads, layers, hidden, hidden))  # zero: a new head is the identity
        self.bias = nn.Parameter(torch.zeros(heads, layers, hidden))
        self.unembed = nn.Parameter(torch.zeros(heads, vocab, hidden)) if own_unembed else None
        self.products: list[PrepackedLinear] = []  # of `lm_heads`, for inference on a CPU

    @property
    def count(self) -> int:
        """Return the number of heads."""
        return self.weight.shape[0]

    def lm_heads(self) -> list[tuple[Tensor, None]]:
        """Return weight and bias of each head's own LM head."""
        return [] if self.unembed is None else [(weight, None) for weight in self.unembed]

    def states(self, x: Tensor, heads: int | None = None) -> Tensor:
        """Return each head's input to the LM head [heads, m, h] for final normed states x [m, h]."""
        n = self.count if heads is None else heads
        x = x.expand(n, *x.shape)  # [n, m, h]
        for layer in range(self.weight.shape[1]):
            x = x + F.silu(torch.baddbmm(self.bias[:n, layer, None], x, self.weight[:n, layer].mT))
        return x

    def forward(
        self,
        x: Tensor,
        shared: Callable[[Tensor], Tensor],
        heads: int | None = None,
        rows: Sequence[PrepackedLinear] = (),
    ) -> Tensor:
        """Return logits [heads, m, V] of final normed states x [m, h].

        shared: LM head for heads without one of their own. rows: selected rows of the heads' own, in place of those.
        """
        x = self.states(x, heads)
        if self.unembed is None:
            return shared(x)
        if products := rows or (self.products if torch.is_inference_mode_enabled() else ()):
            return torch.stack([product(states) for product, states in zip(products, x, strict=False)])
        return x @ self.unembed[: len(x)].mT


# names of residual blocks (head, layer, part) and of vocabulary projections (head): as published, as vLLM packs them
_BLOCK = re.compile(r"^(?:(?:medusa_head\.)?(\d+)\.(\d+)\.linear|blocks\.(\d+)\.layers\.(\d+))\.(weight|bias)$")
_UNEMBED = re.compile(r"^(?:(?:medusa_head\.)?(\d+)\.(\d+)|lm_heads\.(\d+))\.weight$")
_SHARED = "lm_head.weight"  # the base's LM head in vLLM's layout, for heads that have none of their own
OURS = ("weight", "bias")


def heads_from_tensors(tensors: dict[str, Tensor], hidden: int, vocab: int) -> MedusaHeads:
    """Return heads from the published layouts; counts are read from the tensors, not from a config.

    v0.1: `{i}.{j}.linear.{weight,bias}` and `{i}.{L}.weight`; v2: without the latter (the base's LM head is used);
    inside a Medusa-2 model: the same after `medusa_head.`; vLLM: `blocks.{i}.layers.{j}.{weight,bias}`, where all
    biases may be missing, and `lm_heads.{i}.weight` or the base's `lm_head.weight`; ours: `weight`, `bias`, `unembed`.
    Raise UserError for unknown, missing or misshapen tensors.
    """
    with prefixed("Medusa heads"):
        ours = set(OURS) <= tensors.keys() <= {*OURS, "unembed"}
        stacked = tensors if ours else _stacked(tensors)
        weight = stacked["weight"]
        if weight.ndim != 4:
            raise UserError(f"weight has shape {tuple(weight.shape)}, not heads, layers, hidden, hidden")
        heads = MedusaHeads(weight.shape[0], weight.shape[1], hidden, vocab, "unembed" in stacked)
        load_into(heads, {name: tensor.float() for name, tensor in stacked.items()}, "Medusa heads")
    return heads


def _stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of `MedusaHeads` from tensors of single blocks and projections."""
    blocks, unembeds, after = dict[tuple[int, int, str], Tensor](), dict[int, Tensor](), set[int]()
    for name, tensor in tensors.items():
        if match := _BLOCK.match(name):
            i, j = (int(g) for g in match.groups()[:4] if g is not None)
            blocks[i, j, match[5]] = tensor
        elif match := _UNEMBED.match(name):
            unembeds[int(match[1] or match[3])] = tensor
            after |= {int(match[2])} if match[2] else set()  # the index of the block before, plus one
        elif name != _SHARED:
            raise UserError(f"unknown tensor {name!r}")
    if not blocks:
        raise UserError("no residual block found")
    n, layers = 1 + max(i for i, _, _ in blocks), max(1 + max(j for _, j, _ in blocks), *after, 1)
    if after and min(after) < layers:
        raise UserError(f"a vocabulary projection is at {min(after)}, before block {layers - 1}")
    vllm = all(name.startswith(("blocks.", "lm_head")) for name in tensors)
    parts = OURS[:1] if vllm and not any(part == "bias" for _, _, part in blocks) else OURS
    grid = {part: [[(i, j, part) for j in range(layers)] for i in range(n)] for part in parts}
    if missing := [key for rows in grid.values() for row in rows for key in row if key not in blocks]:
        raise UserError("tensor {}.{}.linear.{} is missing".format(*missing[0]))
    if unembeds and (odd := sorted(unembeds.keys() ^ set(range(n)))):
        lacks = "residual blocks" if odd[0] in unembeds else "vocabulary projection"
        raise UserError(f"head {odd[0]} has no {lacks}")
    made = {part: _stack([_stack([blocks[key] for key in row]) for row in rows]) for part, rows in grid.items()}
    made.setdefault("bias", torch.zeros_like(made["weight"][..., 0]))
    return made | ({"unembed": _stack([unembeds[i] for i in range(n)])} if unembeds else {})


def _stack(tensors: list[Tensor]) -> Tensor:
    if len({t.shape for t in tensors}) != 1:
        raise UserError(f"shapes differ: {sorted({tuple(t.shape) for t in tensors})}")
    return torch.stack(tensors)


HEADS_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
INSIDE = "medusa_head."  # prefix of the heads' tensor names in a whole model


def read_heads(path: Path, base: ModelInfo, read: Read, method: str) -> tuple[MedusaHeads, dict[str, Any], bool]:
    """Return the heads, their config, and True if a backbone comes with them.

    Raise UserError, naming the file, if there are none or they do not fit the base.
    """
    source = weights_in(path, method, HEADS_FILES)
    config = read_config(path) if path.is_dir() else {}
    names = read_shapes(source)
    inside = [name for name in names if name.startswith(INSIDE)]
    in_model = bool(inside) and len(inside) < len(names)
    tensors = read(source, lambda name: name.startswith(INSIDE)) if in_model else read(source)
    backbone = in_model or (path.is_dir() and source != path and bool(weight_files(path)))
    try:
        return heads_from_tensors(tensors, base.hidden_size, base.vocab_size), config, backbone
    except UserError as error:
        raise UserError(f"{error} ({source})") from error


def vllm_tensors(heads: MedusaHeads, shared: Tensor) -> dict[str, Tensor]:
    """Return the tensors by vLLM's names. shared: the base's LM head, used if the heads have none of their own."""
    n, layers = heads.weight.shape[:2]
    blocks = {
        f"blocks.{i}.layers.{j}.{part}": stacked[i, j]
        for part, stacked in (("weight", heads.weight), ("bias", heads.bias))
        for i in range(n)
        for j in range(layers)
    }
    if heads.unembed is None:
        return {**blocks, _SHARED: shared}
    return {**blocks, **{f"lm_heads.{i}.weight": unembed for i, unembed in enumerate(heads.unembed)}}


def vllm_config_of(heads: MedusaHeads, base: ModelInfo) -> dict[str, Any]:
    """Return config.json for vLLM, which drops the biases of the blocks without `medusa_fc_bias`."""
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": base.hidden_size,
        "vocab_size": base.vocab_size,
        "num_heads": heads.count,
        "num_hidden_layers": heads.weight.shape[1],
        "medusa_fc_bias": True,
        "original_lm_head": heads.unembed is None,
    }
