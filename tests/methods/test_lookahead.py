"""The window sees what the paper states, the pool keeps the newest, a guess that matches whole yields N tokens."""

from __future__ import annotations

import pytest

from specbench_ss.engine.decoder import DecodeState
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Output, Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.methods.lookahead import Lookahead, LookaheadOptions, NGramPool, prefix_tree
from specbench_ss.options import for_device
from tests.tiny import tiny_model

PROMPT = [20, 4, 4, 30, 12, 9, 8, 50, 41] * 2


class Watched(Lookahead):
    """Writes down the ids, the window and what came of it, step by step."""

    def on_prefill(self, state: DecodeState) -> None:
        self.seen: list[tuple[list[int], list[list[int]], list[int]]] = []
        super().on_prefill(state)

    def forward(self, state: DecodeState, tree: DraftTree) -> Output:
        output = super().forward(state, tree)
        self.seen.append((list(state.ids), self.window.tolist(), output.extra.tolist()))
        return output


@pytest.mark.parametrize("kind", ["llama", "opt", "mistral-window"])
@pytest.mark.parametrize("options", [LookaheadOptions(4, 3, 2), LookaheadOptions(2, 4, 2), LookaheadOptions(3, 1, 1)])
def test_each_token_of_the_window_sees_level_0_up_to_its_column_and_its_column(
    kind: str, options: LookaheadOptions
) -> None:
    """The newest level, one token at a time: a fresh pass over exactly what it should see."""
    target = Target(tiny_model(kind))
    decoder = Watched(target, options)
    generate(decoder, PROMPT, StopParams(14), SamplingParams())
    for ids, window, new in decoder.seen:
        assert window[0][0] == ids[-1] and len(new) == len(window[0])
        for column, token in enumerate(new):
            path = window[0][1 : column + 1] + [level[column] for level in window[1:]]
            assert int(target.next_logits([*ids, *path]).argmax()) == token


def test_the_window_fills_narrows_to_w_and_then_moves() -> None:
    decoder = Watched(Target(tiny_model("llama")), LookaheadOptions(4, 3, 2))
    generate(decoder, PROMPT, StopParams(30), SamplingParams())
    assert [(len(w), len(w[0])) for _, w, _ in decoder.seen][:4] == [(1, 5), (2, 4), (3, 3), (3, 3)]
    (_, first, new), (_, second, _), (_, third, _), (_, fourth, _) = decoder.seen[:4]
    assert set(first[0][1:]) <= set(PROMPT)
    assert second[0][1:] == first[0][2:] and second[1] == new[1:]
    assert fourth[0][1:] == third[1][1:] and fourth[1] == third[2] and fourth[2] == decoder.seen[2][2]


@pytest.mark.parametrize("level", [2, 3, 5])
def test_a_guess_that_matches_whole_yields_a_token_more(level: int) -> None:
    decoder = Lookahead(Target(tiny_model("gpt_neox")), LookaheadOptions(level, 7, 7))
    steps = generate(decoder, PROMPT, StopParams(80), SamplingParams()).steps
    assert max(s.draft_depth for s in steps) == level - 1
    assert max(s.tokens for s in steps) == level


def test_the_greedy_output_does_not_depend_on_the_seed_but_the_window_does() -> None:
    decoder = Watched(Target(tiny_model("llama")), LookaheadOptions(5, 7, 7))
    prompt = list(range(3, 40))
    answers, windows = set(), set()
    for seed in range(4):
        answers.add(tuple(generate(decoder, prompt, StopParams(20), SamplingParams(seed=seed)).tokens))
        windows.add(str(decoder.seen[0][1]))
    assert len(answers) == 1 and len(windows) == 4


def test_a_cpu_has_a_small_window_unless_options_are_given() -> None:
    target = Target(tiny_model("llama"))
    made = Lookahead.load(target, LookaheadOptions(window=3)).options
    assert made == LookaheadOptions(3, 3, 2, pool_from_prompt=True)
    assert for_device(LookaheadOptions(), "cuda") == LookaheadOptions(5, 7, 7, pool_from_prompt=False)


def test_the_prompt_fills_the_pool_where_asked() -> None:
    target = Target(tiny_model("llama"))
    for asked in (False, True):
        decoder = Lookahead(target, LookaheadOptions(3, pool_from_prompt=asked))
        generate(decoder, PROMPT, StopParams(1), SamplingParams())
        assert bool(decoder.pool.following(4)) == asked
    assert decoder.pool.following(4) == [(30, 12), (4, 30)]


def test_the_pool_keeps_the_newest() -> None:
    pool = NGramPool(2)
    pool.add([(1, 2, 3), (1, 4, 5), (1, 2, 3), (1, 6, 7), (2, 0, 0)])
    assert pool.following(1) == [(6, 7), (2, 3)] and pool.following(2) == [(0, 0)] and pool.following(9) == []


def test_common_beginnings_are_merged() -> None:
    assert prefix_tree([(5, 6, 7), (5, 6, 8), (9,), (5, 7)]) == ([5, 6, 7, 8, 9, 7], [0, 1, 2, 2, 0, 1])
