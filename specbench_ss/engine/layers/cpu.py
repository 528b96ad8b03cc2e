"""Native kernels for GEMMs and layers of few query tokens on x86 CPUs.

`cpu_layer.cpp` is compiled for this machine at first use, in some seconds, and kept in the cache folder. Without g++,
on another processor, or with SSBENCH_NATIVE=0, torch's operators are used.

One call runs a layer, its attention or its MLP. A sum is computed in one order whatever the number of query tokens and
threads is. In fused layers with a SiLU MLP of whole panels, a token of one request has the same bits in autoregressive
decoding and in verification of up to MOST_ROWS tokens.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specbench_ss.engine.kv_cache import Cache
from specbench_ss.storage import cache_folder

SOURCE = Path(__file__).with_name("cpu_layer.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC")
NEEDED = {"avx2", "fma", "f16c"}  # flags of the processor
VARIABLE = "SSBENCH_NATIVE"  # 0: do not use them
COMPILE_S = 300.0
MOST_ROWS = 256  # query tokens of one call, as MOST_TOKENS of the source
HEAD_SIZE = 1024  # largest head dimension
PAIRS = {  # types of activations and weights -> number in the source
    (torch.float32, torch.float32): 0,
    (torch.float32, torch.float16): 1,
    (torch.bfloat16, torch.bfloat16): 2,
}
FUNCTIONS = ("packed_size", "pack", "linear", "attend", "layer", "mlp", "norm")
_INT, _LONG, _POINTER = ctypes.c_int, ctypes.c_long, ctypes.c_size_t  # a pointer is an address, 0 for none


class Lora(ctypes.Structure):
    """LoRA of one product, as `Lora` of the source."""

    _fields_ = [
        ("down", _POINTER), ("up", _POINTER), ("rank", ctypes.c_int32), ("first", ctypes.c_int32),
        ("scale", ctypes.c_float),
    ]  # fmt: skip


class Layer(ctypes.Structure):
    """Sizes and weights of a decoder layer, as `Layer` of the source."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("hidden", "heads", "kv_heads", "d", "inner")),
        *((name, ctypes.c_float) for name in ("eps1", "eps2", "eps_head", "scale")),
        *(
            (name, _POINTER)
            for name in (
                "norm1", "qkv", "qkv_bias", "head_norm", "out", "out_bias",
                "norm2", "gate_up", "gate_up_bias", "down", "down_bias",
            )
        ),
        ("lora", Lora * 4),
        ("adapter", Lora),
    ]  # fmt: skip


@dataclass(frozen=True)
class Kernels:
    """The compiled functions. name: instructions that they use."""

    packed_size: Any
    pack: Any
    linear: Any
    attend: Any
    layer: Any
    mlp: Any
    norm: Any
    panel: int  # outputs that are packed together
    name: str
    key: str  # of source, compiler and processor


def kernels() -> Kernels | None:
    """Return the kernels, compiled if they are not in the cache; None where they cannot be used (`problem`)."""
    return _load()[0]


def problem() -> str:
    """Return why there are no native kernels, or ''."""
    return _load()[1]


@functools.cache
def _load() -> tuple[Kernels | None, str]:
    if os.environ.get(VARIABLE) == "0":
        return None, f"{VARIABLE} is 0"
    flags = processor_flags()
    if not sys.platform.startswith("linux") or not flags >= NEEDED:
        return None, "they need Linux on x86 with AVX2, FMA and F16C"
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or ""]
    if not compiler[0]:
        return None, "there is no g++"
    try:
        file = _library_file(compiler, flags)
        library = _opened(file) or _opened(_compiled(compiler, file))
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"{shlex.join(compiler)} cannot compile them: {_reason(error)}"
    if library is None:
        return None, f"{file} cannot be loaded"
    library.ssbench_linear.argtypes = [_INT, _POINTER, _INT, _POINTER, _POINTER, _INT, _LONG, _POINTER, _INT]
    library.ssbench_attend.argtypes = [
        _INT, _POINTER, _POINTER, _INT, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _POINTER, _POINTER, _LONG, _POINTER,
        _INT, _INT,
    ]  # fmt: skip
    library.ssbench_layer.argtypes = [*library.ssbench_attend.argtypes, _INT, _INT]
    library.ssbench_mlp.argtypes = [_INT, _POINTER, _POINTER, _INT, _POINTER, _INT, _INT, _INT]
    library.ssbench_packed_size.argtypes = [_INT, _LONG, _INT]
    library.ssbench_packed_size.restype = _LONG
    library.ssbench_pack.argtypes = [_INT, _POINTER, _LONG, _INT, _POINTER]
    library.ssbench_norm.argtypes = [_INT, _POINTER, _LONG, _POINTER, ctypes.c_float, _INT, _POINTER]
    for name in FUNCTIONS[1:]:
        getattr(library, f"ssbench_{name}").restype = None
    library.ssbench_name.restype = ctypes.c_char_p
    functions = {name: getattr(library, f"ssbench_{name}") for name in FUNCTIONS}
    name = library.ssbench_name().decode()
    return Kernels(**functions, panel=library.ssbench_panel(), name=name, key=file.stem), ""


