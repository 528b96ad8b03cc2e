"""Methods with random weights, as the tests ask for them; the methods' own `examples` are made of the same."""

from __future__ import annotations

from functools import partial

from specbench_ss.conformance import randomise
from specbench_ss.methods.medusa.decode import Medusa, random_medusa
from specbench_ss.methods.ss import decode
from specbench_ss.methods.ss.decode import (
    BESIDE_MLP,
    CONDITIONED,
    ROOTED,
    TWO_LAYERS,
    SpeculativeStreaming,
    random_streams,
)

__all__ = ["BESIDE_MLP", "CONDITIONED", "ROOTED", "TWO_LAYERS", "medusa", "random_streams", "randomise", "streaming"]

medusa = partial(random_medusa, Medusa)
streaming = partial(decode.streaming, SpeculativeStreaming)
