"""Two-model speculative decoding: exact whatever the draft, whose cache is what a fresh pass over the tokens gives."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch.overrides import TorchFunctionMode

from specbench_ss.engine.decoder import DecodeState
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.draft_vocabulary import DraftVocabulary
from specbench_ss.methods._shared.tree_growth import draw
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.sd.decode import TwoModel, TwoModelOptions, draft_chain, draft_path, random_draft
from specbench_ss.methods.sd.draft import Draft
from tests.methods.assisted import assert_same_steps
from tests.methods.exactness import p_value
from tests.tiny import SOME, few, thorough, tiny_model

PROMPTS = ([20, 4, 4, 4, 30, 12, 9, 8, 50, 41, 33, 22, 17, 60, 9], [3])
WHOLE = [i % 59 + 2 for i in range(127)]  # leaves room for one token


@pytest.fixture(scope="module", params=SOME)
def target(request: pytest.FixtureRequest) -> Target:
    return Target(tiny_model(request.param))


@pytest.fixture(scope="module")
def llama() -> Target:
    return Target(tiny_model("llama"))


def akin(target: Target, noise: float = 0.04) -> Target:
    """A draft that is often right."""
    model = copy.deepcopy(target.model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * noise)
    return Target(model)


def test_a_draft_that_is_the_target_is_always_right(target: Target) -> None:
    done = generate(TwoModel(target, TwoModelOptions(gamma=5), target), PROMPTS[0], StopParams(31), SamplingParams())
    assert [s.tokens for s in done.steps] == [6] * 5
    assert done.num_draft_forwards == 1 + 4 + 4 * 5  # the prompt; then every step but the first begins with what is new


@few(2)
@pytest.mark.parametrize("form", ["chain", "tree"])
def test_the_drafts_cache_is_that_of_a_fresh_pass(target: Target, form: Any) -> None:
    decoder = TwoModel(target, TwoModelOptions(form=form, gamma=3, k=3, nodes=0), akin(target, 0.1))
    drafted, keep, kept = decoder._draft_tree, decoder.draft.compact, []

    def watching(state: DecodeState, length: int) -> Any:
        fresh = decoder.draft.model.next_logits(state.ids)
        torch.testing.assert_close(decoder.logits, fresh, atol=1e-4, rtol=1e-4)
        return drafted(state, length)

    def keeping(start: int, rows: list[int]) -> None:
        kept.append(rows)
        keep(start, rows)

    decoder._draft_tree, decoder.draft.compact = watching, keeping  # type: ignore[method-assign]
    steps = generate(decoder, PROMPTS[0], StopParams(30), SamplingParams(1.2, seed=4)).steps
    assert len({s.accepted_tokens for s in steps}) > 1
    assert form == "chain" or any(rows != list(range(len(rows))) for rows in kept)  # some were moved


def test_levels_of_a_tree_are_passes_over_their_paths(target: Target) -> None:
    """Two children of the last token, each with a child; a prompt that is longer than a sliding window."""
    draft, prompt = Draft(target, DraftVocabulary(target.vocab_size)), PROMPTS[0]
    draft.reset(40)
    with torch.inference_mode():
        draft.feed(torch.tensor(prompt))
        eye = torch.eye(2, dtype=torch.bool)
        one = draft.feed_level(torch.tensor([5, 6]), eye, 1)
        two = draft.feed_level(torch.tensor([7, 8]), torch.cat((eye.flip(0), eye), 1), 2)  # 7 follows 6, 8 follows 5
    for logits, path in zip((*one, *two), ([5], [6], [6, 7], [5, 8]), strict=True):
        torch.testing.assert_close(logits, target.next_logits([*prompt, *path]), atol=1e-4, rtol=1e-4)


@thorough
def test_a_sampled_chain_has_one_distribution_for_each_token() -> None:
    draft: Any = SimpleNamespace(feed=lambda token: torch.arange(7.0), vocabulary=DraftVocabulary(7))
    state: Any = SimpleNamespace(rng=torch.Generator().manual_seed(0))
    tokens, probs = draft_chain(draft, torch.zeros(7), 3, 0.0, SamplingParams(temperature=1.0), state)
    assert tokens.shape == (3,) and probs is not None and probs.shape == (3, 7)


@thorough
def test_candidates_are_drawn_where_there_are_fewer_words_than_candidates() -> None:
    """The output is the target's all the same; what is drawn from many words the checks look at."""
    target = Target(tiny_model("llama", vocab=7, layers=2))
    options = TwoModelOptions(form="tree", gamma=2, k=3, candidates="drawn")
    decoder, sampling = TwoModel(target, options, random_draft(target, 128)), SamplingParams(1.3, top_k=2)
    assert sum(s.accepted_tokens for s in generate(decoder, [3, 4, 5], StopParams(60), sampling).steps) > 5
    assert p_value(decoder, [3, 4, 5], sampling, 300, 3) > 1e-3


