"""Drafters that ship for a model are found by its origin.json, its biases and final norm, or its hub id."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from specbench_ss import UserError, generate, load_method, load_model
from specbench_ss.cli.main import main
from specbench_ss.models import bundled
from specbench_ss.models.bundled import VECTORS_HASH, bundled_drafters, vectors_hash
from specbench_ss.models.checkpoint import belongs_to, own_fields
from specbench_ss.models.load import load_model_info
from specbench_ss.models.resolve import LAB, ORIGIN
from tests import gguf_made
from tests.tiny import thorough

NAME = "smollm2"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that states it is smollm2; it holds the lab's base, and the lab's heads are shipped as that model's."""
    folder = tmp_path / "models" / "small"
    shutil.copytree(LAB / "base", folder)
    (folder / ORIGIN).write_text(json.dumps({"name": NAME}))
    shutil.copytree(LAB / "medusa", tmp_path / "drafters" / NAME / "medusa")
    monkeypatch.setattr(bundled, "DRAFTERS", tmp_path / "drafters")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    return folder


def state(**changed: object) -> None:
    """Change what the shipped drafter states of its base."""
    config = bundled.DRAFTERS / NAME / "medusa" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changed))


@pytest.fixture
def elsewhere(fetched: Path, lab: Any) -> Path:
    """The same folder without its origin.json, and drafters that state the hash of its vectors."""
    (fetched / ORIGIN).unlink()
    state(**{VECTORS_HASH: vectors_hash(lab.model.named_parameters())})
    return fetched


def changed(folder: Path, change: Any) -> Path:
    """Write the folder's model with changed parameters to another folder."""
    target = load_model(str(folder), dtype="float32", device="cpu")
    with torch.no_grad():
        for name, p in target.model.named_parameters():
            change(name, p)
    other = folder.with_name("other")
    target.model.save_pretrained(other)
    target.tokenizer.save_pretrained(other)
    return other


def in_bfloat16(_: str, p: torch.Tensor) -> None:
    p.copy_(p.bfloat16())


def final_norm_tuned(name: str, p: torch.Tensor) -> None:
    if name == "model.norm.weight":
        p[0] *= 1.02


def test_a_fetched_model_has_its_drafters(fetched: Path) -> None:
    target = load_model(str(fetched))
    assert load_method("medusa", target).name == "medusa"
    assert target.bundled_drafter("medusa") == load_model_info(str(fetched)).bundled_drafter("medusa")
    assert target.bundled_drafter("ss") is None


def test_a_folder_that_does_not_state_where_it_comes_from_has_none(fetched: Path) -> None:
    (fetched / ORIGIN).unlink()
    with pytest.raises(UserError, match="no weights for model"):
        load_method("medusa", load_model(str(fetched)))


@pytest.mark.parametrize("name", ["../drafters/smollm2", "other", 3, None])
def test_a_name_that_no_package_has_gives_none(fetched: Path, name: object) -> None:
    (fetched / ORIGIN).write_text(json.dumps({"name": name}))
    assert bundled_drafters(str(fetched)) is None


def test_drafters_of_other_weights_are_refused(fetched: Path) -> None:
    state(base_hash="0" * 16)
    with pytest.raises(UserError, match="trained for another base"):
        load_method("medusa", load_model(str(fetched)))


@thorough
def test_the_same_weights_elsewhere_have_them_without_a_warning(
    elsewhere: Path, recwarn: pytest.WarningsRecorder
) -> None:
    assert load_model_info(str(elsewhere)).bundled_drafters == bundled.DRAFTERS / NAME
    method = load_method("medusa", load_model(str(elsewhere)))
    assert not method.load_warnings and not [w for w in recwarn if "rounding" in str(w.message)]


