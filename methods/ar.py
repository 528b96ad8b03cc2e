"""Autoregressive decoding: one token a step, the reference of every comparison."""

from __future__ import annotations

from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.tree import DraftTree


class Autoregressive(Decoder):
    """No draft: every step is the root alone."""

    name = "ar"
    summary = "autoregressive decoding, the reference"
    autoregressive = True

    def max_tokens_per_step(self) -> int:
        return 1

    def propose(self, state: DecodeState) -> DraftTree:
        return DraftTree.root_only(state.root)
