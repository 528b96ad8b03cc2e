"""Decoding with drafters that draft every token of a step in one pass: DFlash and P-EAGLE.

The logits of the draft positions are verified as a chain or as a tree of marginals. DFlash: Chen et al. 2026,
arXiv:2602.06036. P-EAGLE: Hui et al. 2026, arXiv:2602.01469. Trees over DFlash: DDTree (Ringel and Romano 2026,
arXiv:2604.12989), here with at most k tokens per position; with a correction as PCTree (Li et al. 2026,
arXiv:2608.02123) over DSpark, here grown as in EAGLE-2 and for every kind of correction.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor

from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.forward import ForwardPass
from specbench_ss.engine.kv_cache import Cache
from specbench_ss.engine.target import Output, Target
from specbench_ss.engine.tree import MOST_NODES, DraftTree, indices
from specbench_ss.engine.verify import VerifyResult
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.draft_vocabulary import DraftVocabulary
from specbench_ss.methods._shared.drafting import FeatureDecoder, Read
from specbench_ss.methods._shared.heads import best_marginal_nodes
from specbench_ss.methods._shared.target_copies import EMBEDDING, EMBEDDING_AND_HEAD
from specbench_ss.methods._shared.tree_growth import best, draw, grow
from specbench_ss.methods.block_drafters import dflash, peagle
from specbench_ss.methods.block_drafters.dflash import BlockAttention
from specbench_ss.models.checkpoint import own_fields, write_checkpoint
from specbench_ss.options import Bounded, option

NODES = (7, 15, 23, 31, 48, 63)  # tree sizes for tuning
TREE_NODES = 31  # default of a tree
POSITIONS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)  # block sizes for tuning


@dataclass(frozen=True, slots=True)
class BlockDraftOptions(Bounded):
    """Options of block drafters. Raise UserError for incompatible values."""

    weights: str = option("", "Folder, file or hub id of the drafter. Empty: the one bundled with the model.")
    mode: Literal["chain", "tree"] = option(
        "chain",
        "Draft shape. chain: top-1 token at each position, as published. tree: the nodes with the "
        "greatest product of the positions' probabilities (as DDTree and PCTree; not in the drafters' papers).",
    )
    nodes: Annotated[int, Ge(0), Le(MOST_NODES)] = option(
        0, f"Maximum number of drafted nodes per step. 0: all of a chain, {TREE_NODES} of a tree."
    )
    k: Annotated[int, Ge(1), Le(64)] = option(8, "With mode=tree: number of candidates at each position.")
    sample: Literal["on", "off"] = option(
        "off", "When sampling with mode=chain: sample drafts from the positions' distributions."
    )

    @property
    def tree_nodes(self) -> int:
        """Return the drafted nodes of a tree."""
        return self.nodes or TREE_NODES

    def check_together(self) -> None:
        if self.sample == "on" and self.mode == "tree":
            raise UserError(f"{self.owner}: sample=on does not support mode=tree; use mode=chain")


@dataclass(frozen=True, slots=True)
class DFlashOptions(BlockDraftOptions):
    """Options of `dflash`."""

    owner: ClassVar[str] = "dflash"
    block_size: Annotated[int, Ge(0), Le(dflash.MOST_BLOCK)] = option(
        0, "Positions of a block, the root included; at most the trained number. 0: as trained."
    )


@dataclass(frozen=True, slots=True)
class PEagleOptions(BlockDraftOptions):
    """Options of `peagle`."""

    owner: ClassVar[str] = "peagle"
    depths: Annotated[int, Ge(0), Le(peagle.MOST_DEPTHS)] = option(
        0, "Tokens drafted per step; at most the trained number. 0: as trained."
    )


class BlockDecoder(FeatureDecoder):
    """Base of block drafters: options, and a chain or a tree from the logits of the draft positions."""

    node_options = ("nodes",)
    can_export = True
    vllm: ClassVar[dict[str, Any]]  # vLLM's settings for the method
    target_copies = EMBEDDING_AND_HEAD
    size_option: ClassVar[str]  # the option that shortens a drafter's block
    # for `test_instances`: arguments of `random_drafter` with a reduced vocabulary
    reduced_args: ClassVar[dict[str, Any]]
    reduced_size: ClassVar[int]  # block size with a reduced vocabulary
    more_instances: ClassVar[dict[str, tuple[dict[str, Any], dict[str, Any]]]]  # arguments, options

    network: ClassVar[Any]  # module with `random_drafter`, `read_drafter` and `vllm_config_of`

    def __init__(self, target: Target, options: Any, drafter: Any, config: dict[str, Any] | None = None) -> None:
        self.size = self.resolve_options(options, {}, drafter, target)
        self.drafts = self.size - drafter.shape.first
        self.chain_length = min(self.drafts, options.nodes or self.drafts)
        super().__init__(target, options, drafter, config, drafter.shape.layers)
        self.cache = Cache(len(drafter.blocks), 0)
        self.mask_tokens = indices([drafter.shape.mask_token] * (self.size - 1), target.device)

    @classmethod
    def read(cls, options: Any, path: Path, base: ModelInfo, read: Read) -> tuple[Any, dict[str, Any]]:
        drafter, config = cls.network.read_drafter(path, base, read)
        return drafter, config

    @classmethod
    def resolve_options(cls, options: Any, config: Mapping[str, Any], drafter: Any, base: ModelInfo) -> int:
        """Return the block size. Raise UserError if the drafter was not trained for it."""
        (least, most), size = drafter.shape.sizes, int(getattr(options, cls.size_option))
        if size and not least <= size <= most:
            allowed = f"{least} to {most}, as the drafter was trained, or 0"
            raise UserError(f"{cls.name}: {cls.size_option} must be {allowed}, not {size}")
        return size or most

    @classmethod
    def test_instances(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        reduced, tree = cls.reduced_args | {"draft_vocab": max(2, target.vocab_size * 3 // 4)}, {"mode": "tree"}
        instances: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
            "chain": ({}, {}),
            "tree": ({}, {**tree, "nodes": 9, "k": 4}),
            "sampled": ({}, {"sample": "on"}),
            "reduced": (reduced, {**tree, "nodes": 6, "k": 3, cls.size_option: cls.reduced_size}),
            "reduced and sampled": (reduced, {"sample": "on"}),
            **cls.more_instances,
        }

        def build(arguments: dict[str, Any], options: dict[str, Any]) -> Decoder:
            return cls(target, cls.Options(**options), cls.network.random_drafter(target, **arguments))

        return {label: partial(build, *args) for label, args in instances.items()}

    def export(self, folder: Path) -> dict[str, Any]:
        config = self.network.vllm_config_of(self.drafter, self.target)
        write_checkpoint(folder, self.drafter, {**config, **own_fields(self.config)})
        return {**self.vllm, "num_speculative_tokens": self.chain_length}

    def metadata(self) -> dict[str, Any]:
        o, vocab = self.options, self.vocabulary.size
        tree = {"nodes": o.tree_nodes, "k": min(o.k, vocab)}
        form = tree if o.mode == "tree" else {"nodes": self.chain_length, "sample": o.sample}
        return {self.size_option: self.size, "mode": o.mode, **form, **super().metadata()}

    def search_space(self) -> Mapping[str, Sequence[Any]]:
        least, most = self.drafter.shape.sizes
        sizes = sorted({n for n in POSITIONS if least <= n < most} | {most})
        return {self.size_option: sizes, **({"nodes": NODES} if self.options.mode == "tree" else {})}

    def max_tokens_per_step(self) -> int:
        return 1 + int(self.options.tree_nodes if self.options.mode == "tree" else self.chain_length)

    @abstractmethod
    def logits(self, state: DecodeState) -> Tensor:
        """Return logits [drafts, draft vocabulary] of the tokens after the root, from one pass of the drafter."""

    def propose(self, state: DecodeState) -> DraftTree:
        """Draft in one pass: the top-1 token of each position, a tree of them, or a token sampled at each."""
        logits = self.logits(state)
        if self.options.mode == "tree":
            o = self.options
            ids, topology = best_marginal_nodes(logits, o.k, o.tree_nodes, o.owner)
            return self.vocabulary.target_tree(DraftTree(torch.cat((state.root, ids)), topology))
        logits = logits[: self.chain_length]
        if self.options.sample == "on" and not state.sampling.greedy:
            return sampled_chain(state, logits, self.vocabulary)
        return self.vocabulary.target_tree(DraftTree.chain(state.root, logits.argmax(-1)))


def sampled_chain(state: DecodeState, logits: Tensor, vocabulary: DraftVocabulary) -> DraftTree:
    """Return a chain sampled from q, the positions' distributions after temperature and filters."""
    q = state.sampling.probs(logits)
    return vocabulary.target_tree(DraftTree.chain(state.root, draw(q, state.rng)[:, 0], q))


