"""Triton kernels of layers: run by tests/core/test_native_cuda.py, on a CPU by Triton's interpreter.

On a CUDA device (python -m pytest tests/core/interpreted_cuda_layer.py) they are compiled, in bfloat16 and float16.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F

from specbench_ss.engine.cuda_graphs import run_eagerly
from specbench_ss.engine.engines import allclose_rows, enable_cuda_graphs
from specbench_ss.engine.layers import triton
from specbench_ss.engine.layers.triton import CudaLayer, CudaLinear
from specbench_ss.engine.target import Target
from specbench_ss.engine.tree import DraftTree
from tests.tiny import THOROUGH, tiny_model

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16] if ON_GPU else [torch.float32]
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-6}
EPS = 1e-5
SHAPES = {  # heads, kv_heads, d, hidden, inner, cached rows, norm of heads
    "many heads": (4, 4, 32, 64, 96, 0, False),
    "groups, three splits": (4, 2, 32, 64, 100, 300, True),
    "head size that is no power of two": (6, 2, 80, 48, 64, 130, False),
}
pytestmark = pytest.mark.skipif(
    triton.kernels(torch.empty(0, dtype=DTYPES[0], device=DEVICE)) is None, reason=triton.problem(DEVICE)
)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    torch.manual_seed(0)
    return request.param


def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference, relative to the expected one's."""
    return float((actual.double() - expected).norm() / expected.norm())


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x.double(), (x.shape[-1],), weight.double(), EPS)


@pytest.mark.parametrize("n", [1, 3, 20, 65])
def test_products_equal_those_in_float64(dtype: torch.dtype, n: int) -> None:
    inputs, outputs = 96, 100
    x, weight = normal(1, n, inputs, dtype=dtype), normal(outputs, inputs, dtype=dtype)
    bias, residual = normal(outputs, dtype=dtype), normal(1, n, outputs, dtype=dtype)
    product = x.double() @ weight.double().T
    assert difference(CudaLinear(weight, bias)(x, residual), product + bias + residual) < TOLERANCE[dtype]
    gate, up = (product + bias).chunk(2, -1)
    assert difference(CudaLinear(weight, bias, gated=True)(x), F.silu(gate) * up) < TOLERANCE[dtype]


@dataclass
class Case:
    """A layer, its input of n rows, and the memory of its cache."""

    layer: CudaLayer
    x: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    rows: torch.Tensor
    rotary: tuple[torch.Tensor, torch.Tensor]
    mask: torch.Tensor

    def run(self, first: int, end: int) -> torch.Tensor:
        """Run these rows."""
        part = slice(first, end)
        rotary = self.rotary[0][:, part], self.rotary[1][:, part]
        x, mask = self.x[:, part], self.mask[:, :, part]
        attended = self.layer.attend(
            x, self.keys, self.values, self.rows[part], mask.shape[-1], rotary, mask, residual=x
        )
        return self.layer.mlp(attended, attended)


