"""Causal LMs of any architecture: transformers' own layers with our masks, positions and KV cache.

Verification rolls back rejected tokens and masks tokens of other branches. Both need a KV cache and attention with a
mask, which recurrent models lack.

The other inputs of a layer, such as cos and sin, are traced in each pass: the decoder runs with layers that return
their states unchanged and record their arguments. The layers are then called with these arguments, and with our mask
and cache in place of the decoder's.

`check_against_hf` compares the result with the model's own forward pass. A float32 model of the first layers (enough
for one of each kind) gets the loaded weights, tiny windows and a small vocabulary. Prefill and two trees are compared
along each path, without a cache and with eager attention. The loaded model, its configuration and the random state
are unchanged.
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

from specbench_ss.engine.device_map import PerDevice, device_of, to_device, to_device_recursive
from specbench_ss.engine.layers.attention import NAME, set_attention, without_warnings
from specbench_ss.engine.tree import DraftTree
from specbench_ss.errors import UserError, first_line

KINDS_OF_LAYERS = {"full_attention", "sliding_attention"}
TRACE_TOKENS = 9  # length of the traced pass


def unsupported_architecture(config: Any, reason: str) -> UserError:
    """Return the error for an unsupported architecture."""
    return UserError(f"model type {config.model_type!r} cannot be used: {reason}")


def check_generic(config: Any) -> None:
    """Raise UserError, with the reason, for a model that is not a decoder of attention layers with a KV cache."""
    if problem := _unsupported_reason(config):
        raise unsupported_architecture(config, problem)


def _unsupported_reason(config: Any) -> str:
    if getattr(config, "is_encoder_decoder", False):
        return "it has an encoder; only decoder-only models are supported"
    if getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "_is_stateful", False):
        return "it has recurrent layers, which cannot roll back a rejected token"
    if others := sorted(set(getattr(config, "layer_types", None) or ()) - KINDS_OF_LAYERS):
        return f"it has layers of the kind {others[0]}; only full_attention and sliding_attention are supported"
    if getattr(config, "attention_chunk_size", None):
        return "it has chunked attention, which no sliding window describes"
    if getattr(config, "alibi", False):
        return "its layers take 'alibi', which depends on more than a token's position"
    if lacking := [name for name in ("num_hidden_layers", "hidden_size", "vocab_size") if not hasattr(config, name)]:
        return f"its configuration lacks {lacking[0]}, so it is not a plain language model"
    return ""


@dataclass(slots=True)
class LayerTrace:
    """Record of one pass of a decoder.

    calls: input states [B, q, h] and other arguments, by name, of each layer. last: output of the last layer. final:
    output of the decoder. cache: KV cache passed to the decoder. norm: the module that computes `final` from `last`.
    """

    calls: list[tuple[Tensor, dict[str, Any]]] = field(default_factory=list)
    last: Tensor | None = None
    final: Tensor | None = None
    cache: Any = None
    norm: nn.Module | None = None


@contextmanager
def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the module's `forward` within the block; its attributes stay visible."""
    before = module.__dict__.get("forward")  # set by a library, perhaps
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before


