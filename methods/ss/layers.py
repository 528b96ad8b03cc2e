"""Multi-stream attention: the trained streams, their rows, and how these pass a layer.

Equations of the ACL paper; M main states, S stream states, gamma streams, N_s MSA layers on top, h hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from specbench_ss.engine.architectures import Block
from specbench_ss.engine.attention import grouped_attention
from specbench_ss.engine.cpu_kernels import PrepackedLinear
from specbench_ss.engine.device_map import to_device
from specbench_ss.engine.kv_cache import BatchedKVCache
from specbench_ss.engine.target import Target
from specbench_ss.methods.ss.config import StreamConfig, StreamPosition

if TYPE_CHECKING:
    from specbench_ss.training.batch import Documents


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


_layout: list[Layout] = []  # innermost `top_p` last


@contextmanager
def top_p(target: Target, layout: Layout) -> Iterator[None]:
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
    top = scores.topk(min(layout.stream_top_p, keys), -1)  # [B, H_kv, r, m, p]
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

    def condition_on_tokens(self, target: Target, x: Tensor, tokens: Tensor | None) -> Tensor:
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

    def kept_conditioning(self, tokens: Tensor, at: Tensor) -> Tensor:
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
            return total + block.run_mlp(source)
        adapted = self.adapt(layer, block.norm2(source[:, mains:]))
        if c.keep_mlp:
            return total + block.run_mlp(source) + F.pad(adapted, (0, 0, mains, 0))
        fed = [block.run_mlp(source[:, :mains])] if mains else []
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
        if target.graphs is not None and layout.mains:
            if layout.stream_top_p:  # the last keys are taken for the streams' own: padded keys would stand there
                target.graphs.record_fallback(FEW_KEYS, lo, cache)
            else:
                made = target.graphs.run((self, layout), layers, x, lo, cache, mask, rotary, pad=False)
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
    if isinstance(cache, BatchedKVCache):
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
    with top_p(target, layout) if layout.stream_top_p else nullcontext():
        for layer, (block, mask) in enumerate(zip(target.family.blocks[-c.n_msa_layers :], masks, strict=True)):
            x = target.to_layer_device(x, layer - c.n_msa_layers)
            x = streams.pass_layer(layer, block, x, layout.mains, block.attend(x, cache, mask, rotary))
    return target.to_layer_device(x)


CHUNK = 4096  # tokens whose embeddings are normed at a time


class TokenConditioning:
    """One map of `Streams.told` as two tables, made when they are needed: what each token says, and what that changes.

    up [h, rank]: to states. rows: what tokens say, before it is mapped.
    """

    def __init__(self, target: Target, up: Tensor, rows: Callable[[Target, Tensor], Tensor]) -> None:
        self.target, self.up, self.rows = target, up, rows

    @cached_property
    def said(self) -> Tensor:
        """What each token says, [V, rank]."""
        count = len(self.target.model.get_input_embeddings().weight)
        every = torch.arange(count, device=self.target.device)
        with torch.no_grad():
            return torch.cat([self.rows(self.target, tokens) for tokens in every.split(CHUNK)])

    @cached_property
    def product(self) -> PrepackedLinear:
        """By W times the map, [V, rank]: what it changes in the logits of each token."""
        target = self.target
        with torch.no_grad():
            weight = target.unembed @ self.up
            return PrepackedLinear(weight.half().float() if target.fp16_weights else weight, None, target.prepack)

    def of(self, token: Tensor) -> Tensor:
        """What a token int64 [] changes in all logits, [1, V]. To index by it would wait for the device."""
        return self.product(self.said.index_select(0, token[None]))


class StreamConditioning:
    """What roots and parents change in logits, made once for all decoders that share these. None: not learnt."""

    def __init__(self, target: Target, streams: Streams) -> None:
        c = streams.config
        self.root = TokenConditioning(target, streams.root_up, streams.root_rows) if c.root_rank else None
        self.parent = TokenConditioning(target, streams.parent_up, streams.parent_rows) if c.parent_rank else None

    def known(self, logits: Tensor, root: Tensor) -> Tensor:
        """Logits [gamma, V] of streams that know no token yet, with what their root int64 [] says; [gamma, V]."""
        if self.root is not None:
            logits = logits + self.root.of(root)
        if self.parent is not None:  # of the first level the root is the parent
            logits = torch.cat((logits[:1] + self.parent.of(root), logits[1:]))
        return logits

    def changes(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """What parents [.., m] change in the logits of tokens [.., s] as their children: [.., m, s]."""
        assert self.parent is not None
        return self.parent.said[parents] @ self.parent.product.weight[tokens].mT

    def prepare(self) -> None:
        """Make all tables now, so that no step has to."""
        for one in self._learnt():
            one.said, one.product  # noqa: B018 - made by being asked for

    def multiplied(self) -> list[Tensor]:
        """Matrices that `known` multiplies by."""
        return [one.product.weight for one in self._learnt()]

    def _learnt(self) -> list[TokenConditioning]:
        return [one for one in (self.root, self.parent) if one is not None]
