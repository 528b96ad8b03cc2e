"""Kernel launches of a decode step outside of CUDA graphs, counted as torch's operators with a stand-in for a graph.

On a GPU each of them costs the host a few microseconds, as does a replay. An operator that only makes a view launches
nothing; the copy of tokens to the host is not counted.
"""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from specbench_ss import registry
from specbench_ss.engine.cuda_graphs import CudaGraphRunner, Pass
from specbench_ss.engine.generate import DecodeSession, StopParams, kv_cache_size
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.models.tiny import tiny_target
from tests.tiny import few

pytestmark = pytest.mark.usefixtures("torch_kernels_in_module")

PROMPT = [5, 9, 5, 9, 5, 9, 7, 8]
NO_LAUNCH = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "detach_", "lift_fresh", "_unsafe_view"}
# launches of the median step, replays included; a step whose graph is not yet checked has more
BUDGETS = {
    "ar": 5, "dflash": 43, "dspark": 60, "eagle": 18, "eagle2": 19, "eagle3": 23, "hydra": 20, "lookahead": 26,
    "medusa": 11, "medusa2": 11, "mtp": 19, "peagle": 25, "pld": 8, "recycling": 22, "rest": 8, "sd": 29, "space": 14,
    "ss": 13, "suffix": 8, "uno": 12,
}  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts operators that are not views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or func.overloadpacket.__name__ in NO_LAUNCH)
        return func(*args, **(kwargs or {}))


def replayed_unseen(run_pass: Pass) -> Pass:
    """Return a replay of which a mode sees one operator, as a graph is one launch."""
    run_pass()

    def replay() -> tuple[torch.Tensor, ...]:
        torch.ones(1)
        with _disable_current_modes():
            return run_pass()

    return replay


def launches_of_steps(name: str) -> list[int]:
    """Return the launches of each step of a request whose graphs were captured and checked before."""
    target = tiny_target("llama", words=61)
    make = next(iter(registry.method_class(name).test_instances(target).values()))
    decoder = make()
    decoder.target.graphs = CudaGraphRunner(replayed_unseen)
    decoder.target.drop_cache()
    limits = StopParams(40)
    with torch.inference_mode():
        for _ in range(3):
            cache = decoder.target.request_cache(*kv_cache_size(decoder, len(PROMPT) + limits.max_new_tokens))
            session = DecodeSession(decoder, PROMPT, limits, SamplingParams(), cache)
            state, _ = session.prefill()
            counts = []
            while session.finish is None:
                with Launches() as launches:
                    session.step(state)
                counts.append(launches.count)
    assert not decoder.target.graphs.failed_captures
    return counts


@few(5)
@pytest.mark.parametrize("name", BUDGETS)
def test_a_step_launches_no_more_than_its_budget(name: str) -> None:
    assert statistics.median(launches_of_steps(name)) <= BUDGETS[name]
