"""A model's own answers: the tokens that it states by itself, in one row with others or alone, cut off or not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lab.text import conversations
from lab.training import own_conversations
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.models.load import load_target
from specbench_ss.models.resolve import LAB
from specbench_ss.training import self_distill as own_module
from specbench_ss.training.data import TrainingText, load_rows
from specbench_ss.training.self_distill import GenerationOptions, ResponseCache, answer_batch
from tests.methods.train.test_data import documents, write
from tests.tiny import SOME, WHOLE, few, thorough, tiny_model

ASKED = [
    ["What is the capital of France?", "And of Spain?"],
    ["Add 3 and 4."],
    ["Write a short note about the weather in spring.", "Shorter.", "Shorter still."],
    ["Add 12 and 30."],
    ["Name a colour."],
]
LIMIT = 24


@cache
def lab() -> Target:
    return load_target(str(LAB / "base"), dtype="float32", device="cpu")


def load(folder: Path, how: ResponseCache, **more: Any) -> TrainingText:
    folder.mkdir(exist_ok=True)
    file = write(folder / "data.jsonl", [{"turns": turns} for turns in ASKED])
    settings = {"cache": folder / "cache", "log": lambda _: None, "eval_fraction": 0.0, **more}
    return load_rows(file, lab().tokenizer, 160, own=how, **settings)


def alone(turns: list[str]) -> list[int]:
    """The ids of a conversation in which the harness's own loop decodes every answer."""
    target, talk = lab(), list[dict[str, str]]()
    ids: list[int] = []
    for turn in turns:
        talk.append({"role": "user", "content": turn})
        prompt = target.encode_chat(talk)
        answer = generate(Autoregressive(target), prompt, StopParams(LIMIT, target.eos_ids), SamplingParams()).tokens
        ids = [*prompt, *answer]
        talk.append({"role": "assistant", "content": target.decode_text(answer)})
        if answer[-1] not in target.eos_ids:
            break
    return ids


@thorough
def test_greedy_answers_are_what_decoding_states(tmp_path: Path) -> None:
    rows = load(tmp_path, ResponseCache(lab(), LIMIT, batch=2)).train
    assert sorted(ids for ids, _ in documents(rows)) == sorted(tuple(alone(turns)) for turns in ASKED)
    stated = sum(int(mask[-1]) for _, mask in documents(rows))
    assert stated == len(ASKED)  # every document ends with what the model states


def test_answers_in_the_data_are_not_used(tmp_path: Path) -> None:
    target = lab()
    for answer in ("one", "another"):
        row = {"prompt": ASKED[1][0], "completion": answer}
        file = write(tmp_path / "data.jsonl", [row])
        text = load_rows(
            file, target.tokenizer, 160, own=ResponseCache(target, LIMIT), eval_fraction=0.0, cache=tmp_path,
            log=lambda _: None,
        )  # fmt: skip
        assert [ids for ids, _ in documents(text.train)] == [tuple(alone(ASKED[1]))]


def test_a_prompt_that_leaves_no_room_is_counted(tmp_path: Path) -> None:
    file = write(tmp_path / "data.jsonl", [{"prompt": "Hi?"}, {"prompt": "word " * 150}])
    rows = load_rows(
        file, lab().tokenizer, 160, own=ResponseCache(lab(), 80), eval_fraction=0.0, cache=tmp_path, log=lambda _: None
    ).train
    assert (rows.counts.documents, rows.counts.too_long) == (1, 1)
    with pytest.raises(UserError, match="answers of up to 160 tokens leave no room"):
        load(tmp_path, ResponseCache(lab(), 160))


