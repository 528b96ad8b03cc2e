"""Hydra: sequentially dependent draft heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.forward import ForwardPass
from specbench_ss.engine.kv_cache import Cache
from specbench_ss.engine.target import FINAL, Output, Target
from specbench_ss.engine.tree import DraftTree, indices
from specbench_ss.engine.verify import VerifyResult
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.drafting import Read
from specbench_ss.methods._shared.heads import HeadsOptions, StaticTree, TreeHeads
from specbench_ss.methods._shared.small_llama import llama_layer
from specbench_ss.methods.hydra.heads import HydraHeads, read_heads
from specbench_ss.options import option


@dataclass(frozen=True, slots=True)
class HydraOptions(HeadsOptions):
    """Options of `hydra`."""

    owner: ClassVar[str] = "hydra"
    accept: Literal["exact", "typical"] = option(
        "exact",
        "Acceptance rule when sampling. typical (Medusa sec. 2.3.1) is lossy.",
    )


@dataclass(frozen=True, slots=True)
class Level:
    """Nodes that one head drafts: the children of all nodes of one depth."""

    paths: Tensor  # int64 [m, depth + 1]: from the root to each node with children
    width: int  # number of candidates of each such node
    pick: Tensor  # int64 [c]: indices of the children among the m * width candidates, in the tree's order


class Hydra(TreeHeads):
    """Head i predicts the token i + 1 positions after the root from the prefix state and all tokens after it.

    The prefix state is the base's last state (Hydra) or the output of an extra layer over all base states (Hydra++).
    """

    name = "hydra"
    summary = "Hydra and Hydra++: sequential heads on the frozen base, sparse tree"
    paper = "Ankner et al. 2024, arXiv:2402.05109"
    Options = HydraOptions

    def __init__(
        self,
        target: Target,
        options: HeadsOptions,
        drafter: HydraHeads,
        config: dict[str, Any] | None = None,
        tree: StaticTree | None = None,
    ) -> None:
        super().__init__(target, options, drafter, config, tree)
        self.layer = input_layer(self.config, target.n_layers)  # whose input the heads read
        self.aux_hidden_state_layers = () if self.layer == FINAL else (self.layer,)
        self.levels = levels_of(self.tree, target.device)
        self.embedding: Tensor = target.model.get_input_embeddings().weight
        self.cache = Cache(1, 0)  # of the prefix layer
        self.prefix_state = torch.empty(0)  # [1, h], at the position before the root

    @classmethod
    def read(cls, options: Any, path: Path, base: ModelInfo, read: Read) -> tuple[HydraHeads, dict[str, Any]]:
        heads, config = read_heads(path, base, read)
        input_layer(config, base.n_layers)
        return heads, config

    @classmethod
    def test_instances(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        """Return random heads: both prefix states, all forms of LM heads, an earlier layer, and a lossy rule."""

        def build(heads: int = 3, options: HydraOptions | None = None, **arguments: Any) -> Callable[[], Decoder]:
            return lambda: cls.random(target, heads, options, **arguments)

        part = HydraOptions(nodes=4, draft_vocab=str(target.vocab_size * 3 // 4))
        return {
            "hydra++": build(4, layers=2),
            "hydra": build(4, prefix=False),
            "auto": build(options=HydraOptions()),
            "one-head": build(1),
            "earlier-state": build(2, prefix=False, offset=1),
            "shared-head": build(own_unembed=False, offset=1),
            "typical": build(options=HydraOptions(accept="typical")),
            "draft-vocabulary": build(options=part, own_unembed=False),
            "own-heads-draft-vocabulary": build(options=part, prefix=False),
        }

    @classmethod
    def random(
        cls,
        target: Target,
        heads: int = 3,
        options: HydraOptions | None = None,
        layers: int = 1,
        prefix: bool = True,
        own_unembed: bool = True,
        offset: int = 0,
    ) -> Self:
        """Return random heads by `example`. offset: `hidden_state_offset` of their config."""
        layer = llama_layer(target) if prefix else None
        module = HydraHeads(heads, layers, target.hidden_size, target.vocab_size, layer, own_unembed)
        return cls.example(target, module, {"hidden_state_offset": offset}, options)

    # -- decoding -----------------------------------------------------------------------------------------------

    def prefill(self, state: DecodeState, ids: Tensor) -> Output:
        """Run the prompt; the prefix layer reads all its positions."""
        if self.drafter.prefix is None:
            return super().prefill(state, ids)
        output = self.target.prefill(ids, state.cache, self.aux_hidden_state_layers, every=True)
        self.target.empty(self.cache, state.cache.capacity)
        self._extend(output.hidden_states[self.layer])
        return output

    def on_prefill(self, state: DecodeState) -> None:
        """Take the base's last state as prefix state if there is no prefix layer."""
        if self.drafter.prefix is None:
            self.prefix_state = state.hidden_states[self.layer][0]

    def propose(self, state: DecodeState) -> DraftTree:
        """Draft head by head; each reads the tokens drafted before it on every path."""
        (tokens,) = self.target.run_pass((self,), self._draft, None, (state.root, self.prefix_state))
        return DraftTree(tokens, self.tree.topology)

    def _draft(self, _: ForwardPass, tokens: Tensor, prefix: Tensor) -> tuple[Tensor]:
        """Return the tree's tokens [n] for the root [1] and the prefix state [1, h]."""
        for head, level in enumerate(self.levels):
            path = torch.nn.functional.embedding(tokens[level.paths], self.embedding)  # [m, head + 1, h]
            logits = self.drafter.logits(head, prefix, path, self.lm_head, self.head_rows)  # [m, draft vocabulary]
            best = logits.topk(level.width).indices.flatten()
            tokens = torch.cat((tokens, self.vocabulary.token_ids(best[level.pick])))
        return (tokens,)

    def update(self, state: DecodeState, result: VerifyResult, output: Output) -> None:
        """Update the prefix state with the states of the accepted path."""
        if self.drafter.prefix is None:
            self.prefix_state = state.hidden_states[self.layer][0]
        else:
            self._extend(output.hidden_states[self.layer][:, indices(result.path, self.target.device)])

    def _extend(self, states: Tensor) -> None:
        """Run the base's states [1, q, h] of the next q positions through the prefix layer."""
        past, q = self.cache.get_seq_length(), states.shape[1]
        positions = torch.arange(past, past + q, device=states.device)[None]
        inputs = (states, *self.drafter.prefix.rotary(positions, past + q, states.dtype))
        (out,) = self.target.run_pass((self, "prefix"), self._prefix, self.cache, inputs, ((1,),) * 3, q)
        self.prefix_state = out[0, -1:]
        self.cache.commit(q)

    def _prefix(self, current: ForwardPass, states: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor]:
        """Return the prefix layer's output [1, n, h] for the base's states [1, n, h] at successive positions."""
        layer, mask = self.drafter.prefix, current.causal_mask(states.shape[1])
        return (current.layers(layer, layer, (states,), mask, (cos, sin)),)


