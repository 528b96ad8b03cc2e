"""benchmarks/calibration.py: temperatures are those of the data, and divide all that chooses nodes."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from specbench_ss.decoding.decoder import State
from specbench_ss.decoding.loop import Limits, generate
from specbench_ss.decoding.sampling import Sampling
from specbench_ss.decoding.target import Target
from specbench_ss.decoding.tree import DraftTree
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.ss import drafting
from specbench_ss.methods.ss.decoding import SpeculativeStreaming
from specbench_ss.methods.ss.options import SSOptions
from specbench_ss.methods.ss.stream_config import StreamConfig
from tests.methods.decoders import CONDITIONED, TWO_LAYERS, streaming
from tests.tiny import tiny_model

BENCH: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "calibration.py"))
PROMPT = [5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_temperature_is_that_of_the_tokens(temperature: float) -> None:
    rng = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(20_000, 12, generator=rng)
    tokens = torch.multinomial((logits / temperature).softmax(-1), 1, generator=rng)[:, 0]
    assert BENCH["fitted"](logits, tokens) == pytest.approx(temperature, rel=0.05)


@pytest.mark.parametrize("config", [TWO_LAYERS, CONDITIONED], ids=["plain", "root and parent"])
def test_logits_are_those_that_choose_nodes_and_tokens_those_of_the_answer(config: StreamConfig) -> None:
    target = Target(tiny_model("llama"))
    decoder = streaming(target, config, SSOptions(k=2, prune="off", gamma=2))
    answer = generate(Autoregressive(target), PROMPT, Limits(6), Sampling()).tokens
    with torch.inference_mode():
        logits, tokens = BENCH["seen"](decoder, [(PROMPT, answer)])
        assert [level.tolist() for level in tokens] == [answer[1:], answer[2:]]
        for i, root in enumerate(answer[:-1]):
            state = prefilled(decoder, [*PROMPT, *answer[:i]], root)
            first = decoder._stream_logits(state.root[0])[0]
            torch.testing.assert_close(logits[0][i], first, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("config", [TWO_LAYERS, CONDITIONED], ids=["plain", "root and parent"])
def test_nodes_are_chosen_by_divided_logits(config: StreamConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A temperature of 1 changes nothing; the tree of divided logits is that of streams which say a part of it."""
    target, cold = Target(tiny_model("llama")), [0.25, 1.0, 4.0]
    monkeypatch.setattr(drafting, "SHORTLIST", target.vocab_size)
    decoder = streaming(target, config, SSOptions(k=3, n_draft=8, prune="off"))
    same, divided = (BENCH["Calibrated"](decoder, temperatures) for temperatures in ([1.0] * 3, cold))
    changed = 0
    with torch.inference_mode():
        for root in range(3, 30):
            plain = described(decoder, root)
            assert described(same, root) == plain
            found = described(divided, root)
            assert found == by_definition(decoder, root, cold)
            changed += found != plain
    assert changed


def prefilled(decoder: SpeculativeStreaming, ids: list[int], root: int) -> State:
    state = State(ids, len(ids), torch.tensor([root]), decoder.target.new_cache(200), Sampling())
    decoder.prefill(state, torch.tensor([ids]))
    decoder.begin(state)
    return state


def described(decoder: SpeculativeStreaming, root: int) -> set[tuple[int, ...]]:
    """The paths of the tree that is drafted under a root."""
    tree: DraftTree = decoder.propose(prefilled(decoder, PROMPT, root))
    return {tuple(tree.tokens[seen].tolist()) for seen in tree.visibility()[0]}


def by_definition(decoder: SpeculativeStreaming, root: int, temperatures: list[float]) -> set[tuple[int, ...]]:
    """The root and the eight best paths among those of three candidates each, by softmaxes told every parent."""
    streams, target = decoder.streams, decoder.target
    prefilled(decoder, PROMPT, root)
    paths = {(root,): 0.0}
    level = dict(paths)
    for g, temperature in enumerate(temperatures):
        following: dict[tuple[int, ...], float] = {}
        for path, score in level.items():
            told = streams.told(target, decoder.next_streams, torch.tensor(path))
            log_p = (target.logits(told)[g] / temperature).log_softmax(-1)
            following |= {(*path, int(c)): score + float(log_p[c]) for c in log_p.topk(3).indices}
        paths |= following
        level = following
    return set(sorted(paths, key=lambda path: -paths[path])[:9])
