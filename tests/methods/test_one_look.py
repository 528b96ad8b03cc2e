"""From drafting to verification the host asks the device for nothing, and every step has the same rows.

On the meta device, which has shapes and no data, every look of the host at a tensor raises: `.tolist()`, `.item()`,
`int(...)`, choosing by a mask. So each method's steps are made there, eagerly and over buffers that stay.
Where a method looks, that is listed with why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from specbench_ss.engine import cuda_graphs
from specbench_ss.engine.cuda_graphs import CudaGraphRunner, Replay, run_eagerly
from specbench_ss.engine.decoder import Decoder, DecodeState, _members, models_of
from specbench_ss.engine.generate import StopParams, gather_offsets, generate
from specbench_ss.engine.kv_cache import Cache
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Output, Target
from specbench_ss.engine.tree import DeviceTopology, DraftTree
from specbench_ss.engine.verify import VerifyResult
from specbench_ss.methods._shared import fine_tuned
from specbench_ss.methods.block_drafters import dflash as dflash_weights
from specbench_ss.methods.block_drafters import peagle as peagle_weights
from specbench_ss.methods.block_drafters.decode import PEagle, PEagleOptions
from specbench_ss.models.tiny import tiny_model, tiny_target
from tests.core.test_static_passes import DECLINED
from tests.tiny import METHODS, few, instances

META = torch.device("meta")
PROMPT = list(range(5, 21))
LOOKS = {  # method, shape -> where, and why
    ("lookahead", "prompt"): "its pool of n-grams is the host's",
    ("lookahead", "bigrams"): "its pool of n-grams is the host's",
    ("lookahead", "smallest"): "its pool of n-grams is the host's",
    ("recycling", "known-only"): "how many nodes are known is not known beforehand",
    ("sd", "adaptive"): "a threshold ends the chain",
    ("ss", "threshold"): "a threshold says how many nodes stay",
    ("dflash", "tree"): "the best nodes of all places are chosen on the host",
    ("dflash", "reduced"): "the best nodes of all places are chosen on the host",
    ("peagle", "tree"): "the best nodes of all places are chosen on the host",
    ("dspark", "no Markov head"): "a threshold ends the chain",
    ("dspark", "top-1"): "a threshold ends the chain",
    ("dspark", "measured"): "the confidence says how many tokens are verified",
    ("uno", "tree"): "the best nodes of all rows are chosen on the host",
    ("uno", "draft vocabulary, tree"): "the best nodes of all rows are chosen on the host",
}
VARY = {  # methods that draft as much as they find, or as pays
    "pld", "suffix", "rest", "lookahead", "recycling", "space", "sd",
}  # fmt: skip


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Target:
    monkeypatch.setattr(fine_tuned, "hash_weights", lambda model: "of no data")
    monkeypatch.setattr(dflash_weights, "mask_token", lambda base, embedding: 3)
    return Target(tiny_model("llama").to(META), None, "tiny")


def shapes(name: str, target: Target) -> Mapping[str, Callable[[], Decoder]]:
    """A method's examples. P-EAGLE's begin with a copy of the target's words, which here have no data."""
    if name != "peagle":
        return instances(name, target)

    def make(**options: Any) -> Callable[[], Decoder]:
        with META:
            drafter = peagle_weights.new_drafter(target, 5, 2, mask=3, own_embedding=True)
        return lambda: PEagle(target, PEagleOptions(**options), drafter)

    return {"chain": make(), "sampled": make(sample="on"), "tree": make(mode="tree", nodes=9, k=4)}


def on_meta(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.long, device=META)


def reported_anything(tree: DraftTree) -> None:
    """As verification would: the host is reported a shape, here a star."""
    for shape in tree.topology.pending_topologies() if isinstance(tree.topology, DeviceTopology) else []:
        shape.set_host_values([0] * len(shape.pending_values()))