def test_draws_without_replacement_are_in_the_order_of_drawing() -> None:
    rng, q = torch.Generator().manual_seed(0), torch.tensor([0.5, 0.3, 0.2, 0.0])
    pairs = Counter(tuple(draw(q, rng, 2).tolist()) for _ in range(4000))
    expected = {(i, j): 4000 * q[i] * q[j] / (1 - q[i]) for i in range(3) for j in range(3) if i != j}
    assert set(pairs) == set(expected)
    assert chisquare([pairs[t] for t in expected], [float(e) for e in expected.values()]).pvalue > 1e-3
    assert draw(torch.tensor([0.0, 1.0, 0.0]), rng, 3).tolist() == [1, 1, 1]  # nothing of no probability


@few(2)
@pytest.mark.parametrize(
    ("options", "schedule"),
    [
        (TwoModelOptions(gamma=4), "constant"),
        (TwoModelOptions(gamma=8, threshold=0.4), "constant"),
        (TwoModelOptions(gamma=3, schedule="heuristic"), "heuristic"),
    ],
)
def test_every_step_keeps_what_transformers_keeps(
    options: TwoModelOptions, schedule: str, llama: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = akin(llama, 0.015)
    for name, value in {
        "num_assistant_tokens": options.gamma,
        "num_assistant_tokens_schedule": schedule,
        "assistant_confidence_threshold": options.threshold,
    }.items():
        setattr(draft.model.generation_config, name, value)
    decoder = TwoModel(llama, options, draft)
    taus = [assert_same_steps(decoder, p, 40, monkeypatch, assistant_model=draft.model) for p in PROMPTS]
    assert max(taus) > 1.5 and min(taus) < 1 + options.gamma


class Waits(TorchFunctionMode):
    """Counts what would have to wait for a GPU."""

    names = (
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "item",
        "tolist",
        "cpu",
        "numpy",
        "nonzero",
        "multinomial",
    )

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in self.names
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("threshold", "waits"), [(0.0, 0), (1e-9, 3)])
def test_a_chain_of_fixed_length_never_waits_for_the_device(
    temperature: float, threshold: float, waits: int, llama: Target
) -> None:
    decoder = TwoModel(llama, TwoModelOptions(gamma=4, threshold=threshold), akin(llama))
    counts = []
    drafted = decoder._draft_tree

    def counting(state: DecodeState, length: int) -> Any:
        with Waits() as mode:
            tree = drafted(state, length)
        counts.append((len(tree), mode.count))
        return tree

    decoder._draft_tree = counting  # type: ignore[method-assign]
    generate(decoder, PROMPTS[0], StopParams(9), SamplingParams(temperature))
    assert set(counts) == {(5, waits)}


@pytest.mark.parametrize("width", [50, 70])
def test_embeddings_of_another_width(width: int, llama: Target) -> None:
    """Padded to more, or to fewer than the target's, which then has ids that the draft does not have."""
    draft = Target(tiny_model("qwen2", seed=3, vocab=width))
    fed = Draft(draft, DraftVocabulary(61))
    fed.reset(8)
    with torch.inference_mode():
        logits = fed.feed(torch.tensor([3, 60]))
    assert logits.shape == (61,)
    torch.testing.assert_close(logits[: min(width, 61)], draft.next_logits([3, min(60, width - 1)])[:61])
    assert bool((logits[width:] == -torch.inf).all())
    decoder = TwoModel(llama, TwoModelOptions(), random_draft(llama, 128))
    decoder.draft = fed
    expected = generate(Autoregressive(llama), PROMPTS[0], StopParams(20), SamplingParams()).tokens
    assert generate(decoder, PROMPTS[0], StopParams(20), SamplingParams()).tokens == expected
    generate(decoder, PROMPTS[0], StopParams(20), SamplingParams(1.0, top_k=70))


def test_a_fetched_model_is_a_draft_model_by_its_name(
    llama: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSBENCH_CACHE", str(tmp_path))
    options = TwoModelOptions(weights="qwen2.5-coder-0.5b")
    with pytest.raises(UserError, match="not fetched"):
        draft_path(options, llama)
    folder = tmp_path / "models" / options.weights
    folder.mkdir(parents=True)
    assert draft_path(options, llama) == folder