def run_layers(
    current: ForwardPass,
    drafter: Any,
    inputs: Sequence[Tensor],
    masks: Sequence[Tensor | None],
    rotary: tuple[Tensor, Tensor],
) -> Tensor:
    """Return a drafter's output [1, n, h] for inputs [1, n, h] that follow its cache. masks: one per layer."""
    mask = masks[0]
    if any(other is not mask for other in masks):  # concurrent requests do not share it
        out: Tensor = drafter(*inputs, current.rows(inputs[0].shape[1]), masks, rotary)
        return out

    def layers(*given: Any) -> Tensor:
        *rows, cache, mask, rotary = given
        out: Tensor = drafter(*rows, cache, [mask] * len(masks), rotary)
        return out

    return current.layers(drafter, layers, inputs, mask, rotary)


# -- DFlash --------------------------------------------------------------------------------------------------------

# parts of drafters for tests
CONVOLUTIONS = {"conv_kernel_size": 3, "conv_group_size": 8}
SELECTOR = {"selector_rank": 6, "selector_top_k": 5}
RECURRENT_HEAD = {"gru_hidden_dim": 7, "emb_dim": 5, "pure_draft_prefix_len": 1}


class DFlash(BlockDecoder):
    """DFlash: each mask token after the root attends to all hidden states and its block, and drafts a token.

    With a correction (DFlash2, Domino), the block's logits depend on the tokens drafted before: chains and trees are
    then drafted token by token, and q is that of the drafted path.
    """

    name = "dflash"
    summary = "DFlash: a block in one pass of a small network over the target's features"
    paper = "Chen et al. 2026, arXiv:2602.06036"
    Options: ClassVar[Any] = DFlashOptions
    size_option = "block_size"
    network: ClassVar[Any] = dflash
    vllm: ClassVar = {"method": "dflash"}
    reduced_args, reduced_size = {"from_anchor": True}, 4
    more_instances: ClassVar = {
        "windows": ({"layer_masks": (BlockAttention(6, causal=True), BlockAttention(6, from_root=True))}, {}),
        "DFlash 2": ({**CONVOLUTIONS, **SELECTOR, "from_anchor": True}, {"sample": "on", "block_size": 3}),
        "selector tree": (SELECTOR, {"mode": "tree", "nodes": 9, "k": 3}),
        "Domino": (RECURRENT_HEAD, {"sample": "on"}),
    }

    def on_prefill(self, state: DecodeState) -> None:
        """Set the context to the prompt's hidden states."""
        self.target.empty(self.cache, state.cache.capacity + self.size)
        self._extend(self._features)
        self._features = []

    def update(self, state: DecodeState, result: VerifyResult, output: Output) -> None:
        """Add the hidden states of the accepted path to the context."""
        self._extend(self.accepted(result, output)[1])

    def _extend(self, features: Sequence[Tensor]) -> None:
        """Cache keys and values of the next n positions from hidden states [1, n, h]."""
        past, n = self.cache.get_seq_length(), features[0].shape[1]
        context = self.drafter.fuse(features)
        positions = torch.arange(past, past + n, device=context.device)[None]
        keys, values = self.drafter.inject(context, self.rotary(positions, context.dtype))
        for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
            self.cache.update(k, v, layer)
        self.cache.commit(n)

    def logits(self, state: DecodeState) -> Tensor:
        """Return logits [drafts, draft vocabulary]; the block leaves nothing in the cache."""
        logits: Tensor = self.drafter.logits(self.block_states(state), self.target)
        return logits

    def metadata(self) -> dict[str, Any]:
        settings, shape = super().metadata(), self.drafter.shape
        if shape.selector_rank and "k" in settings:
            settings["k"] = min(settings["k"], shape.selector_top_k)
        parts = {name: getattr(shape, name) for name in (*dflash.DFLASH2, *dflash.DOMINO)}
        return {**settings, **{name: value for name, value in parts.items() if value}}

    def propose(self, state: DecodeState) -> DraftTree:
        """Draft a chain or a tree; with a correction, each token by those before it."""
        if self.drafter.correction is None:
            return super().propose(state)
        states = self.block_states(state)
        logits = self.drafter.logits(states, self.target)
        if self.options.mode == "tree":
            return self._tree(state, logits, states)
        tokens, q = self._chain(state, logits, states)
        length = self._length(state, states, tokens)
        if not length:
            return DraftTree.root_only(state.root)
        probs = None if q is None else self.vocabulary.target_probs(q[:length])
        return DraftTree.chain(state.root, tokens[1 : length + 1], probs)

    def _length(self, state: DecodeState, states: Tensor, tokens: Tensor) -> int:
        """Return how many drafted tokens of a chain are verified. states: [n, h]. tokens: with the root, [1 + n]."""
        return len(tokens) - 1

    def _chain(self, state: DecodeState, logits: Tensor, states: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the root and the n tokens of a chain [1 + n], and the q [n, Vd] of each, or None."""
        correction, sampling = self.drafter.correction, state.sampling
        samples = self.options.sample == "on" and not sampling.greedy
        block, table = correction.open(logits, states), self.drafter.table(self.target)
        tokens, rows, memory = [state.root], [], correction.start(states[:1])
        for k in range(self.chain_length):
            corrected, memory = correction.step(*block.at(k), tokens[-1], memory, table)
            if samples:
                rows.append(sampling.probs(corrected))
            drafted = draw(rows[-1], state.rng)[:, 0] if samples else corrected.argmax(-1)
            tokens.append(self.vocabulary.token_ids(block.drafted(k, drafted)))
        return torch.cat(tokens), block.over_vocabulary(torch.cat(rows), logits.shape[-1]) if samples else None

    def _tree(self, state: DecodeState, logits: Tensor, states: Tensor) -> DraftTree:
        """Return the tree of the most probable paths, each node's candidates corrected by its own token."""
        correction, o = self.drafter.correction, self.options
        block, table, position = correction.open(logits, states), self.drafter.table(self.target), 0
        ranked = best(min(o.k, o.tree_nodes, block.logits.shape[-1]))  # no more than a tree of n nodes has
        first, memory = correction.step(*block.at(0), state.root, correction.start(states[:1]), table)

        def choose(rows: Tensor) -> tuple[Tensor, Tensor, None]:
            chosen, log_p, _ = ranked(rows)
            return self.vocabulary.token_ids(block.drafted(position, chosen)), log_p, None

        def expand(tokens: Tensor, visible: Tensor, parent_rows: Tensor, level: int) -> Tensor:
            nonlocal memory, position
            position = level
            corrected: Tensor
            corrected, memory = correction.step(*block.at(level), tokens, memory[parent_rows], table)
            return corrected

        return grow(state.root, first[0], choose, expand, min(len(states), o.tree_nodes), o.tree_nodes)

    def block_states(self, state: DecodeState) -> Tensor:
        """Return normed states [drafts, h] of the drafting positions, from one pass of the drafter."""
        (states,) = self.target.run_pass((self, "block"), self._block, self.cache, (state.root,), rows=self.size)
        state.num_draft_forwards += 1
        drafting: Tensor = states[0, self.drafter.shape.first :]
        return drafting

    def _block(self, current: ForwardPass, root: Tensor) -> tuple[Tensor]:
        """Return normed states [1, size, h] of the root [1] and the mask tokens."""
        embedded = self.drafter.block_inputs(torch.cat((root, self.mask_tokens))[None], self.size, self.target)
        positions = current.positions(torch.arange(self.size, device=root.device))
        rotary = self.rotary(positions, embedded.dtype)
        masks = block_masks(current, self.drafter.shape, self.size, root.device)
        return (run_layers(current, self.drafter, (embedded,), masks, rotary),)


def block_masks(current: ForwardPass, shape: dflash.Shape, size: int, device: torch.device) -> list[Tensor | None]:
    """Return the additive mask of every layer of a block; layers of the same attention share it. None = no mask."""

    def mask(attention: BlockAttention) -> Tensor | None:
        if attention.no_mask and current.on_host:  # in a graph, padded keys are masked
            return None

        def context(past: Any, keys: Tensor) -> Tensor:
            root = past if isinstance(past, Tensor) else torch.full((), past, device=keys.device)
            return attention.context(root, size, keys)

        return current.mask(attention.block(size, device), None if attention.no_mask else context)

    masks = {attention: mask(attention) for attention in set(shape.layer_masks)}
    return [masks[attention] for attention in shape.layer_masks]


# -- P-EAGLE -------------------------------------------------------------------------------------------------------


class PEagle(BlockDecoder):
    """P-EAGLE: newly accepted positions and all draft positions in one pass of EAGLE-3's layer.

    The cache has a slot of hidden state and token for every accepted position before the root's.
    """

    name = "peagle"
    summary = "P-EAGLE: EAGLE-3's layer, all depths in one pass"
    paper = "Hui et al. 2026, arXiv:2602.01469"
    target_copies = EMBEDDING  # its LM head is its own
    Options = PEagleOptions
    size_option = "depths"
    network: ClassVar[Any] = peagle
    vllm: ClassVar = {"method": "eagle3", "parallel_drafting": True}
    reduced_args, reduced_size = {"layers": 1}, 3
    more_instances: ClassVar = {"one position": ({}, {"depths": 1}), "windows": ({"windows": (6, None)}, {})}

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._tokens = self.mask_tokens  # [n] of slots not in the cache yet, the root last; as in `_features`

    def on_prefill(self, state: DecodeState) -> None:
        """Fill the prompt's slots except the last, which is part of the first step's pass."""
        self.target.empty(self.cache, state.cache.capacity + self.size)
        tokens = indices(state.ids[1:], self.target.device)
        if len(tokens) > 1:
            self._pass(state, tokens[:-1], self.drafter.fuse([f[:, :-1] for f in self._features]))
            self.cache.commit(len(tokens) - 1)
        self._tokens, self._features = tokens[-1:], [f[:, -1:] for f in self._features]

    def update(self, state: DecodeState, result: VerifyResult, output: Output) -> None:
        """Store newly accepted positions for the next step's pass."""
        self._tokens, self._features = self.accepted(result, output)

    def logits(self, state: DecodeState) -> Tensor:
        """Return logits [depths, draft vocabulary]; only slots with the target's hidden states stay in the cache."""
        fused, n = self.drafter.fuse(self._features), len(self._tokens)
        mask_state = self.drafter.mask_state().expand(-1, self.size - 1, -1)
        states = self._pass(state, torch.cat((self._tokens, self.mask_tokens)), torch.cat((fused, mask_state), 1))
        self.cache.commit(n)
        logits: Tensor = self.drafter.logits(states[0, n - 1 :], self.target)
        return logits

    def _pass(self, state: DecodeState, tokens: Tensor, fused: Tensor) -> Tensor:
        """Return normed states [1, n, h] of slots that follow the cache: tokens [n], fused hidden states [1, n, h]."""
        state.num_draft_forwards += 1
        inputs, dims = (tokens, fused), ((0,), (1,))
        (states,) = self.target.run_pass((self, "slots"), self._slots, self.cache, inputs, dims, len(tokens))
        return states

    def _slots(self, current: ForwardPass, tokens: Tensor, fused: Tensor) -> tuple[Tensor]:
        """Return normed states [1, n, h] as `_pass` does."""
        positions, windows = torch.arange(len(tokens), device=tokens.device), self.drafter.shape.windows
        masks = {window: self._mask(current, positions, window) for window in set(windows)}
        embedded = self.drafter.embed(tokens[None], self.target)
        rotary = self.rotary(current.positions(positions), fused.dtype)
        return (run_layers(current, self.drafter, (embedded, fused), [masks[w] for w in windows], rotary),)

    def _mask(self, current: ForwardPass, positions: Tensor, window: int | None) -> Tensor | None:
        """Return the causal mask of slots at successive positions [n] behind the cache, within a sliding window."""
        if window is None:
            return current.causal_mask(len(positions))
        back = positions[:, None] - positions  # [n, n]
        return current.mask((back >= 0) & (back < window), lambda past, keys: past + positions[:, None] - keys < window)
