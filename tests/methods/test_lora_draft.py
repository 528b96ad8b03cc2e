"""A LoRA in the draft of `sd`: merged it states what peft states, decoding stays exact, and what does not fit is
reported."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lab.text import APP_CATEGORIES, APP_WEIGHTS, conversations, questions
from specbench_ss.bench import preflight
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.fine_tuned import ADAPTER, ADAPTER_CONFIG, lora_parameters, save_lora
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.sd.decode import TwoModel, TwoModelOptions
from specbench_ss.methods.sd.train import TunedDraft
from specbench_ss.models import resolve
from specbench_ss.models.checkpoint import belongs_to, write_config
from specbench_ss.models.load import load_target
from specbench_ss.models.resolve import LAB
from specbench_ss.options import MethodSpec
from specbench_ss.runs.config import RunConfig
from specbench_ss.training.batch import BaseStates, Batch, future_labels, pick_anchors
from tests.cli import failing
from tests.tiny import few, thorough, tiny_model


@pytest.fixture(scope="module")
def draft() -> Target:
    return load_target(str(LAB / "draft"), dtype="float32", device="cpu")


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
    stated = tuned.module(torch.tensor([[1, 5, 9, 30]])).logits
    torch.save(stated.detach(), tmp_path / "said.pt")
    yield folder


def options(folder: Path) -> TwoModelOptions:
    return TwoModelOptions(weights=str(folder))


@thorough
def test_the_draft_that_came_with_the_model_has_the_lora(lora: Path, lab: Target) -> None:
    preflight.check_methods(RunConfig((MethodSpec("sd", {"weights": str(lora)}),)))
    tuned, plain = TwoModel.load(lab, options(lora)), TwoModel.load(lab, TwoModelOptions())
    stated = tuned.draft.model.model(torch.tensor([[1, 5, 9, 30]])).logits
    assert torch.allclose(stated, torch.load(lora.parent / "said.pt"), atol=1e-4)
    assert not torch.allclose(stated, plain.draft.model.model(torch.tensor([[1, 5, 9, 30]])).logits, atol=0.1)
    assert tuned.training_info == {"tokens": 77}
    assert tuned.metadata()["draft_parameters"] == plain.metadata()["draft_parameters"]
    assert tuned.metadata()["draft_hash"] != plain.metadata()["draft_hash"]
    prompt = lab.encode_chat([{"role": "user", "content": "Tell me the capital of France."}])
    expected = generate(Autoregressive(lab), prompt, StopParams(24), SamplingParams())
    assert generate(tuned, prompt, StopParams(24), SamplingParams()).tokens == expected.tokens


def test_a_lora_that_does_not_fit_is_reported(lora: Path, lab: Target) -> None:
    alone = Target(tiny_model("llama"), name="alone")
    with pytest.raises(UserError, match="has a LoRA that names no model, and 'alone' has no bundled draft"):
        TwoModel.check(options(lora), alone)
    config = json.loads((lora / "config.json").read_text())
    write_config(lora, {**config, "base_hash": "0" * 16, "base_vectors_hash": "0" * 16})
    with pytest.raises(UserError, match="was trained for another draft"):
        TwoModel.load(lab, options(lora))


def stated_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The line that a dry run ends with."""
    line = failing(["run", "--methods", f"sd[weights={folder}]", "--dry-run", "--device", "cpu"], capsys)
    assert line.startswith("ssbench: sd: ") and "Traceback" not in line
    return line


def state(lora: Path, **changed: Any) -> None:
    """Change what the LoRA's configuration states."""
    config = json.loads((lora / ADAPTER_CONFIG).read_text())
    (lora / ADAPTER_CONFIG).write_text(json.dumps({**config, **changed}))


