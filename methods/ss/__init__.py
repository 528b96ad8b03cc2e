"""Speculative Streaming, lossless mode: one fused pass verifies the last draft and drafts the next.

Bhendawade et al., ACL version; docs/design/speculative-streaming.md says where the paper leaves a choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from specbench_ss.decoder import Decoder, State
from specbench_ss.errors import UserError
from specbench_ss.methods.checkpoint import check_base, drafter_folder, load_into, read_config, read_tensors
from specbench_ss.methods.ss.drafting import draft_tree, prune
from specbench_ss.methods.ss.streams import StreamConfig, Streams, run_msa, stream_visibility
from specbench_ss.methods.ss.tuning import worth_trying
from specbench_ss.models import hash_weights
from specbench_ss.target import FINAL, Output, Target
from specbench_ss.tree import DraftTree
from specbench_ss.verify import Verdict

WEIGHTS = "model.safetensors"
MOST_NODES = 4096


@dataclass(frozen=True, slots=True)
class SSOptions:
    """Options of `ss`; 0 or -1 = as trained or as the checkpoint advises."""

    weights: str = field(default="", metadata={"help": "folder with the streams; empty = those of the model"})
    gamma: int = field(default=0, metadata={"help": "streams used per step, at most the trained number; 0 = all"})
    k: int = field(default=0, metadata={"help": "candidates per stream; 1 = chain; 0 = the checkpoint's"})
    n_draft: int = field(
        default=-1,
        metadata={"help": "draft only this many nodes, the best by joint probability; 0 = all, -1 = the checkpoint's"},
    )
    n_keep: int = field(default=0, metadata={"help": "most nodes after pruning, root included; 0 = the checkpoint's"})
    prune: Literal["on", "off"] = field(default="on", metadata={"help": "prune the tree at the pruning layer"})
    prune_threshold: float = field(default=0.0, metadata={"help": "drop nodes of smaller transition probability"})
    mode: Literal["tree", "chain"] = field(default="tree", metadata={"help": "chain = the single best path (k=1)"})


class SpeculativeStreaming(Decoder):
    """gamma streams beside every verified node predict the gamma tokens after the next one."""

    name = "ss"
    summary = "Speculative Streaming, lossless: streams in the frozen base, tree, pruning, fused pass"
    paper = "Bhendawade et al., arXiv:2402.11131 and ACL"
    Options = SSOptions  # type: ignore[assignment]

    def __init__(self, target: Target, options: SSOptions, streams: Streams, advice: dict[str, int]) -> None:
        super().__init__(target, options)
        c = streams.config
        if c.n_msa_layers > target.n_layers:
            raise UserError(f"ss: {c.n_msa_layers} MSA layers, the model has {target.n_layers} layers")
        if options.gamma > c.gamma or options.gamma < 0:
            raise UserError(f"ss: gamma must be 1 to {c.gamma} (as trained), not {options.gamma}")
        self.advice = advice
        self.streams = streams.to(target.device, target.dtype).eval().requires_grad_(False)
        self.lo = target.n_layers - c.n_msa_layers
        self.prune_layer = self.lo if c.prune_layer < 0 else c.prune_layer
        if self.prune_layer > self.lo:
            raise UserError(f"ss: the pruning layer {self.prune_layer} is above layer {self.lo}, where streams begin")
        self.gamma = options.gamma or c.gamma
        self.k = 1 if options.mode == "chain" else options.k or advice.get("k", 3)
        self.n_draft = options.n_draft if options.n_draft >= 0 else advice.get("n_draft", 0)
        self.n_keep = options.n_keep or advice.get("n_keep", 32)
        if min(self.k, self.n_keep) < 1:
            raise UserError("ss: k and n_keep must be at least 1")
        if self.k > target.vocab_size or self.k**self.gamma > MOST_NODES:
            raise UserError(f"ss: k={self.k} with gamma={self.gamma} makes a tree of more than {MOST_NODES} nodes")
        self.next_streams = torch.empty(0)  # [gamma, h], final stream states at the last accepted node

    @classmethod
    def load(cls, target: Target, options: Any) -> SpeculativeStreaming:
        """Streams from the folder that the user named, or those that came with the model."""
        folder = drafter_folder(options.weights, target.companion(cls.name), cls.name, target)
        config = read_config(folder)
        check_base(config, target, "ss")
        try:
            shape = StreamConfig(**config["streams"])
        except (KeyError, TypeError) as error:
            raise UserError(f"ss: {folder / 'config.json'} does not describe streams: {error}") from None
        tensors = read_tensors(folder / WEIGHTS)
        streams = Streams(shape, target.hidden_size)
        load_into(streams, {k: v.float() for k, v in tensors.items()}, "ss")
        return cls(target, options, streams, config.get("advice", {}))

    def described(self) -> dict[str, Any]:
        """The settings as resolved with the checkpoint's advice, and the streams."""
        return {
            "gamma": self.gamma,
            "k": self.k,
            "n_draft": self.n_draft,
            "n_keep": self.n_keep,
            "prune": self.options.prune,
            "prune_threshold": self.options.prune_threshold,
            "prune_layer": self.prune_layer,
            "msa_layers": self.streams.config.n_msa_layers,
            "streams_hash": hash_weights(self.streams),
        }

    def tunable(self) -> Mapping[str, Sequence[Any]]:
        """The size and the form of the tree."""
        chain, pruned = self.options.mode == "chain", self.options.prune == "on"
        return worth_trying(self.streams.config.gamma, self.gamma, self.k, self.n_draft, self.n_keep, pruned, chain)

    def variant(self, options: Any) -> SpeculativeStreaming:
        """The same streams."""
        return type(self)(self.target, options, self.streams, self.advice)

    # -- rows and masks -----------------------------------------------------------------------------------------

    def max_rows(self) -> int:
        """The whole tree below the pruning layer, kept nodes with their streams above it."""
        nodes: int = 1 + sum(self.k**g for g in range(1, self.gamma + 1))
        nodes = min(nodes, 1 + self.n_draft) if self.n_draft else nodes
        kept = min(nodes, self.n_keep) if self.options.prune == "on" else nodes
        return max(nodes, kept * (1 + self.gamma))

    def _with_streams(self, main: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Insert gamma streams beside every row of main [1, m, h]: rows [1, m + m*gamma, h] and their positions.

        Stream j stands at the position of the token whose successor it predicts: its row's + j.
        """
        streams = self.streams.insert(main).unflatten(1, (-1, self.streams.config.gamma))[:, :, : self.gamma]
        ahead = torch.arange(1, self.gamma + 1, device=positions.device)
        places = (positions[:, None] + ahead).clamp_max(self.target.context_length - 1).flatten()
        return torch.cat((main, streams.flatten(1, 2)), 1), torch.cat((positions, places))

    # -- the loop's calls ---------------------------------------------------------------------------------------

    def prefill(self, state: State, ids: Tensor) -> Output:
        """The prompt as the base runs it, then streams on its last token only, over the cache."""
        target, cache, s, g = self.target, state.cache, ids.shape[1], self.gamma
        out = target.prefill(ids, cache, (self.lo,))
        last = torch.tensor([s - 1], device=target.device)
        rows, places = self._with_streams(out.taps[self.lo], last)
        mask = target.causal_mask(g, s)
        x = run_msa(target, self.streams, rows[:, 1:], 0, cache, mask, target.rotary(places[None, 1:], s + g))
        self.next_streams = target.family.norm(x[0])
        return out

    def propose(self, state: State) -> DraftTree:
        """The tree that the last step's streams predict, under the token the main stream decided."""
        logits = self.target.logits(self.next_streams)  # [gamma, V]
        return draft_tree(state.root, logits, self.k, self.n_draft)

    def forward(self, state: State, tree: DraftTree) -> Output:
        """Lower layers over the tree; prune; insert streams; MSA layers over kept nodes and their streams."""
        target, cache = self.target, state.cache
        past, n = cache.get_seq_length(), len(tree)
        visible, depths = tree.visibility()
        positions = depths + past
        rotary = target.rotary(positions[None], past + tree.shape.depth)
        mask = target.block_mask(visible, past) if n > 1 else None
        x = target.embed(tree.tokens[None], positions[None])
        x = target.run(x, 0, self.prune_layer, cache, mask, rotary)
        keep = self._pruned(tree, x, visible)
        kept = tree
        if len(keep) < n:
            index = torch.tensor(keep, device=target.device)
            kept = tree.select(keep)
            x, positions, visible = x[:, index], positions[index], kept.visibility()[0]
            if self.prune_layer < self.lo:
                rotary = target.rotary(positions[None], past + kept.shape.depth)
                mask = target.block_mask(visible, past)
        x = target.run(x, self.prune_layer, self.lo, cache, mask, rotary)
        m = len(kept)
        rows, places = self._with_streams(x, positions)
        msa_mask = target.block_mask(stream_visibility(visible, self.gamma), past)
        longest = past + kept.shape.depth + self.gamma
        x = run_msa(target, self.streams, rows, m, cache, msa_mask, target.rotary(places[None], longest))
        final = target.family.norm(x[:, :m])
        ranges = [(0, self.prune_layer, keep), (self.prune_layer, target.n_layers, range(m))]
        return Output(target.logits(final), kept, {FINAL: final}, ranges, x[0, m:].unflatten(0, (m, self.gamma)))

    def _pruned(self, tree: DraftTree, x: Tensor, visible: Tensor) -> list[int]:
        """Nodes that stay after the pruning layer."""
        if self.options.prune == "off" or (len(tree) <= self.n_keep and self.options.prune_threshold == 0):
            return list(range(len(tree)))
        inner = list(dict.fromkeys(tree.shape.parents[1:]))  # leaves have no transition to judge
        x = x[0, torch.tensor(inner, device=x.device)]
        exits = self.target.logits(self.target.family.norm(self.streams.early_exit(x)))  # [inner, V]
        return prune(tree, inner, exits, visible, self.n_keep, self.options.prune_threshold)

    def observe(self, state: State, verdict: Verdict, output: Output) -> None:
        """Only the streams of the last accepted node draft the next tree."""
        self.next_streams = self.target.family.norm(output.extra[verdict.path[-1]])
