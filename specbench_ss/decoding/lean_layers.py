"""Decoder layers of the Llama family with fewer and larger products, for inference.

q, k and v come of one product, gate and up of another; q and k are turned together; norms are one operator. The modules
keep their weights as views of the joined ones, so memory does not double, and in training the modules themselves run.
A layer that does not agree with its own module when it is made is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specbench_ss.decoding import attention_ways
from specbench_ss.decoding.architectures import Block, Family, rotary_table
from specbench_ss.decoding.attention_ways import Heads
from specbench_ss.decoding.cache import Cache
from specbench_ss.decoding.held_weights import holds_numbers
from specbench_ss.decoding.placement import moved, place_of
from specbench_ss.decoding.products import Packing, Product

ROWS, FIRST = 5, 3  # of the comparison with the module: rows, and the position of the first
OFF = {torch.float32: 1e-4}  # share of the largest value by which a layer may differ from its module
OFF_HALF = 2e-2
Norm = tuple[Tensor, float]  # weight and epsilon of an RMSNorm


class Turn:
    """cos and signed sin [B, q, 1, head_dim] of the step at hand, made once for all layers.

    With its first half negative, sin turns x as in x cos + roll(x) sin, which needs no other sign.
    """

    def __init__(self) -> None:
        self.given: tuple[Tensor, Tensor] | None = None
        self.made: tuple[Tensor, Tensor] | None = None

    def of(self, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return them for cos, sin [B, q, head_dim]."""
        if self.made is None or self.given is not rotary:
            cos, sin = rotary
            first, second = sin.chunk(2, -1)
            self.given, self.made = rotary, (cos[:, :, None], torch.cat((-first, second), -1)[:, :, None])
        return self.made


@dataclass(slots=True)
class Joined:
    """The weights of one layer, joined. heads, kv_heads, d: of attention. norm1 is None where nothing is normed."""

    qkv: Product
    out: Product
    gate_up: Product
    down: Product
    act: Callable[[Tensor], Tensor]
    heads: int
    kv_heads: int
    d: int
    norm1: Norm | None
    norm2: Norm
    head_norm: Norm | None  # weight [heads + kv_heads, d], as Qwen3 norms q and k
    layer: int

    def products(self) -> tuple[Product, ...]:
        """All of the layer."""
        return self.qkv, self.out, self.gate_up, self.down


