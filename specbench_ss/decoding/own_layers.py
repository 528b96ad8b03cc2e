"""A causal LM of any architecture: its layers as transformers wrote them, given our masks, positions and cache.

Nothing is known of the model beforehand; what it gives to its layers is observed (`recording.py`, `own_arguments.py`,
`own_windows.py`), and `proof.py` compares what comes out with the model's own forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specbench_ss.decoding.grouped_attention import set_attention
from specbench_ss.decoding.own_arguments import Arguments, Places, Probes, Tables
from specbench_ss.decoding.own_windows import observed_windows
from specbench_ss.decoding.placement import as_one, moved, place_of
from specbench_ss.decoding.recording import OwnDecoder, Record, stand_in
from specbench_ss.errors import UserError


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
