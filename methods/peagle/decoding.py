"""P-EAGLE: newly accepted places and all drafted ones in one pass, verified as a chain or as a tree of marginals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from specbench_ss.engine.architectures import Outline
from specbench_ss.engine.decoder import Decoder, State
from specbench_ss.engine.kv_cache import Cache
from specbench_ss.engine.target import Output, Target
from specbench_ss.engine.tree import indices
from specbench_ss.engine.verify import Verdict
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.drafter_pass import pass_drafter
from specbench_ss.methods._shared.place_drafts import NODES, described, drafts, rows
from specbench_ss.methods.peagle.options import PEagleOptions
from specbench_ss.models.checkpoint import check_base, drafter_folder, drafter_here, learnt, read_tensors
from specbench_ss.models.load import hash_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from specbench_ss.engine.tree import DraftTree
    from specbench_ss.methods.peagle.drafter import Drafter, Shape

DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)  # worth trying


class PEagle(Decoder):
    """A slot of true feature and token for every decided position, and behind them slots of what is not known."""

    name = "peagle"
    summary = "P-EAGLE: EAGLE-3's layer, all depths in one pass"
    paper = "Hui et al. 2026, arXiv:2602.01469"
    Options = PEagleOptions

    def __init__(self, target: Target, options: PEagleOptions, drafter: Drafter) -> None:
        from specbench_ss.methods._shared.rotary import Rotary

        super().__init__(target, options)
        shape = drafter.shape
        self.depths = self.settle(options, shape)
        self.taps = tuple(dict.fromkeys(shape.layers))
        self.drafter = target.adopt(drafter, self.name)
        self.rotary = Rotary(drafter.config, target.device)
        self.drafter.settle(self.rotary, target.packs)
        self.cache = Cache(len(drafter.blocks), 0)  # slots of true features
        self.masked = indices([shape.mask_token] * (self.depths - 1), target.device)
        self._tokens = self.masked  # [n], of slots not yet passed, the root last
        self._features: list[Tensor] = []  # [1, n, h] of each layer, of the same slots; of the prompt before `begin`

    # -- weights ------------------------------------------------------------------------------------------------

    @classmethod
    def settle(cls, options: PEagleOptions, shape: Shape) -> int:
        """Places that are drafted. Raises UserError where the drafter was trained on fewer."""
        if options.depths > shape.depths:
            raise UserError(
                f"peagle: depths must be 1 to {shape.depths}, as the drafter was trained, or 0, not {options.depths}"
            )
        return options.depths or shape.depths

    @classmethod
    def check(cls, options: Any, base: Outline) -> None:
        """The drafter's configuration, file and shapes, and how far is drafted."""
        from specbench_ss.methods._shared.draft_vocabulary import read_shapes_and_words
        from specbench_ss.methods.peagle.published_files import read_drafter

        base.check_square(cls.name)
        path = drafter_here(options.weights, cls.name, base)
        if path is not None:
            with torch.device("meta"):
                drafter, _ = read_drafter(path, base, read_shapes_and_words)
            cls.settle(options, drafter.shape)

    @classmethod
    def load(cls, target: Target, options: Any) -> PEagle:
        """The drafter from the folder or file that the user named, or the one that came with the model."""
        from specbench_ss.methods.peagle.published_files import read_drafter

        target.check_square(cls.name)
        drafter, config = read_drafter(drafter_folder(options.weights, cls.name, target), target, read_tensors)
        check_base(config, target, cls.name)
        found = cls(target, options, drafter)
        found.learnt = learnt(config)
        return found

    def variant(self, options: Any) -> PEagle:
        """The same drafter, another number of places or another tree."""
        return type(self)(self.target, options, self.drafter)

    @classmethod
    def examples(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        """Random weights in every form."""
        from specbench_ss.methods.peagle.new_weights import random_drafter

        def make(form: dict[str, Any] | None = None, **options: Any) -> Callable[[], Decoder]:
            return lambda: cls(target, PEagleOptions(**options), random_drafter(target, **(form or {})))

        few = max(2, target.vocab_size * 3 // 4)
        return {
            "chain": make(),
            "tree": make(mode="tree", nodes=9, k=4),
            "sampled": make(sample="on"),
            "reduced": make({"draft_vocab": few, "layers": 1}, depths=3, mode="tree", nodes=6, k=3),
            "reduced and sampled": make({"draft_vocab": few}, sample="on"),
            "one place": make(depths=1),
            "windows": make({"windows": (6, None)}),
        }

    # -- what the harness asks ----------------------------------------------------------------------------------

    def described(self) -> dict[str, Any]:
        """What is drafted, and the drafter."""
        return {
            "depths": self.depths,
            **described(self.options, self.drafter.shape.draft_vocab),
            "layers": list(self.drafter.shape.layers),
            "drafter_hash": hash_tensors(self.drafter.state_dict()),
        }

    def tunable(self) -> Mapping[str, Sequence[Any]]:
        """How far is drafted, and the tree's size where there is one."""
        trained = self.drafter.shape.depths
        depths = sorted({d for d in DEPTHS if d < trained} | {trained})
        return {"depths": depths, **({"nodes": NODES} if self.options.mode == "tree" else {})}

    def max_rows(self) -> int:
        """The chain or the tree, root included."""
        return rows(self.options, self.depths)

    # -- slots of true features ---------------------------------------------------------------------------------

    def prefill(self, state: State, ids: Tensor) -> Output:
        """The prompt, with the features of all its positions."""
        output = self.target.prefill(ids, state.cache, self.taps, every=True)
        self._features = [output.taps[layer] for layer in self.drafter.shape.layers]
        return output

    def begin(self, state: State) -> None:
        """Slots of the prompt but its last one, which the first step passes; the last prompt's are forgotten."""
        self.target.empty(self.cache, state.cache.capacity + self.depths)
        tokens = indices(state.ids[1:], self.target.device)
        if len(tokens) > 1:
            self._pass(state, tokens[:-1], self.drafter.fuse([f[:, :-1] for f in self._features]))
            self.cache.advance(len(tokens) - 1)
        self._tokens, self._features = tokens[-1:], [f[:, -1:] for f in self._features]

    def observe(self, state: State, verdict: Verdict, output: Output) -> None:
        """Newly accepted positions and their features are for the next step's pass."""
        path = indices(verdict.path, self.target.device)
        assert output.tree is not None
        self._tokens = torch.cat((output.tree.tokens[path[1:]], verdict.next_token))
        self._features = [output.taps[layer][:, path] for layer in self.drafter.shape.layers]

    # -- drafting -----------------------------------------------------------------------------------------------

    def propose(self, state: State) -> DraftTree:
        """One pass; the best tokens of its places, a tree of them, or a token drawn at each."""
        return drafts(state, self.logits(state), self.options, self.drafter, self.target.vocab_size)

    def logits(self, state: State) -> Tensor:
        """[depths, draft vocabulary] of the tokens after the root; only slots of true features stay in the cache."""
        fused, n = self.drafter.fuse(self._features), len(self._tokens)
        unknown = self.drafter.unknown().expand(-1, self.depths - 1, -1)
        states = self._pass(state, torch.cat((self._tokens, self.masked)), torch.cat((fused, unknown), 1))
        self.cache.advance(n)
        return self.drafter.logits(states[0, n - 1 :], self.target)

    def _pass(self, state: State, tokens: Tensor, fused: Tensor) -> Tensor:
        """Normed states [1, n, h] of slots behind those in the cache: tokens [n], what they read of features."""
        past, n, device = self.cache.get_seq_length(), len(tokens), self.target.device
        mask = self.target.causal_mask(n, past) if past and n > 1 else None
        windows = self.drafter.shape.windows
        seen = {window: self.target.windowed(mask, window, n, self.cache, 0) for window in set(windows)}
        masks = [seen[window] for window in windows]
        rotary = self.rotary(torch.arange(past, past + n, device=device)[None], fused.dtype)
        state.draft_calls += 1
        embedded = self.drafter.embed(tokens[None], self.target)
        return pass_drafter(self.target, self.drafter, self.drafter, (embedded, fused), self.cache, masks, rotary)
