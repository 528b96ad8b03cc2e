"""UNO: the frozen target drafts through a LoRA in rows of noise (arXiv:2609.04010), and verifies in a second pass.

A draft pass has the root and random tokens behind it, causal, at successive positions. The root's row has no LoRA, so
it is the target's own: its token is drafted from p and accepted with probability 1, up to rounding, unless p is
restricted to a draft vocabulary. Row i > 0 drafts the token at its position + 1. Keys and values of the draft pass
are overwritten by the verification.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor

from specbench_ss.engine.architectures import Block, ModelInfo
from specbench_ss.engine.costs import read_by_a_pass
from specbench_ss.engine.decoder import DecodeState
from specbench_ss.engine.forward import ForwardPass
from specbench_ss.engine.kv_cache import row_numbers
from specbench_ss.engine.target import Target
from specbench_ss.engine.tree import MOST_NODES, DraftTree
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.draft_vocabulary import vocabulary_option, with_frequent_tokens
from specbench_ss.methods._shared.drafting import VOCABULARY, DrafterDecoder, Read
from specbench_ss.methods._shared.fine_tuned import without_weights
from specbench_ss.methods._shared.heads import best_marginal_nodes
from specbench_ss.methods._shared.tree_growth import draw
from specbench_ss.methods.uno.lora import (
    MOST_BLOCK,
    RowLora,
    gated_blocks,
    new_lora,
    noise_table,
    noise_tokens,
    read_lora,
    warn_of_other_base,
)
from specbench_ss.models.checkpoint import read_config
from specbench_ss.models.load import hash_tensors
from specbench_ss.options import Bounded, option

BLOCKS = (2, 3, 4, 5, 6, 8, 12, 16)  # for tuning
TREE_NODES = 16  # default of a tree


@dataclass(frozen=True, slots=True)
class UNOOptions(Bounded):
    """Options of `uno`."""

    owner: ClassVar[str] = "uno"
    weights: str = option("", "Folder with the LoRA, as peft writes it. Empty: the one bundled with the model.")
    block: Annotated[int, Ge(0), Le(MOST_BLOCK)] = option(
        0, "Drafted tokens per step, the first of which is the target's own. 0: as trained, or 16."
    )
    mode: Literal["chain", "tree"] = option(
        "chain",
        "Draft shape. tree: the nodes with the greatest product of the rows' probabilities, below the first token.",
    )
    nodes: Annotated[int, Ge(0), Le(MOST_NODES)] = option(
        0, f"Maximum number of drafted nodes per step. 0: all of a chain, {TREE_NODES} of a tree."
    )
    k: Annotated[int, Ge(1), Le(64)] = option(8, "With mode=tree: number of candidates of each row.")
    draft_vocab: str = vocabulary_option()


class UNO(DrafterDecoder):
    """A LoRA of the target in rows of noise drafts; the target without it verifies."""

    name = "uno"
    summary = "UNO: the frozen target drafts in a pass of its own, through a LoRA in rows of noise"
    paper = "Sahoo et al. 2026, arXiv:2609.04010"
    Options = UNOOptions
    node_options = ("nodes", "block")
    advisable = (VOCABULARY,)
    drafter: RowLora

    def __init__(
        self,
        target: Target,
        options: Any,
        drafter: RowLora,
        config: dict[str, Any] | None = None,
        blocks: list[Block] | None = None,
    ) -> None:
        target.require_layer_access(self.name)
        self.size, self.tree_nodes = self.resolve_options(options, config or {}, drafter, target)
        super().__init__(target, options, drafter, config)
        self.blocks = gated_blocks(target, self.drafter, first=1) if blocks is None else blocks
        self.constructor_args = (self.blocks,)
        self.windows = {block.window for block in self.blocks}
        self.noise = noise_table(target.vocab_size, self.size - 1, target.device)
        self.visible = torch.ones(self.size, self.size, dtype=torch.bool, device=target.device).tril()

    @classmethod
    def require(cls, base: ModelInfo) -> None:
        base.require_layer_access(cls.name)
        super().require(base)

    @classmethod
    def read(cls, options: Any, path: Path, base: ModelInfo, read: Read) -> tuple[RowLora, dict[str, Any]]:
        """Return the LoRA of a peft folder, and the config.json that `ssbench train uno` adds.

        Without the hash of its base in config.json, compare the name of that base.
        """
        lora = read_lora(path, without_weights(base.config), read)
        config = read_config(path) if (path / "config.json").is_file() else {}
        if not config.get("base_hash"):
            warn_of_other_base(path, base)
        return lora, config

    @classmethod
    def resolve_options(cls, options: Any, config: Mapping[str, Any], drafter: Any, base: ModelInfo) -> tuple[int, int]:
        """Return the drafted tokens of the block, and the nodes of a tree (0 for a chain)."""
        trained = config.get("block", 16)
        if type(trained) is not int or not 1 <= trained <= MOST_BLOCK:
            raise UserError(f"uno: config.json has block {trained!r}; it must be 1 to {MOST_BLOCK}")
        if "block" in config and options.block > trained:
            raise UserError(f"uno: block must be 1 to {trained}, as the LoRA was trained, or 0, not {options.block}")
        size = int(options.block or trained)
        if options.mode == "tree":
            return size, int(options.nodes or TREE_NODES)
        return min(size, options.nodes or size), 0

    @classmethod
    def test_instances(cls, target: Target) -> Mapping[str, Callable[[], UNO]]:
        """Return random LoRAs: chains of several lengths, and a tree."""

        def build(**options: Any) -> UNO:
            generator = torch.Generator().manual_seed(5)
            lora = with_frequent_tokens(new_lora(target, 3, 2.0), target.vocab_size)
            for p in lora.parameters():
                p.data = 0.1 * torch.randn(p.shape, generator=generator)
            return cls(target, UNOOptions(**options), lora)

        part = str(target.vocab_size * 3 // 4)
        return {
            "chain": partial(build, block=4),
            "long": partial(build, block=7),
            "one": partial(build, block=1),
            "tree": partial(build, block=4, mode="tree", nodes=9, k=3),
            "draft vocabulary": partial(build, block=4, draft_vocab=part),
            "draft vocabulary, tree": partial(build, block=3, mode="tree", nodes=6, k=3, draft_vocab=part),
        }

    def metadata(self) -> dict[str, Any]:
        shape = (
            {"mode": "tree", "nodes": self.tree_nodes, "k": self.options.k} if self.tree_nodes else {"mode": "chain"}
        )
        lora = {"rank": self.drafter.rank, "drafter_hash": hash_tensors(self.drafter.state_dict())}
        return {"block": self.size, **shape, **lora, **self.vocabulary.metadata()}

    def search_space(self) -> Mapping[str, Sequence[Any]]:
        trained = self.config.get("block", MOST_BLOCK)
        blocks = [block for block in BLOCKS if block <= trained]
        return {"block": blocks, **self.vocabulary.search_space()}

    def drafter_weights(self) -> Iterable[Tensor]:
        """Return the weights of a draft pass: the target's, of the LM head the selected rows, and the LoRA's."""
        head = self.target.unembed.data_ptr() if self.head_rows else 0
        read = [weight for weight in read_by_a_pass(self.target.model) if weight.data_ptr() != head]
        return [*read, *(rows.weight for rows in self.head_rows), *self.drafter.parameters()]

    def max_tokens_per_step(self) -> int:
        return 1 + max(self.size, self.tree_nodes)

    def propose(self, state: DecodeState) -> DraftTree:
        """Run the draft pass; return a chain, or a tree below the first token.

        Above temperature 0 the tokens of a chain are sampled, of a tree the first one.
        """
        past = state.cache.get_seq_length()
        n = max(1, min(self.size, self.target.context_length - past - 1))
        draft = partial(self._draft_pass, n)
        (logits,) = self.target.run_pass((self, n), draft, state.cache, (state.root,), longest=past + n - 1, rows=n)
        state.num_draft_forwards += 1
        return self.vocabulary.target_tree(self._draft(state, logits))

    def _draft(self, state: DecodeState, logits: Tensor) -> DraftTree:
        """Return a chain or a tree, in columns of logits [n, draft vocabulary]."""
        q = None if state.sampling.greedy else state.sampling.probs(logits)
        if self.tree_nodes and len(logits) > 1:
            scores = logits if q is None else q.log()
            ids, topology = best_marginal_nodes(scores, self.options.k, self.tree_nodes, "uno", certain_first=True)
            if q is None:
                return DraftTree(torch.cat((state.root, ids)), topology)
            first = draw(q[:1], state.rng)[:, 0]
            return DraftTree(torch.cat((state.root, first, ids[1:])), topology, q[:1])
        if q is None:
            return DraftTree.chain(state.root, logits.argmax(-1))
        return DraftTree.chain(state.root, draw(q, state.rng)[:, 0], q)

    def _draft_pass(self, n: int, current: ForwardPass, root: Tensor) -> tuple[Tensor]:
        """Return logits [n, draft vocabulary] of the root's row and of n - 1 rows of noise."""
        positions = current.positions(row_numbers(root.device, 0, n))
        noise = noise_tokens(self.noise, positions[0, :1], root)[0]
        x = self.target.embed(torch.cat((root, noise))[None, :n], positions)
        mask, rotary, cache = current.mask(self.visible[:n, :n]), current.rotary(positions), current.rows(n)
        masks = {window: self.target.windowed(mask, window, n, cache, 0) for window in self.windows}
        for block in self.blocks:
            x = block(x, cache, masks[block.window], rotary)
        return (self.lm_head(self.target.family.norm(x))[0],)
