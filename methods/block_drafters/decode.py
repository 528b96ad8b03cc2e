"""Decoding with drafters that draft every token of a step in one pass: DFlash and P-EAGLE.

The logits of the draft positions are verified as a chain or as a tree of marginals. DFlash: Chen et al. 2026,
arXiv:2602.06036. P-EAGLE: Hui et al. 2026, arXiv:2602.01469.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from specbench_ss.engine.architectures import Outline
from specbench_ss.engine.decoder import Decoder, State
from specbench_ss.engine.target import Output, Target
from specbench_ss.engine.tree import DraftTree, indices
from specbench_ss.engine.verify import Verdict
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.feature_decoder import FeatureDecoder
from specbench_ss.methods._shared.heads import best_tree, tree_of
from specbench_ss.methods._shared.tree_growth import draw
from specbench_ss.methods.block_drafters.options import BlockDraftOptions, DFlashOptions, PEagleOptions
from specbench_ss.models.checkpoint import check_base, drafter_folder, drafter_here, learnt, read_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from specbench_ss.methods._shared.drafter_network import DrafterNetwork

NODES = (7, 15, 23, 31, 48, 63)  # of trees, for tuning
POSITIONS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)  # of a block, for tuning


class BlockDecoder(FeatureDecoder):
    """Base of both methods: weights, options, and a chain or a tree from the logits of the draft positions.

    A drafter's network is read by `read`; `size_option` names the option that shortens its block.
    """

    Options: ClassVar[Any]
    size_option: ClassVar[str]

    def __init__(self, target: Target, options: Any, drafter: Any) -> None:
        self.size = self.settle(options, drafter.shape)
        self.drafts = self.drafted(self.size, drafter.shape)
        super().__init__(target, options, drafter, drafter.shape.layers)
        self.masked = indices([drafter.shape.mask_token] * (self.size - 1), target.device)

    # -- one family's own ---------------------------------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def read(path: Path, base: Outline, read: Callable[[Path], dict[str, Tensor]]) -> tuple[Any, dict[str, Any]]:
        """Return a folder's network and config.json. Raise UserError where it does not fit the base."""

    @staticmethod
    @abstractmethod
    def trained(shape: Any) -> tuple[int, int]:
        """Return the smallest and the largest block that a network of this shape drafts."""

    @staticmethod
    def drafted(size: int, shape: Any) -> int:
        """Return how many tokens a block of this size drafts."""
        return size

    @abstractmethod
    def logits(self, state: State) -> Tensor:
        """Return logits [drafts, draft vocabulary] of the tokens after the root, from one pass of the drafter."""

    # -- weights ------------------------------------------------------------------------------------------------

    @classmethod
    def settle(cls, options: Any, shape: Any) -> int:
        """Return the size of a block. Raise UserError for one that the drafter was not trained for."""
        (least, most), asked = cls.trained(shape), int(getattr(options, cls.size_option))
        if asked and not least <= asked <= most:
            allowed = f"{least} to {most}, as the drafter was trained, or 0"
            raise UserError(f"{cls.name}: {cls.size_option} must be {allowed}, not {asked}")
        return asked or most

    @classmethod
    def check(cls, options: Any, base: Outline) -> None:
        """Check the drafter's configuration, file and shapes, and the size of the block."""
        from specbench_ss.methods._shared.draft_vocabulary import read_shapes_and_words

        base.check_square(cls.name)
        path = drafter_here(options.weights, cls.name, base)
        if path is not None:
            with torch.device("meta"):
                drafter, _ = cls.read(path, base, read_shapes_and_words)
            cls.settle(options, drafter.shape)

    @classmethod
    def load(cls, target: Target, options: Any) -> BlockDecoder:
        """Load the drafter from the folder or file that the user named, or the one that came with the model."""
        target.check_square(cls.name)
        drafter, config = cls.read(drafter_folder(options.weights, cls.name, target), target, read_tensors)
        check_base(config, target, cls.name)
        found = cls(target, options, drafter)
        found.learnt = learnt(config)
        return found

    def variant(self, options: Any) -> BlockDecoder:
        """Return the same drafter with another block or tree."""
        return type(self)(self.target, options, self.drafter)

    @classmethod
    def example(cls, target: Target, random: Any, form: dict[str, Any], **options: Any) -> Callable[[], Decoder]:
        """Return what makes the method of random weights, as `random(target, **form)` gives them."""
        return lambda: cls(target, cls.Options(**options), random(target, **form))

    # -- what the harness asks ----------------------------------------------------------------------------------

    def described(self) -> dict[str, Any]:
        """Return the draft's form and the drafter."""
        o, words = self.options, self.drafter.draft_vocab or self.target.vocab_size
        tree = {"nodes": o.nodes, "k": min(o.k, words)} if o.mode == "tree" else {}
        return {self.size_option: self.size, "mode": o.mode, **tree, "sample": o.sample, **super().described()}

    def tunable(self) -> Mapping[str, Sequence[Any]]:
        """Return sizes of the block, and of the tree where there is one."""
        least, most = self.trained(self.drafter.shape)
        sizes = sorted({n for n in POSITIONS if least <= n < most} | {most})
        return {self.size_option: sizes, **({"nodes": NODES} if self.options.mode == "tree" else {})}

    def max_rows(self) -> int:
        """Return the size of the chain or the tree, root included."""
        return 1 + int(self.options.nodes if self.options.mode == "tree" else self.drafts)

    # -- drafting -----------------------------------------------------------------------------------------------

    def propose(self, state: State) -> DraftTree:
        """Draft in one pass: the top token of each position, a tree of them, or a token sampled at each."""
        logits = self.logits(state)
        if self.options.mode == "tree":
            return best_nodes(state.root, logits, self.options, self.drafter)
        if self.options.sample == "on" and not state.sampling.greedy:
            return sampled_chain(state, logits, self.drafter, self.target.vocab_size)
        return DraftTree.chain(state.root, self.drafter.token_ids(logits.argmax(-1)))


