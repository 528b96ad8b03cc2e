"""Weight files are found damaged before they are loaded, and every weight counts in a model's hash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specbench_ss.errors import UserError
from specbench_ss.models import load as weight_hash
from specbench_ss.models.load import hash_weights
from specbench_ss.models.resolve import check_folder

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