def processor_flags() -> set[str]:
    """Return the processor's instruction sets as Linux names them; none elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    return set(next((line.partition(":")[2].split() for line in text.splitlines() if line.startswith("flags")), []))


def _library_file(compiler: list[str], flags: set[str]) -> Path:
    """Return the library's place for this source, compiler and processor. Raises OSError or SubprocessError.

    Raises OSError for a folder that another user can write, who could place code there.
    """
    run = subprocess.run([*compiler, "--version"], capture_output=True, check=True, timeout=COMPILE_S)
    if b"clang" in run.stdout:
        raise OSError("clang's OpenMP would add threads to those of torch; set CXX to g++")
    parts = (SOURCE.read_bytes(), run.stdout, " ".join(sorted(flags)).encode(), " ".join(FLAGS).encode())
    folder = cache_folder() / "native"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = folder.stat()
    if state.st_uid != os.geteuid() or state.st_mode & 0o022:
        raise OSError(f"{folder} can be written by other users")
    return folder / f"{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.so"


def _opened(file: Path) -> Any:
    """Return the library; None if it is missing or damaged."""
    try:
        return ctypes.CDLL(str(file))
    except OSError:
        return None


def _compiled(compiler: list[str], file: Path) -> Path:
    """Compile the library and return its file. Raises OSError or SubprocessError."""
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:  # of this process alone, then renamed
        library = Path(folder) / file.name
        command = [*compiler, *FLAGS, "-o", str(library), str(SOURCE)]
        subprocess.run(command, capture_output=True, check=True, timeout=COMPILE_S)
        library.replace(file)
    return file


def _reason(error: Exception) -> str:
    """Return the compiler's first error, else the last line of what it printed."""
    text = getattr(error, "stderr", None) or str(error)
    lines = (text.decode(errors="replace") if isinstance(text, bytes) else text).strip().splitlines()
    return next((line for line in lines if "error:" in line), lines[-1] if lines else type(error).__name__)


def supports(activations: torch.dtype, weights: torch.dtype) -> bool:
    """Return True if there are kernels for these types."""
    return (activations, weights) in PAIRS and kernels() is not None


class NativeLinear:
    """A GEMM of few rows by the native kernel: x [.., in] -> x weight^T + bias [.., out].

    weight: [out, in], of which a packed copy is made. dtype: of x.
    """

    __slots__ = ("bias", "inputs", "linear", "outputs", "packed", "pair")

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        native = kernels()
        assert native is not None
        (self.outputs, self.inputs), self.bias = weight.shape, bias
        self.pair, self.linear = PAIRS[dtype, weight.dtype], native.linear
        weight = weight.detach().contiguous()
        self.packed = weight.new_empty(native.packed_size(self.pair, self.outputs, self.inputs))
        native.pack(self.pair, weight.data_ptr(), self.outputs, self.inputs, self.packed.data_ptr())

    def __call__(self, x: Tensor) -> Tensor:
        """Return the result, of the dtype of x."""
        x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], self.outputs))
        rows, threads = out.numel() // self.outputs, torch.get_num_threads()
        bias = 0 if self.bias is None else self.bias.data_ptr()
        self.linear(
            self.pair, x.data_ptr(), rows, self.packed.data_ptr(), bias, self.inputs, self.outputs, out.data_ptr(),
            threads,
        )  # fmt: skip
        return out