def best_nodes(root: Tensor, logits: Tensor, options: BlockDraftOptions, drafter: DrafterNetwork) -> DraftTree:
    """Return the nodes of the greatest path probability, positions taken as independent.

    It is Medusa's tree, made anew each step. One transfer to the host: the positions' best probabilities.
    """
    k = min(options.k, logits.shape[-1])
    top = logits.topk(k, dim=-1)  # [positions, k]
    probs = (top.values.float() - logits.logsumexp(-1, keepdim=True).float()).exp()
    tree = tree_of(best_tree(probs.tolist(), options.nodes), options.owner)
    at = indices([position * k + rank for position, rank in zip(tree.heads, tree.ranks, strict=True)], logits.device)
    return DraftTree(torch.cat((root, drafter.token_ids(top.indices.flatten()[at]))), tree.shape)


def sampled_chain(state: State, logits: Tensor, drafter: DrafterNetwork, vocab: int) -> DraftTree:
    """Return a chain sampled from q, the positions' distributions after the request's temperature and filters."""
    q, words = state.sampling.probs(logits), drafter.words
    drafted = drafter.token_ids(draw(q, state.rng)[:, 0])
    rows = q.new_zeros(len(q) + 1, vocab)  # the last node has no children
    rows[:-1, slice(None) if words is None else words] = q
    return DraftTree.chain(state.root, drafted, rows)


# -- DFlash --------------------------------------------------------------------------------------------------------


