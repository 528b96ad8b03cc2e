"""Prompt lookup: what is copied, that the output stays the target's, and that the lookup is that of transformers."""

from __future__ import annotations

import random

import pytest
import torch

from specbench_ss.engine.target import Target
from specbench_ss.methods.pld import LookupOptions, PromptLookup, look_up
from tests.methods.assisted import assert_same_steps
from tests.tiny import SOME, few, tiny_model

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
        ("abcdabcda", LookupOptions(length=10, complete=True), ""),  # nothing so long has been stated
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


@few(1)
@pytest.mark.parametrize(("ngram", "length"), [(2, 10), (3, 4), (1, 1)])
def test_every_step_keeps_what_transformers_keeps(ngram: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny_model("llama"))
    given = {"prompt_lookup_num_tokens": length, "max_matching_ngram_size": ngram}
    decoder = PromptLookup(target, LookupOptions(ngram, length))
    taus = [assert_same_steps(decoder, prompt, 60, monkeypatch, **given) for prompt in PROMPTS[:3]]
    assert max(taus) > 1.5
