"""Models that methods make of a quantised target: changed in full precision, then quantised as the target was."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch

from specbench_ss import load_method, load_model
from specbench_ss.engine.decoder import Decoder
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.engine.weights import Quantization, holds_numbers
from specbench_ss.methods._shared.fine_tuned import (
    load_target_like,
    lora_parameters,
    merged_target,
    save_lora,
    with_lora,
)
from specbench_ss.models.quantize import quantise
from tests.quantised import needs, quantised_target, small_model
from tests.tiny import thorough

PROMPT = [5, 9, 5, 9, 5, 9, 7, 8]
GRID = 2.0**-8


def on_a_grid(model: Any) -> str:
    """As `quantise`, by rounding to a grid: what a test can look at without any package."""
    head = model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module is not head:
            module.weight = torch.nn.Parameter((module.weight.data / GRID).round() * GRID, requires_grad=False)
    return "on a grid"


def rounded() -> tuple[Target, list[Any]]:
    """A target on a grid, and what was read again of it."""
    models = [small_model() for _ in range(2)]
    on_a_grid(models[0])
    target, read = Target(models[0], None, "tiny"), list[Any]()

    def reread() -> Any:
        model = small_model()
        read.extend(ref(p) for p in model.parameters())
        return model

    target.quantization = Quantization("on a grid", on_a_grid, reread)
    return target, read


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    """A LoRA whose changes are smaller than half a step of the grid nearly everywhere."""
    tuned = with_lora(Target(small_model()), 2)
    torch.manual_seed(3)
    for p in lora_parameters(tuned.model):
        torch.nn.init.normal_(p, std=0.02)
    save_lora(tmp_path, tuned)
    return tmp_path


def linear(target: Target) -> dict[str, torch.Tensor]:
    head = target.model.get_output_embeddings()
    modules = {name: m for name, m in target.model.named_modules() if m is not head}
    return {name: m.weight for name, m in modules.items() if isinstance(m, torch.nn.Linear)}


def test_a_lora_is_merged_in_full_precision_and_then_kept_as_the_base_is(lora: Path) -> None:
    own = merged_target(rounded()[0], lora, "test")
    expected = copy.deepcopy(merged_target(Target(small_model()), lora, "test").model)
    on_a_grid(expected)
    whole = Target(expected)
    assert all(torch.equal(weight, linear(whole)[name]) for name, weight in linear(own).items())
    assert own.quantised == "on a grid" and own.parameter_count == whole.parameter_count
    assert own.quantization is not None and own.quantization.reread is None, (
        "its LoRA is not in what would be read again"
    )


def test_the_base_stays_and_lends_what_neither_changes_nor_is_quantised(lora: Path) -> None:
    base, read = rounded()
    before = {name: p.clone() for name, p in base.model.named_parameters()}
    own = merged_target(base, lora, "test")
    assert all(torch.equal(p, before[name]) for name, p in base.model.named_parameters())
    assert own.unembed.data_ptr() == base.unembed.data_ptr()
    theirs = {p.data_ptr() for p in base.model.parameters()}
    assert not {weight.data_ptr() for weight in linear(own).values()} & theirs
    gc.collect()
    assert read and not [p for p in read if p() is not None], "a weight in full precision stays in memory"


@thorough
def test_a_whole_model_is_kept_as_the_base_is(tmp_path: Path) -> None:
    other = small_model(seed=5)
    other.save_pretrained(tmp_path)
    on_a_grid(other)
    own = load_target_like(rounded()[0], tmp_path)
    assert all(torch.equal(weight, linear(Target(other))[name]) for name, weight in linear(own).items())
    assert own.quantised == "on a grid"


def answers(method: Decoder, prompts: list[list[int]]) -> list[list[int]]:
    return [generate(method, prompt, StopParams(40), SamplingParams()).tokens for prompt in prompts]


@pytest.mark.parametrize("how", ["int8", "nf4"])
def test_merged_weights_are_quantised_once(how: str, lora: Path) -> None:
    needs(how)
    target = quantised_target(how)
    own = merged_target(target, lora, "test")
    model = copy.deepcopy(merged_target(Target(small_model()), lora, "test").model)
    quantise(model, how)
    assert own.quantised == target.quantised
    assert torch.equal(own.next_logits(PROMPT), Target(model).next_logits(PROMPT))
    assert not torch.equal(own.next_logits(PROMPT), target.next_logits(PROMPT))
    assert not [name for name, weight in linear(own).items() if holds_numbers(weight)]


@pytest.mark.parametrize(
    ("method", "reference"),
    [
        ("medusa2", "medusa2-ar"),
        pytest.param("ss-shared", "ss-shared-ar", marks=thorough),
        pytest.param("space", "space-ar", marks=thorough),
    ],
)
def test_drafting_in_a_quantised_model_gives_its_own_plain_answers(method: str, reference: str) -> None:
    """The check of the lab's own weights."""
    needs("int8")
    target = load_model("lab", dtype="float32", quantize="int8")
    drafting, plain = (load_method(name, target) for name in (method, reference))
    assert drafting.target is plain.target is not target
    assert drafting.target.quantised == target.quantised != ""
    texts = ("Write a story about a fox.", "What is 12 + 7?", "Name three colours.")
    prompts = [target.tokenizer(text).input_ids for text in texts]
    own = answers(plain, prompts)
    assert answers(drafting, prompts) == own != answers(load_method("ar", target), prompts)
