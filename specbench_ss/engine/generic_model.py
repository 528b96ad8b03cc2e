"""Causal LMs of any architecture: transformers' own layers, with our masks, positions and cache.

Verification takes refused tokens back, and hides tokens of other branches of a tree. Both need a cache of keys and
values and attention with a mask; a recurrent state has neither.

What a decoder gives to its layers besides states, such as cos and sin, is asked of the decoder in each pass: it is run
with layers that return their states unchanged, and their arguments are kept. The layers are then called with these
arguments, and with our mask and cache in place of the decoder's own.

`prove` compares the outcome with the model's own forward pass. A float32 model of the first layers, as many as there
are kinds of them, gets the weights that were loaded, tiny windows and a small vocabulary. Prefill and two trees of it
are compared along each path, without a cache and with eager attention. The loaded model, its configuration and the
random state stay as they are.
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
from specbench_ss.engine.device_map import PerDevice, device_of, to_device, to_device_recursive
from specbench_ss.engine.tree import DraftTree
from specbench_ss.errors import UserError, first_line

KINDS_OF_LAYERS = {"full_attention", "sliding_attention"}
TRIED = 9  # tokens of the pass that is observed


def unsupported_architecture(config: Any, why: str) -> UserError:
    """Return the refusal of an architecture, with the reason."""
    return UserError(f"model type {config.model_type!r} cannot be used: {why}")


def check_generic(config: Any) -> None:
    """Raise UserError, with the reason, for a model that is no decoder of attention layers with a cache."""
    if problem := _problem(config):
        raise unsupported_architecture(config, problem)


def _problem(config: Any) -> str:
    if getattr(config, "is_encoder_decoder", False):
        return "it has an encoder; targets are models with a decoder alone"
    if getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "_is_stateful", False):
        return "it is recurrent, in all layers or some: its state cannot take back a refused token"
    if others := sorted(set(getattr(config, "layer_types", None) or ()) - KINDS_OF_LAYERS):
        return f"it has layers of the kind {others[0]}; those of full_attention and sliding_attention can be driven"
    if getattr(config, "attention_chunk_size", None):
        return "its attention is cut into chunks, which no sliding window describes"
    if getattr(config, "alibi", False):
        return "its layers are given 'alibi', which depends on more than a token's position"
    if lacking := [name for name in ("num_hidden_layers", "hidden_size", "vocab_size") if not hasattr(config, name)]:
        return f"its configuration states no {lacking[0]}: it is more, or something else, than a language model"
    return ""


@dataclass(slots=True)
class LayerTrace:
    """One pass of a decoder.

    calls: of each layer, the states [B, q, h] that enter it and its other arguments by their names. last: the last
    layer's output, final: the decoder's own. cache: the one that the decoder was given. norm: the module that made
    `final` of `last`.
    """

    calls: list[tuple[Tensor, dict[str, Any]]] = field(default_factory=list)
    last: Tensor | None = None
    final: Tensor | None = None
    cache: Any = None
    norm: nn.Module | None = None


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


class HfDecoder:
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
        self.names = [list(inspect.signature(layer.forward).parameters) for layer in self.layers]
        self.takes_positions = "position_ids" in inspect.signature(self.decoder.forward).parameters
        self.in_tuple = [False] * len(self.layers)  # whether a layer returns its states inside a tuple
        self.mask: Tensor | None = None  # given to the decoder, which then makes none

    def record(self, ids: Tensor, positions: Tensor | None = None, real: bool = False) -> LayerTrace:
        """Run the decoder on ids [B, q] at positions [1 or B, q] and record it.

        real: run the layers too; else states pass them unchanged.
        """
        seen = LayerTrace(cache=DynamicCache())
        given: dict[str, Any] = {} if self.mask is None else {"attention_mask": self.mask}
        if self.takes_positions and positions is not None:
            given["position_ids"] = positions
        with self.watched(seen, real):
            seen.final = self.decoder(input_ids=ids, past_key_values=seen.cache, use_cache=True, **given)[0]
        if len(seen.calls) != len(self.layers):
            raise UserError(f"{type(self.decoder).__name__} does not call each of its layers once")
        return seen

    @contextmanager
    def watched(self, seen: LayerTrace, real: bool = False) -> Iterator[None]:
        """Record the calls of layers within. real: run the layers too; else states pass them unchanged."""
        with ExitStack() as stack:
            for i, layer in enumerate(self.layers):
                stack.enter_context(stand_in(layer, self._recorder(i, seen, layer.forward if real else None)))
            if real:
                stack.enter_context(_norm_noted(self.decoder, seen))
            yield

    def _recorder(self, i: int, seen: LayerTrace, real: Callable[..., Any] | None) -> Callable[..., Any]:
        names, there = self.names[i], device_of(self.layers[i])

        def forward(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(names, args, strict=False)) | kwargs
            states = given.pop(names[0])
            seen.calls.append((states, given))
            if real is None:
                return (states, None) if self.in_tuple[i] else states
            at = there or states.device
            out = to_device_recursive(
                real(*to_device_recursive(args, at), **to_device_recursive(kwargs, at)), states.device
            )
            self.in_tuple[i] = isinstance(out, tuple)
            seen.last = out[0] if self.in_tuple[i] else out
            return out

        return forward


@contextmanager
def _norm_noted(decoder: nn.Module, seen: LayerTrace) -> Iterator[None]:
    """Note the module of the decoder that is given the last layer's output within."""

    def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if args and args[0] is seen.last:
            seen.norm = module

    handles = [m.register_forward_hook(hook) for m in decoder.children() if not isinstance(m, nn.ModuleList)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class LayerInputs(PerDevice):
    """What the layers of a pass are given besides states, mask and cache."""

    def __init__(self, of: Sequence[dict[str, Any]]) -> None:
        self.of = of

    def on(self, device: torch.device) -> LayerInputs:
        """Return the same on a device. Layers share tensors, which are moved once."""
        there: dict[int, Tensor] = {}

        def one(value: Any) -> Any:
            if isinstance(value, (tuple, list)):
                return type(value)(map(one, value))
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) not in there:
                there[id(value)] = to_device(value, device)
            return there[id(value)]

        return LayerInputs([{name: one(value) for name, value in given.items()} for given in self.of])