@thorough
def test_another_rounding_has_them_with_one_line_in_the_run(
    elsewhere: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(LAB / "ss", bundled.DRAFTERS / NAME / "ss")
    config = bundled.DRAFTERS / NAME / "ss" / "config.json"
    stated = json.loads((bundled.DRAFTERS / NAME / "medusa" / "config.json").read_text())
    config.write_text(json.dumps(json.loads(config.read_text()) | {VECTORS_HASH: stated[VECTORS_HASH]}))
    other, prompts, out = changed(elsewhere, in_bfloat16), tmp_path / "own.jsonl", tmp_path / "out"
    prompts.write_text('{"prompt": "What is the sum of 12 and 30?"}\n')
    asked = ["run", "--model", str(other), "--dtype", "float32", "--methods", "ss[parent=off],medusa", "--warmup", "0"]
    assert main([*asked, "--suite", f"jsonl:{prompts}", "--max-new-tokens", "8", "--out", str(out)]) == 0
    assert "ssbench: warning: weights differ from those" in capsys.readouterr().err
    kept = json.loads((out / "manifest.json").read_text())["warnings"]
    assert sum("by rounding, or by a fine-tune" in text for text in kept) == 1


@thorough
def test_outputs_of_another_rounding_are_its_own(elsewhere: Path) -> None:
    target = load_model(str(changed(elsewhere, in_bfloat16)), dtype="float32", device="cpu")
    ids = target.encode_chat([{"role": "user", "content": "What is the sum of 12 and 30?"}])
    with pytest.warns(UserWarning, match="by rounding"):
        drafted = generate(load_method("medusa", target), ids, max_new_tokens=24)
    assert drafted.tokens == generate(load_method("ar", target), ids, max_new_tokens=24).tokens
    assert drafted.tokens_per_step > 1


def test_a_tuned_model_has_none_and_refuses_those_that_are_named(elsewhere: Path) -> None:
    other = load_model(str(changed(elsewhere, final_norm_tuned)), dtype="float32", device="cpu")
    assert load_model_info(other.name).bundled_drafters is None
    with pytest.raises(UserError, match="no weights for model"):
        load_method("medusa", other)
    with pytest.raises(UserError, match="trained for another base"):
        load_method("medusa", other, weights=str(bundled.DRAFTERS / NAME / "medusa"))


def test_a_hub_id_has_them_before_and_after_its_download(elsewhere: Path, tmp_path: Path) -> None:
    assert bundled_drafters(HUB_ID) == bundled.DRAFTERS / NAME
    assert bundled_drafters("someone/copy") is None and bundled_drafters("a/b/c") is None
    for repo, folder in (("someone/copy", elsewhere), (HUB_ID, changed(elsewhere, final_norm_tuned))):
        cached = tmp_path / "hf" / f"models--{repo.replace('/', '--')}"
        (cached / "refs").mkdir(parents=True)
        (cached / "refs" / "main").write_text("0" * 40)
        shutil.copytree(folder, cached / "snapshots" / ("0" * 40))
    assert bundled_drafters("someone/copy") == bundled.DRAFTERS / NAME
    assert bundled_drafters(HUB_ID) is None  # the name is not needed once the weights are there


def test_without_a_hash_the_hub_id_of_other_weights_has_none(fetched: Path) -> None:
    assert bundled_drafters(HUB_ID) is None


def test_files_of_all_roundings_have_one_hash(tmp_path: Path) -> None:
    """GGUF, float32, bfloat16, and after the scaling of AWQ, which moves factors between norms and matrices."""
    file = tmp_path / "tiny.gguf"
    model = gguf_made.write(file, "qwen2", division="qwen2")
    expected = vectors_hash(model.named_parameters())
    assert len(expected) == 16

    def of(given: Path) -> str:
        return vectors_hash(bundled._vectors_of(str(given)))

    assert of(file) == expected
    model.save_pretrained(tmp_path / "float32")
    model.bfloat16().save_pretrained(tmp_path / "bfloat16")
    for layer in model.model.layers:
        layer.input_layernorm.weight.data /= 3
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            linear.weight.data *= 3
    model.save_pretrained(tmp_path / "awq")
    assert {of(tmp_path / name) for name in ("float32", "bfloat16", "awq")} == {expected}
    model.model.layers[1].self_attn.k_proj.bias.data[0] += 0.01
    model.save_pretrained(tmp_path / "tuned")
    assert of(tmp_path / "tuned") != expected


def test_an_untrained_model_has_no_hash() -> None:
    vectors = [("norm.weight", torch.ones(8)), ("layers.0.q.bias", torch.zeros(8)), ("layers.0.q.weight", torch.eye(8))]
    assert vectors_hash(vectors) == "" != vectors_hash([*vectors, ("layers.1.q.bias", torch.arange(8.0))])


def test_training_states_the_hash_and_exports_keep_it(lab: Any) -> None:
    stated = belongs_to(lab)
    assert stated[VECTORS_HASH] == vectors_hash(lab.model.named_parameters()) != ""
    assert own_fields({**stated, "other": 1}) == stated
