"""Speculative streams: what is trained, and how rows pass a multi-stream-attention (MSA) layer.

Knows the target's blocks, not the loop. Equations of the ACL paper; M main states, S stream states, gamma streams,
N_s MSA layers on top, h hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbench_ss.engine.architectures import Block
from specbench_ss.engine.device_map import to_device
from specbench_ss.engine.kv_cache import PartsCache
from specbench_ss.engine.target import Target
from specbench_ss.methods.ss.attention import TopP, TurnedValues, top_p
from specbench_ss.methods.ss.layout import Layout
from specbench_ss.methods.ss.stream_config import StreamConfig

FEW_KEYS = "streams that see few tokens (stream_attention_top_p)"


class Streams(nn.Module):
    """P_j, f_eta, the stream adapters and o_theta.

    gamma*h (P_j) + 2*R_s*h*N_s (adapters) + 2*eta*h (f_eta) + 2*theta*h (pruning) parameters, and 2*rank*h
    (root, and parent, which are not in the papers); each where configured.
    """

    def __init__(self, config: StreamConfig, hidden: int) -> None:
        super().__init__()
        self.moved: dict[int, tuple[Tensor, Tensor]] = {}  # adapters of layers on other devices than the first
        c = self.config = config
        if c.stream_init == "embedding":
            self.embedding = nn.Parameter(torch.randn(c.gamma, hidden) * 0.02)  # P_j, eq. 4
        if c.adapter_rank:
            self.down = nn.Parameter(torch.randn(c.n_msa_layers, c.adapter_rank, hidden) * hidden**-0.5)
            self.up = nn.Parameter(torch.zeros(c.n_msa_layers, hidden, c.adapter_rank))
        if c.init_rank:
            self.init_down = nn.Parameter(torch.randn(c.init_rank, hidden) * hidden**-0.5)
            self.init_up = nn.Parameter(torch.zeros(hidden, c.init_rank))
        if c.root_rank:
            self.root_down = nn.Parameter(torch.randn(c.root_rank, hidden) * hidden**-0.5)
            self.root_up = nn.Parameter(torch.zeros(hidden, c.root_rank))
        if c.parent_rank:
            self.parent_down = nn.Parameter(torch.randn(c.parent_rank, hidden) * hidden**-0.5)
            self.parent_up = nn.Parameter(torch.zeros(hidden, c.parent_rank))
        self.prune_down = nn.Parameter(torch.randn(c.prune_rank, hidden) * hidden**-0.5)
        self.prune_up = nn.Parameter(torch.zeros(hidden, c.prune_rank))

    def insert(self, main: Tensor, gamma: int) -> Tensor:
        """Eq. 4: main [B, m, h] at layer N - N_s -> streams [B, m * gamma, h], the streams of a row side by side."""
        if self.config.init_rank:
            main = main + F.linear(F.linear(main, self.init_down), self.init_up)
        rows = main[:, :, None].expand(-1, -1, gamma, -1)
        return (rows + self.embedding[:gamma] if self.config.stream_init == "embedding" else rows).flatten(1, 2)

    def adapt(self, layer: int, x: Tensor) -> Tensor:
        """The stream adapter of the layer-th MSA layer: [B, r, h] -> [B, r, h]."""
        down, up = self._adapter(layer, x.device)
        return F.linear(F.silu(F.linear(x, down)), up)

    def _adapter(self, layer: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """A layer's adapter on the device of its rows: where that is another one, it is moved there once and stays."""
        own = self.down[layer], self.up[layer]
        if own[0].device == device:
            return own
        if not torch.is_inference_mode_enabled():  # weights that learn are moved as they are now
            return to_device(own[0], device), to_device(own[1], device)
        if layer not in self.moved:
            self.moved[layer] = to_device(own[0], device), to_device(own[1], device)
        return self.moved[layer]

    def early_exit(self, x: Tensor) -> Tensor:
        """o_theta (sec. 2.3): the main state at the pruning layer, mapped to what the LM head can read."""
        return x + F.linear(F.linear(x, self.prune_down), self.prune_up)

    def told(self, target: Target, x: Tensor, tokens: Tensor | None) -> Tensor:
        """Final, normed streams x [.., gamma, h] with what the tokens after their main row say, where that is learnt.

        tokens int64 [.., n], n of 1 to gamma: the root, which all streams learn, and the tokens after it; the token
        before the one that a stream guesses is its parent. Not in the papers: there streams guess without knowing what
        was decided meanwhile, as EAGLE's and Hydra's drafts do. Of embeddings only the direction counts. A token below
        0 is none. Raises ValueError where tokens are missing.
        """
        c = self.config
        if not c.root_rank and not c.parent_rank:
            return x
        if tokens is None:
            raise ValueError("these streams learn the tokens before their own: give them")
        if c.root_rank:
            x = x + F.linear(self.root_rows(target, tokens[..., 0]), self.root_up)[..., None, :]
        if c.parent_rank:
            said = F.linear(self.parent_rows(target, tokens), self.parent_up) * (tokens >= 0)[..., None]
            x = x + F.pad(said, (0, 0, 0, x.shape[-2] - tokens.shape[-1]))
        return x

    def heard(self, tokens: Tensor, at: Tensor) -> Tensor:
        """Tokens [.., gamma] after the rows at places int64 [..] of a text, as far as `told` may have them.

        Where gradients are made, half of the parents are kept back, since candidates are first looked for without
        them: which ones depends on place and stream alone, so that a training that is resumed sees the same.
        """
        if not self.config.parent_rank or not torch.is_grad_enabled():
            return tokens
        stream = torch.arange(tokens.shape[-1], device=at.device)
        mixed = (at[..., None] * 40503 + stream * 30011) % 65537  # no pattern that places or streams follow
        return tokens.masked_fill((mixed % 2 == 1) & (stream > 0), -1)  # the root is always known

    def root_rows(self, target: Target, roots: Tensor) -> Tensor:
        """Return what roots, int64 [..], say, before it is mapped to states: [.., root_rank]."""
        return _said(target, roots, self.root_down)

    def parent_rows(self, target: Target, tokens: Tensor) -> Tensor:
        """Return what tokens, int64 [..], say to guesses of their children, before it is mapped: [.., parent_rank]."""
        return _said(target, tokens, self.parent_down)

    def pass_layer(self, layer: int, block: Block, x: Tensor, mains: int, attended: Tensor) -> Tensor:
        """After attention: the first `mains` rows through the layer's MLP, the stream rows through the adapter.

        x [B, r, h] before attention, attended [B, r, h] its contribution. As configured, streams pass the MLP as well.
        """
        c, total = self.config, x + attended
        source = x if block.parallel else total
        if not c.adapter_rank:
            return total + block.feed(source)
        adapted = self.adapt(layer, block.norm2(source[:, mains:]))
        if c.keep_mlp:
            return total + block.feed(source) + F.pad(adapted, (0, 0, mains, 0))
        fed = [block.feed(source[:, :mains])] if mains else []
        return total + torch.cat((*fed, adapted), 1)

    def run(self, target: Target, x: Tensor, layout: Layout, cache: Any, mask: Tensor, rotary: Any) -> Tensor:
        """Rows x [B, mains + streams, h] through the top N_s layers, eq. 2 or 3 as the mask says."""
        lo = target.n_layers - self.config.n_msa_layers
        same = self.config.stream_position == "same"
        windowed = partial(windowed_as_main_rows, target, layout.mains) if same else target.windowed

        def layers(x: Tensor, cache: Any, mask: Tensor, rotary: Any) -> tuple[Tensor, ...]:
            upper = enumerate(target.family.blocks[lo:], start=lo)
            masks = [windowed(mask, block.window, x.shape[1], cache, i) for i, block in upper]
            return (run_masked(target, self, x, layout, cache, masks, rotary),)

        made = None
        if target.passes is not None and layout.mains:
            if layout.stream_top_p:  # the last keys are taken for the streams' own: padded keys would stand there
                target.passes.decline(FEW_KEYS, lo, cache)
            else:
                made = target.passes.run((self, layout), layers, x, lo, cache, mask, rotary, pad=False)
        return (made or layers(x, cache, mask, rotary))[0]


