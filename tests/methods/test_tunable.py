"""Search spaces of methods: never the output, only values that exist, and the same weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specbench_ss import registry
from specbench_ss.engine.decoder import Decoder
from specbench_ss.engine.generate import StopParams
from specbench_ss.engine.target import Target
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.medusa.decode import Medusa, MedusaOptions
from specbench_ss.methods.ss.decode import SpeculativeStreaming, SSOptions
from specbench_ss.methods.ss.layers import StreamConfig, Streams
from specbench_ss.methods.ss.shared import SharedStreaming
from specbench_ss.models.checkpoint import KEY
from specbench_ss.options import MethodSpec
from specbench_ss.tuning.session import DecoderBench
from tests.methods import decoders
from tests.tiny import tiny_model

PROMPT = [5, 6, 7, 8, 9, 10, 11]
ADVICE = {KEY: {"k": 3, "n_draft": 8, "n_keep": 5}}
ACCURACIES = [[0.5 / (rank + 1) for rank in range(10)] for _ in range(3)]


def medusa(target: Target) -> Medusa:
    """On an auto tree of five nodes."""
    heads = decoders.medusa(target).drafter
    config = {"accuracies": ACCURACIES, "nodes": 5}
    return Medusa(target, MedusaOptions(), heads, config)


def streams(target: Target) -> SpeculativeStreaming:
    """Advised as the lab's are."""
    module = Streams(StreamConfig(gamma=3, n_msa_layers=2, init_rank=2), target.hidden_size)
    decoders.randomise(module, 2)
    return SpeculativeStreaming(target, SSOptions(), module, ADVICE).with_options(SSOptions())


def shared(target: Target) -> SharedStreaming:
    """Under eq. 3, where what the streams are is part of the model."""
    shape = {"gamma": 3, "n_msa_layers": 2, "adapter_rank": 0, "mode": "shared", "lora_rank": 4}
    module = Streams(StreamConfig(**shape, main_attends_streams=True), target.hidden_size)  # type: ignore[arg-type]
    decoders.randomise(module, 2)
    return SharedStreaming(target, SSOptions(), module, ADVICE).with_options(SSOptions())


MAKERS = {"medusa": medusa, "ss": streams, "ss-shared": shared}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama"))


@pytest.mark.parametrize("name", MAKERS)
def test_variants_share_the_weights_and_are_what_loading_would_give(target: Target, name: str) -> None:
    decoder = MAKERS[name](target)
    weights = {id(p) for p in module(decoder).parameters()}
    for option, values in decoder.search_space().items():
        for value in values:
            near = decoder.with_options(replace(decoder.options, **{option: value}))
            assert {id(p) for p in module(near).parameters()} == weights
    assert decoder.with_options(decoder.options).metadata() == decoder.metadata()


def module(decoder: Decoder) -> torch.nn.Module:
    found: torch.nn.Module = decoder.drafter  # type: ignore[attr-defined]
    return found


def bench(target: Target, name: str, **options: str) -> tuple[DecoderBench, MethodSpec]:
    default = MethodSpec(name, options)
    loaded = MAKERS[name](target).with_options(registry.method_options(default))
    return DecoderBench(default, loaded, Autoregressive(target), [PROMPT], StopParams(8)), default


def test_a_value_that_comes_down_to_the_default_is_the_default(target: Target) -> None:
    found, default = bench(target, "ss")
    labels = [spec.label for spec in found.around(default, "n_draft")]
    assert "ss[n_draft=4]" in labels and "ss[n_draft=8]" not in labels
    changed = MethodSpec("ss", {"n_draft": "4"})
    assert default in found.around(changed, "n_draft")
    assert found.around(changed, "n_draft").count(default) == 1


def test_what_the_user_has_settled_is_not_tuned(target: Target) -> None:
    assert "k" in bench(target, "ss")[0].options(MethodSpec("ss"))
    found, default = bench(target, "ss", k="2")
    assert "k" not in found.options(default)
    assert all(spec.options["k"] == "2" for spec in found.around(default, "gamma"))


def test_a_medusa_tree_of_ones_own_is_not_tuned(target: Target) -> None:
    given = medusa(target)
    assert list(given.search_space()) == ["nodes", "heads"]
    own = Medusa(target, MedusaOptions(tree="tree.json"), given.drafter, tree=given.tree)
    assert not own.search_space()
    unknown = Medusa(target, MedusaOptions(), given.drafter, tree=given.tree)
    assert list(unknown.search_space()) == ["heads"]
