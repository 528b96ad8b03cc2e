"""Faster matrix products and fused decoder layers for CPUs.

A verification pass has 2 to 32 query tokens. torch reorders the weight matrix in each such product, which takes as long
as several rows. Where g++ is available, native kernels (`native_cpu`) use a packed copy of the matrix, and run
attention and MLP of a layer in one call each. Elsewhere two libraries of torch accept a prepacked matrix:

- oneDNN, in float32: 8 rows take about 1.6 times as long as one, instead of 2.2 times. In bfloat16, with processor
  support: all GEMMs of SmolLM2 take half of the time for 1 to 16 rows (docs/log.md).
- FBGEMM, with weights rounded to float16: it reads half of the bytes and computes in float32, so only the order of the
  sums differs. A pass of SmolLM2 took 0.7 of the time (docs/results).

The model's number format selects the library, never the weights: if only a base that was published in float16 read half
of its bytes, a method that changes the base would be compared with a faster model.

The copy adds a half to the memory of the weights or doubles it; it is made only if the machine has plenty.

QKV and gate/up projections are fused; RoPE is applied to Q and K together; norms are one operator. A layer whose fused
form differs from its module stays as it is.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specbench_ss.engine import attention as attention_backends
from specbench_ss.engine import native_cpu, native_cuda
from specbench_ss.engine.architectures import Block, ModelParts, rotary_table
from specbench_ss.engine.attention import Heads
from specbench_ss.engine.cuda_graphs import StaticRows
from specbench_ss.engine.device_map import device_of, to_device_recursive
from specbench_ss.engine.kv_cache import Cache
from specbench_ss.engine.native_cpu import NativeLayer, NativeLinear, NativeNorm
from specbench_ss.engine.native_cuda import CudaLayer, CudaLinear, CudaNorm
from specbench_ss.engine.timing import clearly_fastest
from specbench_ss.errors import UserError

MAX_FP16 = torch.finfo(torch.float16).max


@torch.no_grad()
def round_matrices(model: Any, name: str) -> None:
    """Round every matrix of a float32 model to float16 values, in place; the dtype stays float32.

    So every kernel computes with the same weights. Norms and biases stay as they are. Raises UserError, before any
    change, for a value outside the range of float16.
    """
    matrices = {parameter: p for parameter, p in model.named_parameters() if p.ndim > 1 and p.numel()}
    unsupported = next((p for p in matrices.values() if p.dtype != torch.float32 or p.device.type != "cpu"), None)
    if unsupported is not None:
        raise UserError(f"{name!r} is {unsupported.dtype} on {unsupported.device}; fp16 weights need float32 on a CPU")
    for parameter, p in matrices.items():
        if p.abs().max() > MAX_FP16:
            raise UserError(
                f"{name!r} has weights outside float16 ({parameter} exceeds {MAX_FP16:,.0f}); use --dtype float32"
            )
    for p in matrices.values():
        p.copy_(p.half())


@dataclass(frozen=True, slots=True)
class Quantization:
    """Quantization of a target's linear layers.

    description: for the record. apply: quantizes another model in place and returns the description; raises UserError
    if it cannot. reread: returns the original model, or None.
    """

    description: str
    apply: Callable[[Any], str]
    reread: Callable[[], Any] | None = None

    def of_another(self, model: Any) -> Quantization:
        """Quantize another model the same way, in place. Raises UserError if that fails."""
        return replace(self, description=self.apply(model), reread=None)


def holds_numbers(weight: Tensor) -> bool:
    """Return True for a plain tensor of numbers, False for a quantized parameter."""
    plain = type(weight) is torch.nn.Parameter and type(weight.data) is torch.Tensor
    return plain and weight.is_floating_point()


LEAST_ROWS, MOST_ROWS = 2, 32  # of oneDNN; outside this range torch's default is as fast
MOST_ROWS_HALF = 256  # of FBGEMM
MIN_WEIGHTS = 1 << 14  # smaller matrices gain nothing (128 x 128, AVX2, 1 to 16 rows: 4 to 10 us, by oneDNN 25 to 30)
ONE_ROW_WEIGHTS = 1_500_000  # from here a single row gains by oneDNN too, unless measured
PACKED_DTYPES = (torch.float32, torch.bfloat16)  # of oneDNN's copies
GEMM_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}  # absolute, for a 16-element dot product
MEMORY_SHARE = 4  # the weights may take one part in so many of the machine's memory
HINT_ROWS = 8  # expected number of rows, a hint for the weight layout


PrepackFormat = Literal["", "whole", "half"]  # second copy of the weights: none, reordered in float32, in float16

_FP16_COPIES: WeakSet[PrepackedLinear] = WeakSet()
Key = tuple[torch.Size, torch.dtype, int]  # shape and format of weights, threads
_one_row: dict[Key, int] = {}  # measured minimum rows of the copy


class PrepackedLinear:
    """Linear layer for inference: x [.., in] -> x weight^T + bias [.., out]. weight: [out, in].

    pack: `half` needs weights with float16 values (a model with fp16 weights and its drafters).
    parts: weights that this one is a copy of.
    """

    __slots__ = ("__weakref__", "bias", "half", "least", "most", "native", "packed", "parts", "weight")

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, pack: PrepackFormat = "", parts: Sequence[Tensor] = ()
    ) -> None:
        self.weight, self.bias, self.parts = weight, bias, (*parts, weight)
        self.half = pack == "half" and is_half(weight)  # FBGEMM
        self.packed: Any = None  # the prepacked copy, if any
        self.native: NativeLinear | CudaLinear | None = None
        self.least, self.most = 1, MOST_ROWS_HALF  # range of rows that use the copy
        if self.half:
            _FP16_COPIES.add(self)
        matrix = torch.float16 if self.half else weight.dtype
        same_dtype = bias is None or bias.dtype == weight.dtype
        if same_dtype and weight.is_contiguous() and native_cuda.kernels(weight) is not None:
            self.native, self.most = CudaLinear(weight, bias), native_cuda.MOST_ROWS
        elif pack and weight.device.type == "cpu" and same_dtype and native_cpu.supports(weight.dtype, matrix):
            self.native = NativeLinear(weight.to(matrix), bias, weight.dtype)
            self.most = native_cpu.MOST_ROWS
        elif self.half:
            self.packed = _packed_half(weight, bias)
        elif pack and weight.numel() >= MIN_WEIGHTS and _onednn_works(weight.dtype):
            self.packed = _packed(weight)
            by_size = 1 if weight.numel() >= ONE_ROW_WEIGHTS or weight.dtype == torch.bfloat16 else LEAST_ROWS
            self.least, self.most = _one_row.get(_key(weight), by_size), MOST_ROWS

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product."""
        few = x.ndim > 1 and self.least <= x.shape[:-1].numel() <= self.most
        if few and self.native is not None and self._fits(x):
            return self.native(x)
        if self.packed is None or not few or torch.is_grad_enabled():  # its operators have no gradient
            if x.ndim == 3 and len(x) == 1:  # torch would treat a slice of rows as a batch and copy a bfloat16 weight
                return F.linear(x[0], self.weight, self.bias)[None]
            return F.linear(x, self.weight, self.bias)
        if self.half:
            out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self.packed)
        else:
            out = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out

    def _fits(self, x: Tensor) -> bool:
        """Return True if the native kernel, which checks nothing itself, can read x; torch reports other errors."""
        like = x.dtype == self.weight.dtype and x.device == self.weight.device and x.shape[-1] == self.weight.shape[1]
        return like and torch.is_inference_mode_enabled()


