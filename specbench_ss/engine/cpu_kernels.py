"""Faster matrix products and fused decoder layers for CPUs.

A pass over a draft has 2 to 32 rows. torch gives such a product to a library that reorders the matrix each time,
which takes as long as several rows. Two libraries that torch brings along take a matrix that was reordered once:

- oneDNN, in float32: 8 rows take about 1.6 times as long as one, and not 2.2 times. In bfloat16, where the processor
  multiplies it: all products of SmolLM2 take half of the time for 1 to 16 rows (docs/log.md).
- FBGEMM, with weights rounded to float16 numbers: it reads half of the bytes and computes in float32, so the product is
  that of the rounded weights but for the order of its sums. A pass of SmolLM2 took 0.7 of the time (docs/results).

Which of them is the model's number format, never how a weight happens to be: where the base alone read half of its
bytes, since it was published in float16, a method that changes the base would be held against a model it cannot have.

The copy adds a half to the memory of the weights, or doubles it; it is made only where the machine has plenty.

q, k and v come of one product, gate and up of another; q and k are turned together; norms are one operator. A layer
that does not agree with its own module when it is made is left as it is.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specbench_ss.engine import attention as attention_ways
from specbench_ss.engine.architectures import Block, ModelParts, rotary_table
from specbench_ss.engine.attention import Heads
from specbench_ss.engine.device_map import device_of, to_device_recursive
from specbench_ss.engine.kv_cache import Cache
from specbench_ss.engine.timing import clearly_fastest
from specbench_ss.errors import UserError

LARGEST = torch.finfo(torch.float16).max


@torch.no_grad()
def round_matrices(model: Any, name: str) -> None:
    """Round every matrix of a float32 model, in its own memory, to the nearest float16 numbers; they stay float32.

    So whatever computes with the weights, in whatever order, computes with the same ones. Vectors, as of norms and
    biases, stay as they are. Raises UserError, before anything is changed, for a number that float16 does not hold.
    """
    matrices = {named: p for named, p in model.named_parameters() if p.ndim > 1 and p.numel()}
    other = next((p for p in matrices.values() if p.dtype != torch.float32 or p.device.type != "cpu"), None)
    if other is not None:
        raise UserError(f"{name!r} is {other.dtype} on {other.device}: weights of float32 on a CPU are rounded")
    for named, p in matrices.items():
        if p.abs().max() > LARGEST:
            raise UserError(
                f"{name!r} has weights that float16 does not hold ({named} has numbers beyond {LARGEST:,.0f}): "
                "use --dtype float32"
            )
    for p in matrices.values():
        p.copy_(p.half())


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the weights of a target's linear layers are held.

    words: what was done, for the record. hold: does the same to another model, in place, and returns the words;
    raises UserError where it cannot. reread: returns the target's model as it was published; None: nobody can.
    """

    words: str
    hold: Callable[[Any], str]
    reread: Callable[[], Any] | None = None

    def of_another(self, model: Any) -> Quantization:
        """Hold another model's weights in the same way, in place. Raises UserError where that cannot be."""
        return replace(self, words=self.hold(model), reread=None)


def holds_numbers(weight: Tensor) -> bool:
    """Say whether a parameter is a tensor of numbers, and not of a class that holds them in fewer bits."""
    plain = type(weight) is torch.nn.Parameter and type(weight.data) is torch.Tensor
    return plain and weight.is_floating_point()


LEAST_ROWS, MOST_ROWS = 2, 32  # of oneDNN; with fewer or more, the other library is as fast
MOST_ROWS_HALF = 256  # of FBGEMM
TINY = 1 << 14  # weights: fewer gain nothing (128 x 128, AVX2, 1 to 16 rows: 4 to 10 us, by oneDNN 25 to 30)
LARGE = 1_500_000  # weights, from where a single row gains by oneDNN too, unless it was measured
PACKED = (torch.float32, torch.bfloat16)  # formats that oneDNN's copies are made in
PRODUCTS_OFF = {torch.float32: 1e-4, torch.bfloat16: 0.05}  # by how much products of 16 numbers below one may differ
SHARE = 4  # of the machine's memory the weights may take one part in so many
HINT = 8  # rows that the order of the weights is chosen for


PrepackFormat = Literal["", "whole", "half"]  # the second copy of weights: none, reordered in float32, in float16

_HALVED: WeakSet[PrepackedLinear] = WeakSet()
Key = tuple[torch.Size, torch.dtype, int]  # shape and format of weights, threads
_one_row: dict[Key, int] = {}  # fewest rows of the copy, as measured