@few(1)
@pytest.mark.parametrize("in_a_batch", [False, True])
def test_cut_off_it_goes_on_with_the_next_whole_batch(
    in_a_batch: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = ResponseCache(lab(), LIMIT, temperature=1.0, batch=3)  # places 0 and 3
    whole = load(tmp_path / "whole", how).train
    made = own_module.regenerate_responses

    def cut(*given: Any) -> Iterator[Any]:
        found = made(*given)
        yield next(found)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(own_module, "regenerate_responses", cut)
        load(tmp_path / "cut", how)
    (kept,) = (tmp_path / "cut" / "cache").glob("*.work/answers.jsonl")
    lines = kept.read_bytes().splitlines(keepends=True)
    assert len(lines) in (2, 3)
    kept.write_bytes(b"".join(lines[: len(lines) - in_a_batch]) + b'{"place": 0, "num')  # a line half written
    again: list[int] = []

    def counted(*given: Any) -> Iterator[Any]:
        for place, talks in made(*given):
            again.append(place)
            yield place, talks

    monkeypatch.setattr(own_module, "regenerate_responses", counted)
    rest = load(tmp_path / "cut", how).train
    place = json.loads(lines[0])["place"]
    assert sorted(again) == ([0, 3] if in_a_batch else [3 - place])
    assert np.array_equal(rest.ids, whole.ids) and np.array_equal(rest.mask, whole.mask)
    assert not list((tmp_path / "cut" / "cache").glob("*.work"))


@thorough
def test_temperature_and_seed_make_other_answers(tmp_path: Path) -> None:
    hot = ResponseCache(lab(), LIMIT, temperature=2.0)
    one, two = (load(tmp_path, hot, seed=seed).train for seed in (0, 1))
    greedy = load(tmp_path, ResponseCache(lab(), LIMIT)).train
    assert len({tuple(sorted(documents(rows))) for rows in (one, two, greedy)}) == 3
    assert sorted(documents(load(tmp_path / "b", hot).train)) == sorted(documents(one))


def test_alike_conversations_are_sampled_apart(tmp_path: Path) -> None:
    file = write(tmp_path / "data.jsonl", [{"turns": ASKED[2][:1]}] * 3)
    for batch in (1, 3):
        how = ResponseCache(lab(), LIMIT, temperature=2.0, batch=batch)
        text = load_rows(file, lab().tokenizer, 160, own=how, eval_fraction=0.0, cache=tmp_path, log=lambda _: None)
        assert len(set(documents(text.train))) == 3


# -- batches ------------------------------------------------------------------------------------------------------


def test_a_batch_states_what_each_prompt_would_alone() -> None:
    target = lab()
    prompts = [target.encode_chat([{"role": "user", "content": turns[0]}]) for turns in ASKED]
    how = GenerationOptions(target.eos_ids, LIMIT)
    alone_each = [answer_batch(target, [p], how)[0] for p in prompts]
    assert answer_batch(target, prompts, how) == alone_each


@few(2)
@pytest.mark.parametrize("kind", [*SOME, *WHOLE])
def test_every_architecture_answers_in_a_batch_as_alone(kind: str) -> None:
    """With prompts of any length, past a sliding window, and with answers that end early and leave the batch."""
    target = Target(tiny_model(kind, vocab=61))
    prompts = [[(7 * i + 3 * j) % 58 + 3 for j in range(length)] for i, length in enumerate((1, 14, 5, 22, 3, 9))]
    alone = [generate(Autoregressive(target), p, StopParams(30), SamplingParams()).tokens for p in prompts]
    for ends in (set(), {alone[0][3], alone[1][10], alone[2][1], alone[3][6]}):
        expected = [answer[: next((i for i, t in enumerate(answer, 1) if t in ends), 30)] for answer in alone]
        assert answer_batch(target, prompts, GenerationOptions(ends, 30)) == expected


def test_any_of_the_ends_ends_an_answer() -> None:
    target = lab()
    prompt = target.encode_chat([{"role": "user", "content": ASKED[2][0]}])
    (answer,) = answer_batch(target, [prompt], GenerationOptions(target.eos_ids, LIMIT))
    early = answer[5]
    (cut,) = answer_batch(target, [prompt], GenerationOptions({*target.eos_ids, early}, LIMIT))
    assert cut == answer[: answer.index(early) + 1]


def test_the_model_s_own_penalties_and_the_caller_s_random_numbers_are_left_alone() -> None:
    target = lab()
    prompt = target.encode_chat([{"role": "user", "content": ASKED[2][0]}])
    how = GenerationOptions(target.eos_ids, LIMIT)
    plain = answer_batch(target, [prompt], how)
    config = target.model.generation_config
    before = torch.random.get_rng_state()
    config.repetition_penalty = 5.0
    try:
        assert answer_batch(target, [prompt], how) == plain
        assert target.model.generation_config is config
    finally:
        config.repetition_penalty = None
    hot = GenerationOptions(target.eos_ids, LIMIT, temperature=2.0)
    assert answer_batch(target, [prompt], hot, (1, 2)) == answer_batch(target, [prompt], hot, (1, 2))
    assert answer_batch(target, [prompt], hot, (1, 2)) != answer_batch(target, [prompt], hot, (1, 3))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_lab_s_conversations_are_appended_token_by_token() -> None:
    target = lab()
    batches = list(own_conversations(target, conversations("train", 3), 6, batch=4, limit=12))
    assert sorted(map(len, batches)) == [2, 4]
    how = GenerationOptions(target.eos_ids, 12)
    marker = target.tokenizer.convert_tokens_to_ids("<|assistant|>")
    for ids in (talk.ids for batch in batches for talk in batch):
        last = len(ids) - ids[::-1].index(marker)
        assert answer_batch(target, [ids[:last]], how) == [ids[last:]]