@torch.inference_mode()
def measure_one_row(products: Iterable[PrepackedLinear]) -> None:
    """Use the prepacked copy for single rows where it is clearly faster on this machine.

    All matrices of a shape run one after the other, so that caches behave as in a pass. A baseline whose single row is
    slower than necessary inflates every speedup: with AVX-512, without this, a pass of SmolLM2 over one row took 1.3
    times as long as one over five (docs/log.md). The choice per shape is fixed for the process, so that changed models
    and drafter layers of the same shape use the base's.
    """
    shapes: dict[torch.Size, list[PrepackedLinear]] = {}
    for product in products:
        if product.packed is not None and not product.half:
            shapes.setdefault(product.weight.shape, []).append(product)
    for group in shapes.values():
        key = _key(group[0].weight)
        if key not in _one_row:
            x, usual = group[0].weight.new_ones(1, key[0][1]), group[0].least
            variants = {
                least: partial(_multiply, group, x, least) for least in (usual, LEAST_ROWS if usual == 1 else 1)
            }
            _one_row[key] = clearly_fastest(variants)
        for product in group:
            product.least = _one_row[key]


def _key(weight: Tensor) -> Key:
    return weight.shape, weight.dtype, torch.get_num_threads()


def _multiply(group: Sequence[PrepackedLinear], x: Tensor, least: int) -> None:
    """Run x through every layer; the copy serves `least` rows and more."""
    for product in group:
        product.least = least
        product(x)


