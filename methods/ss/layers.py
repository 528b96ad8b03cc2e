"""Multi-stream attention: trained streams, their rows, masks and layers.

Equations of the EMNLP paper; M main states, S stream states, gamma streams, N_s MSA layers on top, h hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from specbench_ss.engine.architectures import Block
from specbench_ss.engine.device_map import to_device
from specbench_ss.engine.forward import ForwardPass
from specbench_ss.engine.kv_cache import BatchedKVCache
from specbench_ss.engine.layers.attention import grouped_attention
from specbench_ss.engine.layers.cpu import MOST_ROWS, NativeLayer, NativeLinear
from specbench_ss.engine.layers.fused import NativeBlock
from specbench_ss.engine.layers.linear import PackedDtype, PrepackedLinear
from specbench_ss.engine.target import Target
from specbench_ss.methods._shared.draft_vocabulary import DraftVocabulary
from specbench_ss.methods.ss.config import StreamConfig, StreamPosition

if TYPE_CHECKING:
    from specbench_ss.training.masks import Documents


@dataclass(frozen=True, slots=True)
class Layout:
    """Row layout of an MSA layer: `mains` main rows, then gamma streams of each carrier row.

    stream_top_p: number of main keys that streams attend to (EMNLP H.1), 0 = all; if set, every main row is a carrier.
    """

    mains: int
    gamma: int
    stream_top_p: int = 0


def steps_ahead(gamma: int, position: StreamPosition, device: torch.device) -> Tensor:
    """Return the position offset of each of gamma streams from its main row, int64 [gamma].

    The papers do not define stream positions. ahead: 1..gamma, so stream j has the position of the token whose
    successor it predicts. same: 0, the main row's own position.
    """
    steps = torch.arange(1, gamma + 1, device=device)
    return steps if position == "ahead" else torch.zeros_like(steps)


def stream_positions(target: Target, at: Tensor, gamma: int, position: StreamPosition = "ahead") -> Tensor:
    """Return stream positions [.., m * gamma] of rows at positions int64 [.., m], clamped to the model's context."""
    positions = at[..., None] + steps_ahead(gamma, position, at.device)
    return positions.clamp_max(target.context_length - 1).flatten(-2)


def own_streams(rows: int, gamma: int, device: torch.device) -> Tensor:
    """Return the mask bool [rows * gamma, rows * gamma]: stream j of a row attends to streams 1..j of that row."""
    own = torch.ones(gamma, gamma, dtype=torch.bool, device=device).tril()
    same = torch.eye(rows, dtype=torch.bool, device=device)
    return (same[:, None, :, None] & own[:, None]).reshape(rows * gamma, rows * gamma)


own_streams_of_step = cache(own_streams)  # kept, since graphs read them; steps have few sizes


