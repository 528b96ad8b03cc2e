"""What EAGLE, EAGLE-2 and EAGLE-3 share: weights, the drafter's cache of true features, and its passes over nodes.

The cache holds a slot for every position before the root's, each from the target's own feature; what is drafted lies
behind it for a step and is forgotten.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from specbench_ss.engine.architectures import Outline
from specbench_ss.engine.decoder import Decoder, State
from specbench_ss.engine.kv_cache import Cache
from specbench_ss.engine.target import FINAL, Output, Target
from specbench_ss.engine.tree import indices
from specbench_ss.engine.verify import Verdict
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.drafter_pass import pass_drafter
from specbench_ss.methods._shared.tree_advice import with_advice
from specbench_ss.models.checkpoint import check_base, drafter_folder, drafter_here, learnt, read_tensors
from specbench_ss.models.load import hash_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from specbench_ss.methods.eagle.drafter import Drafter


class FeatureDrafting(Decoder):
    """One decoder layer drafts features, and tokens from them. config: what came with the weights."""

    companion: ClassVar[str]  # the folder beside a model that has the weights
    advisable: ClassVar[tuple[str, ...]]  # options that the folder may advise
    tree_options: ClassVar[tuple[str, ...]] = ("nodes", "total_tokens", "depth", "top_k")  # of all that use a folder

    def __init__(
        self, target: Target, options: Any, drafter: Drafter, config: dict[str, Any], layers: Sequence[int] = (FINAL,)
    ) -> None:
        from specbench_ss.methods._shared.rotary import Rotary

        super().__init__(target, options)
        self.config, self.layers, self.learnt = config, tuple(layers), learnt(config)
        self.taps = tuple(layer for layer in layers if layer != FINAL)
        self.drafter = target.adopt(drafter, self.name)
        self.rotary = Rotary(drafter.shape.llama(config), target.device)
        self.drafter.settle(self.rotary, target.packs)
        self.cache = Cache(1, 0)
        self.newest = torch.empty(0)  # [1, 1, h], output of the last slot: what the root's children are read off
        self._features: list[Tensor] = []  # of the prompt, between its prefill and `begin`

    # -- weights ------------------------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def settle(cls, options: Any, config: dict[str, Any], vocab: int) -> Any:
        """What is drafted, from options and what came with the weights. Raises UserError where that cannot be."""

    @classmethod
    def layers_asked(cls, options: Any, base: Outline) -> tuple[int, ...] | None:
        """The layers whose inputs are features, where options say it."""
        return None

    @classmethod
    def layers_of(cls, config: dict[str, Any], base: Outline) -> Sequence[tuple[int, ...]]:
        """The same where they do not, by the weights' config.json; several answers where that leaves it open."""
        return ((FINAL,),)

    @classmethod
    def _layers_here(cls, options: Any, config: dict[str, Any], base: Outline, path: Path) -> Sequence[tuple[int, ...]]:
        """What options say, else the configuration: what is wrong with that is told with the place of the weights."""
        asked = cls.layers_asked(options, base)
        if asked is not None:
            return (asked,)
        try:
            return cls.layers_of(config, base)
        except UserError as error:
            raise UserError(f"{error} ({path})") from None

    @classmethod
    def levels(cls, layers: Sequence[int]) -> int:
        """As `read_drafter` takes it: 0 for EAGLE-1."""
        return 0

    @classmethod
    def check(cls, options: Any, base: Outline) -> None:
        """The drafter's file and shapes, the layers it reads, and the tree."""
        from specbench_ss.methods._shared.draft_vocabulary import read_shapes_and_words
        from specbench_ss.methods.eagle.published_files import drafter_config, read_drafter

        base.check_square(cls.name)
        path = drafter_here(options.weights, cls.name, base, cls.companion)
        if path is None:
            return
        config = drafter_config(path, cls.name)
        layers = cls._layers_here(options, config, base, path)[0]
        with torch.device("meta"):
            drafter = read_drafter(path, base, cls.name, cls.levels(layers), read_shapes_and_words)
        options, _ = with_advice(cls, options, config, base, path, cls.tree_options)
        cls.settle(options, config, drafter.draft_vocab or base.vocab_size)

    @classmethod
    def load(cls, target: Target, options: Any) -> FeatureDrafting:
        """The drafter from the folder or file that the user named, or the one that came with the model."""
        from specbench_ss.methods.eagle.published_files import drafter_config, read_drafter

        target.check_square(cls.name)
        path = drafter_folder(options.weights, cls.name, target, cls.companion)
        config = drafter_config(path, cls.name)
        check_base(config, target, cls.name)
        options, advised = with_advice(cls, options, config, target, path, cls.tree_options)
        candidates = cls._layers_here(options, config, target, path)
        drafter = read_drafter(path, target, cls.name, cls.levels(candidates[0]), read_tensors)
        layers = candidates[0]
        if len(candidates) > 1:
            from specbench_ss.methods.eagle.examples import best_layers

            layers = best_layers(target, drafter, config, candidates)
        found = cls(target, options, drafter, config, layers)
        found.advised = advised
        return found

    def variant(self, options: Any) -> FeatureDrafting:
        """The same drafter with another tree."""
        options, _ = with_advice(self, options, self.config, self.target, Path("config.json"), self.tree_options)
        return type(self)(self.target, options, self.drafter, self.config, self.layers)

    def described(self) -> dict[str, Any]:
        """The features' layers and the drafter, with the words that it drafts."""
        return {"layers": list(self.layers), "drafter_hash": hash_tensors(self.drafter.state_dict())}

    # -- slots of true features ---------------------------------------------------------------------------------

    @property
    @abstractmethod
    def drafted_rows(self) -> int:
        """The most rows of a step that lie in the drafter's cache behind those of true features."""

    def prefill(self, state: State, ids: Tensor) -> Output:
        """The prompt, with the features of all its positions."""
        output = self.target.prefill(ids, state.cache, self.taps, every=True)
        self._features = [output.taps[layer] for layer in self.layers]
        return output

    def begin(self, state: State) -> None:
        """A slot for every position of the prompt; the last prompt's are forgotten."""
        self.target.empty(self.cache, state.cache.capacity + self.drafted_rows)
        self._extend(state, indices(state.ids[1:], self.target.device), self._features)
        self._features = []

    def observe(self, state: State, verdict: Verdict, output: Output) -> None:
        """A slot for every newly accepted position."""
        path = indices(verdict.path, self.target.device)
        assert output.tree is not None
        tokens = torch.cat((output.tree.tokens[path[1:]], verdict.next_token))
        self._extend(state, tokens, [output.taps[layer][:, path] for layer in self.layers])

    def _extend(self, state: State, tokens: Tensor, features: Sequence[Tensor]) -> None:
        """tokens [n], each the one after its feature [1, n, h_t]: their slots stay."""
        past, n = self.cache.get_seq_length(), len(tokens)
        mask = self.target.causal_mask(n, past) if past and n > 1 else None
        positions = torch.arange(past, past + n, device=self.target.device)[None]
        fused = self.drafter.fuse(features)
        embedded = self.drafter.embed(tokens[None], self.target)
        out = self._passed(embedded, fused, mask, self.rotary(positions, fused.dtype))
        self.cache.advance(n)
        self.newest = out[:, -1:]
        state.draft_calls += 1

    # -- slots of drafted nodes ---------------------------------------------------------------------------------

    def rotary_ahead(self, state: State, levels: int) -> tuple[Tensor, Tensor]:
        """cos, sin [1, levels, head_dim] of the slots of drafted nodes: one a level, since a level has one position."""
        ahead = torch.arange(state.position, state.position + levels, device=self.target.device)[None]
        return self.rotary(ahead, self.newest.dtype)

    def descend(
        self,
        state: State,
        tokens: Tensor,
        states: Tensor,
        visible: Tensor,
        rotary: tuple[Tensor, Tensor],
        level: int,
    ) -> Tensor:
        """k nodes of one level, tokens [k] with their parents' states [1, k, h] -> their own states [1, k, h].

        visible bool [k, drafted rows so far + k]. level: 0 for the root's children.
        """
        committed = state.position
        mask = self.target.block_mask(visible, committed)
        cos, sin = (x[:, level : level + 1] for x in rotary)
        embedded = self.drafter.embed(tokens[None], self.target)
        out = self._passed(embedded, states, mask, (cos, sin))
        self.cache.advance(len(tokens))
        state.draft_calls += 1
        return out

    def _passed(self, tokens: Tensor, states: Tensor, mask: Tensor | None, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Embedded tokens and states [1, n, h] of slots behind those in the cache -> their output states [1, n, h]."""
        return pass_drafter(self.target, self.drafter, self._slots, (tokens, states), self.cache, [mask], rotary)

    def _slots(self, tokens: Tensor, states: Tensor, cache: Any, masks: Sequence[Tensor | None], rotary: Any) -> Tensor:
        out: Tensor = self.drafter(tokens, states, cache, masks[0], rotary)
        return out

    def forget_drafted(self, state: State) -> None:
        """Only slots of true features remain."""
        self.cache.keep(state.position, ())