def packing(weight: Tensor, weights_bytes: int, fp16_weights: bool) -> PrepackFormat:
    """Return the most useful prepack format for weights like this one; '' if memory is short.

    weights_bytes: of all weights of the model. fp16_weights: the model's number format.
    """
    if weight.device.type != "cpu" or weight.dtype not in PACKED_DTYPES or not has_room(weights_bytes):
        return ""
    if fp16_weights and (native_cpu.supports(torch.float32, torch.float16) or supports_fp16_gemm()):
        return "half"
    if native_cpu.supports(weight.dtype, weight.dtype):
        return "whole"
    return "whole" if _onednn_works(weight.dtype) and (weight.dtype == torch.float32 or bfloat16_gains()) else ""


def has_room(weights_bytes: int) -> bool:
    """Return True if a second copy of the weights leaves the machine plenty of memory."""
    return MEMORY_SHARE * weights_bytes <= _memory()


def bytes_read(weights: Iterable[Tensor]) -> int:
    """Return the bytes that a pass over these weights reads: half for weights with a float16 copy."""
    halved = {part.untyped_storage().data_ptr() for product in _FP16_COPIES for part in product.parts}
    return sum(_bytes_of(w, halved) for w in weights)


def _bytes_of(weight: Tensor, halved: set[int]) -> int:
    """Return the bytes of one weight; of a quantized one, those of its component tensors."""
    if hasattr(weight, "__tensor_flatten__"):
        parts = [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]
        return sum(part.numel() * part.element_size() for part in parts)
    if (state := getattr(weight, "quant_state", None)) is not None:  # bitsandbytes' scales, and their scales
        nested = getattr(state, "state2", None)  # resolved and removed by its first pass on a CPU with bfloat16
        scales = [state.absmax, *([nested.absmax] if nested is not None else [])]
        return weight.numel() + sum(int(part.numel()) * int(part.element_size()) for part in scales)
    half = weight.ndim >= 2 and weight.untyped_storage().data_ptr() in halved
    return weight.numel() * (2 if half else weight.element_size())


def entries(weight: Tensor) -> int:
    """Return the number of elements; bitsandbytes packs two into a byte."""
    state = getattr(weight, "quant_state", None)
    return weight.numel() if state is None else int(state.shape.numel())


def is_half(weight: Tensor) -> bool:
    """Return True if all of these float32 values are float16 values."""
    if weight.dtype != torch.float32 or weight.is_meta:
        return False
    return bool((weight.half().float() == weight).all())


def _packed(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), HINT_ROWS)
    return packed


def _packed_half(weight: Tensor, bias: Tensor | None) -> Any:
    return torch.ops.quantized.linear_prepack_fp16(weight.detach(), None if bias is None else bias.detach())


def _memory() -> int:
    """Return the bytes of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@functools.cache
def _onednn_works(dtype: torch.dtype) -> bool:
    """Return True if torch has oneDNN's (private) operators and they equal F.linear."""
    if not torch.backends.mkldnn.is_available():
        return False
    return _equals_linear(
        lambda x, weight: torch.ops.mkldnn._linear_pointwise(x, _packed(weight), None, "none", [], ""), dtype
    )


@functools.cache
@torch.inference_mode()
def bfloat16_gains() -> bool:
    """Return True if few rows are clearly faster through a bfloat16 copy, as with processor support.

    Measured once per process, with the current number of threads.
    """
    weight = torch.full((4096, 4096), 0.01, dtype=torch.bfloat16)  # larger than the CPU caches
    rows = weight.new_ones(HINT_ROWS, len(weight))
    return (
        clearly_fastest({copy: partial(PrepackedLinear(weight, None, copy), rows) for copy in ("", "whole")}) == "whole"
    )


@functools.cache
def supports_fp16_gemm() -> bool:
    """Return True if torch and the processor support float32 rows times float16 weights."""
    return _equals_linear(lambda x, weight: torch.ops.quantized.linear_dynamic_fp16(x, _packed_half(weight, None)))


def _equals_linear(product: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype = torch.float32) -> bool:
    x, weight = (torch.arange(n * 16, dtype=torch.float32).sin().half().to(dtype).view(n, 16) for n in (2, 24))
    try:
        with torch.inference_mode():
            return bool(torch.allclose(product(x, weight), F.linear(x, weight), atol=GEMM_TOLERANCE.get(dtype, 0.0)))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


