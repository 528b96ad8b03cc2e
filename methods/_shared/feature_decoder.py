"""Base of decoders whose drafter reads the target's hidden states (EAGLE, P-EAGLE, DFlash)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from specbench_ss.engine.decoder import Decoder, State
from specbench_ss.engine.kv_cache import Cache
from specbench_ss.engine.target import FINAL, Output, Target
from specbench_ss.engine.tree import indices
from specbench_ss.engine.verify import Verdict
from specbench_ss.methods._shared.drafter_pass import pass_drafter
from specbench_ss.models.load import hash_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from specbench_ss.methods._shared.drafter_network import DrafterNetwork


class FeatureDecoder(Decoder):
    """A drafter with a KV cache of its own over hidden states of these target layers; FINAL = the normed last one."""

    def __init__(self, target: Target, options: Any, drafter: DrafterNetwork, layers: Sequence[int]) -> None:
        from specbench_ss.methods._shared.drafter_network import Rotary

        super().__init__(target, options)
        self.layers = tuple(layers)
        self.taps = tuple(dict.fromkeys(layer for layer in layers if layer != FINAL))
        self.drafter: Any = target.adopt(drafter, self.name)
        self.rotary = Rotary(drafter.config, target.device)
        self.drafter.finalize(self.rotary, target.packs)
        self.cache = Cache(len(drafter.blocks), 0)
        self._features: list[Tensor] = []  # [1, n, h] of each layer: the prompt's, between its prefill and `begin`

    def described(self) -> dict[str, Any]:
        """Return the layers that are read, and the hash of the drafter's weights."""
        return {"layers": list(self.layers), "drafter_hash": hash_tensors(self.drafter.state_dict())}

    def prefill(self, state: State, ids: Tensor) -> Output:
        """Run the prompt, and keep the hidden states of all its positions."""
        output = self.target.prefill(ids, state.cache, self.taps, every=True)
        self._features = [output.taps[layer] for layer in self.layers]
        return output

    def accepted(self, verdict: Verdict, output: Output) -> tuple[Tensor, list[Tensor]]:
        """Return the n tokens that a step decided, the new root last, and the hidden states [1, n, h] before each."""
        path = indices(verdict.path, self.target.device)
        assert output.tree is not None
        tokens = torch.cat((output.tree.tokens[path[1:]], verdict.next_token))
        return tokens, [output.taps[layer][:, path] for layer in self.layers]

    def rotary_at(self, first: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos, sin [1, n, head_dim] of n positions from `first` on."""
        return self.rotary(torch.arange(first, first + n, device=self.target.device)[None], dtype)

    def run_drafter(
        self, rows: Sequence[Tensor], masks: Sequence[Tensor | None], rotary: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Return the drafter's output [1, n, h] for rows [1, n, h] behind those in its cache."""
        return pass_drafter(self.target, self.drafter, self.drafter, rows, self.cache, masks, rotary)