def two_steps(decoder: Decoder) -> list[int]:
    """Prefill and two steps of which one drafted token is accepted; the rows of each."""
    cache, rows = decoder.target.new_cache(400), []
    state = DecodeState(list(PROMPT), len(PROMPT), torch.empty(0), cache, SamplingParams())
    output = decoder.prefill(state, on_meta(1, len(PROMPT)))
    step_on(state, VerifyResult([0], [7], on_meta(1)), output)
    decoder.on_prefill(state)
    for _ in range(2):
        start, tree = state.position, decoder.propose(state)
        output = decoder.forward(state, tree)
        kept = output.tree or tree
        rows.append(len(kept))
        reported_anything(kept)
        path = [0, 1] if len(kept) > 1 else [0]
        for lo, hi, offsets in output.rows or [(0, decoder.target.n_layers, range(output.logits.shape[1]))]:
            cache.compact(start, gather_offsets(offsets, path), lo, hi)
        verdict = VerifyResult(path, [9] * len(path), on_meta(1))
        step_on(state, verdict, output)
        decoder.update(state, verdict, output)
    return rows


def step_on(state: DecodeState, verdict: VerifyResult, output: Output) -> None:
    last = verdict.path[-1]
    state.ids, state.root = [*state.ids, *verdict.tokens], verdict.next_token
    state.hidden_states = {layer: t[:, -1:] if len(state.ids) == len(PROMPT) + 1 else t[:, last : last + 1]
                  for layer, t in output.hidden_states.items()}  # fmt: skip


@few(5)
@pytest.mark.parametrize("replay", [None, run_eagerly], ids=["eager", "static"])
@pytest.mark.parametrize("name", METHODS)
@torch.inference_mode()
def test_no_step_looks_at_the_device_before_it_verifies(
    name: str, replay: Replay | None, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Static steps are made without the proof of each, which looks at numbers once."""
    monkeypatch.setattr(cuda_graphs, "same", lambda *given: True)
    for label, make in shapes(name, target).items():
        decoder = make()
        passes = decoder.target.graphs = CudaGraphRunner(replay) if replay else None
        if (name, label) in LOOKS:
            with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
                two_steps(decoder)
        else:
            two_steps(decoder)
            assert passes is None or passes.n_captures and set(passes.fallbacks) == DECLINED.get((name, label), set())


@few(3)
@pytest.mark.parametrize("name", METHODS)
def test_the_same_request_again_is_made_over_the_same_memory(name: str) -> None:
    """Nothing is recorded or proven, and no cache and no buffer is taken again."""
    target = tiny_target("llama", words=61)
    for label, make in instances(name, target).items():
        decoder = make()
        passes = decoder.target.graphs = CudaGraphRunner(run_eagerly)
        seen = []
        for _ in range(3):
            tokens = generate(decoder, PROMPT, StopParams(24), SamplingParams()).tokens
            seen.append((tokens, passes.n_capture_attempts, places(passes), memory_of(decoder)))
        assert seen[1] == seen[2], label
        assert seen[2][2], label


def places(passes: CudaGraphRunner) -> list[int]:
    """Return the addresses of all recordings' buffers, and of the memory that they write."""
    found = []
    for kept in passes.graphs.values():
        inputs = (kept.buffers.past, *kept.buffers.tensors)
        found += [one.data_ptr() for one in (*inputs, *(kept.memory[0] if kept.memory else ())) if one is not None]
    found += [one.data_ptr() for outputs in passes.outputs.values() for one in outputs]
    return sorted(found)


def memory_of(decoder: Decoder) -> list[int]:
    """Return the addresses of the caches of a method, its model and its draft."""
    caches = [one for one in _members(decoder) if isinstance(one, Cache)]
    caches += [model._cache for model in models_of([decoder]) if model._cache is not None]
    return sorted(rows.data_ptr() for cache in caches for rows in (*cache.keys, *cache.values) if rows is not None)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in VARY])
def test_every_step_of_a_request_has_the_same_rows(name: str) -> None:
    target = tiny_target("llama", words=61)
    for label, make in instances(name, target).items():
        if (name, label) != ("ss", "threshold"):
            steps = generate(make(), PROMPT, StopParams(24), SamplingParams()).steps
            assert len({(step.draft_nodes, step.verified_nodes) for step in steps}) == 1, label