class HfDecoder:
    """Decoder of a causal LM and its layers. Raises UserError if they cannot be found."""

    def __init__(self, model: Any) -> None:
        self.model, self.decoder = model, model.get_decoder()
        lists = [m for m in self.decoder.children() if isinstance(m, nn.ModuleList) and len(m)]
        named = [list(m) for m in lists if len(m) == model.config.num_hidden_layers]
        if not named:
            raise UserError(f"{type(self.decoder).__name__} has no list of {model.config.num_hidden_layers} layers")
        self.layers: list[nn.Module] = max(
            named, key=lambda layers: sum(p.numel() for m in layers for p in m.parameters())
        )
        self.names = [list(inspect.signature(layer.forward).parameters) for layer in self.layers]
        self.takes_positions = "position_ids" in inspect.signature(self.decoder.forward).parameters
        self.in_tuple = [False] * len(self.layers)  # True if a layer returns its states in a tuple
        self.mask: Tensor | None = None  # passed to the decoder, which then builds none

    def record(self, ids: Tensor, positions: Tensor | None = None, real: bool = False) -> LayerTrace:
        """Run the decoder on ids [B, q] at positions [1 or B, q] and record it.

        real: run the layers; else they return their input states.
        """
        trace = LayerTrace(cache=DynamicCache())
        kwargs: dict[str, Any] = {} if self.mask is None else {"attention_mask": self.mask}
        if self.takes_positions and positions is not None:
            kwargs["position_ids"] = positions
        with self.traced(trace, real):
            trace.final = self.decoder(input_ids=ids, past_key_values=trace.cache, use_cache=True, **kwargs)[0]
        if len(trace.calls) != len(self.layers):
            raise UserError(f"{type(self.decoder).__name__} does not call each of its layers once")
        return trace

    @contextmanager
    def traced(self, trace: LayerTrace, real: bool = False) -> Iterator[None]:
        """Record the layers' calls within the block. real: run the layers; else they return their input states."""
        with ExitStack() as stack:
            for i, layer in enumerate(self.layers):
                stack.enter_context(replace_forward(layer, self._recorder(i, trace, layer.forward if real else None)))
            if real:
                stack.enter_context(_record_norm(self.decoder, trace))
            yield

    def _recorder(self, i: int, trace: LayerTrace, run_layer: Callable[..., Any] | None) -> Callable[..., Any]:
        names, layer_device = self.names[i], device_of(self.layers[i])

        def forward(*args: Any, **kwargs: Any) -> Any:
            arguments = dict(zip(names, args, strict=False)) | kwargs
            states = arguments.pop(names[0])
            trace.calls.append((states, arguments))
            if run_layer is None:
                return (states, None) if self.in_tuple[i] else states
            device = layer_device or states.device
            out = to_device_recursive(
                run_layer(*to_device_recursive(args, device), **to_device_recursive(kwargs, device)), states.device
            )
            self.in_tuple[i] = isinstance(out, tuple)
            trace.last = out[0] if self.in_tuple[i] else out
            return out

        return forward


@contextmanager
def _record_norm(decoder: nn.Module, trace: LayerTrace) -> Iterator[None]:
    """Record the module of the decoder that is called on the last layer's output within the block."""

    def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if args and args[0] is trace.last:
            trace.norm = module

    handles = [m.register_forward_hook(hook) for m in decoder.children() if not isinstance(m, nn.ModuleList)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class LayerInputs(PerDevice):
    """Arguments of each layer of a pass, without states, mask and cache."""

    def __init__(self, per_layer: Sequence[dict[str, Any]]) -> None:
        self.per_layer = per_layer

    def on(self, device: torch.device) -> LayerInputs:
        """Return the same on a device; tensors that layers share are moved once."""
        moved: dict[int, Tensor] = {}

        def move(value: Any) -> Any:
            if isinstance(value, (tuple, list)):
                return type(value)(map(move, value))
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) not in moved:
                moved[id(value)] = to_device(value, device)
            return moved[id(value)]

        return LayerInputs([{name: move(value) for name, value in inputs.items()} for inputs in self.per_layer])


@dataclass(slots=True)
class HfLayer:
    """One decoder layer, called as its model calls it. mask, cache: names of these arguments."""

    layer: nn.Module
    index: int
    window: int | None  # sliding-window width, None = full attention
    mask: str
    cache: str
    masks_itself: bool = True  # its attention is causal without a mask

    def __call__(self, x: Tensor, cache: Any, mask: Tensor | None, rotary: LayerInputs) -> Tensor:
        """Run the whole layer: [B, q, h] -> [B, q, h]. mask: additive [1 or B, 1, q, kv]."""
        if mask is None and not self.masks_itself:
            q, past = x.shape[1], 0 if cache is None else cache.get_seq_length(self.index)
            hidden = x.new_full((q, past + q), torch.finfo(x.dtype).min)
            mask = hidden.triu_(past + 1)[None, None]
        out = self.layer(x, **rotary.per_layer[self.index] | {self.mask: mask, self.cache: cache})
        states: Tensor = out[0] if isinstance(out, tuple) else out
        return states