class NativeNorm:
    """RMSNorm by the native kernel in inference of few rows, else by the module."""

    def __init__(self, module: Any, eps: float) -> None:
        native = kernels()
        assert native is not None
        self.module, self.weight, self.eps, self.norm = module, module.weight.data, eps, native.norm
        self.pair = PAIRS[self.weight.dtype, self.weight.dtype]

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normed states [.., h]."""
        rows = x.shape[:-1].numel()
        like = x.dtype == self.weight.dtype and x.device == self.weight.device and x.shape[-1] == len(self.weight)
        if not (like and rows <= MOST_ROWS and torch.is_inference_mode_enabled()):
            out: Tensor = self.module(x)
            return out
        x = x.contiguous()
        out = torch.empty_like(x)
        self.norm(self.pair, x.data_ptr(), rows, self.weight.data_ptr(), self.eps, x.shape[-1], out.data_ptr())
        return out


class NativeLayer:
    """A decoder layer by native kernels.

    layer: sizes and addresses. kept: the owners of that memory. silu: the activation is SiLU. index: of the layer in
    the cache. causal: without a mask, a token attends to no later one. most: query tokens of a causal pass; with the
    processor's instructions for bfloat16 torch is faster from 384 on, without them at no length.
    """

    __slots__ = ("causal", "has_mlp", "heads", "index", "kept", "kernels", "layer", "most", "pair")

    def __init__(
        self, layer: Layer, pair: int, kept: tuple[object, ...], silu: bool, index: int, causal: bool = True
    ) -> None:
        native = kernels()
        assert native is not None
        self.layer, self.pair, self.kept, self.kernels = ctypes.addressof(layer), pair, (layer, *kept), native
        self.has_mlp = silu and layer.inner % native.panel == 0  # gate and up begin with a panel
        self.heads, self.index, self.causal = (layer.kv_heads, layer.d), index, causal
        self.most = MOST_ROWS if native.name.endswith("BF16") else sys.maxsize

    def _of(self, layer: Layer, *kept: object) -> NativeLayer:
        """Return the same with other weights."""
        return NativeLayer(layer, self.pair, (self, *kept), self.has_mlp, self.index, self.causal)

    def with_lora(self, pairs: Sequence[tuple[Tensor, Tensor] | None], scale: float, first: int) -> NativeLayer:
        """Return the layer with a LoRA in the rows from `first` on: y += scale B A x.

        pairs: A [r, in] and B [out, r] of the products QKV, output, gate/up and down; None without LoRA.
        """
        layer, kept = Layer.from_buffer_copy(Layer.from_address(self.layer)), list[object]()
        activations, weights = next(types for types, number in PAIRS.items() if number == self.pair)
        for i, pair in enumerate(pairs):
            if pair is not None:
                down, up = (NativeLinear(matrix.to(weights), None, activations).packed for matrix in pair)
                layer.lora[i] = Lora(down.data_ptr(), up.data_ptr(), len(pair[0]), first, scale)
                kept += [down, up]
        return self._of(layer, *kept)

    def with_adapter(self, down: NativeLinear, up: NativeLinear) -> NativeLayer:
        """Return the layer with an adapter up(SiLU(down(norm(x)))) next to its MLP. The layer must have no LoRA."""
        layer = Layer.from_buffer_copy(Layer.from_address(self.layer))
        assert not any(lora.rank for lora in layer.lora), "LoRA and adapter share memory"
        layer.adapter = Lora(down.packed.data_ptr(), up.packed.data_ptr(), down.outputs, 0, 1.0)
        return self._of(layer, down, up)

    def run(
        self,
        kernel: Any,
        x: Tensor,
        cache: Any,
        mask: Tensor | None,
        rotary: tuple[Tensor, Tensor] | None,
        *adapter: int,
    ) -> Tensor | None:
        """Run `kernels.attend`, attention's contribution to x [1, q, h], or `kernels.layer`, the whole layer.

        Keys and values of x are written after the cached ones. None: the kernel does not support this pass, such as
        more than MOST_ROWS query tokens with a mask, a batch, or a cache that changes keys and values.

        Args:
            mask: additive [1, 1, q, past + q], or None: what `causal` states.
            rotary: cos and sin, [1, q, d] or [1, 1, d] for all rows.
            adapter: of the whole layer, as `adapter_start` and `replace_mlp` of `mlp`.
        """
        batch, q, _ = x.shape
        if rotary is None or batch != 1 or getattr(type(cache), "update", None) is not Cache.update:
            return None
        past, (cos, sin) = cache.lengths[self.index], rotary
        if mask is None:
            fits = q <= (self.most if self.causal else MOST_ROWS) and (q == 1 or past == 0 or not self.causal)
        else:
            fits = q <= MOST_ROWS and mask.dtype == x.dtype and mask.shape == (1, 1, q, past + q)
            mask = mask.contiguous()
        if not (fits and q) or cos.dtype != x.dtype or len(cos) != 1:
            return None
        keys, values = cache.writable(self.index, q, self.heads, x)
        if keys.dtype != x.dtype or keys.shape != values.shape or keys.shape[:2] != (1, self.heads[0]):
            return None
        x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
        out, turn = torch.empty_like(x), 0 if cos.shape[1] == 1 else cos.shape[2]
        kernel(
            self.pair, self.layer, x.data_ptr(), q, out.data_ptr(), keys.data_ptr(), values.data_ptr(), keys.stride(1),
            past, cos.data_ptr(), sin.data_ptr(), turn, 0 if mask is None else mask.data_ptr(), self.causal,
            torch.get_num_threads(), *adapter,
        )  # fmt: skip
        return out

    def supports_mlp(self, x: Tensor) -> bool:
        """Return True if `mlp` can run on x [.., h]."""
        return self.has_mlp and 0 < x.shape[:-1].numel() <= self.most and torch.is_inference_mode_enabled()

    def mlp(self, x: Tensor, adapter_start: int | None = None, replace_mlp: bool = False) -> Tensor:
        """Return the MLP's contribution to x [.., h].

        adapter_start: the first row whose adapter is added to the MLP, or replaces it. None: no row has one.
        """
        x = x.contiguous()
        out = torch.empty_like(x)
        rows, threads = x.shape[:-1].numel(), torch.get_num_threads()
        start = rows if adapter_start is None else adapter_start
        self.kernels.mlp(self.pair, self.layer, x.data_ptr(), rows, out.data_ptr(), start, replace_mlp, threads)
        return out