class PrepackedLinear:
    """x [.., in] -> x weight^T + bias [.., out], for inference. weight: [out, in].

    pack: `half` takes weights that are float16 numbers, as those of a model in that format and of its drafters are.
    parts: the weights that this one is a copy of, where it is one.
    """

    __slots__ = ("__weakref__", "bias", "half", "least", "most", "packed", "parts", "weight")

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, pack: PrepackFormat = "", parts: Sequence[Tensor] = ()
    ) -> None:
        self.weight, self.bias, self.parts = weight, bias, (*parts, weight)
        self.half = pack == "half" and is_half(weight)  # whether the copy is FBGEMM's
        self.packed: Any = None  # the copy, where there is one
        self.least, self.most = 1, MOST_ROWS_HALF  # rows that go through the copy
        if self.half:
            self.packed = _packed_half(weight, bias)
            _HALVED.add(self)
        elif pack and weight.numel() >= TINY and _works(weight.dtype):
            self.packed = _packed(weight)
            by_size = 1 if weight.numel() >= LARGE or weight.dtype == torch.bfloat16 else LEAST_ROWS
            self.least, self.most = _one_row.get(_key(weight), by_size), MOST_ROWS

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product."""
        if self.packed is None or x.ndim < 2 or not self.least <= x.shape[:-1].numel() <= self.most:
            if x.ndim == 3 and len(x) == 1:  # torch takes a slice of rows for a batch and copies the weight in bfloat16
                return F.linear(x[0], self.weight, self.bias)[None]
            return F.linear(x, self.weight, self.bias)
        if self.half:
            out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self.packed)
        else:
            out = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out


@torch.inference_mode()
def measure_one_row(products: Iterable[PrepackedLinear]) -> None:
    """Let one row take the copy where this machine multiplies it clearly faster so, and the weight itself elsewhere.

    All products of a shape run one after the other, so that weights come from where they come from in a pass. A
    baseline whose one row is slower than it has to be flatters every method: with AVX-512, without this, a pass of
    SmolLM2 over one row took 1.3 times as long as one over five (docs/log.md). Once measured, a shape keeps its way in
    this process: a changed model and a drafter's layer of the same shapes go the base's.
    """
    shapes: dict[torch.Size, list[PrepackedLinear]] = {}
    for product in products:
        if product.packed is not None and not product.half:
            shapes.setdefault(product.weight.shape, []).append(product)
    for same in shapes.values():
        key = _key(same[0].weight)
        if key not in _one_row:
            x, usual = same[0].weight.new_ones(1, key[0][1]), same[0].least
            ways = {least: partial(_multiply, same, x, least) for least in (usual, LEAST_ROWS if usual == 1 else 1)}
            _one_row[key] = clearly_fastest(ways)
        for product in same:
            product.least = _one_row[key]


def _key(weight: Tensor) -> Key:
    return weight.shape, weight.dtype, torch.get_num_threads()


def _multiply(same: Sequence[PrepackedLinear], x: Tensor, least: int) -> None:
    """Put rows through every one of these, the copy serving so many rows and more."""
    for product in same:
        product.least = least
        product(x)


def packing(weight: Tensor, weights_bytes: int, rounded: bool) -> PrepackFormat:
    """Return by which second copy products with weights like this one gain, where there is room for one.

    weights_bytes: of all weights of the model. rounded: the model's number format is float16 weights.
    """
    if weight.device.type != "cpu" or weight.dtype not in PACKED or not has_room(weights_bytes):
        return ""
    if rounded and supports_fp16_gemm():
        return "half"
    return "whole" if _works(weight.dtype) and (weight.dtype == torch.float32 or bfloat16_gains()) else ""


def has_room(weights_bytes: int) -> bool:
    """Say whether a second copy of weights of so many bytes leaves the machine plenty of memory."""
    return SHARE * weights_bytes <= _memory()


def bytes_read(weights: Iterable[Tensor]) -> int:
    """Return the bytes that a pass over these weights reads: a product that holds one in float16 reads half of them."""
    held = {part.untyped_storage().data_ptr() for product in _HALVED for part in product.parts}
    return sum(_stored(w, held) for w in weights)


def _stored(weight: Tensor, held: set[int]) -> int:
    """Return the bytes of one weight; of one that is held in fewer bits, those of the tensors that it is made of."""
    if hasattr(weight, "__tensor_flatten__"):
        parts = [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]
        return sum(part.numel() * part.element_size() for part in parts)
    if (state := getattr(weight, "quant_state", None)) is not None:  # bitsandbytes' scales, and theirs
        nested = getattr(state, "state2", None)  # which its first pass on a CPU with bfloat16 resolves, and removes
        scales = [state.absmax, *([nested.absmax] if nested is not None else [])]
        return weight.numel() + sum(int(part.numel()) * int(part.element_size()) for part in scales)
    half = weight.ndim == 2 and weight.untyped_storage().data_ptr() in held
    return weight.numel() * (2 if half else weight.element_size())


def entries(weight: Tensor) -> int:
    """Return how many numbers a weight stands for, which bitsandbytes holds two of in a byte."""
    state = getattr(weight, "quant_state", None)
    return weight.numel() if state is None else int(state.shape.numel())


def is_half(weight: Tensor) -> bool:
    """Say whether every one of these float32 numbers is a float16 number."""
    if weight.dtype != torch.float32 or weight.is_meta:
        return False
    return bool((weight.half().float() == weight).all())


def _packed(weight: Tensor) -> Tensor:
    made: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), HINT)
    return made


def _packed_half(weight: Tensor, bias: Tensor | None) -> Any:
    return torch.ops.quantized.linear_prepack_fp16(weight.detach(), None if bias is None else bias.detach())


def _memory() -> int:
    """Return the bytes of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@functools.cache
