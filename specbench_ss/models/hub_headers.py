"""A hub repository without its weights: its small files, and the headers of its safetensors files.

A folder of these reads as the whole repository does wherever only names and shapes matter. So it is known before a
download of gigabytes whether a model and a drafter fit together. This module knows no method. It uses the network only
because the user named a hub id.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from specbench_ss.errors import UserError, first_line
from specbench_ss.models.drafter_folder import HEADER_ONLY
from specbench_ss.models.hub_reach import check_reachable

SAYS = (".json", ".jinja", ".txt", ".model")  # configuration and tokenizer: small, downloaded
PICKLES = (".pt", ".bin", ".pth")  # layout and content are one: only known once downloaded


@dataclass(frozen=True, slots=True)
class Skeleton:
    """folder: holds the small files and headers. weights: {file: bytes} on the hub. unread: files of unknown shapes."""

    folder: Path
    weights: dict[str, int]
    unread: tuple[str, ...]


def fetch(repo: str, folder: Path) -> Skeleton:
    """Fill the folder from the hub. Raises UserError where the hub does not give the repository."""
    check_reachable(repo)
    api = HfApi()
    try:
        files = {f.rfilename: f.size or 0 for f in api.model_info(repo, files_metadata=True).siblings or []}
        weights = {name: size for name, size in files.items() if name.endswith((".safetensors", *PICKLES))}
        for name in files:
            if name.endswith(SAYS):
                api.hf_hub_download(repo, name, local_dir=folder)
            elif name.endswith(".safetensors"):
                write_header(folder / name, api.parse_safetensors_file_metadata(repo, name))
    except Exception as error:  # no such repository, no network, a damaged header: a dozen kinds
        raise UserError(f"the hub does not give {repo!r}: {first_line(error)}") from error
    return Skeleton(folder, weights, tuple(name for name in weights if name.endswith(PICKLES)))


def write_header(path: Path, about: Any) -> None:
    """Write a safetensors file of these tensors with a hole in place of the values, which takes no disk space."""
    header: dict[str, Any] = {
        name: {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": list(t.data_offsets)}
        for name, t in about.tensors.items()
    }
    header["__metadata__"] = {**(about.metadata or {}), HEADER_ONLY: "yes"}
    text = json.dumps(header).encode()
    end = max((t.data_offsets[1] for t in about.tensors.values()), default=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