class HfHead:
    """LM head with everything that the model does after its decoder, such as soft caps and scales."""

    def __init__(self, model: Any, decoder: nn.Module, output: type[Any]) -> None:
        self.model, self.decoder, self.output = model, decoder, output

    @property
    def weight(self) -> Tensor:
        """Return the output embedding, [V, h]."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    def __call__(self, x: Tensor) -> Tensor:
        """Return the logits [.., V] of final, normed states [.., h]."""
        rows = x.reshape(1, -1, x.shape[-1])
        ids = torch.zeros(rows.shape[:2], dtype=torch.long, device=x.device)
        with replace_forward(self.decoder, lambda *_, **__: self.output(last_hidden_state=rows)):
            logits: Tensor = self.model(input_ids=ids).logits
        return logits.reshape(*x.shape[:-1], -1)


class GenericModel:
    """A causal LM in parts whose layers are called whole: embed -> layers -> norm -> head.

    windows: sliding-window width of every layer. Raises UserError for an unsupported model.
    """

    def __init__(self, model: Any, windows: Sequence[int | None]) -> None:
        self.hf = HfDecoder(model)
        self.last: tuple[Tensor, LayerInputs] | None = None  # positions of the last `embed`, and the layers' inputs
        device, attention = model.get_input_embeddings().weight.device, model.config._attn_implementation
        ids = torch.arange(TRACE_TOKENS, device=device)[None] * 7 % min(model.config.vocab_size, 64)
        set_attention(model, "eager")  # other implementations may omit a causal mask
        try:
            with torch.no_grad():
                trace = self.hf.record(ids, torch.arange(TRACE_TOKENS, device=device)[None], real=True)
                self.head = _head(self.hf, ids)
        finally:
            set_attention(model, attention)
        self.norm = _norm(trace)
        self.layers = [
            HfLayer(layer, i, window, _mask_name(inputs), _cache_name(inputs, trace.cache))
            for i, (layer, window, (_, inputs)) in enumerate(zip(self.hf.layers, windows, trace.calls, strict=True))
        ]
        self._preset_mask(ids)

    @torch.no_grad()
    def _preset_mask(self, ids: Tensor) -> None:
        """Pass the decoder a preset mask if its layers get it unchanged, so that it builds none."""
        self.hf.mask = ids.new_zeros(1, 1, 1, 1, dtype=torch.float32)
        try:
            calls = self.hf.record(ids).calls
            if all(inputs[layer.mask] is self.hf.mask for layer, (_, inputs) in zip(self.layers, calls, strict=True)):
                return
        except Exception:  # from a decoder that takes masks of another form
            pass
        self.hf.mask = None

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Embed ids [B, q] at positions [1 or B, q]; return the first layer's input, [B, q, h]."""
        trace = self.hf.record(ids, positions)
        self.last = positions, LayerInputs([inputs for _, inputs in trace.calls])
        return trace.calls[0][0]

    def arguments(self, positions: Tensor) -> LayerInputs:
        """Return the layers' inputs at positions [1 or B, q]; those of the last `embed` are reused."""
        if self.last is None or self.last[0] is not positions:
            self.embed(torch.zeros_like(positions), positions)
        assert self.last is not None
        (_, inputs), self.last = self.last, None
        return inputs


def _mask_name(inputs: dict[str, Any]) -> str:
    shaped = [name for name, value in inputs.items() if getattr(value, "shape", ())[2:] == (TRACE_TOKENS, TRACE_TOKENS)]
    named = [name for name in inputs if "attention_mask" in name and not name.startswith("encoder")]
    if not (shaped or named):
        raise UserError("its layers take no mask")
    return (shaped or named)[0]


def _cache_name(inputs: dict[str, Any], cache: Any) -> str:
    name = next((name for name, value in inputs.items() if value is cache), None)
    if name is None:
        raise UserError("its layers take no KV cache")
    return name


def _norm(trace: LayerTrace) -> Callable[[Tensor], Tensor]:
    """Return the module that the decoder calls after its layers, or the identity if there is none."""
    assert trace.last is not None
    assert trace.final is not None
    if torch.equal(trace.last, trace.final):
        return nn.Identity()
    if trace.norm is None or not torch.equal(trace.norm(trace.last), trace.final):
        raise UserError("its decoder calls more than one module after its layers")
    return trace.norm


def _head(hf: HfDecoder, ids: Tensor) -> Any:
    """Return the output embedding if nothing else follows the decoder, else an `HfHead`."""
    outputs: list[Any] = []
    handle = hf.decoder.register_forward_hook(lambda _, __, out: outputs.append(out))
    try:
        with hf.traced(LayerTrace()):
            logits = hf.model(input_ids=ids[:, :2]).logits
    finally:
        handle.remove()
    states = outputs[-1][0]
    for head in (hf.model.get_output_embeddings(), HfHead(hf.model, hf.decoder, type(outputs[-1]))):
        if head is not None and torch.equal(head(states), logits):
            return head
    raise UserError("its logits depend on more than the decoder's last states")


