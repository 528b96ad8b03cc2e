"""Which layers of a decoder have a sliding window, and how wide: seen in the masks that it makes with tiny windows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from specbench_ss.decoding.recording import OwnDecoder
from specbench_ss.errors import UserError

TINY, APART = 4, 3  # the smallest window, and how much wider the next one is


def window_names(config: Any) -> dict[str, int]:
    """Return the configuration's numbers that may be the width of a window, by their names."""
    listed = {name: getattr(config, name, None) for name in config.to_dict() if "window" in name and "max_" not in name}
    return {name: value for name, value in listed.items() if type(value) is int and value > 0}


@contextmanager
def tiny_windows(config: Any) -> Iterator[dict[int, int]]:
    """Make every window tiny for a while, each of another width; gives {tiny width: real width}."""
    real = window_names(config)
    tiny = {name: TINY + APART * i for i, name in enumerate(real)}
    try:
        for name, width in tiny.items():
            setattr(config, name, width)
        yield {tiny[name]: real[name] for name in real}
    finally:
        for name, width in real.items():
            setattr(config, name, width)


def observed_windows(own: OwnDecoder, masks: list[str], context: int, device: torch.device) -> list[int | None]:
    """Return the window's width of every layer, None = full attention. masks: name of each layer's mask, '' for none.

    Raises UserError where a mask hides something else.
    """
    with tiny_windows(own.model.config) as widths:
        rows = min(context, TINY + APART * (len(widths) + 1) + 1)
        positions = torch.arange(rows, device=device)[None]
        calls = own.record(torch.zeros_like(positions), positions).calls
    numbered = enumerate(zip(calls, masks, strict=True))
    seen = [_width(call.given.get(name) if name else None, i, rows) for i, (call, name) in numbered]
    return [None if width is None else _real(width, widths) for width in seen]


def _real(seen: int, widths: dict[int, int]) -> int:
    nearest = min(widths, key=lambda tiny: abs(tiny - seen), default=None)
    if nearest is None:
        raise UserError("its masks hide more than what is ahead, and its configuration states no window")
    return widths[nearest] + seen - nearest


def _width(mask: Tensor | None, layer: int, rows: int) -> int | None:
    """How many keys the last row of a mask [1, 1, q, q] sees; None where it sees all."""
    if mask is None:  # left out where attention itself hides what is ahead
        return None
    ahead = torch.arange(rows, device=mask.device)
    back = ahead[:, None] - ahead  # [q, q], how far a key lies back
    seen = _visible(mask, layer)
    width = int(seen[-1].sum())
    if not torch.equal(seen, (back >= 0) & (back < width)):
        raise UserError(f"layer {layer} hides something else than a sliding window would")
    return None if width == rows else width


def _visible(mask: Tensor, layer: int) -> Tensor:
    if mask.dtype == torch.bool:
        return mask[0, 0]
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    if mask.masked_fill(hidden, 0).any():
        raise UserError(f"the mask of layer {layer} carries a bias (ALiBi) besides what it hides")
    return ~hidden[0, 0]
