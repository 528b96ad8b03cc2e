"""Causal LMs of any architecture: transformers' own layers, with our masks, positions and cache.

Verification takes refused tokens back, and hides tokens of other branches of a tree. Both need a cache of keys and
values and attention with a mask; a recurrent state has neither.

Nothing is known of the model beforehand; what it gives to its layers is observed (`engine/generic_model.py`,
`engine/generic_model.py`, `engine/generic_model.py`), and `engine/generic_model.py` compares what comes out with the
model's own forward pass.

A float32 model of the first layers, as many as there are kinds of them, gets the weights that were loaded, tiny
windows and a small vocabulary. Prefill and two trees of it are compared with its own forward pass, without a cache
and with eager attention, along each path. The loaded model, its configuration and the random state stay as they are.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, DynamicCache

from specbench_ss.engine.attention import NAME, set_attention, without_warnings
from specbench_ss.engine.device_map import Movable, as_one, moved, place_of
from specbench_ss.engine.tree import DraftTree
from specbench_ss.errors import UserError, first_line

KINDS_OF_LAYERS = {"full_attention", "sliding_attention"}


def cannot_be_used(config: Any, why: str) -> UserError:
    """The refusal of an architecture, with the reason."""
    return UserError(f"model type {config.model_type!r} cannot be used: {why}")


def check_unknown(config: Any) -> None:
    """Raises UserError, with the reason, for a model that is no decoder of attention layers with a cache."""
    if problem := _problem(config):
        raise cannot_be_used(config, problem)


def _problem(config: Any) -> str:
    if getattr(config, "is_encoder_decoder", False):
        return "it has an encoder; targets are models with a decoder alone"
    if _keeps_a_state(config):
        return "it is recurrent, in all layers or some: its state cannot take back a refused token"
    if others := sorted(set(getattr(config, "layer_types", None) or ()) - KINDS_OF_LAYERS):
        return f"it has layers of the kind {others[0]}; those of full_attention and sliding_attention can be driven"
    if getattr(config, "attention_chunk_size", None):
        return "its attention is cut into chunks, which no sliding window describes"
    if lacking := [name for name in ("num_hidden_layers", "hidden_size", "vocab_size") if not hasattr(config, name)]:
        return f"its configuration states no {lacking[0]}: it is more, or something else, than a language model"
    return ""


def _keeps_a_state(config: Any) -> bool:
    """Whether transformers says so of the class that loads it."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return bool(getattr(kind, "_is_stateful", False))


class _OurCache:
    """Stands in a recorded argument where the decoder handed on the cache that it was given."""


CACHE = _OurCache()


@dataclass(slots=True)
class Call:
    """One call of a layer: states [B, q, h] that enter it, every other argument by its name."""

    states: Tensor
    given: dict[str, Any]


@dataclass(slots=True)
class Record:
    """One pass of a decoder: the calls of its layers, the last layer's output and the decoder's own [B, q, h].

    called: module -> (its first argument, its output), of the modules beside the layers, in the order of their calls.
    after: those of them that are called when the last layer is done.
    """

    calls: list[Call] = field(default_factory=list)
    last: Tensor | None = None
    final: Tensor | None = None
    called: dict[nn.Module, tuple[Any, Any]] = field(default_factory=dict)
    after: list[nn.Module] = field(default_factory=list)