def window_names(config: Any) -> list[str]:
    """Return the names of configuration values that may be a window's width."""
    names = [name for name in config.to_dict() if "window" in name and "max_" not in name]
    return [name for name in names if type(value := getattr(config, name, None)) is int and value > 0]


def smaller(config: Any, layers: int, vocab: int) -> Any:
    """Return a copy of a configuration with only the first layers and token ids."""
    small = copy.deepcopy(config)
    for name, value in small.to_dict().items():
        if isinstance(value, list) and len(value) == small.num_hidden_layers:
            setattr(small, name, value[:layers])
    if (getattr(small, "pad_token_id", None) or 0) >= vocab:
        small.pad_token_id = None
    small.num_hidden_layers, small.vocab_size = layers, vocab
    return small


MakeTarget = Callable[[Any, str], Any]

CHECK_VOCAB = 64  # token ids that are compared
CHECK_PROMPT = 12
TINY_WINDOW, WINDOW_STEP = 4, 3  # the smallest window, and the difference to the next one
TOLERANCE = {NAME: 1e-4, "sdpa": 1e-4}  # as a share of 1 + the largest value; 1e-3 for eager attention
FIRST_TREE, KEPT_PATH = [-1, 0, 0, 1, 2, 2, 4], [0, 2, 4]  # a tree, and its accepted path
SECOND_TREE = [-1, 0, 1, 0, 3]


def check_against_hf(model: Any, make: MakeTarget) -> str:
    """Return the attention implementation with which our passes equal the model's own.

    make: builds a `target.Target` with an attention implementation, without this check. Raises UserError with the first
    layer that differs if none agrees.
    """
    weights = _SmallModel(model)
    problem = ""
    for attention in _attentions(model):
        try:
            with without_warnings():
                trial = make(weights.small("eager" if attention == NAME else attention), attention)
                problem = _Comparison(weights.small("eager"), trial, TOLERANCE.get(attention, 1e-3)).problem()
        except UserError as error:
            problem = str(error).rpartition("cannot be used: ")[2]
        except Exception as error:  # from an architecture's own code
            problem = f"calling its layers raises {type(error).__name__}: {first_line(error)}"
        if not problem:
            return attention
    raise unsupported_architecture(model.config, problem)


def _attentions(model: Any) -> list[str]:
    """Return the implementations to try, the fastest first; only the model's own if it accepts no other."""
    implementation = model.config._attn_implementation
    accepted = set_attention(model, NAME)
    set_attention(model, implementation)
    return [NAME, "eager"] if accepted else [implementation]