def case(name: str, n: int, dtype: torch.dtype) -> Case:
    heads, kv_heads, d, hidden, inner, past, with_norm = SHAPES[name]
    torch.manual_seed(1)
    count = past + n + 9  # the last rows are padding, which the mask hides

    def weight(outputs: int, inputs: int) -> torch.Tensor:
        return normal(outputs, inputs, dtype=dtype) / inputs**0.5

    def norm(*shape: int) -> torch.Tensor:
        return (torch.rand(*shape) + 0.5).to(DEVICE, dtype)

    attention = CudaLinear(weight((heads + 2 * kv_heads) * d, hidden)), CudaLinear(weight(hidden, heads * d))
    mlp = CudaLinear(weight(2 * inner, hidden), gated=True), CudaLinear(weight(hidden, inner))
    head_norm = (norm(heads + kv_heads, d), EPS) if with_norm else None
    layer = CudaLayer(
        (norm(hidden), EPS), *attention, (norm(hidden), EPS), *mlp, heads, kv_heads, d, head_norm, d**-0.5
    )
    angles = (torch.rand(1, n, d // 2) * 6).repeat(1, 1, 2)
    mask = torch.zeros(1, 1, n, count)
    mask[0, 0, :, past:].masked_fill_(~torch.ones(n, count - past).bool().tril(), torch.finfo(dtype).min)
    return Case(
        layer, normal(1, n, hidden, dtype=dtype), normal(1, kv_heads, count, d, dtype=dtype),
        normal(1, kv_heads, count, d, dtype=dtype), torch.arange(past, past + n, device=DEVICE),
        (angles.cos().to(DEVICE, dtype), angles.sin().to(DEVICE, dtype)), mask.to(DEVICE, dtype),
    )  # fmt: skip


def expected(one: Case) -> tuple[torch.Tensor, ...]:
    """Return the layer's output, keys and values in float64 by the definition."""
    layer, d = one.layer, one.layer.d
    n, heads, kv_heads = one.x.shape[1], layer.heads, layer.kv_heads
    assert layer.norm1 is not None
    rows = rms(one.x, layer.norm1[0]) @ layer.qkv.weight.double().T
    rows = rows.view(n, -1, d).transpose(0, 1)  # [heads + 2 kv_heads, n, d]
    qk, v = rows[: heads + kv_heads], rows[heads + kv_heads :]
    if layer.head_norm is not None:
        qk = F.rms_norm(qk, (d,), eps=EPS) * layer.head_norm[0].double()[:, None]
    first, second = qk.chunk(2, -1)
    qk = qk * one.rotary[0].double() + torch.cat((-second, first), -1) * one.rotary[1].double()
    keys, values = one.keys[0].double(), one.values[0].double()
    keys[:, one.rows], values[:, one.rows] = qk[heads:], v
    groups = heads // kv_heads
    scores = qk[:heads] @ keys.repeat_interleave(groups, 0).mT * layer.scale + one.mask[0].double()
    attended = (scores.softmax(-1) @ values.repeat_interleave(groups, 0)).transpose(0, 1).reshape(1, n, heads * d)
    x = one.x.double() + attended @ layer.out.weight.double().T
    gate, up = (rms(x, layer.norm2[0]) @ layer.gate_up.weight.double().T).chunk(2, -1)
    return x + F.silu(gate) * up @ layer.down.weight.double().T, keys, values


@pytest.mark.parametrize("n", [1, 5, 20])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_equals_its_definition(dtype: torch.dtype, shape: str, n: int) -> None:
    one = case(shape, n, dtype)
    out, keys, values = expected(one)
    actual = one.run(0, n), one.keys[0], one.values[0]
    for mine, theirs in zip(actual, (out, keys, values), strict=True):
        assert difference(mine, theirs) < TOLERANCE[dtype]


@pytest.fixture
def products_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter multiply row by row: on some processors numpy's bits depend on a row's place in a block."""
    if ON_GPU:
        return
    from triton.runtime import interpreter

    def matmul(a: Any, b: Any, dtype: Any) -> Any:
        return numpy.stack([numpy.matmul(row, b, dtype=dtype) for row in a])

    monkeypatch.setattr(interpreter, "np", SimpleNamespace(**{**vars(numpy), "matmul": matmul}))


@pytest.mark.usefixtures("products_by_rows")
@pytest.mark.parametrize("shape", SHAPES if ON_GPU else ["groups, three splits"])
def test_a_row_has_the_same_bits_whatever_the_width_is(dtype: torch.dtype, shape: str) -> None:
    n = 64 if ON_GPU else 18
    one = case(shape, n, dtype)
    keys, values = one.keys.clone(), one.values.clone()
    together = one.run(0, n)
    written = one.keys, one.values
    one.keys, one.values = keys, values
    alone = torch.cat([one.run(i, i + 1) for i in range(n)], 1)
    assert torch.equal(together, alone)
    assert torch.equal(written[0], one.keys) and torch.equal(written[1], one.values)


@pytest.mark.parametrize("past", [0, 7, 1100])
def test_the_mask_of_a_tree(dtype: torch.dtype, past: int) -> None:
    visible = torch.rand(5, 6, device=DEVICE) < 0.5
    mask = triton.tree_mask(visible, torch.tensor([past], device=DEVICE), past + 9, dtype)
    wanted = torch.full((5, past + 9), torch.finfo(dtype).min, dtype=dtype, device=DEVICE)
    wanted[:, :past] = 0
    wanted[:, past : past + 6].masked_fill_(visible, 0)
    assert mask is not None and torch.equal(mask[0, 0], wanted)


@pytest.mark.skipif(not (THOROUGH or ON_GPU), reason="it runs with SSBENCH_THOROUGH=1")
@pytest.mark.parametrize("kind", ["llama", "qwen3"] if ON_GPU else ["qwen3"])
@torch.inference_mode()
def test_a_model_decodes_as_by_torch(dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, trees behind it with and without static passes, by the kernels and by torch's operators."""

    def logits(with_kernels: bool, static: bool) -> list[torch.Tensor]:
        monkeypatch.setattr(triton, "kernels", real if with_kernels else lambda _: None)
        target = Target(tiny_model(kind).to(DEVICE, dtype))
        assert ("Triton" in target.kernel_summary) == with_kernels
        if static:
            enable_cuda_graphs(target, run_eagerly, "calls")
        cache = target.request_cache(64)
        target.prefill(torch.arange(1, 14, device=DEVICE)[None], cache)
        found = []
        for tokens, parents in (([5], [-1]), ([6, 7, 8, 9], [-1, 0, 0, 1])):
            tree = DraftTree.from_parents(torch.tensor(tokens, device=DEVICE), parents)
            found.append(target.forward_tree(tree, cache).logits.clone())
            cache.commit(1)
        assert target.graphs is None or not (target.graphs.fallbacks or target.graphs.failed_captures)
        return found

    real = triton.kernels
    by_torch = logits(with_kernels=False, static=False)
    for static in (False, True):
        assert all(map(allclose_rows, logits(with_kernels=True, static=static), by_torch))
