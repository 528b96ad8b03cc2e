"""Methods with random weights, as the tests ask for them; the methods' own `examples` are made of the same."""

from __future__ import annotations

from specbench_ss.conformance import randomise
from specbench_ss.engine.target import Target
from specbench_ss.methods.medusa.decode import Medusa
from specbench_ss.methods.ss.config import SSOptions, StreamConfig
from specbench_ss.methods.ss.decode import (
    PARENT_CONDITIONED,
    ROOT_CONDITIONED,
    TWO_LAYERS,
    WITH_MLP,
    SpeculativeStreaming,
    random_streams,
)

__all__ = [
    "WITH_MLP",
    "PARENT_CONDITIONED",
    "ROOT_CONDITIONED",
    "TWO_LAYERS",
    "medusa",
    "random_streams",
    "randomise",
    "streaming",
]

medusa = Medusa.random


def streaming(target: Target, config: StreamConfig, options: SSOptions) -> SpeculativeStreaming:
    """Return lossless streaming with random streams."""
    return SpeculativeStreaming(target, options, random_streams(target, config))