@dataclass(slots=True)
class HfLayer:
    """One decoder layer, called as its model calls it. mask, cache: names of these arguments."""

    layer: nn.Module
    index: int
    window: int | None  # sliding-window width, None = full attention
    mask: str
    cache: str
    masks_itself: bool = True  # whether its attention can do without a mask where only what is ahead is hidden

    def __call__(self, x: Tensor, cache: Any, mask: Tensor | None, rotary: LayerInputs) -> Tensor:
        """The whole layer: [B, q, h] -> [B, q, h]. mask: additive [1 or B, 1, q, kv]."""
        if mask is None and not self.masks_itself:
            q, past = x.shape[1], 0 if cache is None else cache.get_seq_length(self.index)
            hidden = x.new_full((q, past + q), torch.finfo(x.dtype).min)
            mask = hidden.triu_(past + 1)[None, None]
        out = self.layer(x, **rotary.of[self.index] | {self.mask: mask, self.cache: cache})
        states: Tensor = out[0] if isinstance(out, tuple) else out
        return states


class HfHead:
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


class GenericModel:
    """A causal LM in parts whose layers are called whole: embed -> layers -> norm -> head.

    windows: sliding-window width of every layer. Raises UserError where the model cannot be driven.
    """

    def __init__(self, model: Any, windows: Sequence[int | None]) -> None:
        self.own = HfDecoder(model)
        self.last: tuple[Tensor, LayerInputs] | None = None  # positions that were embedded, and what layers get there
        device, attention = model.get_input_embeddings().weight.device, model.config._attn_implementation
        ids = torch.arange(TRIED, device=device)[None] * 7 % min(model.config.vocab_size, 64)
        set_attention(model, "eager")  # masks are left out, else, where they hide only what is ahead
        try:
            with torch.no_grad():
                seen = self.own.record(ids, torch.arange(TRIED, device=device)[None], real=True)
                self.head = _head(self.own, ids)
        finally:
            set_attention(model, attention)
        self.norm = _norm(seen)
        self.layers = [
            HfLayer(layer, i, window, _mask_name(given), _cache_name(given, seen.cache))
            for i, (layer, window, (_, given)) in enumerate(zip(self.own.layers, windows, seen.calls, strict=True))
        ]
        self._spare_masks(ids)

    @torch.no_grad()
    def _spare_masks(self, ids: Tensor) -> None:
        """Give the decoder a mask from now on, where it hands that on, so that it makes none in vain."""
        self.own.mask = ids.new_zeros(1, 1, 1, 1, dtype=torch.float32)
        try:
            calls = self.own.record(ids).calls
            if all(given[layer.mask] is self.own.mask for layer, (_, given) in zip(self.layers, calls, strict=True)):
                return
        except Exception:  # whatever a decoder raises that takes masks of another form
            pass
        self.own.mask = None

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """ids [B, q], positions [1 or B, q] -> what the decoder gives its first layer, [B, q, h]."""
        seen = self.own.record(ids, positions)
        self.last = positions, LayerInputs([given for _, given in seen.calls])
        return seen.calls[0][0]

    def arguments(self, positions: Tensor) -> LayerInputs:
        """Return what layers are given at positions [1 or B, q]; those that were embedded just now are known."""
        if self.last is None or self.last[0] is not positions:
            self.embed(torch.zeros_like(positions), positions)
        assert self.last is not None
        (_, found), self.last = self.last, None
        return found