def stream_visibility(visible: Tensor, gamma: int, carriers: Tensor | None = None, attends: bool = False) -> Tensor:
    """Return the mask of m main rows and the streams of c of them, bool [m + c*gamma, m + c*gamma].

    visible [m, m]: of main rows. carriers int64 [c]: rows with streams, None = all. Stream j of row i attends to the
    main rows visible to row i, and to streams 1..j of row i. A main row attends to its own streams only with `attends`
    (eq. 3).
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
    """Return the mask of a training segment of `length` main rows at `start`, including the keys before it.

    carriers int64 [B, c]: indices of carrier rows in the segment; real bool [B, c]: False for padding. The mask is as
    in `stream_visibility`, bool [B, length + c*gamma, start + length + c*gamma] (EMNLP appendix I).
    """
    b, c = carriers.shape
    keys = torch.arange(start + length, device=carriers.device)
    segment = torch.arange(length, device=carriers.device)
    main = (keys <= start + segment[:, None]).expand(b, -1, -1)  # [B, L, start + L]
    if documents is not None:
        main = main & documents.same((start + segment).expand(b, -1), len(keys))
    attended = (segment[:, None] == carriers[:, None]) & real[:, None] & attends  # [B, L, c]
    upper = torch.cat((main, attended.repeat_interleave(gamma, 2)), 2)
    prefix = main.gather(1, carriers[..., None].expand(-1, -1, len(keys)))  # the mask of the carrier's main row
    prefix = prefix.repeat_interleave(gamma, 1)  # [B, c*gamma, start + L]
    own = own_streams(c, gamma, carriers.device).expand(b, -1, -1)
    return torch.cat((upper, torch.cat((prefix, own), 2)), 1)


NAME = "ssbench_top_p"
MIN_MAIN_ROWS = 8  # main rows: with fewer, main rows alone use kernels that round differently than with stream rows


class RotatedValues:
    """A cache that rotates the values of stream rows: V_tn = V_t exp(i epsilon n), n = 1..gamma (eq. 8).

    Rows are [mains, streams of main 0, streams of main 1, ...]; halves of the head dimension are real and imaginary
    parts. Rotation uses at least single precision: in half precision small angles would be rounded twice.
    """

    is_compileable = False

    def __init__(self, cache: Any, mains: int, gamma: int, angle: float) -> None:
        self.cache, self.mains, self.gamma, self.angle = cache, mains, gamma, angle

    def get_seq_length(self, layer: int = 0) -> int:
        """Return the length of the wrapped cache."""
        return int(self.cache.get_seq_length(layer))

    def update(self, k: Tensor, v: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Update the wrapped cache with k, v [B, kv_heads, rows, head_dim], stream rows of v rotated."""
        streams = v[:, :, self.mains :]
        n = torch.arange(1, self.gamma + 1, device=v.device).repeat(streams.shape[2] // self.gamma)  # [streams]
        angle = (n * self.angle)[:, None].to(torch.promote_types(v.dtype, torch.float32))
        half = v.shape[-1] // 2
        real, imaginary = (x.to(angle.dtype) for x in (streams[..., :half], streams[..., half : 2 * half]))
        cos, sin = angle.cos(), angle.sin()
        rotated = torch.cat((real * cos - imaginary * sin, real * sin + imaginary * cos), -1).to(v.dtype)
        values = torch.cat((v[:, :, : self.mains], torch.cat((rotated, streams[..., 2 * half :]), -1)), 2)
        updated: tuple[Tensor, Tensor] = self.cache.update(k, values, layer)
        return updated


_layout: list[Layout] = []  # innermost `top_p` last


@contextmanager
def top_p(target: Target, layout: Layout) -> Iterator[None]:
    """Use top-p stream attention in the target's attention modules for rows of this layout."""
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
    """Compute EMNLP H.1: q [B, H, m + m*gamma, d], k, v [B, H_kv, past + m + m*gamma, d] -> [B, rows, H, d].

    mask additive [B or 1, 1, rows, keys]. A stream attends, per head, to the p main keys (cached ones and its
    main row's ancestors) with the largest coefficients of its main row, and to its row's earlier streams. Main rows use
    the same attention as without top-p.
    """
    layout = _layout[-1]
    m, g = layout.mains, layout.gamma
    rows = m if m >= MIN_MAIN_ROWS else q.shape[2]
    main, _ = grouped_attention(module, q[:, :, :rows], k, v, mask[:, :, :rows], scaling=scaling, **more)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    keys = k.shape[2] - m * g  # main keys: the cache's and the m new ones
    least = torch.finfo(q.dtype).min
    q = q.unflatten(1, (k.shape[1], -1))  # [B, H_kv, r, rows, d]: r heads share keys and values
    r = q.shape[2]
    scores = q[..., :m, :].flatten(2, 3) @ k[:, :, :keys].transpose(2, 3) * scale  # [B, H_kv, r * m, keys]
    scores = scores.unflatten(2, (r, m)) + mask[:, :, None, :m, :keys]
    top = scores.topk(min(layout.stream_top_p, keys), -1)  # [B, H_kv, r, m, p]
    index = top.indices.flatten(2)[..., None].expand(-1, -1, -1, v.shape[-1])
    top_k, top_v = (x.gather(2, index).unflatten(2, (r, m, -1)) for x in (k, v))  # [B, H_kv, r, m, p, d]
    own_k, own_v = (  # [B, H_kv, r, m, gamma, d]
        x[:, :, None, keys:].unflatten(3, (m, g)).expand(-1, -1, r, -1, -1, -1) for x in (k, v)
    )
    queries = q[..., m:, :].unflatten(3, (m, g)) * scale
    masked = torch.where(top.values > least / 2, 0.0, least)[..., None, :].to(q.dtype)  # fewer than p visible
    earlier = torch.ones(g, g, dtype=torch.bool, device=q.device).tril()
    own = (queries @ own_k.transpose(-1, -2)).masked_fill(~earlier, least)
    joint = torch.cat((queries @ top_k.transpose(-1, -2) + masked, own), -1)  # [B, H_kv, r, m, gamma, p + gamma]
    streams = joint.float().softmax(-1).to(v.dtype) @ torch.cat((top_v, own_v), 4)
    return torch.cat((main[:, :m], streams.flatten(1, 2).flatten(2, 3).transpose(1, 2)), 1), None


AttentionInterface.register(NAME, top_p_attention)

PACKED = ("down", "up", "init_down", "init_up")  # weights of which decoding keeps packed copies
PackedPairs = Mapping[int | None, tuple[PrepackedLinear, PrepackedLinear]]  # the adapter of each MSA layer; None: f_eta
UNPACKED: PackedPairs = MappingProxyType({})


class Streams(nn.Module):
    """Trained parameters: P_j, f_eta, the stream adapters and o_theta.

    gamma*h (P_j) + 2*R_s*h*N_s (adapters) + 2*eta*h (f_eta) + 2*theta*h (pruning) parameters, and 2*rank*h each for
    root and parent conditioning (not in the papers); each if configured. frequent_tokens: as of `draft_vocabulary`.
    """

    frequent_tokens: Tensor | None = None

    def __init__(self, config: StreamConfig, hidden: int) -> None:
        super().__init__()
        self.moved: dict[int, tuple[Tensor, Tensor]] = {}  # adapters of layers on other devices than the first
        self.pairs: PackedPairs = {}
        self.native: dict[tuple[int, NativeLayer], NativeLayer | None] = {}  # a layer's kernels with its adapter
        self.version: tuple[Any, ...] = ()  # of the weights that these are copies of
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

    def packed(self, pack: PackedDtype) -> PackedPairs:
        """Return packed weights for inference, {} without a packed dtype and in training.

        They are packed again if weights have changed, as before an evaluation during training.
        """
        if pack is None or not torch.is_inference_mode_enabled():
            return {}
        weights = [w for name in PACKED if (w := self._parameters.get(name)) is not None]
        version = pack, [(w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights]
        if version != self.version:
            pairs: dict[int | None, tuple[Tensor, Tensor]] = {}
            if self.config.init_rank:
                pairs[None] = self.init_down, self.init_up
            if self.config.adapter_rank:
                pairs |= dict(enumerate(zip(self.down, self.up, strict=True)))
            self.version, self.native = version, {}
            self.pairs = {
                key: (PrepackedLinear(down, None, pack), PrepackedLinear(up, None, pack))
                for key, (down, up) in pairs.items()
            }
        return self.pairs

    def insert(self, main: Tensor, gamma: int, packed: PackedPairs = UNPACKED) -> Tensor:
        """Return the initial streams [B, m * gamma, h] of main rows [B, m, h] at layer N - N_s (eq. 4)."""
        if None in packed:
            down, up = packed[None]
            main = main + up(down(main))
        elif self.config.init_rank:
            main = main + F.linear(F.linear(main, self.init_down), self.init_up)
        rows = main[:, :, None].expand(-1, -1, gamma, -1)
        return (rows + self.embedding[:gamma] if self.config.stream_init == "embedding" else rows).flatten(1, 2)

    def adapt(self, layer: int, x: Tensor, packed: PackedPairs = UNPACKED) -> Tensor:
        """Apply the stream adapter of the layer-th MSA layer: [B, r, h] -> [B, r, h]."""
        if layer in packed:
            down, up = packed[layer]
            return up(F.silu(down(x)))
        weights = self._adapter(layer, x.device)
        return F.linear(F.silu(F.linear(x, weights[0])), weights[1])

    def _native(self, layer: int, block: Block, x: Tensor, packed: PackedPairs) -> NativeLayer | None:
        """Return the native MLP of a layer with its adapter; None where that does not apply."""
        few = len(x) == 1 and x.shape[1] <= MOST_ROWS and x.dtype == self.down.dtype
        if layer not in packed or not few or not isinstance(block, NativeBlock) or not block.native.has_mlp:
            return None
        key = layer, block.native
        if key not in self.native:
            down, up = (linear.native for linear in packed[layer])
            fits = isinstance(down, NativeLinear) and isinstance(up, NativeLinear) and down.pair == block.native.pair
            self.native[key] = block.native.with_adapter(down, up) if fits else None  # type: ignore[arg-type]
        return self.native[key]

    def _adapter(self, layer: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return a layer's adapter on the device of its rows; it is copied there once."""
        down, up = self.down[layer], self.up[layer]
        if down.device == device:
            return down, up
        if not torch.is_inference_mode_enabled():  # trained weights change: copy their current values
            return to_device(down, device), to_device(up, device)
        if layer not in self.moved:
            self.moved[layer] = to_device(down, device), to_device(up, device)
        return self.moved[layer]

    def early_exit(self, x: Tensor) -> Tensor:
        """Apply o_theta (sec. 2.3), which maps main states at the pruning layer to inputs of the LM head."""
        return x + F.linear(F.linear(x, self.prune_down), self.prune_up)

    def condition_on_tokens(self, target: Target, x: Tensor, tokens: Tensor | None) -> Tensor:
        """Condition final, normed streams x [.., gamma, h] on the tokens after their main row, if configured.

        tokens int64 [.., n], n = 1..gamma: the root, which conditions all streams, and the tokens after it, each
        of which conditions the stream of its successor; negative = unknown. It is an extension of the papers, whose
        streams are computed before the root. Embeddings are RMS-normed. Raise ValueError if tokens are missing.
        """
        c = self.config
        if not c.root_rank and not c.parent_rank:
            return x
        if tokens is None:
            raise ValueError("these streams are conditioned on tokens; pass them")
        if c.root_rank:
            x = x + F.linear(token_features(target, tokens[..., 0], self.root_down), self.root_up)[..., None, :]
        if c.parent_rank:
            features = (
                F.linear(token_features(target, tokens, self.parent_down), self.parent_up) * (tokens >= 0)[..., None]
            )
            x = x + F.pad(features, (0, 0, 0, x.shape[-2] - tokens.shape[-1]))
        return x

    def mask_parents(self, tokens: Tensor, at: Tensor) -> Tensor:
        """Return conditioning tokens [.., gamma] of rows at positions int64 [..]; mask half of the parents in training.

        They are masked since candidates are first selected without parents. The choice depends only on position and
        stream, so that a resumed training repeats it.
        """
        if not self.config.parent_rank or not torch.is_grad_enabled():
            return tokens
        stream = torch.arange(tokens.shape[-1], device=at.device)
        mixed = (at[..., None] * 40503 + stream * 30011) % 65537  # pseudo-random in position and stream
        return tokens.masked_fill((mixed % 2 == 1) & (stream > 0), -1)  # the root is never masked

    def run_layer(
        self,
        layer: int,
        block: Block,
        x: Tensor,
        layout: Layout,
        cache: Any,
        mask: Tensor | None,
        rotary: Any,
        packed: PackedPairs = UNPACKED,
    ) -> Tensor:
        """Run rows x [B, r, h] through the layer-th MSA layer: [B, r, h]."""
        if layout.stream_top_p:
            return self.pass_layer(layer, block, x, layout.mains, block.attend_by_torch(x, cache, mask, rotary), packed)
        if not self.config.adapter_rank:
            return block(x, cache, mask, rotary)
        if (native := self._native(layer, block, x, packed)) is not None:
            replaced = not self.config.keep_mlp
            out = native.run(native.kernels.layer, x, cache, mask, rotary, layout.mains, replaced)
            if out is not None:
                return out
        return self.pass_layer(layer, block, x, layout.mains, block.attend(x, cache, mask, rotary), packed)

    def pass_layer(
        self, layer: int, block: Block, x: Tensor, mains: int, attended: Tensor, packed: PackedPairs = UNPACKED
    ) -> Tensor:
        """Run the first `mains` rows through the layer's MLP, and stream rows through the adapter (or MLP, or both).

        x [B, r, h] before attention, attended [B, r, h]: the output of attention.
        """
        c, total = self.config, x + attended
        source = x if block.parallel else total
        if not c.adapter_rank:
            return total + block.run_mlp(source)
        native = self._native(layer, block, source, packed)
        if native is not None:
            return total + native.mlp(source, mains, replace_mlp=not c.keep_mlp)
        adapted = self.adapt(layer, block.norm2(source[:, mains:]), packed)
        if c.keep_mlp:
            return total + block.run_mlp(source) + F.pad(adapted, (0, 0, mains, 0))
        fed = [block.run_mlp(source[:, :mains])] if mains else []
        return total + torch.cat((*fed, adapted), 1)

    def run(self, current: ForwardPass, x: Tensor, layout: Layout, mask: Tensor, rotary: Any) -> Tensor:
        """Run rows x [1, mains + streams, h] through the top N_s layers; the mask selects eq. 2 or 3."""
        target = current.target
        lo = target.n_layers - self.config.n_msa_layers
        same = self.config.stream_position == "same"
        windowed = partial(windowed_as_main_rows, target, layout.mains) if same else target.windowed

        def layers(x: Tensor, cache: Any, mask: Tensor, rotary: Any) -> Tensor:
            masks: list[Tensor | None] = [mask] * self.config.n_msa_layers
            if any(target.windows):
                upper = enumerate(target.family.blocks[lo:], start=lo)
                masks = [windowed(mask, block.window, x.shape[1], cache, i) for i, block in upper]
            return run_masked(target, self, x, layout, cache, masks, rotary)

        if layout.stream_top_p or not layout.mains:  # concurrent requests do not share them
            return layers(x, current.rows(x.shape[1]), mask, rotary)
        return current.layers((self, layout), layers, (x,), mask, rotary, pad=False)


def windowed_as_main_rows(
    target: Target, mains: int, mask: Tensor | None, window: int | None, q: int, cache: Any, layer: int
) -> Tensor | None:
    """Apply `Target.windowed` to streams at the position of their main row, with the same window as the row.

    mask additive [1, 1, q, past + q], of `mains` main rows and then streams. `Target.windowed` derives a row's position
    from the number of new rows visible to it, so streams are hidden from each other in the mask passed to it. Visible
    streams have the same position, so no window hides them.
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


def token_features(target: Target, tokens: Tensor, down: Tensor) -> Tensor:
    """Return features [.., rank] of tokens int64 [..]: RMS-normed embeddings, mapped by down [rank, h]."""
    embedded = target.model.get_input_embeddings()(tokens.clamp_min(0)).to(down.dtype)
    return F.linear(F.rms_norm(embedded, embedded.shape[-1:]), down)


def run_masked(
    target: Target,
    streams: Streams,
    x: Tensor,
    layout: Layout,
    cache: Any,
    masks: Sequence[Tensor | None],
    rotary: Any,
) -> Tensor:
    """Run `Streams.run` with one mask per layer. layout.mains may be 0: then the main keys are in the cache."""
    c = streams.config
    if c.stream_init == "rotation":
        cache = RotatedValues(cache, layout.mains, layout.gamma, c.angle(target.context_length))
    packed = streams.packed(target.prepack)
    with top_p(target, layout) if layout.stream_top_p else nullcontext():
        for layer, (block, mask) in enumerate(zip(target.family.blocks[-c.n_msa_layers :], masks, strict=True)):
            if target.is_multi_device:
                x = target.to_layer_device(x, layer - c.n_msa_layers)
            x = streams.run_layer(layer, block, x, layout, cache, mask, rotary, packed)
    return target.to_layer_device(x) if target.is_multi_device else x


CHUNK = 4096  # tokens embedded at a time


class StreamConditioning:
    """Token conditioning of stream logits by roots and parents, built once for all decoders that share it.

    A token's features are mapped to logits by W times the map, so that streams need no second pass of the LM head.
    vocabulary: of the logits, None = all tokens.
    """

    def __init__(self, target: Target, streams: Streams, vocabulary: DraftVocabulary | None = None) -> None:
        self.target, self.streams = target, streams
        self.vocabulary = vocabulary or DraftVocabulary(target.vocab_size)
        self.root_rank, parent_rank = streams.config.root_rank, streams.config.parent_rank
        self.rank = self.root_rank + parent_rank
        self.kinds = [name for name, rank in (("root", self.root_rank), ("parent", parent_rank)) if rank]

    @cached_property
    def table(self) -> Tensor:
        """Return the features of every token, [V, rank]: as a root, then as a parent."""
        target = self.target
        every = torch.arange(len(target.model.get_input_embeddings().weight), device=target.device).split(CHUNK)
        with torch.no_grad():
            down = torch.cat([getattr(self.streams, f"{name}_down") for name in self.kinds])
            return torch.cat([token_features(target, tokens, down) for tokens in every])

    @cached_property
    def head(self) -> PrepackedLinear:
        """Return W times the maps, [draft vocabulary, rank], which projects features to logits."""
        target, ids = self.target, self.vocabulary.ids
        with torch.no_grad():
            unembed = target.unembed if ids is None else target.unembed[ids]
            weight = unembed @ torch.cat([getattr(self.streams, f"{name}_up") for name in self.kinds], 1)
            return PrepackedLinear(weight.half().float() if target.fp16_weights else weight, None, target.prepack)

    @cached_property
    def feature_mask(self) -> Tensor:
        """Return the mask [2, rank] of a root's features: all for the first stream, its root part for later ones."""
        of_others = torch.arange(self.rank, device=self.target.device) < self.root_rank
        return torch.stack((torch.ones_like(of_others), of_others)).to(self.table.dtype)

    def corrected(self, logits: Tensor, root: Tensor) -> Tensor:
        """Add the corrections of the root [1], the parent of the first level, to logits [gamma, V] of streams."""
        gamma = len(logits)
        changes = self.head(self.table.index_select(0, root) * self.feature_mask[:gamma])  # no device synchronization
        return logits + (changes if gamma < 3 else torch.cat((changes[:1], changes[1:].expand(gamma - 1, -1))))

    def corrections(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """Return the logit corrections [m, s] by parents [m] to their children's tokens [s], all columns of logits."""
        features = self.table.index_select(0, self.vocabulary.token_ids(parents))
        weight = self.head.weight.index_select(0, tokens)
        return features[:, self.root_rank :] @ weight[:, self.root_rank :].mT

    def prepare(self) -> None:
        """Build all tables before the first step."""
        if self.rank:
            self.table, self.head, self.feature_mask  # noqa: B018 - builds the cached properties

    def matrices(self) -> list[Tensor]:
        """Return the matrices that `corrected` multiplies by."""
        return [self.head.weight] if self.rank else []
