"""Keeps the interpreter out of timed samples, and reads the memory they took. Knows no method and no model."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

import torch


@contextlib.contextmanager
def quiet_collector() -> Iterator[None]:
    """Collect garbage now and not again until the block is left: no pause falls into a timed sample."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Spare the objects that exist now from collection, so that collecting before each sample costs little."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[Callable[[], int | None]]:
    """Gives a function that, after the block, tells how many bytes more than at its start a CUDA device had allocated.

    None elsewhere. What is there before, weights of every method and the cache they share, is nobody's in particular.
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    peak: list[int] = []
    yield lambda: peak[0] if peak else None
    if on_gpu:
        peak.append(torch.cuda.max_memory_allocated(device) - before)
