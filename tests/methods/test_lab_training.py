"""The lab trains from nothing: every stage in small, resumable, and what comes out loads and decodes losslessly."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lab import cards
from lab.drafters import OWN_ANSWERS, RECIPES
from lab.pipeline import ANSWERED_SEED, STAGES, train
from lab.text import APP_CATEGORIES, conversations
from lab.training import SIZES, BaseSize, BaseTrainer, completion_mask, new_model, special_ids
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.errors import UserError
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.eagle.decode import Eagle, Eagle2, Eagle3
from specbench_ss.methods.medusa.decode import Medusa, MedusaOptions
from specbench_ss.methods.rest.datastore import SEPARATOR, open_datastore
from specbench_ss.methods.ss.config import SSOptions
from specbench_ss.methods.ss.decode import SpeculativeStreaming
from specbench_ss.models.load import load_target
from specbench_ss.options import MethodSpec
from specbench_ss.registry import load_method
from specbench_ss.training.batch import future_labels, pick_anchors
from tests.tiny import thorough

SPECIAL = {"pad": 0, "bos": 1, "eos": 2, "user": 3, "assistant": 4}


SCALE = 0.001  # of every budget
# learns enough in 24 steps to state something else than the token before, which drafters then learn
TINY = BaseSize(
    hidden=32, layers=4, heads=2, kv_heads=1, ffn=64, vocab=512, context=512, tokens=int(10_000 / SCALE),
    rows_per_step=2, row_length=256, lr=0.1,
)  # fmt: skip


@pytest.fixture
def tiny_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lab with 50,000 parameters in place of 6.6 million, measured on two categories: every stage takes seconds."""
    monkeypatch.setitem(SIZES, "s", TINY)
    monkeypatch.setitem(SIZES, "draft", replace(TINY, layers=2, tokens=1))
    for name in ("eagle3", "peagle"):
        monkeypatch.setitem(RECIPES[name].options, "draft_vocab", 128)
    monkeypatch.setattr(cards, "SPECBENCH_CATEGORIES", ("qa", "math"))
    monkeypatch.setattr(cards, "APP_CATEGORIES", ("sql",))


@thorough
def test_every_stage_in_small_and_nothing_twice(tmp_path: Path, tiny_lab: None) -> None:
    stated: list[str] = []
    train(tmp_path, device="cpu", budget_scale=SCALE, log=stated.append)
    assert not [line for line in stated if " loss 0.000" in line]  # there was something to learn
    target = load_target(str(tmp_path / "export" / "base"), dtype="float32", device="cpu")
    assert target.is_lab
    prompt = target.encode_chat([{"role": "user", "content": "Tell me the capital of France."}])
    reference = generate(Autoregressive(target), prompt, StopParams(20), SamplingParams()).tokens
    rivals = [method.load(target, method.Options()) for method in (Eagle, Eagle2, Eagle3)]
    for decoder in (Medusa.load(target, MedusaOptions()), SpeculativeStreaming.load(target, SSOptions()), *rivals):
        assert generate(decoder, prompt, StopParams(20), SamplingParams()).tokens == reference
    cards = [tmp_path / "export" / name / "README.md" for name in ("base", "draft", "medusa", "ss", "eagle", "eagle3")]
    assert all(card.stat().st_size for card in cards)
    one_budget_no_lm_heads(tmp_path / "export")
    of_the_applications(tmp_path / "export", target.tokenizer)
    as_the_papers_train_them(tmp_path / "export")
    tuned = load_method(MethodSpec.parse("sd[weights=draft-apps]"), target)
    assert generate(tuned, prompt, StopParams(20), SamplingParams()).tokens == reference
    assert "with this LoRA" in (tmp_path / "export" / "draft-apps" / "README.md").read_text()
    learnt = torch.load(tmp_path / "ss" / "checkpoint.pt", weights_only=True)["modules"][0]
    for name, tensor in load_file(tmp_path / "export" / "ss" / "model.safetensors").items():
        assert torch.equal(tensor, learnt[name].half()), f"{name} is not what was learnt"
    stated.clear()
    train(tmp_path, device="cpu", budget_scale=SCALE, log=stated.append)
    assert stated == [f"{stage}: done before" for stage in STAGES]
    stated.clear()
    files = [p for p in tmp_path.rglob("*") if p.is_file() and tmp_path / "draft" not in p.parents]
    others = {path: path.read_bytes() for path in files}
    (tmp_path / "draft" / "model" / "model.safetensors").unlink()
    train(tmp_path, stages=("draft",), device="cpu", budget_scale=SCALE, log=stated.append)
    assert (tmp_path / "draft" / "model" / "model.safetensors").exists()
    assert stated[0].startswith("draft: done before, run again")
    assert all(line.startswith("draft step") for line in stated[1:])  # on the rows that were there
    assert {path: path.read_bytes() for path in others} == others


