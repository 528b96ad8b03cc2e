"""DFlash: a block of drafts in one pass over the target's features, verified as a chain or as a tree of marginals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from specbench_ss.engine.architectures import Outline
from specbench_ss.engine.decoder import Decoder, State
from specbench_ss.engine.kv_cache import Cache
from specbench_ss.engine.target import FINAL, Output, Target
from specbench_ss.engine.tree import indices
from specbench_ss.engine.verify import Verdict
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.drafter_pass import pass_drafter
from specbench_ss.methods._shared.place_drafts import NODES, described, drafts, rows
from specbench_ss.methods.dflash.options import DFlashOptions
from specbench_ss.models.checkpoint import check_base, drafter_folder, drafter_here, learnt, read_tensors
from specbench_ss.models.load import hash_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from specbench_ss.engine.tree import DraftTree
    from specbench_ss.methods.dflash.drafter import Drafter, Shape

BLOCKS = (2, 3, 4, 5, 6, 8, 10, 12, 16)  # sizes worth trying


class DFlash(Decoder):
    """Mask places behind the root, each of which sees all features and all places, draft a token each."""

    name = "dflash"
    summary = "DFlash: a block in one pass of a small network over the target's features"
    paper = "Chen et al. 2026, arXiv:2602.06036"
    Options = DFlashOptions

    def __init__(self, target: Target, options: DFlashOptions, drafter: Drafter) -> None:
        from specbench_ss.methods._shared.rotary import Rotary

        super().__init__(target, options)
        shape = drafter.shape
        self.size = self.settle(options, shape)
        self.drafts = self.size - shape.first
        self.taps = tuple(layer for layer in shape.layers if layer != FINAL)
        self.drafter = target.adopt(drafter, self.name)
        self.rotary = Rotary(drafter.config, target.device)
        self.drafter.settle(self.rotary, target.packs)
        self.cache = Cache(len(drafter.blocks), 0)  # the context's keys and values
        self.masked = indices([shape.mask_token] * (self.size - 1), target.device)
        self._features: list[Tensor] = []  # of the prompt, between its prefill and `begin`

    # -- weights ------------------------------------------------------------------------------------------------

    @classmethod
    def settle(cls, options: DFlashOptions, shape: Shape) -> int:
        """Places of a block. Raises UserError where the drafter has fewer, or none would be drafted."""
        least = 1 + shape.first
        if options.block_size and not least <= options.block_size <= shape.block:
            raise UserError(
                f"dflash: block_size must be {least} to {shape.block}, as the drafter was trained, or 0, "
                f"not {options.block_size}"
            )
        return options.block_size or shape.block

    @classmethod
    def check(cls, options: Any, base: Outline) -> None:
        """The drafter's configuration, file and shapes, and the size of the block."""
        from specbench_ss.methods._shared.draft_vocabulary import read_shapes_and_words
        from specbench_ss.methods.dflash.published_files import read_drafter

        base.check_square(cls.name)
        path = drafter_here(options.weights, cls.name, base)
        if path is not None:
            with torch.device("meta"):
                drafter, _ = read_drafter(path, base, read_shapes_and_words)
            cls.settle(options, drafter.shape)

    @classmethod
    def load(cls, target: Target, options: Any) -> DFlash:
        """The drafter from the folder or file that the user named, or the one that came with the model."""
        from specbench_ss.methods.dflash.published_files import read_drafter

        target.check_square(cls.name)
        path = drafter_folder(options.weights, cls.name, target)
        drafter, config = read_drafter(path, target, read_tensors)
        check_base(config, target, cls.name)
        found = cls(target, options, drafter)
        found.learnt = learnt(config)
        return found

    def variant(self, options: Any) -> DFlash:
        """The same drafter with another block or tree."""
        return type(self)(self.target, options, self.drafter)

    @classmethod
    def examples(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        """Random weights in every form."""
        from specbench_ss.methods.dflash.new_weights import random_drafter
        from specbench_ss.methods.dflash.sight import Sight

        def make(shape: dict[str, Any] | None = None, **options: Any) -> Callable[[], Decoder]:
            return lambda: cls(target, DFlashOptions(**options), random_drafter(target, **(shape or {})))

        few = max(2, target.vocab_size * 3 // 4)
        windows = (Sight(6, causal=True), Sight(6, from_root=True))
        return {
            "chain": make(),
            "tree": make(mode="tree", nodes=9, k=4),
            "sampled": make(sample="on"),
            "reduced": make({"draft_vocab": few, "from_anchor": True}, block_size=4, mode="tree", nodes=6, k=3),
            "reduced and sampled": make({"draft_vocab": few, "from_anchor": True}, sample="on"),
            "windows": make({"sights": windows}),
        }

    # -- what the harness asks ----------------------------------------------------------------------------------

    def described(self) -> dict[str, Any]:
        """What is drafted, and the drafter."""
        return {
            "block_size": self.size,
            **described(self.options, self.drafter.shape.draft_vocab or self.target.vocab_size),
            "layers": list(self.drafter.shape.layers),
            "drafter_hash": hash_tensors(self.drafter.state_dict()),
        }

    def tunable(self) -> Mapping[str, Sequence[Any]]:
        """The size of the block, and the tree's where there is one."""
        trained, least = self.drafter.shape.block, 1 + self.drafter.shape.first
        sizes = sorted({b for b in BLOCKS if least <= b < trained} | {trained})
        return {"block_size": sizes, **({"nodes": NODES} if self.options.mode == "tree" else {})}

    def max_rows(self) -> int:
        """The chain or the tree, root included."""
        return rows(self.options, self.drafts)

    # -- the context --------------------------------------------------------------------------------------------

    def prefill(self, state: State, ids: Tensor) -> Output:
        """The prompt, with the features of all its positions."""
        output = self.target.prefill(ids, state.cache, self.taps, every=True)
        self._features = [output.taps[layer] for layer in self.drafter.shape.layers]
        return output

    def begin(self, state: State) -> None:
        """The prompt's features are the context; the last prompt's are forgotten."""
        self.target.empty(self.cache, state.cache.capacity + self.size)
        self._extend(self._features)
        self._features = []

    def observe(self, state: State, verdict: Verdict, output: Output) -> None:
        """The features of the accepted path join the context."""
        path = indices(verdict.path, self.target.device)
        self._extend([output.taps[layer][:, path] for layer in self.drafter.shape.layers])

    def _extend(self, features: Sequence[Tensor]) -> None:
        """Keep keys and values of the next n positions, from features [1, n, h]."""
        past, n = self.cache.get_seq_length(), features[0].shape[1]
        context = self.drafter.fuse(features)
        keys, values = self.drafter.inject(context, self._rotary(past, n, context.dtype))
        for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
            self.cache.update(k, v, layer)
        self.cache.advance(n)

    def _rotary(self, past: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.rotary(torch.arange(past, past + n, device=self.target.device)[None], dtype)

    # -- drafting -----------------------------------------------------------------------------------------------

    def propose(self, state: State) -> DraftTree:
        """One pass over the block; the best tokens of its places, a tree of them, or a token drawn at each."""
        return drafts(state, self.logits(state), self.options, self.drafter, self.target.vocab_size)

    def logits(self, state: State) -> Tensor:
        """[drafts, draft vocabulary] of the tokens after the root; the block leaves no trace in the cache."""
        past, drafter = self.cache.get_seq_length(), self.drafter
        embedded = drafter.embed(torch.cat((state.root, self.masked))[None], self.target)
        rotary = self._rotary(past, self.size, embedded.dtype)
        states = pass_drafter(self.target, drafter, drafter, (embedded,), self.cache, self._masks(past), rotary)
        state.draft_calls += 1
        return drafter.logits(states[:, drafter.shape.first :], self.target)[0]

    def _masks(self, past: int) -> list[Tensor | None]:
        """Additive [1, 1, size, past + size], one a layer."""
        sights, device = self.drafter.shape.sights, self.target.device
        made: dict[Any, Tensor] = {}
        for sight in {s for s in sights if not s.everything}:
            root, keys = torch.full((), past, device=device), torch.arange(past, device=device)
            seen = torch.cat((sight.context(root, self.size, keys), sight.block(self.size, device)), -1)
            made[sight] = self.target.block_mask(seen, 0)
        return [made.get(sight) for sight in sights]
