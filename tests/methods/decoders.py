"""Methods with random weights, as the tests ask for them; the methods' own `examples` are made of the same."""

from __future__ import annotations

from functools import partial

from specbench_ss.conformance import randomise
from specbench_ss.methods.medusa.decoding import Medusa
from specbench_ss.methods.medusa.examples import random_medusa
from specbench_ss.methods.ss import examples
from specbench_ss.methods.ss.decoding import SpeculativeStreaming
from specbench_ss.methods.ss.examples import BESIDE_MLP, CONDITIONED, ROOTED, TWO_LAYERS, random_streams

__all__ = ["BESIDE_MLP", "CONDITIONED", "ROOTED", "TWO_LAYERS", "medusa", "random_streams", "randomise", "streaming"]

medusa = partial(random_medusa, Medusa)
streaming = partial(examples.streaming, SpeculativeStreaming)