def _mask_name(given: dict[str, Any]) -> str:
    shaped = [name for name, value in given.items() if getattr(value, "shape", ())[2:] == (TRIED, TRIED)]
    named = [name for name in given if "attention_mask" in name and not name.startswith("encoder")]
    if not (shaped or named):
        raise UserError("its layers are given no mask")
    return (shaped or named)[0]


def _cache_name(given: dict[str, Any], cache: Any) -> str:
    name = next((name for name, value in given.items() if value is cache), None)
    if name is None:
        raise UserError("its layers are given no cache of keys and values")
    return name


def _norm(seen: LayerTrace) -> Callable[[Tensor], Tensor]:
    """[.., h] -> [.., h]: the one module that the decoder calls after its layers, if it calls any."""
    assert seen.last is not None
    assert seen.final is not None
    if torch.equal(seen.last, seen.final):
        return nn.Identity()
    if seen.norm is None or not torch.equal(seen.norm(seen.last), seen.final):
        raise UserError("its decoder does more after its layers than calling one module")
    return seen.norm


def _head(own: HfDecoder, ids: Tensor) -> Any:
    """The output embedding where that is all that follows the decoder, else the model's own forward pass around it."""
    outputs: list[Any] = []
    handle = own.decoder.register_forward_hook(lambda _, __, out: outputs.append(out))
    try:
        with own.watched(LayerTrace()):
            logits = own.model(input_ids=ids[:, :2]).logits
    finally:
        handle.remove()
    states = outputs[-1][0]
    for head in (own.model.get_output_embeddings(), HfHead(own.model, own.decoder, type(outputs[-1]))):
        if head is not None and torch.equal(head(states), logits):
            return head
    raise UserError("what follows its decoder is not determined by the decoder's last states")


def window_names(config: Any) -> list[str]:
    """Return the names of the configuration's numbers that may be the width of a window."""
    names = [name for name in config.to_dict() if "window" in name and "max_" not in name]
    return [name for name in names if type(value := getattr(config, name, None)) is int and value > 0]


def smaller(config: Any, layers: int, words: int) -> Any:
    """Return a copy of a configuration, with the first layers and words alone."""
    made = copy.deepcopy(config)
    for name, value in made.to_dict().items():
        if isinstance(value, list) and len(value) == made.num_hidden_layers:
            setattr(made, name, value[:layers])
    if (getattr(made, "pad_token_id", None) or 0) >= words:
        made.pad_token_id = None
    made.num_hidden_layers, made.vocab_size = layers, words
    return made


Make = Callable[[Any, str], Any]

WORDS = 64  # of the vocabulary that are compared
PROMPT = 12
TINY, APART = 4, 3  # the smallest window, and how much wider the next one is
ALIKE = {NAME: 1e-4, "sdpa": 1e-4}  # what may differ, of 1 + the largest; 1e-3 for eager attention
FIRST, KEPT = [-1, 0, 0, 1, 2, 2, 4], [0, 2, 4]  # a tree, and the path of it that stays
SECOND = [-1, 0, 1, 0, 3]


