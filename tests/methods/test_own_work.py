"""Rows of a method's own are counted as torch counts what they compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from specbench_ss.bench.runner import cost_shape
from specbench_ss.engine.decoder import Decoder
from specbench_ss.engine.generate import DecodeSession, StopParams
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.methods.lookahead import Lookahead
from specbench_ss.methods.space.decode import SPACE
from specbench_ss.methods.ss.decode import SpeculativeStreaming
from specbench_ss.methods.ss.shared import SharedAutoregressive, SharedStreaming
from specbench_ss.registry import method_class
from specbench_ss.results.cost_model import counted
from specbench_ss.runs.records import SampleRecord
from tests.tiny import few, tiny_model

SHAPES: list[tuple[type[Decoder], str]] = [
    (method_class("ar"), "default"),
    (method_class("pld"), ""),
    (Lookahead, "default"),
    (SPACE, "default"),
    (SPACE, "one"),
    (SpeculativeStreaming, "unpruned"),
    (SpeculativeStreaming, "chain"),
    (SpeculativeStreaming, "tree"),
    (SpeculativeStreaming, "best-nodes"),
    (SpeculativeStreaming, "threshold"),
    (SpeculativeStreaming, "top-p"),
    (SpeculativeStreaming, "fewer-streams"),
    (SpeculativeStreaming, "with-mlp"),
    (SharedStreaming, "tree"),
    (SharedAutoregressive, "eq-3"),
]


@few(5)
@pytest.mark.usefixtures("torch_kernels")
@pytest.mark.parametrize(("method", "shape"), SHAPES, ids=lambda x: x if isinstance(x, str) else x.name)
def test_counted_operations_are_those_that_torch_counts(
    method: type[Decoder], shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch counts none for attention on a CPU, and none for products by native kernels."""
    monkeypatch.setattr(SpeculativeStreaming, "most_fused", 0)  # a product with the streams of a draft is drafting too
    target = Target(tiny_model("llama"))
    test_instances = method.test_instances(target)
    decoder = test_instances[shape or next(iter(test_instances))]()
    own = decoder.target
    prompt = [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 10]
    session = DecodeSession(decoder, prompt, StopParams(60), SamplingParams(), own.new_cache(own.context_length))
    with torch.inference_mode():
        state, _ = session.prefill()
        steps = [session.step(state) for _ in range(8)]  # the window of lookahead is full then
        computed, forward = [], session._forward

        def watched(*given: Any) -> Any:
            with FlopCounterMode(display=False) as counter:
                made = forward(*given)
            computed.append(counter.get_total_flops())
            return made

        monkeypatch.setattr(session, "_forward", watched)
        for _ in range(6):
            if session.finish is None:
                steps.append(session.step(state))
    last = steps[8:]
    assert last
    row = SampleRecord("q", 0, "m", 0, "c", 0, 0, 0, "e", "h", "ok")
    row.prompt_tokens = row.tokens = row.num_draft_forwards = 0
    row.steps, row.draft_nodes, row.verified_nodes = (
        len(last),
        sum(s.draft_nodes for s in last),
        sum(s.verified_nodes for s in last),
    )
    about = cost_shape(decoder) | {"attention_flops": 0, "drafter": None}
    cost = counted([row], about)
    assert cost is not None
    share = cost.flops / sum(computed)
    exits = isinstance(decoder, SpeculativeStreaming) and decoder.settings.prune  # pruning reads the LM head, uncounted
    assert 0.5 < share <= 1.02 if exits else share == pytest.approx(1, rel=0.05)
