"""Methods with random weights, as the tests ask for them; the methods' own `examples` are made of the same."""

from __future__ import annotations

from specbench_ss.methods.medusa.examples import random_medusa as medusa
from specbench_ss.methods.ss.examples import TWO_LAYERS, random_streams, streaming
from specbench_ss.testing import randomise

__all__ = ["TWO_LAYERS", "medusa", "random_streams", "randomise", "streaming"]
