"""Fused layers and packed products give what the modules give, and are left out where they would not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from specbench_ss.engine.architectures import family_of
from specbench_ss.engine.layers import cpu, linear
from specbench_ss.engine.layers.fused import FusedBlock
from specbench_ss.engine.layers.linear import PrepackedLinear, bytes_read, packing
from specbench_ss.engine.target import FINAL, Target
from specbench_ss.engine.tree import DraftTree
from tests.tiny import ARCHITECTURES, tiny_model

FUSED = [kind for kind in ARCHITECTURES if kind not in ("opt", "gpt_neox", "gpt_neox-serial")]
PROMPT, TREE = torch.arange(1, 14)[None], [-1, 0, 0, 1, 3, 2]


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


needs_kernels = pytest.mark.skipif(cpu.kernels() is None, reason="there are no native kernels")


@needs_kernels
def test_weights_are_packed_where_kernels_read_them_and_they_fit_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(4, 4)
    assert packing(weight, 1000, False) == torch.float32 and packing(weight, 1000, True) == torch.float16
    assert packing(weight.bfloat16(), 1000, False) == torch.bfloat16
    assert packing(weight.half(), 1000, False) is None, "no kernel computes in float16"
    monkeypatch.setattr(linear, "_memory", lambda: 3999)
    assert packing(weight, 1000, False) is None
    monkeypatch.setattr(linear, "_memory", lambda: 10**12)
    monkeypatch.setattr(cpu, "supports", lambda *_: False)
    assert packing(weight, 1000, False) is None


@needs_kernels
@pytest.mark.parametrize("rows", [1, 6, 7, 40, cpu.MOST_ROWS + 1])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_with_float16_numbers_is_the_product(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(1, rows, 48), torch.randn(80, 48).half().float()
    extra = torch.randn(80) if bias else None
    with torch.inference_mode():
        product = PrepackedLinear(weight, extra, pack=torch.float16)
        made = product(x)
    assert product.half and made.shape == (1, rows, 80)
    assert torch.allclose(made, F.linear(x, weight, extra), atol=1e-4)


@needs_kernels
def test_the_number_format_decides_and_not_how_a_weight_happens_to_be() -> None:
    weight, half = torch.randn(80, 48).half().float(), torch.float16
    assert not PrepackedLinear(weight, pack=torch.float32).half, (
        "float32 is read where it was asked for, of every model"
    )
    assert PrepackedLinear(weight, pack=half).weight is weight
    weight[3, 5] += 1e-5
    assert not PrepackedLinear(weight, pack=half).half, "it would be another matrix"


@needs_kernels
def test_bytes_are_counted_as_they_are_read() -> None:
    halved, whole = torch.randn(8, 16).half().float(), torch.randn(8, 16)
    kept = [PrepackedLinear(halved, pack=torch.float16), PrepackedLinear(whole, pack=torch.float32)]
    assert bytes_read([halved, whole]) == 2 * 128 + 4 * 128
    assert bytes_read([halved[2:4]]) == 2 * 32, "a part of a joined matrix"
    again = PrepackedLinear(halved, pack=torch.float16)
    del again
    assert bytes_read([halved]) == 2 * 128, "another product of the same weight is still there"
    del kept
    assert bytes_read([halved]) == 4 * 128


@needs_kernels
def test_bytes_of_weights_that_were_copied_into_one_product() -> None:
    parts = [torch.randn(4, 16).half().float() for _ in range(2)]
    product = PrepackedLinear(torch.cat(parts), pack=torch.float16, parts=parts)
    assert product.half and bytes_read(parts) == 2 * 128


@needs_kernels
def test_a_single_state_without_rows_is_multiplied_too() -> None:
    weight = torch.randn(8, 16).half().float()
    with torch.inference_mode():
        made = PrepackedLinear(weight, pack=torch.float16)(x := torch.randn(16))
    assert torch.allclose(made, F.linear(x, weight), atol=1e-5)
