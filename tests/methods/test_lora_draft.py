"""A LoRA in the draft of `sd`: merged it says what peft says, decoding stays exact, and what does not fit is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from specbench_ss.benchmark import preflight
from specbench_ss.decoding.loop import Limits, generate
from specbench_ss.decoding.sampling import Sampling
from specbench_ss.decoding.target import Target
from specbench_ss.errors import UserError
from specbench_ss.method_spec import MethodSpec
from specbench_ss.methods._shared.lora import ADAPTER_CONFIG, lora_parameters, save_lora
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.sd.decoding import TwoModel
from specbench_ss.methods.sd.options import TwoModelOptions
from specbench_ss.methods.sd.training import TunedDraft
from specbench_ss.models.drafter_folder import belongs_to, write_config
from specbench_ss.models.loading import load_target
from specbench_ss.models.model_folder import LAB
from specbench_ss.runs.config import RunConfig
from specbench_ss.suites.lab_text.catalog import APP_CATEGORIES, questions
from specbench_ss.suites.lab_text.training_text import APP_WEIGHTS, conversations
from specbench_ss.training.batches import Batch, future_labels, pick_anchors
from specbench_ss.training.trainee import BaseStates
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def draft() -> Target:
    return load_target(str(LAB / "draft"), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def lab_target() -> Target:
    return load_target("lab", dtype="float32", device="cpu")


@pytest.fixture
def lora(draft: Target, tmp_path: Path) -> Iterator[Path]:
    """The folder of a random LoRA of the lab's draft."""
    tuned, folder = TunedDraft(draft, 4, 1e-3), tmp_path / "tuned"
    generator = torch.Generator().manual_seed(0)
    for p in lora_parameters(tuned.module):
        p.data = torch.randn(p.shape, generator=generator).mul(0.05).half().float()
    folder.mkdir()
    write_config(folder, {**belongs_to(draft), "trained": {"tokens": 77}})
    save_lora(folder, tuned.tuned)
    said = tuned.module(torch.tensor([[1, 5, 9, 30]])).logits
    torch.save(said.detach(), tmp_path / "said.pt")
    yield folder


def options(folder: Path) -> TwoModelOptions:
    return TwoModelOptions(weights=str(folder))


def test_the_draft_that_came_with_the_model_has_the_lora(lora: Path, lab_target: Target) -> None:
    preflight.check_methods(RunConfig((MethodSpec("sd", {"weights": str(lora)}),)))
    tuned, plain = TwoModel.load(lab_target, options(lora)), TwoModel.load(lab_target, TwoModelOptions())
    said = tuned.draft.model.model(torch.tensor([[1, 5, 9, 30]])).logits
    assert torch.allclose(said, torch.load(lora.parent / "said.pt"), atol=1e-4)
    assert not torch.allclose(said, plain.draft.model.model(torch.tensor([[1, 5, 9, 30]])).logits, atol=0.1)
    assert tuned.learnt == {"tokens": 77}
    assert tuned.described()["draft_parameters"] == plain.described()["draft_parameters"]
    assert tuned.described()["draft_hash"] != plain.described()["draft_hash"]
    prompt = lab_target.encode_chat([{"role": "user", "content": "Tell me the capital of France."}])
    expected = generate(Autoregressive(lab_target), prompt, Limits(24), Sampling())
    assert generate(tuned, prompt, Limits(24), Sampling()).tokens == expected.tokens


def test_a_lora_that_does_not_fit_is_told(lora: Path, lab_target: Target) -> None:
    alone = Target(tiny_model("llama"), name="alone")
    with pytest.raises(UserError, match="holds a LoRA that names no model, and no draft came with 'alone'"):
        TwoModel.check(options(lora), alone)
    config = json.loads((lora / "config.json").read_text())
    write_config(lora, {**config, "base_hash": "0" * 16})
    with pytest.raises(UserError, match="was trained for another base"):
        TwoModel.load(lab_target, options(lora))
    (lora / "adapter_model.safetensors").write_bytes(b"x" * 64)
    with pytest.raises(UserError, match="cannot read weights"):
        TwoModel.check(options(lora), lab_target)
    (lora / "config.json").unlink()
    with pytest.raises(UserError, match="no config.json"):
        TwoModel.check(options(lora), lab_target)


def test_a_lora_that_names_its_model_is_loaded_as_that_model(lora: Path, lab_target: Target) -> None:
    config = json.loads((lora / ADAPTER_CONFIG).read_text())
    (lora / ADAPTER_CONFIG).write_text(json.dumps({**config, "base_model_name_or_path": str(LAB / "draft")}))
    (lora / "config.json").unlink()
    for file in (LAB / "draft").glob("tokenizer*"):
        (lora / file.name).write_bytes(file.read_bytes())
    said = TwoModel.load(lab_target, options(lora)).draft.model.model(torch.tensor([[1, 5, 9, 30]])).logits
    assert torch.allclose(said, torch.load(lora.parent / "said.pt"), atol=1e-4)


def test_the_lora_alone_learns_and_answers_alone_are_learnt(draft: Target) -> None:
    tuned = TunedDraft(draft, 4, 1e-3)
    (group,) = tuned.parameter_groups()
    trained = {id(p) for p in tuned.module.parameters() if p.requires_grad}
    assert trained == {id(p) for p in group["params"]}
    ids = torch.tensor([[1, 3, 9, 4, 7, 8, 2, 0]])
    answer = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 0]]).bool().numpy()
    labels = future_labels(ids.numpy(), answer, 2, 1)
    batch = Batch(ids, torch.from_numpy(labels), pick_anchors(labels, 4, np.random.default_rng(0)))
    loss, _ = tuned.loss(BaseStates(torch.empty(0), {}, {}), batch)
    expected = torch.nn.functional.cross_entropy(draft.model(ids).logits[0, 3:6], ids[0, 4:7])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


def test_it_learns_of_the_applications_and_of_no_question_that_is_asked() -> None:
    learnt = list(islice(conversations("train", 6, APP_WEIGHTS), 400))
    assert {e.category for e in learnt} == set(APP_CATEGORIES)
    asked = {q.turns[0] for q in questions(APP_CATEGORIES, "eval", 80)}
    assert not asked & {e.turns[0] for e in learnt}