def _works(dtype: torch.dtype) -> bool:
    """Say whether this build of torch has oneDNN's operators, no part of its API, and they give what F.linear gives."""
    if not torch.backends.mkldnn.is_available():
        return False
    return _gives(lambda x, weight: torch.ops.mkldnn._linear_pointwise(x, _packed(weight), None, "none", [], ""), dtype)


@functools.cache
@torch.inference_mode()
def bfloat16_gains() -> bool:
    """Say whether few rows go clearly faster through the copy in bfloat16, as where the processor multiplies it.

    Asked once in a process, with the threads that torch has then.
    """
    weight = torch.full((4096, 4096), 0.01, dtype=torch.bfloat16)  # more than a cache holds
    rows = weight.new_ones(HINT, len(weight))
    return (
        clearly_fastest({copy: partial(PrepackedLinear(weight, None, copy), rows) for copy in ("", "whole")}) == "whole"
    )


@functools.cache
def supports_fp16_gemm() -> bool:
    """Say whether this build of torch and this processor multiply float32 rows with weights kept in float16."""
    return _gives(lambda x, weight: torch.ops.quantized.linear_dynamic_fp16(x, _packed_half(weight, None)))


def _gives(product: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype = torch.float32) -> bool:
    x, weight = (torch.arange(n * 16, dtype=torch.float32).sin().half().to(dtype).view(n, 16) for n in (2, 24))
    try:
        with torch.inference_mode():
            return bool(torch.allclose(product(x, weight), F.linear(x, weight), atol=PRODUCTS_OFF.get(dtype, 0.0)))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


ROWS, FIRST = 5, 3  # of the comparison with the module: rows, and the position of the first
LAYERS_OFF = {torch.float32: 1e-4}  # share of the largest value by which a layer may differ from its module
OFF_HALF = 2e-2
Norm = tuple[Tensor, float]  # weight and epsilon of an RMSNorm


class RopeCache:
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
class FusedWeights:
    """The weights of one layer, joined. heads, kv_heads, d: of attention. norm1 is None where nothing is normed."""

    qkv: PrepackedLinear
    out: PrepackedLinear
    gate_up: PrepackedLinear
    down: PrepackedLinear
    act: Callable[[Tensor], Tensor]
    heads: int
    kv_heads: int
    d: int
    norm1: Norm | None
    norm2: Norm
    head_norm: Norm | None  # weight [heads + kv_heads, d], as Qwen3 norms q and k
    layer: int

    def products(self) -> tuple[PrepackedLinear, ...]:
        """All of the layer."""
        return self.qkv, self.out, self.gate_up, self.down


