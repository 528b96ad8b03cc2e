"""A short hash of all of a model's weights. It tells bases, drafters and runs apart."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

HASH_WORDS = 1 << 18  # 64-bit words in one checksum: 2 MiB, which stay in a cache; part of what the hash is


def hash_weights(model: Any) -> str:
    """Return a short sha256 over the names, shapes and a checksum of all bits of every parameter.

    The checksum of a tensor is the sum of its 64-bit words, each times an odd random number, modulo 2^64. It is exact,
    so it is the same on every device, and it differs whenever any single word changes. It is computed on the tensor's
    own device in one pass over memory: hundredths of a second for the lab's models, a few seconds for 7B parameters on
    a CPU, less on a GPU.
    """
    return hash_tensors(dict(model.named_parameters()))


def hash_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """Hash any tensors as `hash_weights` does; buffers too, where they hold what no parameter does."""
    digest = hashlib.sha256()
    for name, p in sorted(tensors.items()):
        digest.update(f"{name}{tuple(p.shape)}".encode())
        for checksum in _checksums(p.detach()):
            digest.update(checksum.to_bytes(8, "little", signed=True))
    return digest.hexdigest()[:16]


def _checksums(tensor: torch.Tensor) -> list[int]:
    """Return one checksum for each HASH_WORDS words of a tensor. Its last word is filled up with zeros."""
    bits = tensor.reshape(-1).view(torch.uint8)
    if bits.numel() % 8 or bits.storage_offset() % 8:
        bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).clone()
    words = bits.view(torch.int64)
    factors = _odd_factors(min(HASH_WORDS, len(words))).to(tensor.device)
    sums = [(part * factors[: len(part)]).sum() for part in words.split(HASH_WORDS)]
    return torch.stack(sums).tolist() if sums else []


def _odd_factors(n: int) -> torch.Tensor:
    """Return the first n of a fixed sequence of odd random int64 that no version of any library changes."""
    return torch.from_numpy((np.random.PCG64(0).random_raw(n) | 1).view(np.int64))
