"""Pairs of models: whether they speak of the same tokens, and drafts through text where they do not."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lab.text import SPECBENCH_CATEGORIES, questions
from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.decoder import Generation
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.sd.decode import Retokenizer, TwoModel, TwoModelOptions, added_text, append_text, encode_after
from specbench_ss.methods.sd.draft import mismatch
from specbench_ss.models.checkpoint import find_drafter
from specbench_ss.models.load import load_model_info
from specbench_ss.models.resolve import LAB
from tests.methods.train.tokenizers_made import made_tokenizer
from tests.tiny import few, thorough, tiny_model

QUESTION = "What is 12 + 30? Explain it in one sentence."


def shuffled(source: Path, out: Path) -> Path:
    """The same model with other ids for the same tokens: those that are not special in reverse."""
    shutil.copytree(source, out)
    tokenizer = json.loads((out / "tokenizer.json").read_text())
    special = {t["id"] for t in tokenizer["added_tokens"]}
    usual = [i for i in tokenizer["model"]["vocab"].values() if i not in special]
    new = {i: i for i in special} | dict(zip(sorted(usual), sorted(usual, reverse=True), strict=True))
    tokenizer["model"]["vocab"] = {token: new[i] for token, i in tokenizer["model"]["vocab"].items()}
    (out / "tokenizer.json").write_text(json.dumps(tokenizer))
    order = torch.tensor(sorted(new, key=lambda i: new[i]))
    tensors = load_file(out / "model.safetensors")
    rows = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = torch.cat((rows[order], rows[len(order) :]))
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shuffled(LAB / "draft", tmp_path_factory.mktemp("draft") / "shuffled")


def answer(decoder: Any, sampling: SamplingParams | None = None, new: int = 40) -> Any:
    prompt = decoder.target.encode_chat([{"role": "user", "content": QUESTION}])
    return generate(decoder, prompt, StopParams(new, decoder.target.eos_ids), sampling or SamplingParams())


@thorough
def test_a_draft_through_text_is_about_as_good_as_one_of_the_same_vocabulary(lab: Target, other: Path) -> None:
    """Pooled over texts without markers of who speaks: those are special tokens, which text does not carry."""
    direct = TwoModel.load(lab, TwoModelOptions())
    through = TwoModel.load(lab, TwoModelOptions(weights=str(other), retokenise=True))
    assert answer(direct).tokens == answer(through).tokens == answer(Autoregressive(lab)).tokens
    made: dict[Any, list[Generation]] = {direct: [], through: []}
    for question in questions(SPECBENCH_CATEGORIES, "calibration", 1):
        prompt = lab.tokenizer(question.turns[0], add_special_tokens=False)["input_ids"]
        for decoder, runs in made.items():
            runs.append(generate(decoder, prompt, StopParams(40, lab.eos_ids), SamplingParams()))
        assert made[direct][-1].tokens == made[through][-1].tokens
    one, two = (
        sum(s.tokens for r in runs for s in r.steps) / sum(len(r.steps) for r in runs) for runs in made.values()
    )
    assert one > 1.5
    assert two > 0.85 * one
    calls = [sum(r.num_draft_forwards for r in runs) for runs in made.values()]
    assert calls[1] < 1.3 * calls[0]  # nothing is read twice but the end of what is cut again
    assert through.metadata()["retokenised"] and not direct.metadata()["retokenised"]
    assert (
        answer(through, SamplingParams(0.8, seed=5), 8).tokens == answer(through, SamplingParams(0.8, seed=5), 8).tokens
    )


def test_the_draft_reads_what_reading_everything_again_would_give(lab: Target, other: Path) -> None:
    through = TwoModel.load(lab, TwoModelOptions(weights=str(other), retokenise=True, gamma=3))
    drafted, seen = through._draft_tree, 0

    def watching(state: Any, length: int) -> Any:
        nonlocal seen
        seen += 1
        assert through.retokenizer is not None
        text = lab.tokenizer.decode(state.ids, skip_special_tokens=True)
        assert through.draft.model.tokenizer.decode(through.retokenizer.ids, skip_special_tokens=True) == text
        fresh = through.draft.model.next_logits(through.retokenizer.ids)
        torch.testing.assert_close(through.logits, fresh, atol=2e-3, rtol=2e-3)
        return drafted(state, length)

    through._draft_tree = watching  # type: ignore[method-assign]
    answer(through, new=16)
    assert seen > 3


@few(1)
@pytest.mark.parametrize("kinds", [("gpt", "llama"), ("llama", "gpt"), ("gpt", "gpt")])
def test_greedy_equals_autoregressive_through_text(kinds: tuple[str, str]) -> None:
    """Random models state random bytes, characters cut in two among them."""
    tokenizers = [made_tokenizer(kind, "plain") for kind in kinds]
    target, draft = (Target(tiny_model("llama", seed=i, vocab=len(t)), t) for i, t in enumerate(tokenizers))
    options = TwoModelOptions(retokenise=True, gamma=3)
    decoder = TwoModel(target, options, draft)
    assert (decoder.retokenizer is None) == (kinds[0] == kinds[1])
    for prompt in (target.tokenizer("the sum of 12 and 30 is").input_ids, [5], list(range(10, 120))):
        expected = generate(Autoregressive(target), prompt, StopParams(24), SamplingParams()).tokens
        assert generate(decoder, prompt, StopParams(24), SamplingParams()).tokens == expected


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_new_text_is_cut_as_the_whole_would_be(kind: str) -> None:
    tokenizer = made_tokenizer(kind, "plain")
    whole = tokenizer("The answer has two lines and a curious user").input_ids
    for at in range(4, len(whole) - 1):
        before, after = whole[:at], whole[at:]
        text = added_text(tokenizer, before[-3:], after)
        assert encode_after(tokenizer, before[-3:], text) == after
        assert append_text(tokenizer, before, text, 3) == whole


def test_a_word_that_was_cut_is_mended_when_it_goes_on() -> None:
    tokenizer = made_tokenizer("gpt", "plain")
    whole = tokenizer("The answer").input_ids
    cut = tokenizer("The ans").input_ids
    assert cut != whole[: len(cut)]
    assert append_text(tokenizer, cut, "wer", 10) == whole


def test_half_a_character_is_waited_for() -> None:
    tokenizer = made_tokenizer("gpt", "plain")
    retokenizer = Retokenizer(tokenizer, tokenizer, 10)
    ids = tokenizer("a é b").input_ids
    cut = next(i for i in range(1, len(ids)) if tokenizer.decode(ids[:i]).endswith("\ufffd"))
    assert retokenizer.append(ids[: cut - 1]) and not retokenizer.append(ids[:cut])
    assert retokenizer.append(ids) and tokenizer.decode(retokenizer.ids) == "a é b"


def test_vocabularies_are_compared_by_what_they_state(lab: Target, other: Path) -> None:
    assert mismatch(lab, load_model_info(str(LAB / "draft"))) == ""
    usual = lab.vocab_size - len(lab.tokenizer.all_special_ids)
    stated = mismatch(lab, load_model_info(str(other)))
    assert stated.startswith(f"{usual // 2 * 2} ids have other tokens, id ")
    wider = load_model_info(str(LAB / "draft"))
    wider.vocab_size += 64
    assert mismatch(lab, wider) == ""
    renamed = copy.deepcopy(lab.tokenizer)
    renamed.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    wider.tokenizer = copy.deepcopy(lab.tokenizer)
    wider.tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})  # the same id, in no prompt
    assert renamed.get_vocab()["<tool>"] == wider.tokenizer.get_vocab()["<image>"]
    config = copy.deepcopy(lab.config)
    config.vocab_size += 64
    assert mismatch(ModelInfo(config, renamed, "renamed"), wider) == ""
    renamed.chat_template = "<tool>" + renamed.chat_template
    assert "'<image>', not '<tool>'" in mismatch(ModelInfo(config, renamed, "renamed"), wider)
    wider.tokenizer = None
    assert mismatch(lab, wider) == f"{lab.vocab_size + 64} tokens, the model has {lab.vocab_size}"


def test_pairs_that_do_not_fit_are_one_line_before_anything_is_loaded(lab: Target, other: Path, tmp_path: Path) -> None:
    def reported(options: TwoModelOptions, base: Any = lab) -> str:
        with pytest.raises(UserError) as refused:
            TwoModel.check(options, base)
        assert "\n" not in str(refused.value)
        return str(refused.value)

    wrong = reported(TwoModelOptions(weights=str(other)))
    assert f"sd: the draft {str(other)!r} has another vocabulary: " in wrong and "--set sd.retokenise=on" in wrong
    TwoModel.check(TwoModelOptions(weights=str(other), retokenise=True), lab)
    TwoModel.check(TwoModelOptions(), lab)
    TwoModel.check(TwoModelOptions(weights=str(LAB / "base")), lab)  # its own draft
    assert "no such file or folder" in reported(TwoModelOptions(weights="./nowhere"))
    assert reported(TwoModelOptions(weights=str(tmp_path))).startswith("sd: the draft: ")
    assert "--set sd.weights=PATH" in reported(TwoModelOptions(), Target(tiny_model("llama")))
    assert "k must be at most 4000, the size" in reported(
        TwoModelOptions(form="tree", gamma=1, k=4095), outline(lab, 4000)
    )


def outline(like: Target, size: int) -> Any:
    """The target's, with fewer tokens."""
    found = load_model_info("lab")
    found.vocab_size = size
    return found


def test_a_draft_that_ships_is_found_by_its_name(lab: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to the lab alone, and a folder of that name that lies here comes first."""
    monkeypatch.chdir(tmp_path)
    assert find_drafter("draft", "sd", lab) == LAB / "draft"
    with pytest.raises(UserError, match="no such file or folder: drift"):
        find_drafter("drift", "sd", lab)
    with pytest.raises(UserError, match="no such file or folder: draft"):
        find_drafter("draft", "sd", Target(tiny_model("llama")))
    (tmp_path / "draft").mkdir()
    assert find_drafter("draft", "sd", lab) == Path("draft")