ROWS, FIRST = 5, 3  # rows of the check against the module, and their first position
LAYER_TOLERANCE = {torch.float32: 1e-4}  # as a share of the largest value
HALF_TOLERANCE = 0.1  # of norms in half precision; rounded scores of peaked attention change single values by more
Norm = tuple[Tensor, float]  # weight and epsilon of an RMSNorm


class RopeCache:
    """cos and signed sin [B, q, 1, head_dim] of the current step, computed once for all layers.

    The first half of sin is negated: RoPE is then x cos + roll(x) sin.
    """

    def __init__(self) -> None:
        self.rotary: tuple[Tensor, Tensor] | None = None
        self.tables: tuple[Tensor, Tensor] | None = None

    def of(self, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return them for cos, sin [B, q, head_dim]."""
        if self.tables is None or self.rotary is not rotary:
            cos, sin = rotary
            first, second = sin.chunk(2, -1)
            self.rotary, self.tables = rotary, (cos[:, :, None], torch.cat((-first, second), -1)[:, :, None])
        return self.tables


@dataclass(slots=True)
class FusedWeights:
    """Fused weights of one layer. heads, kv_heads, d: of attention. norm1: None without a norm."""

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
    head_norm: Norm | None  # weight [heads + kv_heads, d], the QK norm of Qwen3
    layer: int

    def products(self) -> tuple[PrepackedLinear, ...]:
        """Return all linear layers."""
        return self.qkv, self.out, self.gate_up, self.down


@dataclass(slots=True)
class FusedBlock(Block):
    """A block that uses fused weights in inference mode, and its modules otherwise."""

    joined: FusedWeights
    rope: RopeCache
    native: NativeLayer | None = None
    cuda: CudaLayer | None = None

    def __call__(self, x: Tensor, cache: Any, mask: Tensor | None, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """Run the whole layer: [B, q, h] -> [B, q, h]."""
        attended = self._attend_on_cuda(x, cache, mask, rotary, x)
        if attended is None or self.cuda is None:
            return Block.__call__(self, x, cache, mask, rotary)
        return self.cuda.mlp(attended, attended)

    def attend(self, x: Tensor, cache: Any, mask: Tensor | None, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return attention's contribution to x [B, q, h], to be added to it."""
        if rotary is None or not torch.is_inference_mode_enabled():
            return Block.attend(self, x, cache, mask, rotary)
        if (attended := self._attend_on_cuda(x, cache, mask, rotary)) is not None:
            return attended
        if (attended := self._attend_natively(x, cache, mask, rotary)) is not None:
            return attended
        return self.attend_by_torch(x, cache, mask, rotary)

    def attend_by_torch(self, x: Tensor, cache: Any, mask: Tensor | None, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Return attention's contribution by torch's operators, also with gradients."""
        w, (b, q, _) = self.joined, x.shape
        rows = w.qkv(_apply_norm(x, w.norm1)).view(b, q, -1, w.d)  # [B, q, heads + 2 kv_heads, d]
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
        out = attention(module, query, key, value, mask, dropout=0.0, scaling=module.scaling)[0]  # [B, q, heads, d]
        return w.out(out.reshape(b, q, -1))

    def _attend_on_cuda(
        self,
        x: Tensor,
        cache: Any,
        mask: Tensor | None,
        rotary: tuple[Tensor, Tensor] | None,
        residual: Tensor | None = None,
    ) -> Tensor | None:
        """Return attention's contribution, plus the residual, by Triton kernels; None where they do not apply."""
        w, (b, q, _) = self.joined, x.shape
        one_request = b == 1 and 0 < q <= native_cuda.MOST_QUERIES and _is_plain(cache)
        if self.cuda is None or not one_request or rotary is None or not torch.is_inference_mode_enabled():
            return None
        own_attention = getattr(self.attention.config, "_attn_implementation", "") == attention_backends.NAME
        if not own_attention or rotary[0].dtype != x.dtype or len(rotary[0]) != 1 or (mask is None and q > 1):
            return None
        if mask is not None and (mask.dtype != x.dtype or mask.shape[:3] != (1, 1, q) or mask.stride(3) != 1):
            return None
        keys, values, rows, count = cache.places(x.new_empty(1, w.kv_heads, q, w.d), w.layer)
        assert keys.shape == values.shape and keys.shape[:2] == (1, w.kv_heads) and keys.dtype == x.dtype
        assert mask is None or mask.shape[3] == count
        cos, sin = (table.expand(1, q, w.d).contiguous() for table in rotary)
        return self.cuda.attend(x, keys, values, rows, count, (cos, sin), mask, residual)

    def _attend_natively(
        self, x: Tensor, cache: Any, mask: Tensor | None, rotary: tuple[Tensor, Tensor]
    ) -> Tensor | None:
        """Return attention's contribution by the native kernel; None where that does not apply."""
        w, (b, q, _) = self.joined, x.shape
        implementation = getattr(self.attention.config, "_attn_implementation", "")
        one_request = b == 1 and q > 0 and isinstance(cache, Cache) and _is_plain(cache)
        if self.native is None or not one_request or implementation != attention_backends.NAME:
            return None
        past, (cos, sin) = cache.get_seq_length(w.layer), self.rope.of(rotary)
        causal = getattr(self.attention, "is_causal", True)
        if q > (self.native.most if mask is None and causal else native_cpu.MOST_ROWS):
            return None
        if mask is None:
            fits = q == 1 or past == 0 or not causal
        else:
            fits, mask = mask.dtype == x.dtype and mask.shape == (1, 1, q, past + q), mask.contiguous()
        if not fits or cos.dtype != x.dtype or len(cos) != 1:
            return None
        cache.check(past, past + q, w.layer)
        if not cache.has(w.layer):
            like = x.new_empty(1, w.kv_heads, q, w.d)
            cache.allocate(like, like, w.layer)
        keys, values = cache.memory_of(w.layer)
        if keys.dtype != x.dtype or keys.shape[:2] != (1, w.kv_heads) or values.shape != keys.shape:
            return None
        rows = (1, q, 1, w.d)  # tokens of one level of a drafter's tree share a position
        rotary = cos.expand(rows).contiguous(), sin.expand(rows).contiguous()
        return self.native.attend(x.contiguous(), keys, values, past, rotary, mask, causal)

    def run_mlp(self, x: Tensor) -> Tensor:
        """Return the MLP's contribution to x [B, q, h]."""
        if not torch.is_inference_mode_enabled():
            return Block.run_mlp(self, x)
        if self.cuda is not None and 0 < x.shape[:-1].numel() <= native_cuda.MOST_QUERIES:
            return self.cuda.mlp(x)
        if self.native is not None and self.native.has_mlp and 0 < x.shape[:-1].numel() <= self.native.most:
            return self.native.mlp(x)
        return self.mlp_by_torch(x)

    def mlp_by_torch(self, x: Tensor) -> Tensor:
        """Return the MLP's contribution by torch's operators, also with gradients."""
        w = self.joined
        gate, up = w.gate_up(_apply_norm(x, w.norm2)).chunk(2, -1)
        return w.down(w.act(gate) * up if torch.is_grad_enabled() else w.act(gate).mul_(up))


def _is_plain(cache: Any) -> bool:
    """Return True for a cache of one request whose memory a kernel can write."""
    return type(cache) is StaticRows or (isinstance(cache, Cache) and type(cache).update is Cache.update)


def _apply_norm(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else F.rms_norm(x, (x.shape[-1],), norm[0], norm[1])


def fused_blocks(family: ModelParts, pack: PrepackFormat, device: torch.device) -> list[Block]:
    """Return the blocks of a model, fused where supported and equal to the modules.

    Changes no weight and uses no random number. pack: format of the second copy. device: of cos and sin.
    """
    first = family.blocks[0].attention
    weight = next(first.parameters(), None)
    if family.rotary is None or weight is None or weight.is_meta or not holds_numbers(weight):
        return family.blocks
    rope, like = RopeCache(), weight.new_empty(1, 1, 1, device=device)
    cos, sin = rotary_table(family.rotary, FIRST + ROWS, like)
    rotary = cos[None, FIRST:], sin[None, FIRST:]
    on_device = {
        there: to_device_recursive(rotary, there)
        for there in {device_of(block.attention) or device for block in family.blocks}
    }
    return [fuse(block, on_device[device_of(block.attention) or device], rope, pack) for block in family.blocks]


def native_norm(family: ModelParts) -> Callable[[Tensor], Tensor]:
    """Return the final norm by the native kernel if the layers use such kernels, else the module."""
    norm: Any = family.norm
    uses_native = all(isinstance(block, FusedBlock) and block.native is not None for block in family.blocks)
    rms = _norm(norm) if isinstance(norm, nn.Module) else None
    if rms is not None and all(isinstance(block, FusedBlock) and block.cuda for block in family.blocks):
        return CudaNorm(norm, rms[1])
    if not uses_native or rms is None or rms[0].dtype != family.blocks[-1].joined.qkv.weight.dtype:
        return family.norm
    return NativeNorm(norm, rms[1])


def products_of(blocks: Sequence[Block], head: Any) -> list[PrepackedLinear]:
    """Return the linear layers of fused blocks in order, then the LM head if it is one."""
    every = [p for block in blocks if isinstance(block, FusedBlock) for p in block.joined.products()]
    return [*every, head] if isinstance(head, PrepackedLinear) else every


def describe(blocks: Sequence[Block], head: Any) -> str:
    """Return a description of the kernels of these layers and the LM head in inference."""
    count = sum(isinstance(block, FusedBlock) for block in blocks)
    layers = f"{count} of {len(blocks)} layers fused" if count else "layers as in transformers"
    if any(isinstance(block, FusedBlock) and block.cuda for block in blocks):
        return f"{layers}; Triton kernels for few rows"
    fused = next((block for block in blocks if isinstance(block, FusedBlock)), None)
    weight = None if fused is None else fused.joined.qkv.weight
    if weight is not None and weight.device.type == "cuda" and weight.dtype in native_cuda.HALF:
        return f"{layers}; no Triton kernels: {native_cuda.problem(weight.device) or 'they do not fit the layers'}"
    native = [p for p in products_of(blocks, head) if p.native is not None]
    if native and (kernels := native_cpu.kernels()) is not None:
        halves = ", fp16 weights" if all(product.half for product in native) else ""
        return f"{layers}; native kernels for few rows ({kernels.name}{halves})"
    packed = [p for p in products_of(blocks, head) if p.packed is not None]
    if not packed:
        return layers
    kind = "fp16 weights" if all(p.half for p in packed) else "prepacked weights"
    scope = "" if count else " of the LM head"
    onednn = [p for p in packed if not p.half]
    one_row = f", single rows in {sum(p.least == 1 for p in onednn)} of {len(onednn)}" if onednn else ""
    return f"{layers}; GEMMs{scope} of few rows with {kind}{one_row}"


def fuse(block: Block, rotary: tuple[Tensor, Tensor], rope: RopeCache, pack: PrepackFormat) -> Block:
    """Return the fused form of a block, or the block itself. rotary: cos, sin [1, ROWS, head_dim] for the check.

    Weights on the meta device cannot be checked: their block stays.
    """
    if rotary[0].is_meta:
        return block
    joined = _joined(block, rotary[0].shape[-1], pack)
    if joined is None:
        return block
    fused = FusedBlock(
        block.norm1, block.attention, block.norm2, block.mlp, block.parallel, block.cache_argument, block.window,
        joined, rope, _native(joined, block.attention),
    )  # fmt: skip
    heads = Heads(str(rotary[0].device), rotary[0].dtype, joined.heads, joined.kv_heads, joined.d)
    attention_backends.describe(heads)  # measure now, for drafter layers too, and not in a step
    native, fused.native = fused.native, None
    if not _equals_modules(block, fused, rotary):
        return block
    fused.cuda = _cuda(joined, block.attention)
    if fused.cuda is not None and not _equals_modules(block, fused, rotary):
        fused.cuda = None
    fused.native = native
    if native is not None and not _equals_modules(block, fused, rotary):
        fused.native = None
    if fused.native is not None:
        fused.norm2 = NativeNorm(block.norm2, joined.norm2[1])
    return fused


def _cuda(joined: FusedWeights, attention: Any) -> CudaLayer | None:
    """Return the form of a layer by Triton kernels, or None if they do not support it."""
    natives = [product.native for product in joined.products()]
    if not all(isinstance(native, CudaLinear) for native in natives) or not _fits_kernels(joined):
        return None
    qkv, out, gate_up, down = joined.products()
    if not native_cuda.fits(qkv.weight.device, joined.d) or not _is_silu(joined.act):
        return None
    return CudaLayer(
        joined.norm1, CudaLinear(qkv.weight, qkv.bias), CudaLinear(out.weight, out.bias),
        joined.norm2, CudaLinear(gate_up.weight, gate_up.bias, gated=True), CudaLinear(down.weight, down.bias),
        joined.heads, joined.kv_heads, joined.d, joined.head_norm, float(attention.scaling),
    )  # fmt: skip


def _is_silu(act: Callable[[Tensor], Tensor]) -> bool:
    probe = torch.linspace(-4, 4, 9)
    return torch.equal(act(probe), F.silu(probe))


def _fits_kernels(w: FusedWeights) -> bool:
    """Return True for matrices of the expected shapes, whole groups of heads and an even head dimension."""
    (qkv, out, gate_up, down), heads_d = (product.weight for product in w.products()), w.heads * w.d
    h, inner = qkv.shape[1], down.shape[1]
    shapes = ((heads_d + 2 * w.kv_heads * w.d, h), (h, heads_d), (2 * inner, h), (h, inner))
    same_dtype = w.head_norm is None or w.head_norm[0].dtype == w.norm2[0].dtype
    fits = all(matrix.shape == shape for matrix, shape in zip((qkv, out, gate_up, down), shapes, strict=True))
    return fits and w.heads % w.kv_heads == 0 and w.d % 2 == 0 and same_dtype


def _native(joined: FusedWeights, attention: Any) -> NativeLayer | None:
    """Return the native form of a layer, or None if the kernels do not support it."""
    natives = [product.native for product in joined.products()]
    supported = all(isinstance(native, NativeLinear) for native in natives) and joined.d <= native_cpu.HEAD_SIZE
    if not supported or not _fits_kernels(joined):
        return None
    qkv, out, gate_up, down = cast("list[NativeLinear]", natives)
    eps1, norm1 = (0.0, None) if joined.norm1 is None else (joined.norm1[1], joined.norm1[0].data)
    eps_head, head_norm = (0.0, None) if joined.head_norm is None else (joined.head_norm[1], joined.head_norm[0])
    tensors: dict[str, Tensor | None] = {
        "norm1": norm1, "qkv": qkv.packed, "qkv_bias": qkv.bias, "head_norm": head_norm,
        "out": out.packed, "out_bias": out.bias, "norm2": joined.norm2[0].data, "gate_up": gate_up.packed,
        "gate_up_bias": gate_up.bias, "down": down.packed, "down_bias": down.bias,
    }  # fmt: skip
    kept = tuple(tensor for tensor in tensors.values() if tensor is not None)
    if not all(tensor.is_contiguous() for tensor in kept):
        return None
    layer = native_cpu.Layer(
        qkv.inputs, joined.heads, joined.kv_heads, joined.d, down.inputs,
        eps1, joined.norm2[1], eps_head, float(attention.scaling),
        *(0 if tensor is None else tensor.data_ptr() for tensor in tensors.values()),
    )  # fmt: skip
    return NativeLayer(layer, qkv.pair, kept, silu=_is_silu(joined.act))


def _joined(block: Block, head_dim: int, pack: PrepackFormat) -> FusedWeights | None:
    """Return a layer's fused weights, or None if the layer is not supported."""
    attention: Any = block.attention
    parts, norms, act = layer_linears(block), _norms(block), _activation(block.mlp)
    if parts is None or norms is None or act is None or block.parallel or getattr(attention, "head_dim", 0) != head_dim:
        return None
    qkv, out, gate_up, down = parts
    heads = out[0].in_features // head_dim
    kv_heads = (sum(m.out_features for m in qkv) // head_dim - heads) // 2
    head_norm, supported = _head_norm(attention, heads, kv_heads)
    if not supported or any(norm and norm[0].dtype != out[0].weight.dtype for norm in norms):
        return None
    return FusedWeights(
        _product(qkv, pack), _product(out, pack), _product(gate_up, pack), _product(down, pack), act,
        heads, kv_heads, head_dim, norms[0], norms[1], head_norm, attention.layer_idx,
    )  # fmt: skip


def layer_linears(block: Block) -> tuple[list[nn.Linear], ...] | None:
    """Return the linear layers of QKV, output, gate/up and down projection, or None if one is missing."""
    attention, mlp = block.attention, block.mlp
    parts = (
        _linears(attention, ("q_proj", "k_proj", "v_proj")) or _linears(attention, ("qkv_proj",)),
        _linears(attention, ("o_proj",)),
        _linears(mlp, ("gate_proj", "up_proj")) or _linears(mlp, ("gate_up_proj",)),
        _linears(mlp, ("down_proj",)),
    )
    consistent = all(len({m.bias is None for m in modules}) == 1 for modules in parts)  # all or none have a bias
    return parts if consistent else None


def _activation(mlp: Any) -> Callable[[Tensor], Tensor] | None:
    act: Callable[[Tensor], Tensor] | None = getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None))
    return act


def _norms(block: Block) -> tuple[Norm | None, Norm] | None:
    """Return both norms of a block (the first may be the identity), or None if one is not supported."""
    first, second = _norm(block.norm1), _norm(block.norm2)
    supported = second is not None and (first is not None or isinstance(block.norm1, nn.Identity))
    return (first, second) if supported and second is not None else None


def _linears(owner: Any, names: Sequence[str]) -> list[nn.Linear]:
    """Return these modules if all are plain linear layers, without quantization or adapters; else []."""
    modules = [getattr(owner, name, None) for name in names]
    supported = [module for module in modules if type(module) is nn.Linear and holds_numbers(module.weight)]
    return supported if len(supported) == len(names) else []


def _product(modules: Sequence[nn.Linear], pack: PrepackFormat) -> PrepackedLinear:
    return PrepackedLinear(
        _concatenated(modules, "weight"), None if modules[0].bias is None else _concatenated(modules, "bias"), pack
    )


def _norm(module: Any) -> Norm | None:
    """Return weight and epsilon of an RMSNorm; None for any other module."""
    epsilon = getattr(module, "variance_epsilon", None)
    return None if epsilon is None else (module.weight, epsilon)


def _head_norm(attention: Any, heads: int, kv_heads: int) -> tuple[Norm | None, bool]:
    """Return the QK norm, if any, and whether the layer's head norms are supported."""
    q, k = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    if q is None and k is None:
        return None, True
    norms = _norm(q), _norm(k)
    if norms[0] is None or norms[1] is None or norms[0][1] != norms[1][1] or norms[0][0].shape != norms[1][0].shape:
        return None, False
    weight = torch.cat((norms[0][0].expand(heads, -1), norms[1][0].expand(kv_heads, -1)))
    return (weight.detach(), norms[0][1]), True


def _concatenated(modules: Sequence[nn.Linear], name: str) -> Tensor:
    """Concatenate a parameter of these modules into one tensor; each module then has a view of it."""
    parts: list[Tensor] = [getattr(m, name).data for m in modules]
    joined = _adjacent(parts)
    if joined is None:
        joined, at = torch.cat(parts), 0
        for module, part in zip(modules, parts, strict=True):
            getattr(module, name).data = joined[at : at + len(part)]
            at += len(part)
    return joined


def _adjacent(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the parts as one tensor if they are already adjacent in memory."""
    first, rows, address = parts[0], 0, parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != address or part.dtype != first.dtype or not part.is_contiguous():
            return None
        address, rows = address + part.numel() * part.element_size(), rows + len(part)
    available = first.untyped_storage().nbytes() // first.element_size() - first.storage_offset()
    fits = rows * first[0].numel() <= available
    return first.as_strided((rows, *first.shape[1:]), first.stride()) if fits else None


@torch.inference_mode()
def _equals_modules(block: Block, fused: FusedBlock, rotary: tuple[Tensor, Tensor]) -> bool:
    """Return True if a fused block equals its modules, within rounding, with and without a mask and cached rows."""
    weight, layer = fused.joined.qkv.weight, fused.joined.layer
    indices = torch.arange(ROWS * weight.shape[1], device=weight.device)
    x = torch.sin(indices.float()).to(weight.dtype).view(1, ROWS, -1)
    mask = torch.zeros(1, 1, ROWS, 2 * ROWS, dtype=weight.dtype, device=weight.device)
    mask[..., 1:-1:2] = torch.finfo(weight.dtype).min
    results = []
    for form in (block, fused):
        cache = Cache(layer + 1, 2 * ROWS)
        attended = form.attend(x, cache, None, rotary)
        cache.commit(ROWS)
        again = form.attend(x, cache, mask, rotary)
        results.append((attended, again, form.run_mlp(attended), cache.keys[layer], cache.values[layer]))
    return all(_close(a, b) for a, b in zip(*results, strict=True))


def _close(a: Tensor | None, b: Tensor | None) -> bool:
    """Return True if b equals a within rounding."""
    if a is None or b is None or a.shape != b.shape:
        return False
    difference, tolerance = (a.float() - b.float()), LAYER_TOLERANCE.get(a.dtype)
    if tolerance is None:
        return bool(difference.norm() <= HALF_TOLERANCE * a.float().norm())
    return bool(difference.abs().max() <= tolerance * (1 + a.abs().max()))