@dataclass(slots=True)
class LeanBlock(Block):
    """A block that computes with joined weights in inference mode, and as its modules do otherwise."""

    joined: Joined
    turn: Turn

    def attend(self, x: Tensor, cache: Any, mask: Tensor | None, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """Attention's contribution to x [B, q, h] (to be added to it)."""
        if rotary is None or not torch.is_inference_mode_enabled():
            return Block.attend(self, x, cache, mask, rotary)
        w, (b, q, _) = self.joined, x.shape
        rows = w.qkv(_normed(x, w.norm1)).view(b, q, -1, w.d)  # [B, q, heads + 2 kv_heads, d]
        qk, v = rows.split((w.heads + w.kv_heads, w.kv_heads), 2)
        if w.head_norm is not None:
            qk = F.rms_norm(qk, (w.d,), eps=w.head_norm[1]) * w.head_norm[0]
        cos, sin = self.turn.of(rotary)
        qk = torch.addcmul(qk * cos, qk.roll(w.d // 2, -1), sin).transpose(1, 2)
        query, key, value = qk[:, : w.heads], qk[:, w.heads :], v.transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, w.layer)
        module: Any = self.attention
        attention = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]
        seen = attention(module, query, key, value, mask, dropout=0.0, scaling=module.scaling)[0]  # [B, q, heads, d]
        return w.out(seen.reshape(b, q, -1))

    def feed(self, x: Tensor) -> Tensor:
        """The MLP's contribution to x [B, q, h]."""
        if not torch.is_inference_mode_enabled():
            return Block.feed(self, x)
        w = self.joined
        gate, up = w.gate_up(_normed(x, w.norm2)).chunk(2, -1)
        return w.down(w.act(gate).mul_(up))


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else F.rms_norm(x, (x.shape[-1],), norm[0], norm[1])


def lean_blocks(family: Family, pack: Packing, device: torch.device) -> list[Block]:
    """Return the blocks of a family, lean where that is possible and agrees with the modules.

    It changes no weight and draws no random number. pack: whether to keep a second copy of weights (`Product`).
    device: that of cos and sin.
    """
    first = family.blocks[0].attention
    weight = next(first.parameters(), None)
    if family.rotary is None or weight is None or weight.is_meta or not holds_numbers(weight):
        return family.blocks
    turn, like = Turn(), weight.new_empty(1, 1, 1, device=device)
    cos, sin = rotary_table(family.rotary, FIRST + ROWS, like)
    rotary = cos[None, FIRST:], sin[None, FIRST:]
    here = {at: moved(rotary, at) for at in {place_of(block.attention) or device for block in family.blocks}}
    return [lean(block, here[place_of(block.attention) or device], turn, pack) for block in family.blocks]


def products_of(blocks: Sequence[Block], head: Any) -> list[Product]:
    """Return the matrix products of lean layers, in their order, and that of the LM head where it is one."""
    every = [p for block in blocks if isinstance(block, LeanBlock) for p in block.joined.products()]
    return [*every, head] if isinstance(head, Product) else every


def in_words(blocks: Sequence[Block], head: Any) -> str:
    """Say for the record what computes these layers and the LM head in inference."""
    count = sum(isinstance(block, LeanBlock) for block in blocks)
    layers = f"{count} of {len(blocks)} layers lean" if count else "layers as transformers wrote them"
    packed = [p for p in products_of(blocks, head) if p.packed is not None]
    if not packed:
        return layers
    by = "weights in float16" if all(p.half for p in packed) else "reordered weights"
    of = "" if count else " of the LM head"
    whole = [p for p in packed if not p.half]
    one = f", of one row in {sum(p.least == 1 for p in whole)} of {len(whole)}" if whole else ""
    return f"{layers}; products{of} of few rows by {by}{one}"


def lean(block: Block, rotary: tuple[Tensor, Tensor], turn: Turn, pack: Packing) -> Block:
    """Return the lean form of a block, or the block itself. rotary: cos, sin [1, ROWS, head_dim] to compare with.

    Weights without data, on the meta device, cannot be compared: their block stays.
    """
    if rotary[0].is_meta:
        return block
    joined = _joined(block, rotary[0].shape[-1], pack)
    if joined is None:
        return block
    made = LeanBlock(
        block.norm1, block.attention, block.norm2, block.mlp, block.parallel, block.cache_argument, block.window,
        joined, turn,
    )  # fmt: skip
    heads = Heads(str(rotary[0].device), rotary[0].dtype, joined.heads, joined.kv_heads, joined.d)
    attention_ways.in_words(heads)  # what is fastest is measured now, also of a drafter's layers, and in no step
    return made if _agree(block, made, rotary) else block


def _joined(block: Block, turned: int, pack: Packing) -> Joined | None:
    """Join a layer's weights; None where it is not of this form. turned: width of cos and sin."""
    attention: Any = block.attention
    parts, norms, act = _parts(block), _norms(block), _activation(block.mlp)
    if parts is None or norms is None or act is None or block.parallel or getattr(attention, "head_dim", 0) != turned:
        return None
    qkv, out, gate_up, down = parts
    heads = out[0].in_features // turned
    kv_heads = (sum(m.out_features for m in qkv) // turned - heads) // 2
    head_norm, known = _head_norm(attention, heads, kv_heads)
    if not known or any(norm and norm[0].dtype != out[0].weight.dtype for norm in norms):
        return None
    return Joined(
        _product(qkv, pack), _product(out, pack), _product(gate_up, pack), _product(down, pack), act,
        heads, kv_heads, turned, norms[0], norms[1], head_norm, attention.layer_idx,
    )  # fmt: skip


def _parts(block: Block) -> tuple[list[nn.Linear], ...] | None:
    """Return the linear layers of q, k and v, of the output, of gate and up, and of down; None where one is missing."""
    attention, mlp = block.attention, block.mlp
    parts = (
        _linears(attention, ("q_proj", "k_proj", "v_proj")) or _linears(attention, ("qkv_proj",)),
        _linears(attention, ("o_proj",)),
        _linears(mlp, ("gate_proj", "up_proj")) or _linears(mlp, ("gate_up_proj",)),
        _linears(mlp, ("down_proj",)),
    )
    alike = all(len({m.bias is None for m in modules}) == 1 for modules in parts)  # of one product or of none
    return parts if alike else None


def _activation(mlp: Any) -> Callable[[Tensor], Tensor] | None:
    act: Callable[[Tensor], Tensor] | None = getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None))
    return act


