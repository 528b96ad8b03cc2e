"""Warm-up: rounds over all methods until their times settle. Nothing of it is recorded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

SETTLED = 0.10  # spread of the last times per token, largest over smallest minus one
WINDOW = 3  # how many last times have to agree
EXTRA_ROUNDS = 6  # on top of one round per prompt
MAX_NEW_TOKENS = 64  # of a warm-up request


def warm_up(
    methods: Collection[str],
    prompts: Sequence[list[int]],
    sample: Callable[[str, list[int], int], float],
    warn: Callable[[str], None],
) -> int:
    """One round per prompt, then the last prompt again until every method has settled; how many rounds it took.

    sample(label, prompt ids, max_new_tokens) -> seconds per token. A method that fails is warned of and left out.
    """
    times: dict[str, list[float]] = {label: [] for label in methods}
    for number in range(len(prompts) + EXTRA_ROUNDS):
        fixed = number >= len(prompts) - 1  # from here on always the same prompt: its times compare
        restless = [label for label, own in times.items() if not settled(own)]
        if not restless or not prompts:
            return number
        for label in restless if fixed and number >= len(prompts) else list(times):
            try:
                seconds = sample(label, prompts[min(number, len(prompts) - 1)], MAX_NEW_TOKENS)
            except Exception as e:  # the run itself will record it, sample by sample
                warn(f"{label} failed during warm-up: {type(e).__name__}: {e}")
                del times[label]
                continue
            if fixed:
                times[label].append(seconds)
    restless = [label for label, own in times.items() if not settled(own)]
    if restless:
        warn(f"times had not settled after warm-up: {', '.join(restless)}")
    return len(prompts) + EXTRA_ROUNDS


def settled(times: Sequence[float]) -> bool:
    """Whether the last times agree."""
    last = times[-WINDOW:]
    return len(last) == WINDOW and max(last) <= (1 + SETTLED) * min(last)
