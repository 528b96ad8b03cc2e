"""Conformance checks of every registered method; autoregressive decoding against transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from specbench_ss import registry
from specbench_ss.cli.check import references_of
from specbench_ss.conformance import ARCHITECTURES, check_decoder, kit, tiny_target
from specbench_ss.engine import cuda_graphs
from specbench_ss.engine.cuda_graphs import CudaGraphRunner, run_eagerly
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.ss.decode import SpeculativeStreaming
from specbench_ss.options import MethodSpec
from tests.checks import architectures, plain, statistical
from tests.tiny import METHODS as SOME_METHODS
from tests.tiny import THOROUGH, few, instances, third, tiny_model

METHODS = registry.names(registry.METHODS)
# of the quick suite: each acceptance rule and kind of draft distribution
ACCEPTED = ("dflash", "medusa2", "pld", "space", "ss")
REPLAYED = [kind for kind in ARCHITECTURES if kind != "mistral-window"]  # layers with windows are not
PROMPTS = ([5, 6, 7, 8, 9, 10, 11], [3], [20, 4, 4, 4, 30, 12, 9, 8, 50, 41, 33, 22, 17, 60, 9])


@few(5)
@pytest.mark.parametrize("name", SOME_METHODS)
def test_every_method_passes_the_checks(name: str) -> None:
    """On one architecture, or if thorough the first shape on all of them; see `tests/checks.py`."""
    own_model, turn = name in references_of([MethodSpec(name)]), METHODS.index(name)
    check_decoder(partial(instances, name), architectures=architectures(turn), checks=plain(turn), own_model=own_model)


@few(2)
@pytest.mark.parametrize("name", METHODS if THOROUGH else ACCEPTED)
def test_every_method_is_exact_where_tokens_are_sampled(name: str) -> None:
    own_model, turn = name in references_of([MethodSpec(name)]), METHODS.index(name)
    check_decoder(partial(instances, name), architectures=(), checks=statistical(turn), own_model=own_model)


@pytest.mark.parametrize("name", METHODS if THOROUGH else ("medusa",))
def test_every_method_passes_the_checks_where_steps_are_replayed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `--engine graph` makes them, but that each operator is called: no graph is needed for the buffers.

    The buffers are new here, not the method, and all of its shapes share them: the first one is tested in all cases of
    every check, every third of the others in two of each, even if thorough. Neighbouring methods have different
    architectures; `tests/core/test_static_passes.py` holds all methods to eager drafts and answers on one of them.
    """

    def replayed(*given: Any, **options: Any) -> Target:
        target = tiny_target(*given, **options)
        if not target.no_graph_reason:
            target.graphs = CudaGraphRunner(run_eagerly)
        return target

    monkeypatch.setattr(kit, "tiny_target", replayed)
    monkeypatch.setattr(cuda_graphs, "BLOCK", 8)  # the checks' caches are small
    turn, own_model = METHODS.index(name), name in references_of([MethodSpec(name)])
    kind, checks = REPLAYED[turn % len(REPLAYED)], plain(turn, thorough=False)
    check_decoder(partial(third, name), architectures=(kind,), checks=checks, own_model=own_model)


@few(3)
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_autoregressive_equals_transformers(kind: str) -> None:
    target = Target(tiny_model(kind))
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        theirs = target.model.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
        ours = generate(Autoregressive(target), prompt, StopParams(40), SamplingParams()).tokens
        assert ours == theirs[0, len(prompt) :].tolist()


def test_acceptance_is_counted_against_what_was_drafted() -> None:
    """Pruning takes nodes away from verification, not from the count of what was drafted."""
    one_kept = SpeculativeStreaming.test_instances(Target(tiny_model("llama")))["one-kept"]()
    steps = generate(one_kept, [5, 6, 7], StopParams(20), SamplingParams()).steps
    assert {(step.verified_nodes, step.draft_depth, step.draft_nodes) for step in steps} == {(0, 3, 14)}
