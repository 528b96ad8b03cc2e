"""LoRA of a target's layers that is on in some rows of a pass: UNO's drafter (arXiv:2609.04010).

y = W x + g s B A x for every adapted matrix, with g = 1 in the rows that hold noise and 0 elsewhere.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbench_ss.engine.architectures import Block, ModelInfo, family_of
from specbench_ss.engine.device_map import DeviceBlock, place_blocks, to_device_recursive
from specbench_ss.engine.layers.cpu import NativeLayer
from specbench_ss.engine.layers.fused import FusedBlock, NativeBlock, RopeCache, layer_linears
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.fine_tuned import (
    ADAPTER,
    ADAPTER_CONFIG,
    DOWN,
    PREFIX,
    UP,
    adapted_modules,
    check_lora,
)
from specbench_ss.models.checkpoint import HUB_ID, public_name
from specbench_ss.user_files import read_json

MOST_BLOCK = 64
Pair = tuple[Tensor, Tensor]  # A [rank, in], B [out, rank]


def layer_matrices(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers of a causal LM but the LM head, by name."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}


class RowLora(nn.Module):
    """LoRA matrices by module name. scale: alpha / r, or alpha / sqrt(r) if rank-stabilised."""

    def __init__(self, pairs: Mapping[str, Pair], scale: float) -> None:
        super().__init__()
        self.names, self.scale = tuple(pairs), scale
        self.index = {name: i for i, name in enumerate(self.names)}
        self.down = nn.ParameterList([nn.Parameter(down) for down, _ in pairs.values()])
        self.up = nn.ParameterList([nn.Parameter(up) for _, up in pairs.values()])

    @property
    def pairs(self) -> dict[str, Pair]:
        """Return A and B of each module."""
        return {name: (self.down[i], self.up[i]) for i, name in enumerate(self.names)}

    @property
    def rank(self) -> int:
        """Return the largest rank."""
        return max(len(down) for down, _ in self.pairs.values())

    def joined(self, modules: Sequence[tuple[str, nn.Linear]]) -> Pair | None:
        """Return A and B of a product that joins the outputs of these modules; None if none is adapted."""
        downs, ups, like = list[Tensor](), list[Tensor](), self.down[0]
        for name, module in modules:
            at = self.index.get(name)
            downs.append(like.new_zeros(0, module.in_features) if at is None else self.down[at])
            ups.append(like.new_zeros(module.out_features, 0) if at is None else self.up[at])
        return (torch.cat(downs), torch.block_diag(*ups)) if sum(map(len, downs)) else None


class RowGated(nn.Module):
    """A product with a LoRA in the rows from `first` on: x [B, r, in] -> [B, r, out]. pair: returns A and B."""

    def __init__(self, product: Any, pair: Callable[[], Pair | None], scale: float, first: int) -> None:
        super().__init__()
        self.product, self.pair, self.scale, self.first = product, pair, scale, first

    def forward(self, x: Tensor) -> Tensor:
        """Return the product."""
        out: Tensor = self.product(x)
        pair = self.pair()
        if pair is None or x.shape[1] <= self.first:
            return out
        added = F.linear(self.scale * F.linear(x[:, self.first :], pair[0]), pair[1])
        return out + (F.pad(added, (0, 0, self.first, 0)) if self.first else added)


@dataclass(slots=True)
class GatedBlock(FusedBlock):
    """A fused layer with a LoRA in some rows, with or without gradients."""

    native: NativeLayer | None

    def attend(self, x: Tensor, cache: Any, mask: Tensor | None, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return attention's contribution to x [B, q, h], to be added to it."""
        assert rotary is not None
        if self.native is not None and torch.is_inference_mode_enabled():
            out = self.native.run(self.native.kernels.attend, x, cache, mask, rotary)
            if out is not None:
                return out
        return self.attend_by_torch(x, cache, mask, rotary)

    def run_mlp(self, x: Tensor) -> Tensor:
        """Return the MLP's contribution to x [B, q, h]."""
        natively = self.native is not None and len(x) == 1 and self.native.supports_mlp(x)
        return self.native.mlp(x) if natively else self.mlp_by_torch(x)  # type: ignore[union-attr]


def gated_blocks(target: Target, lora: RowLora, first: int, trained: bool = False) -> list[Block]:
    """Return the target's layers with the LoRA on in the rows from `first` on; their weights are shared.

    trained: compute the joined matrices in each call, with gradients.
    """

    def gated(product: Any, *modules: tuple[str, nn.Linear]) -> RowGated:
        pair = partial(lora.joined, modules)
        if not trained:
            pair = partial(_same, to_device_recursive(pair(), modules[0][1].weight.device))
        return RowGated(product, pair, lora.scale, first)

    own = [block.block if isinstance(block, DeviceBlock) else block for block in target.family.blocks]
    blocks = _gated_blocks(target, own, gated, trained)
    return place_blocks(blocks, [block.attention for block in own], target.device)


