"""What multi-stream attention needs beside a mask: turned values (eq. 8) and top-p stream attention (ACL H.1).

Both hook into the frozen attention modules from outside: through the cache that they write to, and through
transformers' table of attention functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from specbench_ss.engine.attention import grouped_attention
from specbench_ss.engine.target import Target

NAME = "ssbench_top_p"
FEW = 8  # main rows: fewer take kernels of their own, which round otherwise than with the stream rows beside them


class TurnedValues:
    """A cache in which the values of stream rows are turned: V_tn = V_t exp(i epsilon n), n = 1..gamma (eq. 8).

    Rows are [mains, streams of main 0, streams of main 1, ...]; halves of the head dimension are the complex parts.
    Turned in single precision at least: in half precision small angles would be rounded twice.
    """

    is_compileable = False

    def __init__(self, cache: Any, mains: int, gamma: int, angle: float) -> None:
        self.cache, self.mains, self.gamma, self.angle = cache, mains, gamma, angle

    def get_seq_length(self, layer: int = 0) -> int:
        """As the cache beneath."""
        return int(self.cache.get_seq_length(layer))

    def update(self, k: Tensor, v: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """k, v [B, kv_heads, rows, head_dim], the stream rows of v turned, into the cache beneath."""
        streams = v[:, :, self.mains :]
        n = torch.arange(1, self.gamma + 1, device=v.device).repeat(streams.shape[2] // self.gamma)  # [streams]
        turn = (n * self.angle)[:, None].to(torch.promote_types(v.dtype, torch.float32))
        half = v.shape[-1] // 2
        real, imaginary = (x.to(turn.dtype) for x in (streams[..., :half], streams[..., half : 2 * half]))
        cos, sin = turn.cos(), turn.sin()
        turned = torch.cat((real * cos - imaginary * sin, real * sin + imaginary * cos), -1).to(v.dtype)
        values = torch.cat((v[:, :, : self.mains], torch.cat((turned, streams[..., 2 * half :]), -1)), 2)
        kept: tuple[Tensor, Tensor] = self.cache.update(k, values, layer)
        return kept


@dataclass(slots=True)
class TopP:
    """Layout of the rows of a pass in which streams see only the p main keys that their main row attends to most."""

    p: int
    mains: int
    gamma: int


_layout: list[TopP] = []  # innermost `top_p` last


@contextmanager
def top_p(target: Target, layout: TopP) -> Iterator[None]:
    """Within: attention modules of the target compute top-p stream attention for rows of this layout."""
    before = target.config._attn_implementation
    _layout.append(layout)
    target.config._attn_implementation = NAME
    try:
        yield
    finally:
        target.config._attn_implementation = before
        _layout.pop()


def top_p_attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float | None = None, **more: Any
) -> tuple[Tensor, None]:
    """ACL H.1. q [B, H, m + m*gamma, d], k, v [B, H_kv, past + m + m*gamma, d] -> [B, rows, H, d].

    mask additive [B or 1, 1, rows, keys]. A stream sees the p main keys (cached ones and those of its main row's
    ancestors) with the largest coefficients of its main row, head by head, and its own streams before it. Main rows
    pass the attention that they pass without top-p.
    """
    layout = _layout[-1]
    m, g = layout.mains, layout.gamma
    rows = m if m >= FEW else q.shape[2]
    main, _ = grouped_attention(module, q[:, :, :rows], k, v, mask[:, :, :rows], scaling=scaling, **more)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    keys = k.shape[2] - m * g  # main keys: the cache's and the m new ones
    least = torch.finfo(q.dtype).min
    q = q.unflatten(1, (k.shape[1], -1))  # [B, H_kv, r, rows, d]: r heads share keys and values
    r = q.shape[2]
    scores = q[..., :m, :].flatten(2, 3) @ k[:, :, :keys].transpose(2, 3) * scale  # [B, H_kv, r * m, keys]
    scores = scores.unflatten(2, (r, m)) + mask[:, :, None, :m, :keys]
    top = scores.topk(min(layout.p, keys), -1)  # [B, H_kv, r, m, p]
    chosen = top.indices.flatten(2)[..., None].expand(-1, -1, -1, v.shape[-1])
    seen_k, seen_v = (x.gather(2, chosen).unflatten(2, (r, m, -1)) for x in (k, v))  # [B, H_kv, r, m, p, d]
    own_k, own_v = (  # [B, H_kv, r, m, gamma, d]
        x[:, :, None, keys:].unflatten(3, (m, g)).expand(-1, -1, r, -1, -1, -1) for x in (k, v)
    )
    queries = q[..., m:, :].unflatten(3, (m, g)) * scale
    hidden = torch.where(top.values > least / 2, 0.0, least)[..., None, :].to(q.dtype)  # fewer than p visible
    earlier = torch.ones(g, g, dtype=torch.bool, device=q.device).tril()
    own = (queries @ own_k.transpose(-1, -2)).masked_fill(~earlier, least)
    joint = torch.cat((queries @ seen_k.transpose(-1, -2) + hidden, own), -1)  # [B, H_kv, r, m, gamma, p + gamma]
    streams = joint.float().softmax(-1).to(v.dtype) @ torch.cat((seen_v, own_v), 4)
    return torch.cat((main[:, :m], streams.flatten(1, 2).flatten(2, 3).transpose(1, 2)), 1), None


AttentionInterface.register(NAME, top_p_attention)