class _SmallModel:
    """The first layers of a model in float32, enough for one of each kind."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device = model.get_input_embeddings().weight.device
        self.layers = _kinds(HfDecoder(model).layers, model.config)
        self.vocab = min(CHECK_VOCAB, model.config.vocab_size)
        self.tensors: dict[str, Tensor] = {}

    def config(self, attention: str) -> Any:
        """Return the configuration with fewer layers and token ids and with tiny windows."""
        config = smaller(self.model.config, self.layers, self.vocab)
        for i, name in enumerate(window_names(config)):
            setattr(config, name, TINY_WINDOW + WINDOW_STEP * i)
        config._attn_implementation = attention
        return config

    def small(self, attention: str) -> Any:
        """Return a model of the same class with these weights; those that cannot be copied (4 bits) are random."""
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
            weight = loaded.get(name)
            if weight is not None and slot.ndim and weight.ndim and len(weight) == self.model.config.vocab_size:
                weight = weight[: len(slot)]
            fits = weight is not None and weight.shape == slot.shape
            if weight is not None and fits and weight.is_floating_point() == slot.is_floating_point():
                self.tensors[name] = weight.detach().to(self.device)
            elif slot.is_floating_point():
                width = slot.shape[-1] if slot.ndim else 1
                self.tensors[name] = (torch.randn(slot.shape, generator=generator) * width**-0.5).to(self.device)
        self.tensors = {name: t.float() if t.is_floating_point() else t for name, t in self.tensors.items()}


def _kinds(layers: list[nn.Module], config: Any) -> int:
    """Return how many of the first layers include every kind of layer; at least two if possible."""
    types = getattr(config, "layer_types", None) or [""] * len(layers)
    kinds = [(kind, tuple(_traits(layer))) for kind, layer in zip(types, layers, strict=True)]
    return max(min(2, len(layers)), *(kinds.index(kind) + 1 for kind in kinds))


def _traits(layer: nn.Module) -> Iterable[str]:
    """Yield the properties that distinguish layers: their modules with plain attributes, except the index."""
    for module in layer.modules():
        attributes = {k: v for k, v in vars(module).items() if isinstance(v, (bool, int, float, str))}
        yield f"{type(module).__name__} {sorted((k, str(v)) for k, v in attributes.items() if k != 'layer_idx')}"


class _Comparison:
    """One prompt and two trees through our passes and through the model's own forward pass."""

    def __init__(self, small: Any, trial: Any, tolerance: float) -> None:
        self.hf, self.trial, self.tolerance = HfDecoder(small), trial, tolerance
        self.vocab = trial.vocab_size
        self.final_states: Tensor | None = None  # input of the target's final norm, [1, n, h]
        norm: Callable[[Tensor], Tensor] = trial.family.norm

        def traced(x: Tensor) -> Tensor:
            self.final_states = x
            return norm(x)

        trial.family.norm = traced

    @torch.inference_mode()
    def problem(self) -> str:
        """Return a description of the first difference, or ''."""
        trial, device = self.trial, self.trial.device
        n = min(CHECK_PROMPT, trial.context_length - len(FIRST_TREE) - len(SECOND_TREE))
        prompt, ids, difference = [(7 * i + 3) % self.vocab for i in range(n)], list[int](), ""
        cache, every_layer = trial.new_cache(n + len(FIRST_TREE) + len(SECOND_TREE)), range(trial.n_layers)
        for part in (prompt[:TINY_WINDOW], prompt[TINY_WINDOW:]):  # within every window (no mask needed), and beyond
            ids += part
            out = trial.prefill(torch.tensor([part], device=device), cache, every_layer, every=True)
            difference = difference or self._compare(list(range(len(part))), ids, out, out.logits[0])
        for parents, kept_nodes in ((FIRST_TREE, KEPT_PATH), (SECOND_TREE, [])):
            start = cache.get_seq_length()
            tokens = [(11 * i + start) % self.vocab for i in range(len(parents))]
            tree = DraftTree.from_parents(torch.tensor(tokens, device=device), parents)
            out = trial.forward_tree(tree, cache, every_layer)
            for leaf in sorted(set(range(len(parents))) - set(parents)):
                path = _path(parents, leaf)
                difference = difference or self._compare(
                    path, ids + [tokens[i] for i in path], out, out.logits[0, path]
                )
            cache.compact(start, kept_nodes)
            ids += [tokens[i] for i in kept_nodes]
        return difference

    def _compare(self, rows: list[int], ids: list[int], out: Any, logits: Tensor) -> str:
        """Compare logits [n, V] with the last ones of the model's own pass over ids; if they differ, find the layer.

        rows: the rows of our pass on this path.
        """
        input_ids = torch.tensor([ids], device=self.trial.device)
        expected_logits = self.hf.model(input_ids=input_ids, use_cache=False).logits[0, -len(logits) :]
        if self._close(logits, expected_logits):
            return ""
        trace = self.hf.record(input_ids, real=True)
        assert self.final_states is not None
        assert trace.last is not None
        states = [out.hidden_states[i][0, rows] for i in range(self.trial.n_layers)] + [self.final_states[0, rows]]
        for i, (a, b) in enumerate(zip(states, [*(x for x, _ in trace.calls), trace.last], strict=True)):
            expected = b[0, -len(rows) :]
            if not self._close(a, expected):
                what = "the input of its first layer" if i == 0 else f"layer {i - 1} ({self._name(i - 1)})"
                return f"{what} {_difference_text(a, expected, 'states')}"
        return f"the part after its last layer {_difference_text(logits, expected_logits, 'logits')}"

    def _close(self, ours: Tensor, theirs: Tensor) -> bool:
        return float((ours - theirs).abs().max()) <= self.tolerance * (1 + float(theirs.abs().max()))  # False for NaN

    def _name(self, layer: int) -> str:
        return type(self.hf.layers[layer]).__name__


def _difference_text(ours: Tensor, theirs: Tensor, what: str) -> str:
    largest_difference, largest_value = float((ours - theirs).abs().max()), float(theirs.abs().max())
    return (
        f"differs from the model's own forward pass by {largest_difference:.2g}, with {what} up to {largest_value:.2g}"
    )


def _path(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path
