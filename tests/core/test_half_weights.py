"""`--dtype float16-weights`: matrices are rounded once, and every way of computing with them gives the same model."""

from __future__ import annotations

import copy

import pytest
import torch

from specbench_ss import load_model, load_run
from specbench_ss.cli.main import main
from specbench_ss.engine.layers import cpu
from specbench_ss.engine.layers.fused import FusedBlock
from specbench_ss.engine.target import Target
from specbench_ss.engine.weights import is_half
from specbench_ss.errors import UserError
from specbench_ss.models.devices import resolve_dtype
from specbench_ss.models.tiny import tiny_model
from specbench_ss.registry import method_class
from tests.tiny import thorough

needs_kernels = pytest.mark.skipif(cpu.kernels() is None, reason="there are no native kernels")


def test_matrices_are_rounded_and_vectors_are_not() -> None:
    model = tiny_model("llama")
    model.model.norm.weight.data.fill_(1.0001)
    target = Target(model, fp16_weights=True)
    assert all(is_half(p) for p in model.parameters() if p.ndim > 1)
    assert float(model.model.norm.weight[0]) == pytest.approx(1.0001, abs=1e-7)
    assert (target.number_format, target.dtype) == ("float16-weights", torch.float32)


@needs_kernels
def test_the_fused_pass_is_the_rounded_models_own() -> None:
    model, ids = tiny_model("llama"), list(range(3, 40))
    own = copy.deepcopy(model)
    target = Target(model, fp16_weights=True)
    assert "fp16 weights" in target.kernel_summary
    for p in own.parameters():
        if p.ndim > 1:
            p.data.copy_(p.data.half())
    with torch.no_grad():
        expected = own(torch.tensor([ids])).logits[0, -1]
    assert torch.allclose(target.next_logits(ids), expected, atol=1e-4)


def test_a_target_of_other_weights_keeps_the_form() -> None:
    target = Target(tiny_model("llama"), name="one", fp16_weights=True)
    other = target.with_model(copy.deepcopy(tiny_model("llama")), "hash")
    assert (other.fp16_weights, other.name, other.weights_hash) == (True, "one", "hash")
    assert all(is_half(p) for p in other.model.parameters() if p.ndim > 1)


def test_a_number_that_float16_does_not_hold_is_named_before_anything_changes() -> None:
    model = tiny_model("llama")
    model.lm_head.weight.data[0, 0] = 7e4
    before = model.model.embed_tokens.weight.clone()
    with pytest.raises(UserError, match=r"lm_head\.weight exceeds 65,504.*float32"):
        Target(model, fp16_weights=True)
    assert torch.equal(before, model.model.embed_tokens.weight)


def test_it_is_for_cpus() -> None:
    assert resolve_dtype("float16-weights", "cpu") == torch.float32
    with pytest.raises(UserError, match="for CPUs"):
        resolve_dtype("float16-weights", "cuda:1")


@thorough
def test_the_lab_is_the_same_model_either_way() -> None:
    fp16_weights, plain = load_model("lab", dtype="float16-weights"), load_model("lab")
    assert all(
        torch.equal(a, b) for a, b in zip(fp16_weights.model.parameters(), plain.model.parameters(), strict=True)
    )


@thorough
def test_a_run_states_what_was_rounded(tmp_path: object) -> None:
    out = f"{tmp_path}/run"
    command = f"run --methods medusa,pld --tasks qa --limit 1 --max-new-tokens 8 --warmup 0 --out {out}".split()
    assert main([*command, "--dtype", "float16-weights"]) == 0
    run = load_run(out)
    assert run.manifest["model"]["dtype"] == "float16-weights"
    assert set(run.output_match["verdict"].dropna()) == {"identical"}


@needs_kernels
@torch.inference_mode()
def test_a_drafter_is_rounded_whole_and_read_as_the_model_is() -> None:
    target = Target(tiny_model("llama"), fp16_weights=True)
    decoder = next(iter(method_class("eagle").test_instances(target).values()))()
    drafter = decoder.drafter
    assert all(is_half(p) for p in drafter.parameters() if p.ndim > 1)
    assert isinstance(drafter.blocks[0], FusedBlock) and all(p.half for p in drafter.blocks[0].joined.products())
    large = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(large.weight, 1e5)
    with pytest.raises(UserError, match="'eagle' has weights outside float16"):
        target.to_target_dtype_device(large, "eagle")
