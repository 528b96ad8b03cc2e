"""Decoder layers with fused weights, in the fastest form that equals their modules.

QKV and gate/up projections are one product each; RoPE is applied to Q and K together; norms are one operator. `fuse`
chooses a layer's form once, when a model is loaded: Triton kernels, native kernels, or torch's operators. A layer whose
fused form differs from its modules stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specbench_ss.engine.architectures import Block, ModelParts, rotary_table
from specbench_ss.engine.cuda_graphs import StaticRows
from specbench_ss.engine.device_map import device_of, to_device_recursive
from specbench_ss.engine.kv_cache import Cache
from specbench_ss.engine.layers import cpu, triton
from specbench_ss.engine.layers.cpu import NativeLayer, NativeLinear, NativeNorm
from specbench_ss.engine.layers.linear import PackedDtype, PrepackedLinear
from specbench_ss.engine.layers.triton import CudaLayer, CudaLinear, CudaNorm
from specbench_ss.engine.weights import holds_numbers

PROBE_ROWS, PROBE_POSITION = 5, 3  # rows of the check against the module, and their first position
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
    """A layer that uses fused weights and torch's operators in inference mode, and its modules otherwise."""

    joined: FusedWeights
    rope: RopeCache

    def attend(self, x: Tensor, cache: Any, mask: Tensor | None, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return attention's contribution to x [B, q, h], to be added to it."""
        if rotary is None or not torch.is_inference_mode_enabled():
            return Block.attend(self, x, cache, mask, rotary)
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

    def run_mlp(self, x: Tensor) -> Tensor:
        """Return the MLP's contribution to x [B, q, h]."""
        return self.mlp_by_torch(x) if torch.is_inference_mode_enabled() else Block.run_mlp(self, x)

    def mlp_by_torch(self, x: Tensor) -> Tensor:
        """Return the MLP's contribution by torch's operators, also with gradients."""
        w = self.joined
        gate, up = w.gate_up(_apply_norm(x, w.norm2)).chunk(2, -1)
        return w.down(w.act(gate) * up if torch.is_grad_enabled() else w.act(gate).mul_(up))


@dataclass(slots=True)
class NativeBlock(FusedBlock):
    """A fused layer that uses native kernels for the passes that they support."""

    native: NativeLayer

    def __call__(self, x: Tensor, cache: Any, mask: Tensor | None, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """Run the whole layer: [B, q, h] -> [B, q, h]."""
        native = self.native
        if native.has_mlp and torch.is_inference_mode_enabled():
            out = native.run(native.kernels.layer, x, cache, mask, rotary, x.shape[1], False)
            if out is not None:
                return out
        return Block.__call__(self, x, cache, mask, rotary)

    def attend(self, x: Tensor, cache: Any, mask: Tensor | None, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return attention's contribution to x [B, q, h], to be added to it."""
        if torch.is_inference_mode_enabled():
            out = self.native.run(self.native.kernels.attend, x, cache, mask, rotary)
            if out is not None:
                return out
        return FusedBlock.attend(self, x, cache, mask, rotary)

    def run_mlp(self, x: Tensor) -> Tensor:
        """Return the MLP's contribution to x [B, q, h]."""
        return self.native.mlp(x) if self.native.supports_mlp(x) else FusedBlock.run_mlp(self, x)


@dataclass(slots=True)
class TritonBlock(FusedBlock):
    """A fused layer that uses Triton kernels for the passes that they support."""

    cuda: CudaLayer

    def __call__(self, x: Tensor, cache: Any, mask: Tensor | None, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """Run the whole layer: [B, q, h] -> [B, q, h]."""
        attended = self._attend(x, cache, mask, rotary, residual=x)
        return Block.__call__(self, x, cache, mask, rotary) if attended is None else self.cuda.mlp(attended, attended)

    def attend(self, x: Tensor, cache: Any, mask: Tensor | None, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return attention's contribution to x [B, q, h], to be added to it."""
        attended = self._attend(x, cache, mask, rotary)
        return FusedBlock.attend(self, x, cache, mask, rotary) if attended is None else attended

    def _attend(
        self,
        x: Tensor,
        cache: Any,
        mask: Tensor | None,
        rotary: tuple[Tensor, Tensor] | None,
        residual: Tensor | None = None,
    ) -> Tensor | None:
        """Return attention's contribution, plus the residual; None where the kernels do not apply."""
        w, (b, q, _) = self.joined, x.shape
        writable = type(cache) is StaticRows or getattr(type(cache), "update", None) is Cache.update
        if b != 1 or not 0 < q <= triton.MOST_QUERIES or not writable or not torch.is_inference_mode_enabled():
            return None
        if rotary is None or rotary[0].dtype != x.dtype or len(rotary[0]) != 1 or (mask is None and q > 1):
            return None
        if mask is not None and (mask.dtype != x.dtype or mask.shape[:3] != (1, 1, q) or mask.stride(3) != 1):
            return None
        keys, values, rows, count = cache.write_slots(x.new_empty(1, w.kv_heads, q, w.d), w.layer)
        assert keys.shape == values.shape and keys.shape[:2] == (1, w.kv_heads) and keys.dtype == x.dtype
        assert mask is None or mask.shape[3] == count
        cos, sin = (table.expand(1, q, w.d).contiguous() for table in rotary)
        return self.cuda.attend(x, keys, values, rows, count, (cos, sin), mask, residual)

    def run_mlp(self, x: Tensor) -> Tensor:
        """Return the MLP's contribution to x [B, q, h]."""
        few = 0 < x.shape[:-1].numel() <= triton.MOST_QUERIES and torch.is_inference_mode_enabled()
        return self.cuda.mlp(x) if few else FusedBlock.run_mlp(self, x)


def _apply_norm(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else F.rms_norm(x, (x.shape[-1],), norm[0], norm[1])


def fused_blocks(family: ModelParts, pack: PackedDtype, device: torch.device) -> list[Block]:
    """Return the blocks of a model, fused where supported and equal to the modules.

    Changes no weight and uses no random number. pack: format of the second copy. device: of cos and sin.
    """
    first = family.blocks[0].attention
    weight = next(first.parameters(), None)
    if family.rotary is None or weight is None or weight.is_meta or not holds_numbers(weight):
        return family.blocks
    rope, like = RopeCache(), weight.new_empty(1, 1, 1, device=device)
    cos, sin = rotary_table(family.rotary, PROBE_POSITION + PROBE_ROWS, like)
    rotary = cos[None, PROBE_POSITION:], sin[None, PROBE_POSITION:]
    on_device = {
        there: to_device_recursive(rotary, there)
        for there in {device_of(block.attention) or device for block in family.blocks}
    }
    return [fuse(block, on_device[device_of(block.attention) or device], rope, pack) for block in family.blocks]


def final_norm(family: ModelParts) -> Callable[[Tensor], Tensor]:
    """Return the final norm by the kernels of the layers if all layers use such kernels, else the module."""
    norm: Any = family.norm
    rms = _norm(norm) if isinstance(norm, nn.Module) else None
    if rms is not None and all(isinstance(block, TritonBlock) for block in family.blocks):
        return CudaNorm(norm, rms[1])
    if rms is None or not all(isinstance(block, NativeBlock) for block in family.blocks):
        return family.norm
    same_dtype = rms[0].dtype == family.blocks[-1].joined.qkv.weight.dtype
    return NativeNorm(norm, rms[1]) if same_dtype else family.norm


def describe(blocks: Sequence[Block], head: Any) -> str:
    """Return a description of the kernels of these layers and the LM head in inference."""
    fused = [block for block in blocks if isinstance(block, FusedBlock)]
    layers = f"{len(fused)} of {len(blocks)} layers fused" if fused else "layers as in transformers"
    if any(isinstance(block, TritonBlock) for block in fused):
        return f"{layers}; Triton kernels for few rows"
    weight = fused[0].joined.qkv.weight if fused else None
    if weight is not None and weight.device.type == "cuda" and weight.dtype in triton.HALF:
        return f"{layers}; no Triton kernels: {triton.problem(weight.device) or 'they do not fit the layers'}"
    products = [product for block in fused for product in block.joined.products()]
    products += [head] if isinstance(head, PrepackedLinear) else []
    native = [product for product in products if product.native is not None]
    if native and (kernels := cpu.kernels()) is not None:
        halves = ", fp16 weights" if all(product.half for product in native) else ""
        return f"{layers}; native kernels for few rows ({kernels.name}{halves})"
    return layers


def fuse(block: Block, rotary: tuple[Tensor, Tensor], rope: RopeCache, pack: PackedDtype) -> Block:
    """Return the fastest form of a block that equals it, or the block itself.

    rotary: cos, sin [1, PROBE_ROWS, head_dim] for the check. Weights on the meta device cannot be
    checked: their block stays.
    """
    joined = None if rotary[0].is_meta else _joined(block, rotary[0].shape[-1], pack)
    if joined is None:
        return block
    parts: dict[str, Any] = {field.name: getattr(block, field.name) for field in fields(Block)}
    parts |= {"joined": joined, "rope": rope}
    fused, cuda, native = FusedBlock(**parts), _cuda(joined, block.attention), _native(joined, block)
    if not _equals_modules(block, fused, rotary):
        return block
    form: FusedBlock = fused
    if cuda is not None:
        form = TritonBlock(**parts, cuda=cuda)
    elif native is not None:
        form = NativeBlock(**parts, native=native)
        form.norm2 = NativeNorm(block.norm2, joined.norm2[1])
    return form if form is fused or _equals_modules(block, form, rotary) else fused


def _cuda(joined: FusedWeights, attention: Any) -> CudaLayer | None:
    """Return the form of a layer by Triton kernels, or None if they do not support it."""
    natives = [product.native for product in joined.products()]
    if not all(isinstance(native, CudaLinear) for native in natives) or not _fits_kernels(joined):
        return None
    qkv, out, gate_up, down = joined.products()
    if not triton.fits(qkv.weight.device, joined.d) or not _is_silu(joined.act):
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


def _native(joined: FusedWeights, block: Block) -> NativeLayer | None:
    """Return the native form of a layer, or None if the kernels do not support it."""
    attention: Any = block.attention
    natives = [product.native for product in joined.products()]
    supported = all(isinstance(native, NativeLinear) for native in natives) and joined.d <= cpu.HEAD_SIZE
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
    layer = cpu.Layer(
        qkv.inputs, joined.heads, joined.kv_heads, joined.d, down.inputs,
        eps1, joined.norm2[1], eps_head, float(attention.scaling),
        *(0 if tensor is None else tensor.data_ptr() for tensor in tensors.values()),
    )  # fmt: skip
    causal = getattr(attention, "is_causal", True)
    return NativeLayer(layer, qkv.pair, kept, _is_silu(joined.act), joined.layer, causal)


def _joined(block: Block, head_dim: int, pack: PackedDtype) -> FusedWeights | None:
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


def _product(modules: Sequence[nn.Linear], pack: PackedDtype) -> PrepackedLinear:
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
    indices = torch.arange(PROBE_ROWS * weight.shape[1], device=weight.device)
    x = torch.sin(indices.float()).to(weight.dtype).view(1, PROBE_ROWS, -1)
    mask = torch.zeros(1, 1, PROBE_ROWS, 2 * PROBE_ROWS, dtype=weight.dtype, device=weight.device)
    mask[..., 1:-1:2] = torch.finfo(weight.dtype).min
    results = []
    for form in (block, fused):
        cache = Cache(layer + 1, 2 * PROBE_ROWS)
        attended = form.attend(x, cache, None, rotary)
        cache.commit(PROBE_ROWS)
        again, mlp = form.attend(x, cache, mask, rotary), form.run_mlp(attended)
        whole = form(x, cache, mask, rotary) if x.shape == attended.shape else mlp  # EAGLE-3's input is twice as wide
        results.append((attended, again, mlp, whole, cache.keys[layer], cache.values[layer]))
    return all(_close(a, b) for a, b in zip(*results, strict=True))


def _close(a: Tensor | None, b: Tensor | None) -> bool:
    """Return True if b equals a within rounding."""
    if a is None or b is None or a.shape != b.shape:
        return False
    difference, tolerance = (a.float() - b.float()), LAYER_TOLERANCE.get(a.dtype)
    if tolerance is None:
        return bool(difference.norm() <= HALF_TOLERANCE * a.float().norm())
    return bool(difference.abs().max() <= tolerance * (1 + a.abs().max()))