def rewrite(lora: Path, change: Callable[[str, torch.Tensor], tuple[str, torch.Tensor] | None]) -> None:
    """Change or leave out the LoRA's tensors."""
    pairs = [change(name, tensor) for name, tensor in load_file(lora / ADAPTER).items()]
    (lora / ADAPTER).unlink()
    save_file({pair[0]: pair[1].contiguous() for pair in pairs if pair}, lora / ADAPTER)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no configuration": (lambda lora: (lora / ADAPTER_CONFIG).unlink(), "without adapter_config.json"),
    "broken JSON": (lambda lora: (lora / ADAPTER_CONFIG).write_text("{r"), "cannot read .*adapter_config.json"),
    "no object": (lambda lora: (lora / ADAPTER_CONFIG).write_text("[]"), "adapter_config.json is not a JSON object"),
    "nothing said": (lambda lora: (lora / ADAPTER_CONFIG).write_text("{}"), "has another peft_type"),
    "another kind": (lambda lora: state(lora, peft_type="IA3"), "has another peft_type"),
    "another rank": (lambda lora: state(lora, r=3), "has rank 4, but .* has r = 3"),
    "no rank": (lambda lora: state(lora, r="x"), "has rank 4, but .* has r = 'x'"),
    "another width": (
        lambda lora: rewrite(lora, lambda k, t: (k, t[:, :-1] if "lora_A" in k else t)), "weights; the model has"
    ),
    "a half": (lambda lora: rewrite(lora, lambda k, t: None if k.endswith("0.mlp.up_proj.lora_B.weight") else (k, t)),
               "is damaged: it lacks .*up_proj.lora_B.weight"),
    "a pair of two ranks": (
        lambda lora: rewrite(lora, lambda k, t: (k, t[:, :-1] if "lora_B" in k else t)), "mismatching shapes"
    ),
    "another architecture": (
        lambda lora: rewrite(lora, lambda k, t: (k.replace("model.layers", "transformer.h"), t)),
        "adapts transformer.h.* which the model does not have",
    ),
    "no weights": (lambda lora: (lora / ADAPTER).unlink(), "no weight file"),
    "cut weights": (lambda lora: os.truncate(lora / ADAPTER, 5000), "cannot read weights"),
    "no config.json": (lambda lora: (lora / "config.json").unlink(), "no config.json"),
    "a model that is nowhere": (
        lambda lora: state(lora, base_model_name_or_path="/no/such/model"),
        "is for '/no/such/model'.*: '/no/such/model' is neither a local folder nor a valid hub id",
    ),
    "a larger model": (
        lambda lora: state(lora, base_model_name_or_path=str(LAB / "base")),
        "is for .* .adapter_config.json.* weights; the model has",
    ),
    "no name": (lambda lora: state(lora, base_model_name_or_path=["a"]), "lacks base_model_name_or_path"),
}  # fmt: skip


@few(6)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_or_wrong_lora_is_reported_before_a_model_is_loaded(
    damage: str, lora: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harm, words = DAMAGE[damage]
    harm(lora)
    assert re.search(words, stated_of(lora, capsys))


def test_a_lora_that_names_a_hub_model_is_reported_where_there_is_no_hub(
    lora: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere() -> Any:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(resolve, "get_session", nowhere)
    state(lora, base_model_name_or_path="someone/nothing-here")
    line = stated_of(lora, capsys)
    assert "is for 'someone/nothing-here' (adapter_config.json)" in line
    assert "cannot be reached" in line


def test_a_lora_that_names_its_model_is_loaded_as_that_model(lora: Path, lab: Target) -> None:
    config = json.loads((lora / ADAPTER_CONFIG).read_text())
    (lora / ADAPTER_CONFIG).write_text(json.dumps({**config, "base_model_name_or_path": str(LAB / "draft")}))
    (lora / "config.json").unlink()
    for file in (LAB / "draft").glob("tokenizer*"):
        (lora / file.name).write_bytes(file.read_bytes())
    stated = TwoModel.load(lab, options(lora)).draft.model.model(torch.tensor([[1, 5, 9, 30]])).logits
    assert torch.allclose(stated, torch.load(lora.parent / "said.pt"), atol=1e-4)


def test_the_lora_alone_learns_and_answers_alone_are_learnt(draft: Target) -> None:
    tuned = TunedDraft(draft, 4, 1e-3)
    (group,) = tuned.parameter_groups()
    trained = {id(p) for p in tuned.module.parameters() if p.requires_grad}
    assert trained == {id(p) for p in group["params"]}
    ids = torch.tensor([[1, 3, 9, 4, 7, 8, 2, 0]])
    answer = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 0]]).bool().numpy()
    labels = future_labels(ids.numpy(), answer, 1)
    batch = Batch(ids, torch.from_numpy(labels), pick_anchors(labels, 4, np.random.default_rng(0)))
    loss, _ = tuned.loss(BaseStates(torch.empty(0), {}, {}), batch)
    expected = torch.nn.functional.cross_entropy(draft.model(ids).logits[0, 3:6], ids[0, 4:7])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


def test_it_learns_of_the_applications_and_of_no_question_that_is_asked() -> None:
    learnt = list(islice(conversations("train", 6, APP_WEIGHTS), 400))
    assert {e.category for e in learnt} == set(APP_CATEGORIES)
    asked = {q.turns[0] for q in questions(APP_CATEGORIES, "eval", 80)}
    assert not asked & {e.turns[0] for e in learnt}
