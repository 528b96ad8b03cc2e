"""The automaton against counting by hand; how long a draft may be; what the past remembers and forgets."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.methods.suffix import Past, Suffix, SuffixAutomaton, SuffixOptions
from tests.tiny import tiny_model

PROMPT = [20, 4, 4, 30, 12, 9, 8, 50, 41] * 2


def automaton(texts: Sequence[Sequence[int]]) -> SuffixAutomaton:
    found = SuffixAutomaton()
    for i, text in enumerate(texts):
        if i:
            found.end()
        for token in text:
            found.extend(token)
    return found


def substrings(texts: Sequence[Sequence[int]]) -> Counter[tuple[int, ...]]:
    return Counter(tuple(t[a:b]) for t in texts for a in range(len(t)) for b in range(a + 1, len(t) + 1))


def state_of(found: SuffixAutomaton, text: Sequence[int]) -> int:
    state = 0
    for token in text:
        state = found.next[state][token]
    return state


def some_texts() -> list[list[list[int]]]:
    rng = random.Random(0)
    return [
        [[rng.randrange(letters) for _ in range(rng.randint(1, 24))] for _ in range(count)]
        for letters in (1, 2, 3) for count in (1, 2, 5) for _ in range(3)
    ]  # fmt: skip


@pytest.mark.parametrize("texts", some_texts(), ids=lambda texts: f"{len(texts)}-{sum(map(len, texts))}")
def test_every_substring_is_counted_and_nothing_else_is_there(texts: list[list[int]]) -> None:
    found, counts = automaton(texts), substrings(texts)
    for text, count in counts.items():
        state = state_of(found, text)
        assert found.count[state] == count
        assert set(found.next[state]) == {t[-1] for t in counts if t[:-1] == text}
    assert len(found.next) <= max(2, 2 * sum(map(len, texts)))


@pytest.mark.parametrize("texts", some_texts()[::3], ids=lambda texts: f"{len(texts)}-{sum(map(len, texts))}")
def test_the_longest_suffix_that_occurs_is_found(texts: list[list[int]]) -> None:
    """Of the text itself by its link, of another one by following it."""
    found, counts, last = automaton(texts), substrings(texts), texts[-1]
    longest = max(i for i in range(len(last)) if i == 0 or counts[tuple(last[-i:])] > 1)
    assert found.length[found.link[found.last]] == longest
    rng, state, length, other = random.Random(1), 0, 0, []
    for _ in range(30):
        other.append(rng.randrange(4))
        state, length = found.follow(state, length, other[-1])
        assert length == max(i for i in range(len(other) + 1) if i == 0 or counts[tuple(other[-i:])])
        assert state == state_of(found, other[len(other) - length :])


def test_a_draft_is_the_likeliest_nodes() -> None:
    """After 'ab': c twice (then d, then e), d once, and the present end, which nothing has followed."""
    a, b, c, d, e, f = range(6)
    found = automaton([[a, b, c, d, a, b, c, e, a, b, d, f, a, b]])
    state = found.link[found.last]
    assert found.length[state] == 2
    tree = found.draft(state, 7, 0.25, chain=False)
    assert (tree.tokens, tree.parents) == ([c, d, e, d, f, a, a], [0, 0, 1, 1, 2, 3, 4])
    assert tree.score == pytest.approx(2 / 3 + 6 / 3)
    chain = found.draft(state, 3, 0.1, chain=True)
    assert (chain.tokens, chain.parents) == ([c, e, a], [0, 1, 2])
    assert chain.score == pytest.approx(2 / 3 + 1 / 3 + 1 / 3)
    assert found.draft(state, 10, 0.5, chain=False).tokens == [c]


@pytest.mark.parametrize("matched", [1, 3, 40])
def test_the_draft_grows_with_the_match(matched: int) -> None:
    options = SuffixOptions(factor=1.5, offset=1.0, nodes=20)
    assert options.budget(matched) == {1: 2, 3: 5, 40: 20}[matched]
    assert SuffixOptions(offset=-5.0).budget(matched) == max(0, matched - 5)


def test_a_long_repetition_is_drafted_as_far_as_the_match_was_long() -> None:
    """The prompt ends with five tokens that it has had before: five nodes, then what they yielded counts as well."""
    decoder = Suffix(Target(tiny_model("llama")), SuffixOptions())
    text = [*range(10, 40), *range(10, 15)]
    decoder.on_prefill(state := _state(text))
    tree = decoder.propose(state)
    assert tree.tokens.tolist() == [14, 15, 16, 17, 18, 19] and tree.topology.parents == (-1, 0, 1, 2, 3, 4)
    shallow = Suffix(decoder.target, SuffixOptions(depth=2))
    shallow.on_prefill(state)
    assert shallow.propose(state).tokens.tolist() == [14, 15, 16]


def test_the_better_of_request_and_past_is_drafted() -> None:
    decoder = Suffix(Target(tiny_model("llama")), SuffixOptions(past=True))
    decoder.past.add([*range(10, 40)])
    decoder.on_prefill(state := _state([13, 30, 8, 12, 13]))
    assert decoder.propose(state).tokens.tolist() == [13, 14, 15], "two matched there, one here"
    decoder.on_prefill(state := _state([11, 12, 13, 50, 51, 52, 53, 54, 11, 12, 13]))
    assert decoder.propose(state).tokens.tolist() == [13, 50, 51, 52], "three here and there: here"


def test_the_past_is_remembered_where_asked() -> None:
    target = Target(tiny_model("llama"))
    for past in (False, True):
        decoder = Suffix(target, SuffixOptions(past=past, offset=4))
        assert decoder.stateful == past
        first, again = (generate(decoder, PROMPT, StopParams(40), SamplingParams()) for _ in range(2))
        assert first.tokens == again.tokens
        assert (len(again.steps) < len(first.steps)) == past
        assert [list(a) for a in decoder.past.answers] == ([first.tokens] if past else [])


def test_of_too_many_answers_the_older_half_is_forgotten() -> None:
    past = Past(4)
    for i in range(1, 6):
        past.add([i, i, 10])
    assert list(past.answers) == [[4, 4, 10], [5, 5, 10]]
    assert set(past.text.next[0]) == {4, 5, 10}
    assert past.text.count[state_of(past.text, [10])] == 2
    one = Past(1)
    one.add([1])
    one.add([2])
    assert set(one.text.next[0]) == {2}


def _state(ids: list[int]) -> Any:
    from types import SimpleNamespace

    import torch

    return SimpleNamespace(ids=ids, prompt_tokens=len(ids), root=torch.tensor(ids[-1:]))