def one_budget_no_lm_heads(export: Path) -> None:
    """All that learn from the base's answers saw as much of them, the small draft too; heads use the base's LM head."""
    alike = [name for name, recipe in RECIPES.items() if recipe.course is OWN_ANSWERS]
    configs = [json.loads((export / name / "config.json").read_text()) for name in alike]
    trained = [config.get("ssbench", config)["trained"] for config in configs]
    assert len({(t["steps"], t["tokens"]) for t in trained}) == 1
    assert 0 < trained[0]["tokens"] < 2 * 5 * TINY.row_length  # rows have padding
    names = [*load_file(export / "medusa" / "medusa_lm_head.safetensors")]
    names += load_file(export / "hydra" / "hydra_lm_head.safetensors")
    assert names and not [name for name in names if "unembed" in name or "lm_head" in name]


def as_the_papers_train_them(export: Path) -> None:
    """Eq. 3, eq. 1 and next tokens alone: each in its folder, of the same files and steps, and another LoRA."""
    names = ("ss-shared", "ss-shared-eq1", "next-token")
    configs = [json.loads((export / name / "config.json").read_text()) for name in names]
    assert [(c["streams"]["main_attends_streams"], c["trained"]["alpha_j"]) for c in configs] == [
        (True, 0.1), (False, 0.1), (False, 0.0),
    ]  # fmt: skip
    assert len({c["trained"]["steps"] for c in configs}) == 1
    files = [{p.name for p in (export / name).iterdir()} for name in names]
    assert files[0] == files[1] == files[2]
    assert len({(export / name / "adapter_model.safetensors").read_bytes() for name in names}) == 3
    assert (export / "ss-shared-eq1" / "README.md").stat().st_size


def of_the_applications(out: Path, tokenizer: Any) -> None:
    """Questions in the datastore of `rest` are from the applications' generators only."""
    asked = list(islice(conversations("train", ANSWERED_SEED), 64))
    prompts = tokenizer([f"<|bos|><|user|>{example.turns[0]}<|assistant|>" for example in asked])["input_ids"]
    category = {np.int32(ids).tobytes(): example.category for ids, example in zip(prompts, asked, strict=True)}
    stored = open_datastore(out / "rest").chunks[0].tokens
    talks = [part[part != SEPARATOR] for part in np.split(stored, np.flatnonzero(stored == SEPARATOR))]
    marker = special_ids(tokenizer)["assistant"]
    known = [category[talk[: 1 + int(np.argmax(talk == marker))].tobytes()] for talk in talks if len(talk)]
    assert len(known) > 1 and set(known) <= set(APP_CATEGORIES)


def test_a_resumed_base_is_the_uninterrupted_one(tmp_path: Path) -> None:
    size = replace(SIZES["draft"], hidden=32, ffn=32, vocab=64, rows_per_step=2, row_length=16)
    rng = np.random.default_rng(0)
    rows = rng.integers(5, 64, (12, 16)).astype(np.int32)
    rows[:, 3], rows[:, -1] = 4, 2

    def trainer(folder: str) -> BaseTrainer:
        return BaseTrainer(new_model(size, SPECIAL, 0), size, rows, SPECIAL, "cpu", tmp_path / folder)

    whole = trainer("whole")
    whole.train(lambda _: None, save_every=2)
    cut = trainer("cut")
    for _ in range(3):  # killed one step after the checkpoint at step 2
        cut.advance()
        if cut.step == 2:
            cut.save()
    again = trainer("cut")
    assert again.step == 2
    again.train(lambda _: None, save_every=2)
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(UserError, match="made with layers 2, not 3"):
        deeper = replace(size, layers=3)
        BaseTrainer(new_model(deeper, SPECIAL, 0), deeper, rows, SPECIAL, "cpu", tmp_path / "cut")
    with pytest.raises(UserError, match="made with text"):
        BaseTrainer(new_model(size, SPECIAL, 0), size, rows[::-1], SPECIAL, "cpu", tmp_path / "cut")


def test_answers_are_masked_from_after_the_marker_to_the_end_token() -> None:
    row = np.array([1, 3, 9, 4, 7, 8, 2, 3, 9, 4, 6, 2, 1, 3, 4, 5, 0])
    assert completion_mask(row, SPECIAL).astype(int).tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 1, 0]
    unfinished = np.array([1, 3, 9, 4, 7, 8, 1, 3, 9, 4, 6, 2, 0, 0])
    assert completion_mask(unfinished, SPECIAL).astype(int).tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0]


def test_anchor_labels_stay_inside_one_answer() -> None:
    row = np.array([[1, 3, 9, 4, 7, 8, 2, 1, 3, 4, 6, 5, 7, 2]])
    answer = completion_mask(row, SPECIAL)
    anchors = pick_anchors(future_labels(row.astype(np.int64), answer, 3), 20, np.random.default_rng(0))
    labels = {
        int(t): anchors.labels[0, i].tolist() for i, t in enumerate(anchors.at[0]) if anchors.labels[0, i, 0] != -100
    }
    assert labels == {
        3: [7, 8, 2, -100], 4: [8, 2, -100, -100], 9: [6, 5, 7, 2], 10: [5, 7, 2, -100], 11: [7, 2, -100, -100],
    }  # fmt: skip
