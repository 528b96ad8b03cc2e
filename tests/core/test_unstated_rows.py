"""A method need not state how many rows a step puts through the target; one that does is kept to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from specbench_ss.conformance import check_decoder
from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.kv_cache import Cache
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.methods.ar import Autoregressive
from tests.checks import checks, plain
from tests.tiny import THOROUGH, tiny_model

PROMPT = [3, 9, 4, 7, 5]


class Bushy(Decoder):
    """Drafts 100 nodes: of every word that there is one, and a chain of ones behind the first."""

    name, summary = "bushy", "a hundred nodes"

    def propose(self, state: DecodeState) -> DraftTree:
        words = min(50, self.target.vocab_size)
        tokens = [int(state.root), *range(words), *[1] * (100 - words)]
        parents = [-1, *[0] * words, 1, *range(words + 1, 100)]
        return DraftTree.from_parents(torch.tensor(tokens), parents)


class Modest(Bushy):
    """States that it needs two rows."""

    name = "modest"

    def max_tokens_per_step(self) -> int:
        return 2


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    yield Target(tiny_model("llama"))


def test_a_step_of_a_hundred_nodes_gives_the_greedy_tokens(target: Target) -> None:
    """The first step fills all that was reserved: 5 + 20 + 64 rows."""
    for fresh in (Target(tiny_model("llama")), target):
        wanted = generate(Autoregressive(fresh), PROMPT, StopParams(20), SamplingParams()).tokens
        made = generate(Bushy(fresh), PROMPT, StopParams(20), SamplingParams())
        assert made.tokens == wanted and made.steps[0].draft_nodes == 100


def test_sampled_tokens_are_those_of_a_cache_that_was_large_enough(target: Target) -> None:
    def tokens(fresh: Target) -> list[int]:
        return generate(Bushy(fresh), PROMPT, StopParams(20), SamplingParams(1.0, seed=4)).tokens

    roomy = Target(tiny_model("llama"))
    roomy.request_cache(1000)
    assert tokens(Target(tiny_model("llama"))) == tokens(roomy)


def test_a_method_that_needs_more_than_it_states_ends_with_an_error() -> None:
    fresh = Target(tiny_model("llama"))
    with pytest.raises(RuntimeError, match=r"raise the method's max_tokens_per_step"):
        generate(Modest(fresh), PROMPT, StopParams(20), SamplingParams())
    generate(
        Bushy(fresh), PROMPT, StopParams(20), SamplingParams()
    )  # one that states nothing, then one that does, on one target
    with pytest.raises(RuntimeError, match="max_tokens_per_step"):
        generate(Modest(fresh), PROMPT, StopParams(120), SamplingParams())


def test_a_cache_that_grows_keeps_rows_that_no_length_counts_yet() -> None:
    """In a pass the layers below have written their new rows when one above needs more room."""
    torch.manual_seed(0)
    grown, roomy = Cache(2, 3), Cache(2, 50)
    grown.grows = True
    for rows in (2, 1, 7, 30):
        layers = [torch.randn(1, 2, rows, 4) for _ in range(2)]
        for layer, k in enumerate(layers):
            one, other = grown.update(k, -k, layer), roomy.update(k, -k, layer)
            assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
        for cache in (grown, roomy):
            cache.commit(rows)
    assert grown.capacity >= 40


def test_the_checks_hold_for_a_method_that_states_nothing() -> None:
    """All but the one that holds a method to what it states."""
    quick = [check for check in plain(0) if check.name in ("draft", "rows", "counts", "greedy", "ends", "together")]
    tried = check_decoder(Bushy, architectures=["llama"], checks=checks(0) if THOROUGH else quick, all=True)
    results = {result.check.name: result for result in tried}
    assert results["rows"].exempt == "max_tokens_per_step() is None" and not results["rows"].tried
    assert not [name for name, result in results.items() if result.failure]
