"""Whether a model that is not taken apart is driven rightly: held, when it is loaded, against its own forward pass.

A float32 model of the first layers, as many as there are kinds of them, gets the weights that were loaded, tiny windows
and a small vocabulary. Prefill and two trees of it are compared with its own forward pass, without a cache and with
eager attention, along each path. The loaded model, its configuration and the random state stay as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

from specbench_ss.decoding.grouped_attention import NAME, set_attention, without_warnings
from specbench_ss.decoding.own_windows import APART, TINY, window_names
from specbench_ss.decoding.recording import OwnDecoder
from specbench_ss.decoding.tree import DraftTree
from specbench_ss.decoding.unknown_types import cannot_be_used
from specbench_ss.errors import UserError, first_line

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
                found = _problem(weights, windows, attention, make)
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


def _problem(weights: _Weights, windows: list[int | None], attention: str, make: Make) -> str:
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