def input_layer(config: dict[str, Any], layers: int) -> int:
    """Return the layer whose input the heads read; `hidden_state_offset` counts from the last. Raise UserError."""
    offset = config.get("hidden_state_offset", 0)
    if not isinstance(offset, int) or isinstance(offset, bool) or not 0 <= offset <= layers:
        raise UserError(f"hydra: 'hidden_state_offset' in config.json must be 0 to {layers}, not {offset!r}")
    return layers - offset if offset else FINAL


def levels_of(tree: StaticTree, device: torch.device) -> list[Level]:
    """Return the levels of the tree, whose nodes are in order of depth."""
    parents, children = tree.topology.parents, tree.topology.children()
    paths: list[list[int]] = [[0]]
    for node, parent in enumerate(parents[1:], start=1):
        paths.append([*paths[parent], node])
    levels = []
    for head in range(tree.depth):
        inner = [n for n, depth in enumerate(tree.topology.depths) if depth == head and children[n]]
        ranks = [(row, tree.ranks[child - 1]) for row, n in enumerate(inner) for child in children[n]]
        width = 1 + max(rank for _, rank in ranks)
        pick = torch.tensor([row * width + rank for row, rank in ranks], device=device)
        levels.append(Level(torch.tensor([paths[n] for n in inner], device=device), width, pick))
    return levels