@dataclass(slots=True)
class FusedBlock(Block):
    """A block that computes with joined weights in inference mode, and as its modules do otherwise."""

    joined: FusedWeights
    rope: RopeCache

    def attend(self, x: Tensor, cache: Any, mask: Tensor | None, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """Attention's contribution to x [B, q, h] (to be added to it)."""
        if rotary is None or not torch.is_inference_mode_enabled():
            return Block.attend(self, x, cache, mask, rotary)
        w, (b, q, _) = self.joined, x.shape
        rows = w.qkv(_normed(x, w.norm1)).view(b, q, -1, w.d)  # [B, q, heads + 2 kv_heads, d]
        qk, v = rows.split((w.heads + w.kv_heads, w.kv_heads), 2)
        if w.head_norm is not None:
            qk = F.rms_norm(qk, (w.d,), eps=w.head_norm[1]) * w.head_norm[0]
        cos, sin = self.rope.of(rotary)
        qk = torch.addcmul(qk * cos, qk.roll(w.d // 2, -1), sin).transpose(1, 2)
        query, key, value = qk[:, : w.heads], qk[:, w.heads :], v.transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, w.layer)
        module: Any = self.attention
        attention = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]
        seen = attention(module, query, key, value, mask, dropout=0.0, scaling=module.scaling)[0]  # [B, q, heads, d]
        return w.out(seen.reshape(b, q, -1))

    def run_mlp(self, x: Tensor) -> Tensor:
        """The MLP's contribution to x [B, q, h]."""
        if not torch.is_inference_mode_enabled():
            return Block.run_mlp(self, x)
        w = self.joined
        gate, up = w.gate_up(_normed(x, w.norm2)).chunk(2, -1)
        return w.down(w.act(gate).mul_(up))


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else F.rms_norm(x, (x.shape[-1],), norm[0], norm[1])


def fused_blocks(family: ModelParts, pack: PrepackFormat, device: torch.device) -> list[Block]:
    """Return the blocks of a family, lean where that is possible and agrees with the modules.

    It changes no weight and draws no random number. pack: whether to keep a second copy of weights (`PrepackedLinear`).
    device: that of cos and sin.
    """
    first = family.blocks[0].attention
    weight = next(first.parameters(), None)
    if family.rotary is None or weight is None or weight.is_meta or not holds_numbers(weight):
        return family.blocks
    turn, like = RopeCache(), weight.new_empty(1, 1, 1, device=device)
    cos, sin = rotary_table(family.rotary, FIRST + ROWS, like)
    rotary = cos[None, FIRST:], sin[None, FIRST:]
    here = {
        at: to_device_recursive(rotary, at) for at in {device_of(block.attention) or device for block in family.blocks}
    }
    return [fuse(block, here[device_of(block.attention) or device], turn, pack) for block in family.blocks]


def products_of(blocks: Sequence[Block], head: Any) -> list[PrepackedLinear]:
    """Return the matrix products of lean layers, in their order, and that of the LM head where it is one."""
    every = [p for block in blocks if isinstance(block, FusedBlock) for p in block.joined.products()]
    return [*every, head] if isinstance(head, PrepackedLinear) else every


def describe(blocks: Sequence[Block], head: Any) -> str:
    """Say for the record what computes these layers and the LM head in inference."""
    count = sum(isinstance(block, FusedBlock) for block in blocks)
    layers = f"{count} of {len(blocks)} layers lean" if count else "layers as transformers wrote them"
    packed = [p for p in products_of(blocks, head) if p.packed is not None]
    if not packed:
        return layers
    by = "weights in float16" if all(p.half for p in packed) else "reordered weights"
    of = "" if count else " of the LM head"
    whole = [p for p in packed if not p.half]
    one = f", of one row in {sum(p.least == 1 for p in whole)} of {len(whole)}" if whole else ""
    return f"{layers}; products{of} of few rows by {by}{one}"


def fuse(block: Block, rotary: tuple[Tensor, Tensor], turn: RopeCache, pack: PrepackFormat) -> Block:
    """Return the lean form of a block, or the block itself. rotary: cos, sin [1, ROWS, head_dim] to compare with.

    Weights without data, on the meta device, cannot be compared: their block stays.
    """
    if rotary[0].is_meta:
        return block
    joined = _joined(block, rotary[0].shape[-1], pack)
    if joined is None:
        return block
    made = FusedBlock(
        block.norm1, block.attention, block.norm2, block.mlp, block.parallel, block.cache_argument, block.window,
        joined, turn,
    )  # fmt: skip
    heads = Heads(str(rotary[0].device), rotary[0].dtype, joined.heads, joined.kv_heads, joined.d)
    attention_ways.describe(heads)  # what is fastest is measured now, also of a drafter's layers, and in no step
    return made if _agree(block, made, rotary) else block


def _joined(block: Block, turned: int, pack: PrepackFormat) -> FusedWeights | None:
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
    return FusedWeights(
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


def _product(modules: Sequence[nn.Linear], pack: PrepackFormat) -> PrepackedLinear:
    return PrepackedLinear(_one(modules, "weight"), None if modules[0].bias is None else _one(modules, "bias"), pack)


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
def _agree(block: Block, made: FusedBlock, rotary: tuple[Tensor, Tensor]) -> bool:
    """Say whether a lean block gives what its modules give, for rows behind some others."""
    weight, layer = made.joined.qkv.weight, made.joined.layer
    places = torch.arange(ROWS * weight.shape[1], device=weight.device)
    x = torch.sin(places.float()).to(weight.dtype).view(1, ROWS, -1)
    results = []
    for one in (block, made):
        cache = Cache(layer + 1, ROWS)
        seen = one.attend(x, cache, None, rotary)
        results.append((seen, one.run_mlp(seen), cache.keys[layer], cache.values[layer]))
    allowed = LAYERS_OFF.get(weight.dtype, OFF_HALF)
    return all(_close(a, b, allowed) for a, b in zip(*results, strict=True))


def _close(a: Tensor | None, b: Tensor | None, allowed: float) -> bool:
    if a is None or b is None or a.shape != b.shape:
        return False
    return bool((a - b).abs().max() <= allowed * (1 + a.abs().max()))
