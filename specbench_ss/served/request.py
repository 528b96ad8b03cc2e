"""Request parameters of a chat completion."""

from __future__ import annotations

from typing import Any

from specbench_ss.runs.config import RunConfig

SEEDS = 2**31  # servers take seeds below this


def settings(config: RunConfig, longest: int, seed: int) -> dict[str, Any]:
    """Return how to decode. longest: tokens, where the run does not say. Only what is no default is sent besides."""
    asked: dict[str, Any] = {"max_tokens": config.max_new_tokens or longest, "temperature": config.temperature}
    if config.temperature > 0:
        asked |= {"seed": seed % SEEDS} | ({"top_p": config.top_p} if config.top_p < 1 else {})
    return asked | ({"stop": list(config.stop)} if config.stop else {})