def windowed_as_main_rows(
    target: Target, mains: int, mask: Tensor | None, window: int | None, q: int, cache: Any, layer: int
) -> Tensor | None:
    """`Target.windowed` for streams at the position of their main row: they see as far back as it does.

    mask additive [1, 1, q, past + q], of `mains` main rows and then streams. `Target.windowed` counts the new rows that
    a row sees to know its place, so that streams are shown to it as if they saw no stream. Those that they see stand at
    their own position, and no window hides them.
    """
    if window is None or mask is None:
        return mask
    if isinstance(cache, PartsCache):
        fold = partial(windowed_as_main_rows, target, mains)
        return cast("Tensor", cache.windowed(fold, cast("Any", mask), window, q, layer))
    end = cache.get_seq_length(layer) + mains
    alone = mask.clone()
    alone[..., mains:, end:] = torch.finfo(mask.dtype).min
    folded = target.windowed(alone, window, q, cache, layer)
    assert folded is not None
    return torch.cat((folded[..., :end], mask[..., end:]), -1)


def _said(target: Target, tokens: Tensor, down: Tensor) -> Tensor:
    known = target.model.get_input_embeddings()(tokens.clamp_min(0)).to(down.dtype)
    return F.linear(F.rms_norm(known, known.shape[-1:]), down)


def run_masked(
    target: Target,
    streams: Streams,
    x: Tensor,
    layout: Layout,
    cache: Any,
    masks: Sequence[Tensor | None],
    rotary: Any,
) -> Tensor:
    """`Streams.run` with a mask for each of the top N_s layers. layout.mains may be 0: the cache gives keys."""
    c = streams.config
    if c.stream_init == "rotation":
        cache = TurnedValues(cache, layout.mains, layout.gamma, c.angle(target.context_length))
    chosen = TopP(layout.stream_top_p, layout.mains, layout.gamma)
    with top_p(target, chosen) if layout.stream_top_p else nullcontext():
        for layer, (block, mask) in enumerate(zip(target.family.blocks[-c.n_msa_layers :], masks, strict=True)):
            x = target.carried(x, layer - c.n_msa_layers)
            x = streams.pass_layer(layer, block, x, layout.mains, block.attend(x, cache, mask, rotary))
    return target.carried(x)