class DFlash(BlockDecoder):
    """DFlash: mask tokens behind the root, each of which sees all hidden states and the block, draft a token each."""

    name = "dflash"
    summary = "DFlash: a block in one pass of a small network over the target's features"
    paper = "Chen et al. 2026, arXiv:2602.06036"
    Options = DFlashOptions
    size_option = "block_size"

    @staticmethod
    def read(path: Path, base: Outline, read: Callable[[Path], dict[str, Tensor]]) -> tuple[Any, dict[str, Any]]:
        """Return a folder's network and config.json."""
        from specbench_ss.methods.block_drafters.dflash import read_drafter

        return read_drafter(path, base, read)

    @staticmethod
    def trained(shape: Any) -> tuple[int, int]:
        """Return the smallest block, which drafts one token, and the trained one."""
        return 1 + shape.first, shape.block

    @staticmethod
    def drafted(size: int, shape: Any) -> int:
        """Return the positions that draft: all, or all but the root's."""
        return int(size - shape.first)

    @classmethod
    def examples(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        """Return random weights in every form."""
        from specbench_ss.methods.block_drafters.dflash import Sight, random_drafter

        few = {"draft_vocab": max(2, target.vocab_size * 3 // 4), "from_anchor": True}
        windows = {"sights": (Sight(6, causal=True), Sight(6, from_root=True))}
        return {
            "chain": cls.example(target, random_drafter, {}),
            "tree": cls.example(target, random_drafter, {}, mode="tree", nodes=9, k=4),
            "sampled": cls.example(target, random_drafter, {}, sample="on"),
            "reduced": cls.example(target, random_drafter, few, block_size=4, mode="tree", nodes=6, k=3),
            "reduced and sampled": cls.example(target, random_drafter, few, sample="on"),
            "windows": cls.example(target, random_drafter, windows),
        }

    def begin(self, state: State) -> None:
        """Take the prompt's hidden states as context; drop the last prompt's."""
        self.target.empty(self.cache, state.cache.capacity + self.size)
        self._extend(self._features)
        self._features = []

    def observe(self, state: State, verdict: Verdict, output: Output) -> None:
        """Add the hidden states of the accepted path to the context."""
        self._extend(self.accepted(verdict, output)[1])

    def _extend(self, features: Sequence[Tensor]) -> None:
        """Cache keys and values of the next n positions, from hidden states [1, n, h]."""
        past, n = self.cache.get_seq_length(), features[0].shape[1]
        context = self.drafter.fuse(features)
        keys, values = self.drafter.inject(context, self.rotary_at(past, n, context.dtype))
        for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
            self.cache.update(k, v, layer)
        self.cache.advance(n)

    def logits(self, state: State) -> Tensor:
        """Return logits [drafts, draft vocabulary]; the block leaves nothing in the cache."""
        past, drafter = self.cache.get_seq_length(), self.drafter
        embedded = drafter.embed(torch.cat((state.root, self.masked))[None], self.target)
        rotary = self.rotary_at(past, self.size, embedded.dtype)
        states = self.run_drafter((embedded,), self._masks(past), rotary)
        state.draft_calls += 1
        logits: Tensor = drafter.logits(states[:, drafter.shape.first :], self.target)[0]
        return logits

    def _masks(self, past: int) -> list[Tensor | None]:
        """Return additive masks [1, 1, size, past + size], one a layer."""
        sights, device = self.drafter.shape.sights, self.target.device
        made: dict[Any, Tensor] = {}
        for sight in {s for s in sights if not s.everything}:
            root, keys = torch.full((), past, device=device), torch.arange(past, device=device)
            visible = torch.cat((sight.context(root, self.size, keys), sight.block(self.size, device)), -1)
            made[sight] = self.target.block_mask(visible, 0)
        return [made.get(sight) for sight in sights]


# -- P-EAGLE -------------------------------------------------------------------------------------------------------


class PEagle(BlockDecoder):
    """P-EAGLE: newly accepted positions and all draft positions in one pass of EAGLE-3's layer.

    The cache has a slot of true hidden state and token for every decided position before the root's.
    """

    name = "peagle"
    summary = "P-EAGLE: EAGLE-3's layer, all depths in one pass"
    paper = "Hui et al. 2026, arXiv:2602.01469"
    Options = PEagleOptions
    size_option = "depths"

    def __init__(self, target: Target, options: PEagleOptions, drafter: Any) -> None:
        super().__init__(target, options, drafter)
        self._tokens = self.masked  # [n], of slots that are not in the cache yet, the root last; `_features` are theirs

    @staticmethod
    def read(path: Path, base: Outline, read: Callable[[Path], dict[str, Tensor]]) -> tuple[Any, dict[str, Any]]:
        """Return a folder's network and config.json."""
        from specbench_ss.methods.block_drafters.peagle import read_drafter

        return read_drafter(path, base, read)

    @staticmethod
    def trained(shape: Any) -> tuple[int, int]:
        """Return 1 and the trained depths."""
        return 1, shape.depths

    @classmethod
    def examples(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        """Return random weights in every form."""
        from specbench_ss.methods.block_drafters.peagle import random_drafter

        few = {"draft_vocab": max(2, target.vocab_size * 3 // 4)}
        return {
            "chain": cls.example(target, random_drafter, {}),
            "tree": cls.example(target, random_drafter, {}, mode="tree", nodes=9, k=4),
            "sampled": cls.example(target, random_drafter, {}, sample="on"),
            "reduced": cls.example(target, random_drafter, few | {"layers": 1}, depths=3, mode="tree", nodes=6, k=3),
            "reduced and sampled": cls.example(target, random_drafter, few, sample="on"),
            "one place": cls.example(target, random_drafter, {}, depths=1),
            "windows": cls.example(target, random_drafter, {"windows": (6, None)}),
        }

    def begin(self, state: State) -> None:
        """Fill slots of the prompt but its last, which the first step passes; drop the last prompt's."""
        self.target.empty(self.cache, state.cache.capacity + self.size)
        tokens = indices(state.ids[1:], self.target.device)
        if len(tokens) > 1:
            self._pass(state, tokens[:-1], self.drafter.fuse([f[:, :-1] for f in self._features]))
            self.cache.advance(len(tokens) - 1)
        self._tokens, self._features = tokens[-1:], [f[:, -1:] for f in self._features]

    def observe(self, state: State, verdict: Verdict, output: Output) -> None:
        """Keep newly accepted positions for the next step's pass."""
        self._tokens, self._features = self.accepted(verdict, output)

    def logits(self, state: State) -> Tensor:
        """Return logits [depths, draft vocabulary]; only slots of true hidden states stay in the cache."""
        fused, n = self.drafter.fuse(self._features), len(self._tokens)
        unknown = self.drafter.unknown().expand(-1, self.size - 1, -1)
        states = self._pass(state, torch.cat((self._tokens, self.masked)), torch.cat((fused, unknown), 1))
        self.cache.advance(n)
        logits: Tensor = self.drafter.logits(states[0, n - 1 :], self.target)
        return logits

    def _pass(self, state: State, tokens: Tensor, fused: Tensor) -> Tensor:
        """Return normed states [1, n, h] of slots behind the cache: tokens [n], fused hidden states [1, n, h]."""
        past, n = self.cache.get_seq_length(), len(tokens)
        mask = self.target.causal_mask(n, past) if past and n > 1 else None
        windows = self.drafter.shape.windows
        made = {window: self.target.windowed(mask, window, n, self.cache, 0) for window in set(windows)}
        state.draft_calls += 1
        embedded = self.drafter.embed(tokens[None], self.target)
        rotary = self.rotary_at(past, n, fused.dtype)
        return self.run_drafter((embedded, fused), [made[window] for window in windows], rotary)