def _gated_blocks(target: Target, own: Sequence[Block], gated: Callable[..., RowGated], trained: bool) -> list[Block]:
    """Return the target's own layers with gated products: of joined weights where they are fused."""
    fused = [block for block in own if isinstance(block, FusedBlock)]
    if len(fused) < target.n_layers:
        model = copy.deepcopy(target.model, {id(p): p for p in target.model.parameters()})
        for name, module in layer_matrices(model).items():
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, gated(module, (name, module)))
        return family_of(model).blocks
    names, rope, blocks = {id(m): name for name, m in target.model.named_modules()}, RopeCache(), list[Block]()
    for block in fused:
        parts = layer_linears(block)
        assert parts is not None
        w = block.joined
        qkv, out, gate_up, down = (
            gated(product, *((names[id(m)], m) for m in modules))
            for product, modules in zip(w.products(), parts, strict=True)
        )
        joined = replace(w, qkv=qkv, out=out, gate_up=gate_up, down=down)  # type: ignore[arg-type]
        pairs, native = [product.pair() for product in (qkv, out, gate_up, down)], None
        if isinstance(block, NativeBlock) and not trained:
            native = block.native.with_lora(pairs, qkv.scale, qkv.first)
        blocks.append(
            GatedBlock(
                block.norm1, block.attention, block.norm2, block.mlp, block.parallel, block.cache_argument,
                block.window, joined, rope, native,
            )
        )  # fmt: skip
    return blocks


def _same(pair: Pair | None) -> Pair | None:
    return pair


def new_lora(target: Target, rank: int, scale: float) -> RowLora:
    """Return an untrained LoRA of all matrices of the layers: A random, B zero."""
    pairs = {}
    for name, m in layer_matrices(target.model).items():
        pairs[name] = torch.randn(rank, m.in_features) * m.in_features**-0.5, torch.zeros(m.out_features, rank)
    return RowLora(pairs, scale)


def read_lora(folder: Path, model: nn.Module, read: Callable[..., dict[str, Tensor]]) -> RowLora:
    """Return the LoRA of a peft folder. model: the base, may be on the meta device.

    Raises UserError for anything but plain LoRA of matrices of this model's layers.
    """
    if not (folder / ADAPTER_CONFIG).is_file():
        raise UserError(f"uno: {folder} has no {ADAPTER_CONFIG}; a LoRA as peft writes it is expected")
    check_lora(folder, "uno")
    names, config = adapted_modules(folder, "uno"), read_json(folder / ADAPTER_CONFIG)
    for key in ("rank_pattern", "alpha_pattern", "fan_in_fan_out"):
        if config.get(key):
            raise UserError(f"uno: {folder / ADAPTER_CONFIG} has {key}, which is not supported")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not names:
        raise UserError(f"uno: r in {folder / ADAPTER_CONFIG} is {rank!r}, it must be a whole number above 0")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha) or not alpha:
        raise UserError(f"uno: lora_alpha in {folder / ADAPTER_CONFIG} is {alpha!r}, it must be a number other than 0")
    matrices = layer_matrices(model)
    for name, (outputs, inputs) in names.items():
        if name not in matrices:
            raise UserError(f"uno: {folder / ADAPTER} adapts {name}, which is no matrix of this model's layers")
        base = matrices[name].out_features, matrices[name].in_features
        if base != (outputs, inputs):
            found, expected = f"{outputs}x{inputs}", "x".join(map(str, base))
            raise UserError(f"uno: {folder / ADAPTER} is for another model: {name} has {expected} weights, not {found}")
    tensors = read(folder / ADAPTER)
    pairs = {name: (tensors[PREFIX + name + DOWN], tensors[PREFIX + name + UP]) for name in names}
    return RowLora(pairs, alpha / (rank**0.5 if config.get("use_rslora") else rank))


def warn_of_other_base(folder: Path, base: ModelInfo) -> None:
    """Warn if a LoRA names another base than this model; both must have hub ids."""
    named, own = str(read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path") or ""), public_name(base)
    if HUB_ID.fullmatch(own) and HUB_ID.fullmatch(named) and named.lower() != own.lower():
        warnings.warn(f"uno: the LoRA in {folder} was trained on {named}; this model is {own}", stacklevel=2)


NOISE_ROWS = 4_099  # a prime


def noise_table(vocab: int, count: int, device: torch.device) -> Tensor:
    """Return pseudo-random token ids [NOISE_ROWS, count], the same in every process and on every device."""
    generator = torch.Generator().manual_seed(40_503)
    ids = torch.randint(vocab, (MOST_BLOCK, NOISE_ROWS), generator=generator)
    return ids[:count].T.contiguous().to(device)


def noise_tokens(table: Tensor, at: Tensor, roots: Tensor) -> Tensor:
    """Return noise [.., count] for the rows behind tokens `roots` at positions `at`, int64 [..].

    It depends on nothing else, so that a resumed training and a repeated request have the same.
    """
    return table[(at * 40_503 + roots * 69_069) % NOISE_ROWS]
