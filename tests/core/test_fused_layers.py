"""Fused layers and packed products give what the modules give, and are left out where they would not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from specbench_ss.engine import cpu_kernels
from specbench_ss.engine.architectures import family_of
from specbench_ss.engine.cpu_kernels import MOST_ROWS, FusedBlock, PrepackedLinear
from specbench_ss.engine.target import FINAL, Target
from specbench_ss.engine.tree import DraftTree
from tests.tiny import ARCHITECTURES, tiny_model

FUSED = [kind for kind in ARCHITECTURES if kind not in ("opt", "gpt_neox", "gpt_neox-serial")]
PROMPT, TREE = torch.arange(1, 14)[None], [-1, 0, 0, 1, 3, 2]


@pytest.fixture(autouse=True)
def copies_of_tiny_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of these tests are so small that no copy of them would be made."""
    monkeypatch.setattr(cpu_kernels, "MIN_WEIGHTS", 0)


def is_fused(target: Target) -> bool:
    return all(isinstance(block, FusedBlock) for block in target.family.blocks)


def passes(target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a prefill and of a tree behind it."""
    with torch.inference_mode():
        cache = target.new_cache(32)
        first = target.prefill(PROMPT, cache).logits
        tree = DraftTree.from_parents(list(range(5, 5 + len(TREE))), TREE)
        return first, target.forward_tree(tree, cache, (1,)).logits


@pytest.mark.parametrize("kind", FUSED)
def test_fused_layers_give_what_the_modules_give(kind: str) -> None:
    target = Target(tiny_model(kind))
    assert is_fused(target) and target.kernel_summary.startswith(f"{target.n_layers} of {target.n_layers} layers fused")
    fused = passes(target)
    target.family.blocks = family_of(target.model).blocks
    for mine, theirs in zip(fused, passes(target), strict=True):
        assert (mine - theirs).abs().max() <= 1e-4 * (1 + theirs.abs().max())


@pytest.mark.parametrize("kind", ["opt", "gpt_neox"])
def test_other_layers_are_left_as_they_are(kind: str) -> None:
    assert not any(isinstance(block, FusedBlock) for block in Target(tiny_model(kind)).family.blocks)


def test_modules_hold_views_of_the_joined_weights() -> None:
    model = tiny_model("llama")
    before = {name: p.clone() for name, p in model.named_parameters()}
    block: Any = Target(model).family.blocks[0]
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    joined, attention = block.joined.qkv.weight, block.attention
    assert attention.q_proj.weight.data_ptr() == joined.data_ptr()
    attention.v_proj.weight.data.zero_()
    assert not joined[-attention.v_proj.out_features :].any()


def test_a_second_target_of_the_same_model_shares_the_joined_weights() -> None:
    model = tiny_model("llama")
    first, second = (Target(model).family.blocks[0].joined for _ in range(2))  # type: ignore[attr-defined]
    assert first.qkv.weight.data_ptr() == second.qkv.weight.data_ptr()
    assert first.gate_up.weight.data_ptr() == second.gate_up.weight.data_ptr()


def test_gradients_flow_through_the_modules() -> None:
    target = Target(tiny_model("llama"))
    weight = target.family.blocks[1].attention.q_proj.weight
    weight.requires_grad_(True)
    target.prefill(PROMPT, target.new_cache(16)).hidden_states[FINAL].sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None and bool(weight.grad.any())


class _Doubling(torch.nn.Module):
    """Looks like an RMSNorm, and is none."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.variance_epsilon, self.norm = norm.weight, norm.variance_epsilon, norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = 2 * self.norm(x)
        return out


def test_a_layer_that_does_not_agree_with_its_module_is_left_as_it_is() -> None:
    model = tiny_model("llama")
    model.model.layers[1].input_layernorm = _Doubling(model.model.layers[1].input_layernorm)
    target = Target(model)
    assert [isinstance(block, FusedBlock) for block in target.family.blocks[:3]] == [True, False, True]


def test_adapted_layers_are_left_as_they_are() -> None:
    class Adapted(torch.nn.Linear):
        pass

    model = tiny_model("llama")
    model.model.layers[0].self_attn.k_proj.__class__ = Adapted
    target = Target(model)
    assert not isinstance(target.family.blocks[0], FusedBlock) and target.kernel_summary.startswith(
        "3 of 4 layers fused"
    )


def test_a_copy_of_a_model_has_weights_of_its_own() -> None:
    model = tiny_model("llama")
    target = Target(model)
    other = Target(copy.deepcopy(model))
    other.family.blocks[0].attention.q_proj.weight.data.zero_()
    assert bool(target.family.blocks[0].joined.qkv.weight[0].any())  # type: ignore[attr-defined]


needs_packing = pytest.mark.skipif(
    not cpu_kernels._onednn_works(torch.float32), reason="this build of torch has no packed products"
)


@pytest.mark.usefixtures("torch_kernels")
@needs_packing
@pytest.mark.parametrize("rows", [1, 2, 3, 8, MOST_ROWS, MOST_ROWS + 1])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", cpu_kernels.PACKED_DTYPES)
def test_a_packed_product_is_the_product(dtype: torch.dtype, rows: int, bias: bool) -> None:
    """Against float64, with sums as large as those of a layer."""
    if not cpu_kernels._onednn_works(dtype):
        pytest.skip(f"this build of torch has no packed products in {dtype}")
    torch.manual_seed(rows)
    x, weight = torch.randn(1, rows, 48, dtype=dtype), torch.randn(80, 48, dtype=dtype)
    extra = torch.randn(80, dtype=dtype) if bias else None
    with torch.inference_mode():
        product = PrepackedLinear(weight, extra, pack="whole")
        product.least = 1
        made = product(x)
    exact = F.linear(x.double(), weight.double(), None if extra is None else extra.double())
    assert product.packed is not None and made.shape == (1, rows, 80) and made.dtype == dtype
    assert (made - exact).abs().max() <= {torch.float32: 1e-4, torch.bfloat16: 2**-8 * 40}[dtype]


@pytest.mark.usefixtures("torch_kernels")
@needs_packing
@pytest.mark.parametrize("least", [1, 2])
def test_one_row_takes_the_way_that_is_clearly_faster(monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    monkeypatch.setattr(cpu_kernels, "_one_row", {})
    monkeypatch.setattr(cpu_kernels, "clearly_fastest", lambda ways: least)
    made = [PrepackedLinear(torch.randn(80, 48), None, pack="whole") for _ in range(3)]
    cpu_kernels.measure_one_row(made)
    assert [product.least for product in made] == [least] * 3
    monkeypatch.setattr(cpu_kernels, "clearly_fastest", None)  # not measured again
    cpu_kernels.measure_one_row(made)
    assert PrepackedLinear(torch.randn(80, 48), None, pack="whole").least == least, "another model's, of the same shape"


@pytest.mark.usefixtures("torch_kernels")
@needs_packing
def test_only_weights_that_gain_and_fit_twice_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(4, 4)
    assert cpu_kernels.packing(weight, 1000, False) == "whole"
    assert not cpu_kernels.packing(weight.half(), 1000, False)
    for gains in (False, True):
        monkeypatch.setattr(cpu_kernels, "bfloat16_gains", lambda gains=gains: gains)
        assert cpu_kernels.packing(weight.bfloat16(), 1000, False) == (
            "whole" if gains and cpu_kernels._onednn_works(torch.bfloat16) else ""
        )
    monkeypatch.setattr(cpu_kernels, "_memory", lambda: 3999)
    assert not cpu_kernels.packing(weight, 1000, False)
    monkeypatch.setattr(cpu_kernels, "_memory", lambda: 10**12)
    monkeypatch.setattr(cpu_kernels, "_onednn_works", lambda dtype: False)
    monkeypatch.setattr(cpu_kernels, "supports_fp16_gemm", lambda: True)
    assert cpu_kernels.packing(weight, 1000, True) == "half"
    monkeypatch.setattr(cpu_kernels, "supports_fp16_gemm", lambda: False)
    assert not cpu_kernels.packing(weight, 1000, False), "a build of torch without these operators"


needs_halves = pytest.mark.skipif(
    not cpu_kernels.supports_fp16_gemm(), reason="this build of torch has no float16 weights"
)


@needs_halves
@pytest.mark.parametrize("rows", [1, 6, 7, 40, cpu_kernels.MOST_ROWS_HALF + 1])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_with_float16_numbers_is_the_product(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(1, rows, 48), torch.randn(80, 48).half().float()
    extra = torch.randn(80) if bias else None
    with torch.inference_mode():
        product = PrepackedLinear(weight, extra, pack="half")
        made = product(x)
    assert product.half and made.shape == (1, rows, 80)
    assert torch.allclose(made, F.linear(x, weight, extra), atol=1e-4)


@needs_halves
def test_the_number_format_decides_and_not_how_a_weight_happens_to_be() -> None:
    weight = torch.randn(80, 48).half().float()
    assert not PrepackedLinear(weight, pack="whole").half, "float32 is read where float32 was asked for, of every model"
    assert PrepackedLinear(weight, pack="half").weight is weight
    weight[3, 5] += 1e-5
    assert not PrepackedLinear(weight, pack="half").half, "it would be another matrix"


@needs_halves
def test_bytes_are_counted_as_they_are_read() -> None:
    halved, whole = torch.randn(8, 16).half().float(), torch.randn(8, 16)
    kept = [PrepackedLinear(halved, pack="half"), PrepackedLinear(whole, pack="whole")]
    assert cpu_kernels.bytes_read([halved, whole]) == 2 * 128 + 4 * 128
    assert cpu_kernels.bytes_read([halved[2:4]]) == 2 * 32, "a part of a joined matrix"
    again = PrepackedLinear(halved, pack="half")
    del again
    assert cpu_kernels.bytes_read([halved]) == 2 * 128, "another product of the same weight is still there"
    del kept
    assert cpu_kernels.bytes_read([halved]) == 4 * 128


@needs_halves
def test_bytes_of_weights_that_were_copied_into_one_product() -> None:
    parts = [torch.randn(4, 16).half().float() for _ in range(2)]
    product = PrepackedLinear(torch.cat(parts), pack="half", parts=parts)
    assert product.half and cpu_kernels.bytes_read(parts) == 2 * 128


@needs_halves
def test_a_single_state_without_rows_is_multiplied_too() -> None:
    weight = torch.randn(8, 16).half().float()
    with torch.inference_mode():
        made = PrepackedLinear(weight, pack="half")(x := torch.randn(16))
    assert torch.allclose(made, F.linear(x, weight), atol=1e-5)
