"""Autoregressive decoding: one token per step, the baseline of every comparison."""

from __future__ import annotations

from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.tree import DraftTree


class Autoregressive(Decoder):
    """Draft nothing: every step verifies the root alone."""

    name = "ar"
    summary = "autoregressive decoding, the baseline"
    autoregressive = True

    def max_tokens_per_step(self) -> int:
        return 1

    def propose(self, state: DecodeState) -> DraftTree:
        return DraftTree.root_only(state.root)
