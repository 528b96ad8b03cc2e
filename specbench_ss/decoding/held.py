"""What a method holds between requests: its models, and the caches of all that it drafts with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from specbench_ss.decoding.cache import Cache
from specbench_ss.decoding.decoder import Decoder
from specbench_ss.decoding.target import Target


def models_of(decoders: Iterable[Decoder]) -> list[Target]:
    """Return every model that these run through the layers of a target: their own, and those of their drafts."""
    found = {id(one): one for decoder in decoders for one in _held_by(decoder) if isinstance(one, Target)}
    return list(found.values())


def drop_caches(decoder: Decoder) -> None:
    """Forget what a method's caches and its models' hold, and their memory: a request was broken off at any place."""
    for held in _held_by(decoder):
        if isinstance(held, Cache):
            held.drop()
        elif isinstance(held, Target):
            held.drop_cache()


def _held_by(decoder: Decoder) -> Iterator[Any]:
    """Yield what a method holds, and what that holds in turn; of a target nothing further, of a method all."""
    for held in vars(decoder).values():
        yield held
        if isinstance(held, Decoder):
            yield from _held_by(held)
        elif not isinstance(held, Target):
            yield from list(getattr(held, "__dict__", {}).values())
