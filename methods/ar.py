"""Autoregressive decoding: one token a step, the reference of every comparison."""

from __future__ import annotations

from specbench_ss.engine.decoder import Decoder, State
from specbench_ss.engine.tree import DraftTree


class Autoregressive(Decoder):
    """No draft: every step is the root alone."""

    name = "ar"
    summary = "autoregressive decoding, the reference"
    autoregressive = True

    def max_rows(self) -> int:
        return 1

    def propose(self, state: State) -> DraftTree:
        return DraftTree.root_only(state.root)
