"""transformers' assisted generation, reported what each of its steps keeps: what our own steps are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers.generation import candidate_generator

from specbench_ss.engine.decoder import Decoder
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams

GENERATORS = (candidate_generator.AssistedCandidateGenerator, candidate_generator.PromptLookupCandidateGenerator)


def assert_same_steps(
    decoder: Decoder, prompt: Sequence[int], new: int, monkeypatch: pytest.MonkeyPatch, **given: Any
) -> float:
    """Ours and `generate(**given)` keep as many tokens in every step; gives the tokens a step.

    Theirs drafts before the prompt is read, ours after the token that reading gives: theirs is given that token too.
    """
    ours = generate(decoder, prompt, StopParams(new), SamplingParams())
    kept: list[int] = []
    for generator in GENERATORS:
        monkeypatch.setattr(generator, "update_candidate_strategy", _counting(generator, kept))
    ids = torch.tensor([[*prompt, ours.tokens[0]]])
    out = decoder.target.model.generate(
        ids, max_new_tokens=new - 1, do_sample=False, eos_token_id=None, pad_token_id=0, **given
    )
    monkeypatch.undo()
    assert out[0, len(prompt) :].tolist() == ours.tokens
    assert kept == [step.tokens for step in ours.steps]
    assert ours.tokens_per_step is not None
    return ours.tokens_per_step


def _counting(generator: Any, kept: list[int]) -> Any:
    update = generator.update_candidate_strategy

    def counted(self: Any, ids: Any, scores: Any, matches: int) -> None:
        kept.append(int(matches) + 1)
        update(self, ids, scores, matches)

    return counted
