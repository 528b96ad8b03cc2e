"""The fastest attention backend is measured when a method is loaded, also for its drafter's heads: in no step."""

from __future__ import annotations

import copy

import pytest

from specbench_ss import registry
from specbench_ss.engine import attention as attention_ways
from specbench_ss.engine.attention import KERNEL, Heads
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.models.tiny import tiny_model


@pytest.mark.usefixtures("torch_kernels")
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("eagle", "auto"), ("eagle2", "chain"), ("eagle3", "small"), ("peagle", "tree"), ("dflash", "windows"),
        ("hydra", "hydra++"), ("mtp", "chain"),
    ],
)  # fmt: skip
def test_heads_of_another_shape_than_the_models_are_measured_when_a_drafter_is_loaded(
    name: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = set[tuple[Heads, str, int, int]]()

    def fastest(of: Heads, case: str, count: int, threads: int, sequences: int) -> str:
        asked.add((of, case, count, sequences))
        return KERNEL

    monkeypatch.setattr(attention_ways, "fastest", fastest)
    target = Target(tiny_model("llama").bfloat16())  # for which a CPU's ways are measured
    target.config = copy.deepcopy(target.config)  # of which drafters are made: with one head of keys for all
    target.config.num_key_value_heads = 1
    decoder = registry.method_class(name).test_instances(target)[shape]()
    ahead = set(asked)
    asked.clear()
    generate(decoder, [5, 9, 5, 9, 7, 8], StopParams(8), SamplingParams())
    assert {of.kv_heads for of, *_ in asked} == {1, 2}, "the drafter's heads and the model's attend"
    assert asked <= ahead
