"""Which rows a multi-stream-attention layer has, where they stand, and which see each other. Knows no weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from specbench_ss.engine.target import Target
    from specbench_ss.methods.ss.stream_config import StreamPosition
    from specbench_ss.training.trainee import Documents


@dataclass(frozen=True, slots=True)
class Layout:
    """The rows of an MSA layer: `mains` main rows, then gamma streams of each row that carries them.

    stream_top_p: streams see only so many main keys (ACL H.1), 0 = all; then every main row carries streams.
    """

    mains: int
    gamma: int
    stream_top_p: int = 0


def steps_ahead(gamma: int, position: StreamPosition, device: torch.device) -> Tensor:
    """How many positions each of gamma streams stands ahead of its main row, int64 [gamma].

    The papers do not say where streams stand. ahead: 1..gamma, so that stream j has the position of the token whose
    successor it predicts. same: 0, the main row's own position.
    """
    steps = torch.arange(1, gamma + 1, device=device)
    return steps if position == "ahead" else torch.zeros_like(steps)


def stream_positions(target: Target, at: Tensor, gamma: int, position: StreamPosition = "ahead") -> Tensor:
    """Positions of the streams of rows at positions int64 [.., m]: [.., m * gamma], none beyond the model's context."""
    places = at[..., None] + steps_ahead(gamma, position, at.device)
    return places.clamp_max(target.context_length - 1).flatten(-2)


def own_streams(rows: int, gamma: int, device: torch.device) -> Tensor:
    """Bool [rows * gamma, rows * gamma]: stream j of a row sees streams 1..j of that row and no other's."""
    own = torch.ones(gamma, gamma, dtype=torch.bool, device=device).tril()
    same = torch.eye(rows, dtype=torch.bool, device=device)
    return (same[:, None, :, None] & own[:, None]).reshape(rows * gamma, rows * gamma)


own_streams_of_step = lru_cache(maxsize=256)(own_streams)  # trees are of few and small sizes, unlike training's rows


def stream_visibility(visible: Tensor, gamma: int, carriers: Tensor | None = None, attends: bool = False) -> Tensor:
    """Who sees whom among m main rows and the streams of c of them, bool [m + c*gamma, m + c*gamma].

    visible [m, m]: main rows. carriers int64 [c]: rows that carry streams, None = all. Stream j of row i sees what
    row i sees, and streams 1..j of row i, no other's. A main row sees its own streams where it attends to them
    (eq. 3), and no stream otherwise.
    """
    m = visible.shape[0]
    carriers = torch.arange(m, device=visible.device) if carriers is None else carriers
    upper = torch.nn.functional.pad(visible, (0, len(carriers) * gamma))
    if attends:
        own = torch.arange(m, device=visible.device)[:, None] == carriers  # [m, c]
        upper = torch.cat((visible, own.repeat_interleave(gamma, 1)), 1)
    own = own_streams_of_step(len(carriers), gamma, visible.device)
    return torch.cat((upper, torch.cat((visible[carriers].repeat_interleave(gamma, 0), own), 1)))


def segment_visibility(
    length: int,
    start: int,
    carriers: Tensor,
    real: Tensor,
    gamma: int,
    attends: bool,
    documents: Documents | None = None,
) -> Tensor:
    """As `stream_visibility` for a segment of `length` main rows at `start` in training, over the keys before it too.

    carriers int64 [B, c]: places in the segment of the rows that carry streams; real bool [B, c]: which are no padding.
    Returns bool [B, length + c*gamma, start + length + c*gamma] (ACL appendix I).
    """
    b, c = carriers.shape
    keys = torch.arange(start + length, device=carriers.device)
    here = torch.arange(length, device=carriers.device)
    main = (keys <= start + here[:, None]).expand(b, -1, -1)  # [B, L, start + L]
    if documents is not None:
        main = main & documents.same((start + here).expand(b, -1), len(keys))
    sees = (here[:, None] == carriers[:, None]) & real[:, None] & attends  # [B, L, c]
    upper = torch.cat((main, sees.repeat_interleave(gamma, 2)), 2)
    prefix = main.gather(1, carriers[..., None].expand(-1, -1, len(keys)))  # what the carrier's main row sees
    prefix = prefix.repeat_interleave(gamma, 1)  # [B, c*gamma, start + L]
    own = own_streams(c, gamma, carriers.device).expand(b, -1, -1)
    return torch.cat((upper, torch.cat((prefix, own), 2)), 1)