def check_against_hf(model: Any, make: Make) -> str:
    """Return the attention with which the model is driven as it would run itself.

    make: gives a `target.Target` that drives a model with an attention, without proof. Raises UserError where none
    agrees, with the first layer that is off.
    """
    weights = _Weights(model)
    found = ""
    for attention in _attentions(model):
        try:
            with without_warnings():
                trial = make(weights.small("eager" if attention == NAME else attention), attention)
                found = _Comparison(weights.small("eager"), trial, ALIKE.get(attention, 1e-3)).problem()
        except UserError as error:
            found = str(error).rpartition("cannot be used: ")[2]
        except Exception as error:  # whatever an architecture's code raises where it is called in another way
            found = f"calling its layers raises {type(error).__name__}: {first_line(error)}"
        if not found:
            return attention
    raise unsupported_architecture(model.config, found)


def _attentions(model: Any) -> list[str]:
    """The quickest first; only its own where the model does not take another."""
    own = model.config._attn_implementation
    taken = set_attention(model, NAME)
    set_attention(model, own)
    return [NAME, "eager"] if taken else [own]


class _Weights:
    """The first layers of a model, in float32, as many as there are kinds of them."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device = model.get_input_embeddings().weight.device
        self.layers = _kinds(HfDecoder(model).layers, model.config)
        self.words = min(WORDS, model.config.vocab_size)
        self.tensors: dict[str, Tensor] = {}

    def config(self, attention: str) -> Any:
        """The configuration of fewer layers and words, with tiny windows."""
        config = smaller(self.model.config, self.layers, self.words)
        for i, name in enumerate(window_names(config)):
            setattr(config, name, TINY + APART * i)
        config._attn_implementation = attention
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
        self.own, self.trial, self.alike = HfDecoder(small), trial, alike
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
        cache, every_layer = trial.new_cache(n + len(FIRST) + len(SECOND)), range(trial.n_layers)
        for part in (prompt[:TINY], prompt[TINY:]):  # within every window, where there may be no mask; beyond
            held += part
            out = trial.prefill(torch.tensor([part], device=device), cache, every_layer, every=True)
            found = found or self._against(list(range(len(part))), held, out, out.logits[0])
        for parents, kept in ((FIRST, KEPT), (SECOND, [])):
            start = cache.get_seq_length()
            tokens = [(11 * i + start) % self.words for i in range(len(parents))]
            tree = DraftTree.from_parents(torch.tensor(tokens, device=device), parents)
            out = trial.forward_tree(tree, cache, every_layer)
            for leaf in sorted(set(range(len(parents))) - set(parents)):
                path = _path(parents, leaf)
                found = found or self._against(path, held + [tokens[i] for i in path], out, out.logits[0, path])
            cache.compact(start, kept)
            held += [tokens[i] for i in kept]
        return found

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
        states = [out.hidden_states[i][0, rows] for i in range(self.trial.n_layers)] + [self.before[0, rows]]
        for i, (a, b) in enumerate(zip(states, [*(x for x, _ in seen.calls), seen.last], strict=True)):
            own = b[0, -len(rows) :]
            if not self._alike(a, own):
                what = "what enters its first layer" if i == 0 else f"layer {i - 1} ({self._name(i - 1)})"
                return f"{what} {_off(a, own, 'states')}"
        return f"what follows its last layer {_off(logits, theirs, 'logits')}"

    def _alike(self, ours: Tensor, theirs: Tensor) -> bool:
        return float((ours - theirs).abs().max()) <= self.alike * (1 + float(theirs.abs().max()))  # False for NaN

    def _name(self, layer: int) -> str:
        return type(self.own.layers[layer]).__name__


def _off(ours: Tensor, theirs: Tensor, what: str) -> str:
    most, largest = float((ours - theirs).abs().max()), float(theirs.abs().max())
    return f"differs from the model's own forward pass by {most:.2g}, with {what} up to {largest:.2g}"


def _path(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path
