"""Replayed passes of real bfloat16 models: rounding is accepted, and a replay that is wrong is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from specbench_ss import load_model
from specbench_ss.engine.cuda_graphs import Pass, PassBuffers, run_eagerly
from specbench_ss.engine.engines import enable_cuda_graphs
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.models.catalog import fetchable_model
from tests.frozen import frozen
from tests.tiny import few, thorough

pytestmark = pytest.mark.usefixtures("torch_kernels_in_module")  # the stand-in for a graph records torch's operators


@pytest.fixture(scope="module")
def deep() -> Target:
    """Return a random Llama in bfloat16: its 32 layers amplify rounding beyond two percent of its logits."""
    config: Any = transformers.LlamaConfig
    torch.manual_seed(0)
    made: Any = transformers.AutoModelForCausalLM.from_config(
        config(
            vocab_size=512, hidden_size=256, num_hidden_layers=32, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=512, max_position_embeddings=256,
        )
    )  # fmt: skip
    for weights in made.parameters():
        if weights.ndim > 1:
            nn.init.normal_(weights, std=0.06)
    return Target(made.to(torch.bfloat16))


@pytest.fixture(scope="module")
def smollm2() -> Target:
    """Return SmolLM2-135M in bfloat16, where it is fetched."""
    if not fetchable_model("smollm2").fetched:
        pytest.skip("the model was not fetched: ssbench models fetch smollm2")
    return load_model("smollm2", device="cpu", dtype="bfloat16")


@pytest.fixture(params=["deep", pytest.param("smollm2", marks=thorough)])
def half(request: pytest.FixtureRequest) -> Target:
    """Return a model in bfloat16 whose steps are not replayed."""
    target: Target = request.getfixturevalue(request.param)
    target.graphs = None
    return target


@few(1)
@pytest.mark.parametrize("replay", [run_eagerly, frozen])
def test_a_deep_model_in_half_precision_is_replayed(half: Target, replay: Any) -> None:
    enable_cuda_graphs(half, replay, "calls")
    assert half.engine == "graph" and not half.graphs.fallbacks  # type: ignore[union-attr]


class Recorded:
    """A pass over a tree that was recorded, whose buffers can be changed behind its back before it is replayed."""

    def __init__(self, one: Pass) -> None:
        kept = inspect.getclosurevars(one).nonlocals
        self.one, self.buffers, self.made = one, kept["buffers"], kept["static_pass"]
        self.first = SimpleNamespace(tokens=self.buffers.tensors[0].clone(), past=self.buffers.past.clone())


def its_first_results(target: Target, made: Recorded) -> Pass:
    outs = tuple(out.clone() for out in made.one())
    return lambda: outs


def stale_tokens(target: Target, made: Recorded) -> Pass:
    return changed(made, lambda buffers: buffers.tensors[0].copy_(made.first.tokens))


def stale_places(target: Target, made: Recorded) -> Pass:
    """Those behind which it was recorded; the first pass of a form is right, a later one is not."""
    return changed(made, lambda buffers: buffers.past.copy_(made.first.past))


def no_mask(target: Target, made: Recorded) -> Pass:
    return changed(made, lambda buffers: visible_of(buffers).fill_(True))


def padding_is_seen(target: Target, made: Recorded) -> Pass:
    return changed(made, lambda buffers: visible_of(buffers)[:, -1].logical_not_())


def a_node_does_not_see_the_root(target: Target, made: Recorded) -> Pass:
    return changed(made, lambda buffers: visible_of(buffers)[buffers.n - 1, 0].fill_(False))


def siblings_see_each_other(target: Target, made: Recorded) -> Pass:
    return changed(made, lambda buffers: visible_of(buffers).copy_(torch.ones_like(visible_of(buffers)).tril()))


def visible_of(buffers: PassBuffers) -> Tensor:
    """Return the nodes' mask; of a root, which has none, one that nothing reads."""
    return buffers.tensors[1] if len(buffers.tensors) > 1 else torch.ones(1, 1, dtype=torch.bool)


def positions_are_one_off(target: Target, made: Recorded) -> Pass:
    """Rotary embeddings, places of the cache and the mask follow from the number of cached rows."""
    return changed(made, lambda buffers: buffers.past.add_(1))


def keys_are_not_written(target: Target, made: Recorded) -> Pass:
    rows = made.made.rows

    def unwritten(n: int, first: int = 0) -> Any:
        cache: Any = rows(n, first)
        cache.update = lambda k, v, layer, *_, **__: tuple(
            part[:, :, : cache.keys] for part in cache.cache.memory_of(layer)
        )
        return cache

    def replayed() -> tuple[Tensor, ...]:
        made.made.rows = unwritten
        try:
            return made.one()
        finally:
            del made.made.rows

    return replayed


def one_number_is_rounded_otherwise(target: Target, made: Recorded) -> Pass:
    def replayed() -> tuple[Tensor, ...]:
        outs = tuple(out.clone() for out in made.one())
        outs[0].view(torch.int16)[0, 0, 7] += 1
        return outs

    return replayed


def first_results_again_from_the_fourth_time_on(target: Target, made: Recorded) -> Pass:
    """Nothing is proven by then: the logits at the end have to show."""
    given: list[tuple[Tensor, ...]] = []

    def replayed() -> tuple[Tensor, ...]:
        given.append(tuple(out.clone() for out in made.one()))
        return given[-1] if len(given) < 4 else given[0]

    return replayed


def changed(made: Recorded, change: Callable[[Any], object]) -> Pass:
    """Return the pass over buffers that are changed first, and are as they were afterwards."""

    def replayed() -> tuple[Tensor, ...]:
        kept = (made.buffers.past, *made.buffers.tensors)
        before = [tensor.clone() for tensor in kept]
        change(made.buffers)
        try:
            return made.one()
        finally:
            for tensor, was in zip(kept, before, strict=True):
                tensor.copy_(was)

    return replayed


FAULTS = (
    its_first_results, stale_tokens, stale_places, no_mask, padding_is_seen, a_node_does_not_see_the_root,
    siblings_see_each_other, positions_are_one_off, keys_are_not_written, one_number_is_rounded_otherwise,
    first_results_again_from_the_fourth_time_on,
)  # fmt: skip


@few(4)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_replay_that_is_wrong_is_refused_in_half_precision(deep: Target, fault: Any) -> None:
    deep.graphs = None
    with pytest.raises(UserError, match="something else|other logits"):
        enable_cuda_graphs(deep, lambda one: fault(deep, Recorded(one)), "calls")
    assert deep.graphs is None
