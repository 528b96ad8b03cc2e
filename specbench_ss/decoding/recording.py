"""What a model's own decoder gives to its layers, seen by running it with something else in their place.

Knows transformers' decoders from outside: their layers, their arguments, and that they call one layer after another.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from specbench_ss.errors import UserError


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
