"""Weight files are found damaged before they are loaded, and every weight counts in a model's hash."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specbench_ss.errors import UserError
from specbench_ss.models import load as weight_hash
from specbench_ss.models.load import hash_weights, load_model_info, load_target
from specbench_ss.models.resolve import check_folder
from specbench_ss.models.tiny import tiny_model, tiny_tokenizer
from tests.cli import failing
from tests.tiny import few

TENSORS = {"a": torch.arange(64.0), "b": torch.ones(3, 5)}


def folder(path: Path, layout: str) -> list[Path]:
    """A folder with a config and weights; its weight files."""
    (path / "config.json").write_text("{}")
    if layout == "shards":
        names = ["model-1-of-2.safetensors", "model-2-of-2.safetensors"]
        for name, (key, tensor) in zip(names, TENSORS.items(), strict=True):
            save_file({key: tensor}, path / name)
        index = {"weight_map": dict(zip(TENSORS, names, strict=True))}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        return [path / name for name in names]
    if layout == "model.safetensors":
        save_file(TENSORS, path / layout)
    else:
        torch.save(TENSORS, path / layout)
    return [path / layout]


LAYOUTS = ("model.safetensors", "shards", "pytorch_model.bin")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kept", [0, 7, -1])
def test_a_file_cut_anywhere_is_named(tmp_path: Path, layout: str, kept: int) -> None:
    file = folder(tmp_path, layout)[-1]
    content = file.read_bytes()
    file.write_bytes(content[:kept])
    with pytest.raises(UserError, match=f"cannot read weight file {file}: "):
        check_folder(tmp_path)


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    last = folder(tmp_path, "shards")[-1]
    last.unlink()
    with pytest.raises(UserError, match=f"no weight file {last}"):
        check_folder(tmp_path)


@pytest.mark.parametrize("names", [[], {}, {"a": 1}, {"a": {}}, {"a": "x" * 5000}, None])
def test_an_index_that_names_no_files(tmp_path: Path, names: Any) -> None:
    folder(tmp_path, "shards")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(UserError, match="weight_map"):
        check_folder(tmp_path)


DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 1001])
def test_every_weight_counts(dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest change of any single weight, its sign, in whichever part it falls, and an exchange of two."""
    monkeypatch.setattr(weight_hash, "HASH_WORDS", 16)
    layer = torch.nn.Linear(size, 1, bias=False).to(dtype)
    weight = layer.weight.data.view(-1)
    before, seen = hash_weights(layer), set()
    for i in range(0, size, max(1, size // 97)):
        old = weight[i].clone()
        weight[i] = torch.nextafter(old.float(), torch.tensor(9.0)) if dtype == torch.float32 else old + 0.5
        seen.add(hash_weights(layer))
        weight[i] = -old
        seen.add(hash_weights(layer))
        weight[i] = old
    assert before not in seen
    assert hash_weights(layer) == before
    if size > 1:
        layer.weight.data = layer.weight.data.flip(1)
        assert hash_weights(layer) != before


def test_the_hash_is_of_values_not_of_how_they_lie() -> None:
    layer = torch.nn.Linear(6, 5, bias=False)
    before = hash_weights(layer)
    layer.weight.data = layer.weight.data.T.contiguous().T  # the same matrix, column by column
    assert hash_weights(layer) == before
    padded = torch.zeros(31)
    padded[1:] = layer.weight.data.reshape(-1)
    layer.weight.data = padded[1:].view(5, 6)  # begins in the middle of a word
    assert hash_weights(layer) == before


def test_the_hash_is_pinned() -> None:
    """Checkpoints carry the hash of their base: another way to compute it must not go unnoticed."""
    layer = torch.nn.Linear(3 * weight_hash.HASH_WORDS, 1)
    layer.weight.data = torch.arange(3.0 * weight_hash.HASH_WORDS)[None]
    layer.bias.data = torch.tensor([-1.0])
    assert hash_weights(layer) == "5cc9ee12958b09b1"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    tiny_model("llama").save_pretrained(path)
    tiny_tokenizer(61).save_pretrained(path)
    return path


def changed(base: Path, path: Path, file: str, **values: Any) -> str:
    """A copy of the model with other values in one of its files."""
    shutil.copytree(base, path, dirs_exist_ok=True)
    content = json.loads((path / file).read_text())
    for name, value in values.items():
        place = content["model"] if file == "tokenizer.json" else content
        place[name] = value
    (path / file).write_text(json.dumps(content))
    return str(path)


@few(8)
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("num_hidden_layers", -1, "num_hidden_layers"),
        ("num_hidden_layers", 0, "num_hidden_layers"),
        ("num_hidden_layers", 10**9, "num_hidden_layers"),
        ("num_hidden_layers", 1000, "too small"),
        ("num_hidden_layers", "x", "num_hidden_layers"),
        ("num_hidden_layers", None, "num_hidden_layers"),
        ("hidden_size", 0, "hidden_size"),
        ("hidden_size", 31, "hidden_size|hidden size"),
        ("hidden_size", 32_000, "too small"),
        ("vocab_size", 0, "vocab_size"),
        ("vocab_size", 10**7, "too small"),
        ("vocab_size", 7, "ids up to 60, the model 7 tokens"),
        ("num_attention_heads", 0, "is 0 or of another kind"),
        ("num_key_value_heads", -1, "num_key_value_heads"),
        ("head_dim", 0, "head_dim"),
        ("intermediate_size", 10**9, "intermediate_size"),
        ("max_position_embeddings", 0, "max_position_embeddings"),
        ("rope_parameters", {"rope_type": "spiral"}, "spiral"),
        ("rope_parameters", [], "rope"),
        ("hidden_act", "none", "none"),
        ("dtype", [], "of another kind than transformers expects"),
        ("model_type", "none", "none"),
        ("architectures", 1, "architectures"),
    ],
)
def test_a_configuration_from_which_no_model_can_be_built(
    base: Path, tmp_path: Path, name: str, value: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = changed(base, tmp_path, "config.json", **{name: value})
    if name == "architectures":
        load_model_info(path)
        return
    assert re.search(words, failing(["models", "check", path, "pld"], capsys))
    with pytest.raises(UserError, match=words):
        load_target(path, device="cpu", dtype="float32")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("vocab", {}, "no tokens|cannot load"),
        ("vocab", None, "cannot load"),
        ("merges", [["a", "zz"]], "cannot load"),
        ("vocab", {"a": 10**6, "b": 1}, "ids up to 1,000,000|cannot load"),
        ("type", "none", "cannot load"),
    ],
)
def test_a_tokenizer_that_does_not_fit(base: Path, tmp_path: Path, name: str, value: Any, words: str) -> None:
    values = {name: value} if name != "vocab" else {name: value, "merges": []}
    with pytest.raises(UserError, match=words):
        load_model_info(changed(base, tmp_path, "tokenizer.json", **values))


def test_weights_of_another_shape_are_named(base: Path, tmp_path: Path) -> None:
    path = changed(base, tmp_path, "config.json")
    weights = load_file(tmp_path / "model.safetensors")
    save_file(
        weights | {"model.layers.1.mlp.up_proj.weight": torch.ones(5, 3)},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight of shape \[5, 3\]"):
        load_target(path, device="cpu", dtype="float32")


@pytest.mark.parametrize("name", ["x" * 5000, "a/" * 2500, "a\0b", "/dev/zero", "", "a/" + "b" * 300])
def test_names_that_no_file_can_have(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(failing(["run", "--model", name, "--methods", "pld"], capsys)) < 600


def test_a_folder_that_may_not_be_read(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(UserError, match="permission denied"):
        load_model_info(str(base))


def test_an_added_token_beyond_the_model_is_refused_where_a_prompt_has_it(base: Path) -> None:
    info = load_model_info(str(base))
    info.tokenizer.chat_template = "{{ messages[0]['content'] }}<new>"
    info.tokenizer.add_tokens(["<new>"])
    with pytest.raises(UserError, match="gives id 61, beyond the 61 of the model"):
        info.encode_chat([{"role": "user", "content": "ab"}])
