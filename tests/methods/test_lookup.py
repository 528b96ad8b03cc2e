"""Prompt lookup: what is copied, that the output stays the target's, and that the lookup is that of transformers."""

from __future__ import annotations

import random

import pytest
import torch

from specbench_ss.engine.generate import Limits, generate
from specbench_ss.engine.sampling import Sampling
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.pld import LookupOptions, PromptLookup, look_up
from tests.methods.assisted import assert_same_steps
from tests.tiny import SOME, tiny_model

PROMPTS = ([5, 6, 7, 5, 6, 7, 8, 5, 6], [3], [20, 4, 4, 4, 30, 12, 9, 8, 50, 4, 4, 12], [7, 8, 9] * 42 + [7])


@pytest.fixture(scope="module", params=SOME)
def target(request: pytest.FixtureRequest) -> Target:
    return Target(tiny_model(request.param))


@pytest.mark.parametrize(
    ("text", "options", "copied"),
    [
        ("abcXabcYabc", LookupOptions(length=2), "Xa"),
        ("abcXabcYabc", LookupOptions(length=2, match="last"), "Ya"),
        ("abcXabc", LookupOptions(length=9), "Xabc"),
        ("abcXabc", LookupOptions(length=5, complete=True), ""),
        ("abcXabc", LookupOptions(length=4, complete=True), "Xabc"),
        ("abcdabcda", LookupOptions(length=10, complete=True), ""),  # nothing so long has been said
        ("bcYabcXdbc", LookupOptions(), "YabcXdbc"),  # the trigram is new, the bigram is not
        ("bcYabcXdbc", LookupOptions(ngram=1, length=2), "Ya"),
        ("aaa", LookupOptions(), "a"),  # the newest n-gram itself is no occurrence, one that overlaps it is
        ("abcd", LookupOptions(), ""),
        ("a", LookupOptions(), ""),
        ("\ud800b\ud800", LookupOptions(), "b\ud800"),  # an id that is no character
        ("\U0010ffffb\U0010ffff", LookupOptions(), "b\U0010ffff"),
    ],
)
def test_what_is_copied(text: str, options: LookupOptions, copied: str) -> None:
    assert look_up(text, options) == copied


def first_by_windows(ids: list[int], ngram: int, length: int) -> list[int]:
    """The same by comparing every window, as the method is usually written."""
    row = torch.tensor(ids)
    for n in range(min(ngram, len(ids) - 1), 0, -1):
        for start in (row.unfold(0, n, 1) == row[-n:]).all(1).nonzero()[:, 0].tolist():
            if start + n < len(ids):
                return ids[start + n : start + n + length]
    return []


def test_it_is_what_comparing_every_window_finds() -> None:
    rng = random.Random(3)
    found = 0
    for _ in range(300):
        ids = [rng.choice((3, 255, 256, 300, 70_000)) for _ in range(rng.randrange(1, 25))]
        expected = first_by_windows(ids, 3, 4)
        assert [ord(c) for c in look_up("".join(map(chr, ids)), LookupOptions(length=4))] == expected
        found += bool(expected)
    assert found > 200


def test_greedy_equals_autoregressive_and_something_is_accepted(target: Target) -> None:
    decoders = {label: make() for label, make in PromptLookup.examples(target).items()}
    for prompt in PROMPTS:
        expected = generate(Autoregressive(target), prompt, Limits(30), Sampling()).tokens
        for label, decoder in decoders.items():
            done = generate(decoder, prompt, Limits(30), Sampling())
            assert done.tokens == expected, label
            assert done.draft_calls == 0
    assert max(s.accepted for s in generate(decoders["first"], PROMPTS[1], Limits(90), Sampling()).steps) > 1


def test_no_state_from_the_last_prompt() -> None:
    decoder = PromptLookup(Target(tiny_model("llama")))
    first = [generate(decoder, p, Limits(12), Sampling(0.9, seed=4)).steps for p in PROMPTS]
    again = [generate(decoder, p, Limits(12), Sampling(0.9, seed=4)).steps for p in reversed(PROMPTS)]
    counts = [[(s.nodes, s.tokens) for s in steps] for steps in first]
    assert counts == [[(s.nodes, s.tokens) for s in steps] for steps in again[::-1]]


@pytest.mark.parametrize(("ngram", "length"), [(2, 10), (3, 4), (1, 1)])
def test_every_step_keeps_what_transformers_keeps(ngram: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny_model("llama"))
    given = {"prompt_lookup_num_tokens": length, "max_matching_ngram_size": ngram}
    decoder = PromptLookup(target, LookupOptions(ngram, length))
    taus = [assert_same_steps(decoder, prompt, 60, monkeypatch, **given) for prompt in PROMPTS[:3]]
    assert max(taus) > 1.5


@pytest.mark.parametrize(("name", "value"), [("ngram", 0), ("length", 0), ("length", 4096)])
def test_what_cannot_be_looked_up(name: str, value: int) -> None:
    with pytest.raises(UserError, match=f"pld: {name} must be 1 to 409[56], not {value}"):
        LookupOptions(**{name: value})  # type: ignore[arg-type]


def test_tuning_may_try_only_what_leaves_the_output_alone() -> None:
    target = Target(tiny_model("llama"))
    decoder = PromptLookup(target)
    expected = generate(Autoregressive(target), PROMPTS[0], Limits(20), Sampling()).tokens
    for name, values in decoder.tunable().items():
        for value in values:
            made = decoder.variant(LookupOptions(**{name: value}))
            assert generate(made, PROMPTS[0], Limits(20), Sampling()).tokens == expected