@contextmanager
def stand_in(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Call `forward` wherever the module is called; its attributes stay visible."""
    before = module.__dict__.get("forward")  # a library may have put one there
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before


class OwnDecoder:
    """A causal LM's decoder and its layers. Raises UserError where they cannot be found."""

    def __init__(self, model: Any) -> None:
        self.model, self.decoder = model, model.get_decoder()
        lists = [m for m in self.decoder.children() if isinstance(m, nn.ModuleList) and len(m)]
        named = [list(m) for m in lists if len(m) == model.config.num_hidden_layers]
        if not named:
            raise UserError(f"{type(self.decoder).__name__} has no list of its decoder layers")
        self.layers: list[nn.Module] = max(
            named, key=lambda layers: sum(p.numel() for m in layers for p in m.parameters())
        )
        self.signatures = [inspect.signature(layer.forward) for layer in self.layers]
        self.takes_positions = "position_ids" in inspect.signature(self.decoder.forward).parameters
        self.in_tuple = [False] * len(self.layers)  # whether a layer returns its states inside a tuple

    def call(self, ids: Tensor, positions: Tensor | None = None) -> tuple[Any, Any]:
        """Run the decoder on ids [B, q] at positions [1 or B, q]; returns its output, and the cache it was given."""
        cache = DynamicCache()
        where = {"position_ids": positions} if self.takes_positions and positions is not None else {}
        return self.decoder(input_ids=ids, past_key_values=cache, use_cache=True, **where), cache

    def passed(self, layer: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Call:
        """The arguments of one call by their names."""
        bound = self.signatures[layer].bind(*args, **kwargs).arguments
        given: dict[str, Any] = {}
        for name, value in bound.items():
            kind = self.signatures[layer].parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                raise UserError(f"{type(self.layers[layer]).__name__} takes arguments without names")
            given |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
        return Call(given.pop(next(iter(bound))), given)

    def record(self, ids: Tensor, positions: Tensor | None = None, real: bool = False) -> Record:
        """Run the decoder on ids [B, q] and record it. real: run the layers too; else states pass them unchanged."""
        seen = Record()
        with ExitStack() as stack, torch.no_grad():
            for i, layer in enumerate(self.layers):
                stack.enter_context(stand_in(layer, self._recorder(i, seen, layer.forward if real else None)))
            if real:
                stack.enter_context(_watch(self._beside(), len(self.layers), seen))
            out, cache = self.call(ids, positions)
        seen.final = out[0]
        for call in seen.calls:
            call.given = {name: CACHE if value is cache else value for name, value in call.given.items()}
        if len(seen.calls) != len(self.layers):
            raise UserError(f"{type(self.decoder).__name__} does not call each of its layers once")
        return seen

    def _recorder(self, i: int, seen: Record, real: Callable[..., Any] | None) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            call = self.passed(i, args, kwargs)
            seen.calls.append(call)
            if real is None:
                return (call.states, None) if self.in_tuple[i] else call.states
            out = real(*args, **kwargs)
            self.in_tuple[i] = isinstance(out, tuple)
            seen.last = out[0] if self.in_tuple[i] else out
            return out

        return forward

    def _beside(self) -> list[nn.Module]:
        """The decoder's modules that are no part of a layer."""
        inside = {id(m) for layer in self.layers for m in layer.modules()}
        return [m for m in self.decoder.modules() if m is not self.decoder and id(m) not in inside]

    def entering(self, ids: Tensor, positions: Tensor) -> Tensor:
        """What the decoder gives to its first layer, [B, q, h]; nothing is computed beyond that."""
        found: list[Tensor] = []

        def stop(*args: Any, **kwargs: Any) -> Any:
            found.append(self.passed(0, args, kwargs).states)
            raise _Enough

        with stand_in(self.layers[0], stop):
            try:
                self.call(ids, positions)
            except _Enough:
                return found[0]
        raise AssertionError("a decoder that called its first layer before does not call it now")


class _Enough(Exception):  # noqa: N818 - no error: it ends a pass early
    pass


@contextmanager
def _watch(modules: list[nn.Module], layers: int, seen: Record) -> Iterator[None]:
    """Record calls of these modules within."""

    def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        seen.called[module] = (args[0] if args else None, out)
        if len(seen.calls) == layers:
            seen.after.append(module)

    handles = [m.register_forward_hook(hook) for m in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


ROWS, FEWER, SHIFT = 9, 6, 2  # of the passes that are compared
AT_FIRST, CHUNK = 4096, 512  # positions whose tables are made at once; those that are computed in one pass


@dataclass(frozen=True, slots=True)
class Place:
    """Stands in an argument where a layer is given a table's rows at the positions; None: the positions themselves."""

    table: int | None = None


@dataclass(slots=True)
class Arguments:
    """How one layer is called besides its states: what stays the same, and the names of what does not.

    placed: arguments that depend on positions, with a `Place` wherever they do.
    """

    fixed: dict[str, Any] = field(default_factory=dict)
    placed: dict[str, Any] = field(default_factory=dict)
    cache: str = ""
    mask: str = ""


def leaves(value: Any) -> list[Any]:
    """What is inside tuples, lists and dicts, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for one in value for leaf in leaves(one)] if isinstance(value, (tuple, list)) else [value]


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same tuples, lists and dicts with every leaf changed, in order."""
    if isinstance(value, dict):
        return {name: mapped(one, change) for name, one in value.items()}
    return type(value)(mapped(one, change) for one in value) if isinstance(value, (tuple, list)) else change(value)


class Probes:
    """Four short passes of a decoder: some tokens, other tokens, the first tokens further on, fewer of them."""

    def __init__(self, own: OwnDecoder, vocab: int, device: torch.device) -> None:
        self.own = own
        self.ids = torch.arange(ROWS, device=device)[None] * 7 % vocab
        self.positions = torch.arange(ROWS, device=device)[None]
        self.first = own.record(self.ids, self.positions, real=True)
        self.others = own.record(self.ids.flip(1).add(1) % vocab, self.positions)
        self.further = own.record(self.ids, self.positions + SHIFT) if own.takes_positions else None
        self.fewer = own.record(self.ids[:, :FEWER], self.positions[:, :FEWER])
        self.tables: dict[int, tuple[int, str, int]] = {}  # id of a tensor -> layer, argument and leaf it was seen at

    def arguments(self, layer: int) -> Arguments:
        """What the layer's arguments are. Raises UserError for one that depends on more than positions."""
        found = Arguments()
        for name, value in self.first.calls[layer].given.items():
            if value is CACHE:
                found.cache = name
            elif self._is_mask(layer, name):
                found.mask = name
            else:
                self._sort(found, layer, name, value)
        if not found.cache:
            raise UserError("its layers are given no cache of keys and values")
        return found

    def _seen(self, layer: int, name: str) -> list[list[Any]]:
        """The argument's leaves in the four passes."""
        passes = [self.first, self.others, self.further or self.first, self.fewer]
        return [leaves(p.calls[layer].given.get(name)) for p in passes]

    def _is_mask(self, layer: int, name: str) -> bool:
        a, _, _, d = (found[0] for found in self._seen(layer, name))
        if a is None or d is None:
            return "attention_mask" in name and a is d and not name.startswith("encoder")
        is_tensor = isinstance(a, Tensor) and isinstance(d, Tensor)
        return is_tensor and a.ndim == 4 and a.shape[2:] == (ROWS, ROWS) and d.shape[2:] == (FEWER, FEWER)

    def _sort(self, found: Arguments, layer: int, name: str, value: Any) -> None:
        seen = list(zip(*self._seen(layer, name), strict=True))
        if all(_same(a, b) and _same(a, c) and _same(a, d) for a, b, c, d in seen):
            found.fixed[name] = value
            return
        numbers = iter(range(len(seen)))
        found.placed[name] = mapped(value, lambda _: self._placed(layer, name, seen, next(numbers)))

    def _placed(self, layer: int, name: str, seen: list[Any], leaf: int) -> Any:
        a, b, c, d = seen[leaf]
        if _same(a, b) and _same(a, c) and _same(a, d):
            return a
        if all(isinstance(one, Tensor) for one in (a, b, c, d)) and self.further is not None:
            if torch.equal(a, self.positions) and torch.equal(c, a + SHIFT) and _same(a, b):
                return Place()
            along = a.ndim > 1 and a.shape[:2] == (1, ROWS) and d.shape[:2] == (1, FEWER)
            if along and _same(a, b) and _same(a[:, SHIFT:], c[:, :-SHIFT]) and _same(a[:, :FEWER], d):
                self.tables.setdefault(id(a), (layer, name, leaf))
                return Place(id(a))
        raise UserError(f"its layers are given {name!r}, which depends on more than a token's position")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


class Places(Movable):
    """What depends on positions in one pass over q rows; all layers of the pass are given the same."""

    def __init__(self, values: list[dict[str, Any]]) -> None:
        self.values = values  # keyword arguments, of every kind of layer
        self._causal: Tensor | None = None

    def on(self, device: torch.device) -> Places:
        """Return the same on a device."""
        return Places(moved(self.values, device))

    def causal(self, x: Tensor, past: int) -> Tensor:
        """Additive [1, 1, q, past + q] that hides what is ahead, for attention that hides nothing by itself."""
        q = x.shape[1]
        if self._causal is None or self._causal.shape[2:] != (q, past + q):
            full = torch.full((q, past + q), torch.finfo(x.dtype).min, dtype=x.dtype, device=x.device)
            self._causal = full.triu_(past + 1)[None, None]
        return self._causal


class Tables:
    """What a decoder computes of positions alone, such as cos and sin, for positions 0..length-1; grown when needed."""

    def __init__(self, probes: Probes, kinds: list[dict[str, Any]], context: int) -> None:
        self.own, self.context, self.kinds = probes.own, context, kinds
        self.where = probes.tables
        self.rows: dict[int, Tensor] = {}  # table -> [length, ..]
        self.length = 0
        if self.where:
            self._grow(min(context, AT_FIRST), probes.ids.device)

    def at(self, positions: Tensor, longest: int | None) -> Places:
        """Arguments at positions [1 or B, q]; longest: host-side bound on them, if known."""
        need = self.context if longest is None else longest + 1
        if self.rows and need > self.length:
            self._grow(min(self.context, max(need, 2 * self.length)), positions.device)
        taken: dict[int | None, Tensor] = {table: rows[positions] for table, rows in self.rows.items()}
        taken[None] = positions

        def pick(leaf: Any) -> Any:
            return taken[leaf.table] if isinstance(leaf, Place) else leaf

        return Places([mapped(kind, pick) for kind in self.kinds])

    @torch.inference_mode(False)
    def _grow(self, length: int, device: torch.device) -> None:
        parts: dict[int, list[Tensor]] = {table: [rows] for table, rows in self.rows.items()}
        for start in range(self.length, length, CHUNK):
            positions = torch.arange(start, min(start + CHUNK, length), device=device)[None]
            seen = self.own.record(torch.zeros_like(positions), positions)
            for table, (layer, name, leaf) in self.where.items():
                parts.setdefault(table, []).append(leaves(seen.calls[layer].given[name])[leaf][0].clone())
        self.rows = {table: torch.cat(found) for table, found in parts.items()}
        self.length = length


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


@dataclass(slots=True)
class OwnLayer:
    """One decoder layer, called as its model calls it. `kind`: which of `Places.values` it is given."""

    layer: nn.Module
    index: int
    window: int | None  # sliding-window width, None = full attention
    arguments: Arguments
    kind: int
    masks_itself: bool = True  # whether its attention can do without a mask where only what is ahead is hidden

    def __call__(self, x: Tensor, cache: Any, mask: Tensor | None, rotary: Places) -> Tensor:
        """The whole layer: [B, q, h] -> [B, q, h]. mask: additive [1 or B, 1, q, kv]; rotary: of `Tables.at`."""
        a = self.arguments
        if mask is None and not self.masks_itself:
            mask = rotary.causal(x, 0 if cache is None else cache.get_seq_length(self.index))
        given: dict[str, Any] = {a.mask: mask, a.cache: cache}
        out = self.layer(x, **a.fixed, **rotary.values[self.kind], **given)
        states: Tensor = out[0] if isinstance(out, tuple) else out
        return states


class OwnHead:
    """The LM head with all that the model does after its decoder, such as soft caps and scales."""

    def __init__(self, model: Any, decoder: nn.Module, output: type[Any]) -> None:
        self.model, self.decoder, self.output = model, decoder, output

    @property
    def weight(self) -> Tensor:
        """The output embedding, [V, h]."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    def __call__(self, x: Tensor) -> Tensor:
        """Final, normed states [.., h] -> logits [.., V]."""
        rows = x.reshape(1, -1, x.shape[-1])
        ids = torch.zeros(rows.shape[:2], dtype=torch.long, device=x.device)
        with stand_in(self.decoder, lambda *_, **__: self.output(last_hidden_state=rows)):
            logits: Tensor = self.model(input_ids=ids).logits
        return logits.reshape(*x.shape[:-1], -1)


@dataclass(slots=True)
class OwnParts:
    """What `architectures.Family` holds, for a model that is not taken apart."""

    layers: list[OwnLayer]
    embed: Callable[[Tensor, Tensor], Tensor]
    norm: Callable[[Tensor], Tensor]
    head: Any
    tables: Tables


def own_parts(model: Any, context: int) -> OwnParts:
    """Observe how the model calls its layers. Raises UserError where it cannot be driven, with the reason."""
    own = OwnDecoder(model)
    first = model.get_input_embeddings().weight.device
    with as_one(own.layers, first, stand_in):
        return _observed(own, context, first)


def _observed(own: OwnDecoder, context: int, device: torch.device) -> OwnParts:
    model = own.model
    implementation = model.config._attn_implementation
    set_attention(model, "eager")  # masks are left out, else, where they hide only what is ahead
    try:
        probes = Probes(own, min(model.config.vocab_size, 64), device)
        arguments = [probes.arguments(i) for i in range(len(own.layers))]
        windows = observed_windows(own, [a.mask for a in arguments], context, device)
    finally:
        set_attention(model, implementation)
    kinds: list[dict[str, Any]] = []
    layers = []
    for i, (layer, window, a) in enumerate(zip(own.layers, windows, arguments, strict=True)):
        if a.placed not in kinds:
            kinds.append(a.placed)
        a.fixed = moved(a.fixed, place_of(layer) or device)
        layers.append(OwnLayer(layer, i, window, a, kinds.index(a.placed)))
    tables = Tables(probes, kinds, context)
    return OwnParts(layers, _embed(own, probes), _norm(own, probes.first), _head(own, probes), tables)


Embed = Callable[["Tensor", "Tensor"], "Tensor"]


def _embed(own: OwnDecoder, probes: Probes) -> Embed:
    """ids [B, q], positions [1 or B, q] -> [B, q, h]: the quickest way to what the decoder gives its first layer.

    Embeddings of tokens alone or with those of positions, where that is all; else the decoder itself, up to its layers.
    """
    places = [probes.positions, probes.positions + 2]
    truth = [own.entering(probes.ids, at) for at in places]
    for way in _quick_ways(own, probes):
        if all(torch.equal(way(probes.ids, at), x) for at, x in zip(places, truth, strict=True)):
            return way
    if not own.takes_positions:
        raise UserError("its decoder cannot be told the positions of its tokens")
    return own.entering


def _quick_ways(own: OwnDecoder, probes: Probes) -> list[Embed]:
    embedding = own.model.get_input_embeddings()

    def with_places(module: nn.Module) -> Embed:
        return lambda ids, positions: embedding(ids) + module(positions)

    placing = [
        module
        for module, (first, _) in probes.first.called.items()
        if module is not embedding and isinstance(first, torch.Tensor) and torch.equal(first, probes.positions)
    ]
    return [lambda ids, positions: embedding(ids), *map(with_places, placing)]


def _norm(own: OwnDecoder, seen: Record) -> Callable[[Tensor], Tensor]:
    """[.., h] -> [.., h]: the one module that the decoder calls after its layers, if it calls any."""
    assert seen.last is not None
    assert seen.final is not None
    if torch.equal(seen.last, seen.final):
        return torch.nn.Identity()
    for module in seen.after:
        first, out = seen.called[module]
        if isinstance(out, torch.Tensor) and torch.equal(first, seen.last) and torch.equal(out, seen.final):
            return module
    raise UserError(f"{type(own.decoder).__name__} does more after its layers than calling one module")


@torch.no_grad()
def _head(own: OwnDecoder, probes: Probes) -> Any:
    """The output embedding where that is all that follows the decoder, else the model's own forward pass around it."""
    outputs: list[Any] = []
    handle = own.decoder.register_forward_hook(lambda _, __, out: outputs.append(out))
    try:
        logits = own.model(input_ids=probes.ids[:, :2]).logits
    finally:
        handle.remove()
    states = outputs[-1][0]
    for head in (own.model.get_output_embeddings(), OwnHead(own.model, own.decoder, type(outputs[-1]))):
        if head is not None and torch.equal(head(states), logits):
            return head
    raise UserError("what follows its decoder is not determined by the decoder's last states")


Make = Callable[[Any, str], Any]

WORDS = 64  # of the vocabulary that are compared
PROMPT = 12
ALIKE = {NAME: 1e-4, "sdpa": 1e-4}  # what may differ, of 1 + the largest; 1e-3 for eager attention
FIRST, KEPT = [-1, 0, 0, 1, 2, 2, 4], [0, 2, 4]  # a tree, and the path of it that stays
SECOND = [-1, 0, 1, 0, 3]


def prove(model: Any, windows: list[int | None], make: Make) -> str:
    """Return the attention with which the model is driven as it would run itself.

    make: gives a `target.Target` that drives a model with an attention, without proof. Raises UserError where none
    agrees, with the first layer that is off.
    """
    weights = _Weights(model)
    found = ""
    for attention in _attentions(model):
        try:
            with without_warnings():
                found = _proof_problem(weights, windows, attention, make)
        except UserError as error:
            found = str(error)
        except Exception as error:  # whatever an architecture's code raises where it is called in another way
            found = f"calling its layers raises {type(error).__name__}: {first_line(error)}"
        if not found:
            return attention
    raise cannot_be_used(model.config, found)


def _attentions(model: Any) -> list[str]:
    """The quickest first; only its own where the model does not take another."""
    own = model.config._attn_implementation
    taken = set_attention(model, NAME)
    set_attention(model, own)
    return [NAME, "eager"] if taken else [own]


def _proof_problem(weights: _Weights, windows: list[int | None], attention: str, make: Make) -> str:
    """What is wrong with driving the model so; empty where nothing is."""
    trial = make(weights.small("eager" if attention == NAME else attention), attention)
    for i, (ours, theirs) in enumerate(zip(trial.windows, windows, strict=False)):
        if (ours is None) != (theirs is None):
            return f"whether layer {i} has a sliding window depends on the window's width"
    return _Comparison(weights.small("eager"), trial, ALIKE.get(attention, 1e-3)).problem()


class _Weights:
    """The first layers of a model, in float32, as many as there are kinds of them."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device = model.get_input_embeddings().weight.device
        self.layers = _kinds(OwnDecoder(model).layers, model.config)
        self.words = min(WORDS, model.config.vocab_size)
        self.tensors: dict[str, Tensor] = {}

    def config(self, attention: str) -> Any:
        """The configuration of fewer layers and words, with tiny windows."""
        config = copy.deepcopy(self.model.config)
        for name, value in config.to_dict().items():
            if isinstance(value, list) and len(value) == config.num_hidden_layers:
                setattr(config, name, value[: self.layers])
        for i, name in enumerate(window_names(config)):
            setattr(config, name, TINY + APART * i)
        if (getattr(config, "pad_token_id", None) or 0) >= self.words:
            config.pad_token_id = None
        config.num_hidden_layers, config.vocab_size, config._attn_implementation = self.layers, self.words, attention
        return config

    def small(self, attention: str) -> Any:
        """A model of the same class with these weights; those that cannot be copied, as of 4 bits, are random."""
        with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
            model = type(self.model)(self.config(attention))
        if not self.tensors:
            self._fill(model)
        model.load_state_dict(self.tensors, assign=True, strict=False)
        return model.to(self.device).float().eval().requires_grad_(False)

    def _fill(self, small: Any) -> None:
        loaded = {name.replace(".base_layer.", "."): t for name, t in self.model.state_dict().items()}
        generator = torch.Generator().manual_seed(0)
        for name, slot in small.state_dict().items():
            given = loaded.get(name)
            if given is not None and slot.ndim and given.ndim and len(given) == self.model.config.vocab_size:
                given = given[: len(slot)]
            same = given is not None and given.shape == slot.shape
            if given is not None and same and given.is_floating_point() == slot.is_floating_point():
                self.tensors[name] = given.detach().to(self.device)
            elif slot.is_floating_point():
                width = slot.shape[-1] if slot.ndim else 1
                self.tensors[name] = (torch.randn(slot.shape, generator=generator) * width**-0.5).to(self.device)
        self.tensors = {name: t.float() if t.is_floating_point() else t for name, t in self.tensors.items()}


def _kinds(layers: list[nn.Module], config: Any) -> int:
    """How many of the first layers hold every kind of layer; two at least, where there are so many."""
    types = getattr(config, "layer_types", None) or [""] * len(layers)
    kinds = [(kind, tuple(_traits(layer))) for kind, layer in zip(types, layers, strict=True)]
    return max(min(2, len(layers)), *(kinds.index(kind) + 1 for kind in kinds))


def _traits(layer: nn.Module) -> Iterable[str]:
    """What tells layers apart: their modules, and these modules' plain attributes, but for the layer's number."""
    for module in layer.modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, (bool, int, float, str))}
        yield f"{type(module).__name__} {sorted((k, str(v)) for k, v in plain.items() if k != 'layer_idx')}"


class _Comparison:
    """One prompt and two trees through a driven model and through its own forward pass."""

    def __init__(self, small: Any, trial: Any, alike: float) -> None:
        self.own, self.trial, self.alike = OwnDecoder(small), trial, alike
        self.words = trial.vocab_size
        self.before: Tensor | None = None  # what the driven model's final norm was given, [1, n, h]
        norm: Callable[[Tensor], Tensor] = trial.family.norm

        def watched(x: Tensor) -> Tensor:
            self.before = x
            return norm(x)

        trial.family.norm = watched

    @torch.inference_mode()
    def problem(self) -> str:
        """The first difference in words; empty where there is none."""
        trial, device = self.trial, self.trial.device
        n = min(PROMPT, trial.context_length - len(FIRST) - len(SECOND))
        prompt, held, found = [(7 * i + 3) % self.words for i in range(n)], list[int](), ""
        cache, taps = trial.new_cache(n + len(FIRST) + len(SECOND)), range(trial.n_layers)
        for part in (prompt[:TINY], prompt[TINY:]):  # within every window, where there may be no mask; beyond
            held += part
            out = trial.prefill(torch.tensor([part], device=device), cache, taps, every=True)
            found = found or self._against(list(range(len(part))), held, out, out.logits[0])
        for parents, kept in ((FIRST, KEPT), (SECOND, [])):
            start = cache.get_seq_length()
            tokens = [(11 * i + start) % self.words for i in range(len(parents))]
            tree = DraftTree.of(torch.tensor(tokens, device=device), parents)
            out = trial.forward_tree(tree, cache, taps)
            for leaf in sorted(set(range(len(parents))) - set(parents)):
                path = _path(parents, leaf)
                found = found or self._against(path, held + [tokens[i] for i in path], out, out.logits[0, path])
            cache.keep(start, kept)
            held += [tokens[i] for i in kept]
        return found or self._of_two_minds(torch.tensor([held], device=device))

    def _of_two_minds(self, ids: Tensor) -> str:
        """Whether the model itself answers otherwise with a cache: it may drop keys that its masks do not hide."""
        held = self.own.model(input_ids=ids[:, :-1], use_cache=True).past_key_values
        cached = self.own.model(input_ids=ids[:, -1:], past_key_values=held, use_cache=True).logits[0, -1]
        whole = self.own.model(input_ids=ids, use_cache=False).logits[0, -1]
        if self._alike(cached, whole):
            return ""
        return f"its own forward pass with a cache {_off(cached, whole, 'logits', 'the one without')}"

    def _against(self, rows: list[int], ids: list[int], out: Any, logits: Tensor) -> str:
        """Compare logits [n, V] with the last ones of the model's own pass over ids; if they differ, find the layer.

        rows: of the driven pass, those that lie on this path.
        """
        whole = torch.tensor([ids], device=self.trial.device)
        theirs = self.own.model(input_ids=whole, use_cache=False).logits[0, -len(logits) :]
        if self._alike(logits, theirs):
            return ""
        seen = self.own.record(whole, real=True)
        assert self.before is not None
        assert seen.last is not None
        states = [out.taps[i][0, rows] for i in range(self.trial.n_layers)] + [self.before[0, rows]]
        for i, (a, b) in enumerate(zip(states, [*(call.states for call in seen.calls), seen.last], strict=True)):
            own = b[0, -len(rows) :]
            if not self._alike(a, own):
                what = "what enters its first layer" if i == 0 else f"layer {i - 1} ({self._name(i - 1)})"
                return f"{what} {_off(a, own, 'states')}"
        return f"what follows its last layer {_off(logits, theirs, 'logits')}"

    def _alike(self, ours: Tensor, theirs: Tensor) -> bool:
        return float((ours - theirs).abs().max()) <= self.alike * (1 + float(theirs.abs().max()))  # False for NaN

    def _name(self, layer: int) -> str:
        return type(self.own.layers[layer]).__name__


def _off(ours: Tensor, theirs: Tensor, what: str, whom: str = "the model's own forward pass") -> str:
    most, largest = float((ours - theirs).abs().max()), float(theirs.abs().max())
    return f"differs from {whom} by {most:.2g}, with {what} up to {largest:.2g}"


def _path(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path