def _norms(block: Block) -> tuple[Norm | None, Norm] | None:
    """Return both norms of a block, the first may be the identity; None where one is something else."""
    first, second = _norm(block.norm1), _norm(block.norm2)
    known = second is not None and (first is not None or isinstance(block.norm1, nn.Identity))
    return (first, second) if known and second is not None else None


def _linears(owner: Any, names: Sequence[str]) -> list[nn.Linear]:
    """Return these modules where all of them are plain linear layers, neither quantised nor adapted; else nothing."""
    found = [getattr(owner, name, None) for name in names]
    plain = [module for module in found if type(module) is nn.Linear and holds_numbers(module.weight)]
    return plain if len(plain) == len(names) else []


def _product(modules: Sequence[nn.Linear], pack: Packing) -> Product:
    return Product(_one(modules, "weight"), None if modules[0].bias is None else _one(modules, "bias"), pack)


def _norm(module: Any) -> Norm | None:
    """Return weight and epsilon of an RMSNorm; None for any other module."""
    epsilon = getattr(module, "variance_epsilon", None)
    return None if epsilon is None else (module.weight, epsilon)


def _head_norm(attention: Any, heads: int, kv_heads: int) -> tuple[Norm | None, bool]:
    """Return the norm of q's and k's heads, where there is one, and whether this is all that is known to be there."""
    q, k = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    if q is None and k is None:
        return None, True
    norms = _norm(q), _norm(k)
    if norms[0] is None or norms[1] is None or norms[0][1] != norms[1][1] or norms[0][0].shape != norms[1][0].shape:
        return None, False
    weight = torch.cat((norms[0][0].expand(heads, -1), norms[1][0].expand(kv_heads, -1)))
    return (weight.detach(), norms[0][1]), True


def _one(modules: Sequence[nn.Linear], name: str) -> Tensor:
    """Return a parameter of these modules as one tensor of which each is then a view."""
    parts: list[Tensor] = [getattr(m, name).data for m in modules]
    whole = _adjacent(parts)
    if whole is None:
        whole, at = torch.cat(parts), 0
        for module, part in zip(modules, parts, strict=True):
            getattr(module, name).data = whole[at : at + len(part)]
            at += len(part)
    return whole


def _adjacent(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the tensor that the parts are, one after the other, where they lie so in memory already."""
    first, rows, at = parts[0], 0, parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != at or part.dtype != first.dtype or not part.is_contiguous():
            return None
        at, rows = at + part.numel() * part.element_size(), rows + len(part)
    room = first.untyped_storage().nbytes() // first.element_size() - first.storage_offset()
    fits = rows * first[0].numel() <= room
    return first.as_strided((rows, *first.shape[1:]), first.stride()) if fits else None


@torch.inference_mode()
def _agree(block: Block, made: LeanBlock, rotary: tuple[Tensor, Tensor]) -> bool:
    """Say whether a lean block gives what its modules give, for rows behind some others."""
    weight, layer = made.joined.qkv.weight, made.joined.layer
    places = torch.arange(ROWS * weight.shape[1], device=weight.device)
    x = torch.sin(places.float()).to(weight.dtype).view(1, ROWS, -1)
    results = []
    for one in (block, made):
        cache = Cache(layer + 1, ROWS)
        seen = one.attend(x, cache, None, rotary)
        results.append((seen, one.feed(seen), cache.keys[layer], cache.values[layer]))
    allowed = OFF.get(weight.dtype, OFF_HALF)
    return all(_close(a, b, allowed) for a, b in zip(*results, strict=True))


def _close(a: Tensor | None, b: Tensor | None, allowed: float) -> bool:
    if a is None or b is None or a.shape != b.shape:
        return False
    return bool((a - b).abs().max() <= allowed * (1 + a.abs().max()))
