"""Drafters that ship for a model, found by the weights that they were trained for."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specbench_ss.models.catalog import HUB, fetchable
from specbench_ss.models.gguf import gguf_file, gguf_vectors
from specbench_ss.models.resolve import find_folder, is_lab, model_origin, weight_files
from specbench_ss.user_files import read_json

DRAFTERS = Path(__file__).parents[1] / "drafters"  # a folder of drafters for each of some fetchable models
VECTORS_HASH = "base_vectors_hash"  # in config.json of a drafter's folder
LAYER_NUMBER = re.compile(r"\.\d+\.")


def bundled_drafters(model: str) -> Path | None:
    """Return the folder with the drafters that came with this model, or None.

    The model is recognised by its `origin.json`, by the `vectors_hash` of its files, wherever they are, or, before
    the download of a hub id, by that name. `check_base` compares the weights when a drafter is loaded.
    """
    folder = find_folder(model)
    if is_lab(model):
        return folder and folder.parent
    name = model_origin(model).get("name")
    if isinstance(name, str) and name in fetchable():
        return DRAFTERS / name
    by_hash = {read_json(file).get(VECTORS_HASH): file.parents[1] for file in DRAFTERS.glob("*/*/config.json")}
    by_hash.pop(None, None)
    if stated := vectors_hash(_vectors_of(model)):
        return by_hash.get(stated)
    names = (other.name for other in fetchable().values() if other.page == HUB + model)
    return next((DRAFTERS / name for name in names if DRAFTERS / name in by_hash.values()), None)


def vectors_hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a short sha256 of a model's biases and norms outside its layers, or '' if they are untrained.

    tensors: names and values of the model's parameters; other tensors may be left out. The hash is the same for all
    roundings of one model, since these vectors are not quantized, and for names of transformers and of llama.cpp. The
    norms of layers are left out: AWQ scales them.
    """
    vectors = [value.detach().to("cpu", torch.bfloat16) for name, value in tensors if is_vector(name, value.ndim)]
    if not vectors or len(torch.cat(vectors).float().unique()) <= 2:  # ones and zeros
        return ""
    digests = sorted(hashlib.sha256(vector.view(torch.uint8).numpy().tobytes()).digest() for vector in vectors)
    return hashlib.sha256(b"".join(digests)).hexdigest()[:16]


def is_vector(name: str, dimensions: int) -> bool:
    """Return True for a bias, or a norm outside the layers."""
    return dimensions == 1 and (name.endswith(".bias") or LAYER_NUMBER.search(name) is None)


def _vectors_of(model: str) -> Iterator[tuple[str, Tensor]]:
    """Yield names and values of the vectors in a model's safetensors or GGUF file; nothing for other or no files."""
    folder = find_folder(model)
    file = gguf_file(model) if folder is None else None
    if file is not None:
        yield from gguf_vectors(file)
        return
    folder = folder or _cached_folder(model)
    for part in weight_files(folder) if folder is not None else ():
        if part.suffix == ".safetensors":
            yield from _safetensors_vectors(part)


def _cached_folder(repo: str) -> Path | None:
    """Return the folder of a hub repository in the Hugging Face cache, or None."""
    try:
        cached = try_to_load_from_cache(repo, "config.json")
    except HFValidationError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _safetensors_vectors(file: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                if is_vector(name, len(opened.get_slice(name).get_shape())):
                    yield name, opened.get_tensor(name)
    except (OSError, SafetensorError):  # a hub model that is downloaded in part; loading reports damaged files
        return
