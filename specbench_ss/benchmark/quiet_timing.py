"""Keeps the interpreter out of timed samples, and reads the memory they took. Knows no method and no model."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

import torch

P = TypeVar("P")


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
def peak_memory(*devices: torch.device) -> Iterator[Callable[[], int | None]]:
    """Gives a function that, after the block, tells how many bytes more than at its start a CUDA device had allocated.

    None elsewhere. Of several devices, the sum of what each had at most.

    What is there before, weights of every method and the cache they share, is nobody's in particular.
    """
    gpus = [device for device in devices if device.type == "cuda"]
    for device in gpus:
        torch.cuda.reset_peak_memory_stats(device)
    before = sum(map(torch.cuda.memory_allocated, gpus))
    peak: list[int] = []
    yield lambda: peak[0] if peak else None
    if gpus:
        peak.append(sum(map(torch.cuda.max_memory_allocated, gpus)) - before)


SETTLED = 0.10  # spread of the last times per token, largest over smallest minus one
WINDOW = 3  # how many last times have to agree
EXTRA_ROUNDS = 6  # on top of one round per prompt
MAX_NEW_TOKENS = 64  # of a warm-up request


def warm_up(
    methods: Collection[str],
    prompts: Sequence[P],
    sample: Callable[[str, P, int], float],
    warn: Callable[[str], None],
    failed: Callable[[str, BaseException], None],
) -> int:
    """Make one round per prompt, then the last prompt again until every method has settled; return how many rounds.

    sample(label, prompt, max_new_tokens) -> seconds per token; a prompt is ids, or messages. failed(label, error):
    called for a method that fails, which is left out of what follows.
    """
    times: dict[str, list[float]] = {label: [] for label in methods}

    def one_round(labels: Collection[str], prompt: P) -> None:
        for label in list(labels):
            try:
                times[label].append(sample(label, prompt, MAX_NEW_TOKENS))
            except (Exception, SystemExit) as e:
                del times[label]
                failed(label, e)

    for prompt in prompts:
        for own in times.values():
            own.clear()  # times of different prompts do not compare
        one_round(times, prompt)
    rounds = len(prompts)
    while prompts and rounds < len(prompts) + EXTRA_ROUNDS:
        restless = [label for label, own in times.items() if not settled(own)]
        if not restless:
            return rounds
        one_round(restless, prompts[-1])
        rounds += 1
    restless = [label for label, own in times.items() if not settled(own)]
    if restless:
        warn(f"times had not settled after warm-up: {', '.join(restless)}")
    return rounds


def settled(times: Sequence[float]) -> bool:
    """Whether the last times agree."""
    last = times[-WINDOW:]
    return len(last) == WINDOW and max(last) <= (1 + SETTLED) * min(last)
