"""Logits processors of the model's own generation configuration: the same for every method, as in `generate`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from specbench_ss.bench.sampled_tokens import _logits
from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.logits_processors import processors_of, settings_note
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.errors import UserError
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.models.load import load_target
from specbench_ss.models.tiny import tiny_tokenizer
from specbench_ss.runs.output_match import judge
from specbench_ss.runs.records import SampleRecord
from tests.tiny import METHODS, few, instances, thorough, tiny_model

PROMPT = [3, 5, 4, 3, 6, 2, 5, 3, 1, 4]
SETTINGS: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 3.0},
    {"repetition_penalty": 0.4, "suppress_tokens": [4]},
    {"bad_words_ids": [[2], [5], [3]], "min_new_tokens": 6},
)


def target_with(**settings: Any) -> Target:
    """Return a tiny target with these settings in its generation configuration; token 3 ends an output."""
    model = tiny_model("llama", 3, vocab=11)
    model.generation_config.update(eos_token_id=3, **settings)
    return Target(model, name="tiny with settings")


@pytest.mark.parametrize("settings", SETTINGS)
def test_ar_is_generate_of_transformers(settings: dict[str, Any]) -> None:
    target = target_with(**settings)
    expected = target.model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=24)[0, len(PROMPT) :]
    limits = StopParams(24, target.eos_ids)
    assert generate(Autoregressive(target), PROMPT, limits, SamplingParams()).tokens == expected.tolist()
    plain = Target(tiny_model("llama", 3, vocab=11))
    assert target.with_model(target.model, "").processors == target.processors
    assert generate(Autoregressive(plain), PROMPT, limits, SamplingParams()).tokens != expected.tolist()


@few(4)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_keeps_the_output_of_its_baseline(name: str) -> None:
    target = target_with(repetition_penalty=1.3, suppress_tokens=[4], min_new_tokens=5)
    for label, make in instances(name, target).items():
        decoder = make()
        if decoder.lossless and decoder.baseline_for(decoder.options).name == "ar":
            outputs = [
                generate(one, PROMPT, StopParams(20, target.eos_ids), SamplingParams()).tokens
                for one in (decoder, Autoregressive(target))
            ]
            assert outputs[0] == outputs[1], label


class Guesses(Decoder):
    """Draft a fixed tree with repeated tokens."""

    name, summary = "guesses", "fixed guesses"

    def max_tokens_per_step(self) -> int:
        return 5

    def propose(self, state: DecodeState) -> DraftTree:
        return DraftTree.from_parents([state.root, 1, 2, 1, 6], [-1, 0, 0, 1, 1])


@thorough
def test_sampled_tokens_follow_the_processed_distribution() -> None:
    target = target_with(repetition_penalty=2.0, suppress_tokens=[5])
    sampling, n, many = SamplingParams(1.3), 2, 1500
    counts = Counter(
        tuple(generate(Guesses(target), PROMPT, StopParams(n), SamplingParams(1.3, seed=seed)).tokens)
        for seed in range(many)
    )
    assert all(5 not in tokens for tokens in counts)
    expected = {tokens: many * _probability(target, tokens, sampling) for tokens in counts}
    often = [tokens for tokens in expected if expected[tokens] > 20]
    assert len(often) > 10
    chi = sum((counts[tokens] - expected[tokens]) ** 2 / expected[tokens] for tokens in often)
    assert chi < len(often) + 4 * (2 * len(often)) ** 0.5


def _probability(target: Target, tokens: tuple[int, ...], sampling: SamplingParams) -> float:
    """Return the probability of an output by single passes of the whole prompt, processed token by token."""
    total, ids = 1.0, list(PROMPT)
    for token in tokens:
        logits = target.next_logits(ids).float().clone()
        seen = torch.tensor(sorted({*ids}))
        logits[seen] = torch.where(logits[seen] < 0, logits[seen] * 2.0, logits[seen] / 2.0)
        logits[5] = -torch.inf
        total *= float(sampling.probs(logits)[token])
        ids.append(token)
    return total


def test_verdicts_apply_the_processors() -> None:
    target = target_with(repetition_penalty=3.0, suppress_tokens=[6])
    decoder, limits = Autoregressive(target), StopParams(12)
    output = generate(decoder, PROMPT, limits, SamplingParams()).tokens
    rows = [
        SampleRecord("q", 0, name, 0, "c", 0, 0, 0, "e", "s", "ok", token_ids=ids, finish="length")
        for name, ids in (("ar", output), ("m", [*output[:4], 6, *output[5:]]))
    ]
    match = judge(decoder, PROMPT, *rows)
    assert (match.verdict, match.first_difference) == ("mismatch", 4)
    parts = list(_logits(decoder, PROMPT, output, range(len(output))))
    assert torch.cat(parts).argmax(-1).tolist() == output


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": -1.0},
        {"repetition_penalty": float("nan")},
        {"bad_words_ids": [3]},
        {"suppress_tokens": "all"},
        {"min_new_tokens": {}, "repetition_penalty": "x"},
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="generation_config"):
        target_with(**settings)


@pytest.mark.parametrize("eos", [{}, "x", [1, None]])
def test_an_end_token_that_is_none_is_refused(eos: Any) -> None:
    model = tiny_model("llama", vocab=11)
    model.generation_config.eos_token_id = eos
    with pytest.raises(UserError, match="eos_token_id"):
        Target(model, name="m")


def test_the_note_names_what_is_applied_and_what_is_not() -> None:
    model = tiny_model("llama", vocab=11)
    model.generation_config.update(repetition_penalty=1.1, top_k=20, no_repeat_ngram_size=3, bad_words_ids=[[1, 2]])
    processors, others = processors_of(model, frozenset())
    assert processors is not None
    note = settings_note({"applied": processors.applied(), "not_applied": others})
    for text in (
        "repetition_penalty 1.1 applied",
        "top_k 20",
        "no_repeat_ngram_size 3",
        "bad_words_ids",
        "not applied",
    ):
        assert text in note
    assert settings_note({"applied": {}, "not_applied": {}}) == ""


def test_generation_config_none_applies_nothing(tmp_path: Path) -> None:
    model = target_with(repetition_penalty=1.5).model
    model.save_pretrained(tmp_path)
    tiny_tokenizer(model.config.vocab_size).save_pretrained(tmp_path)
    assert load_target(str(tmp_path), dtype="float32").processors is not None
    plain = load_target(str(tmp_path), dtype="float32", generation_config="none")
    assert plain.processors is None and 3 in plain.eos_ids
