"""MTP: the target's own multi-token-prediction layer drafts, as EAGLE's layer does.

One layer is used recursively: from the second draft on it reads its own state of the row before, and its KV rows follow
those of the accepted tokens for one step. Several layers are used in turn: layer j has a row for every position i, with
the state of layer j - 1 at i and the token x_{i+1+j} (DeepSeek-V3, arXiv:2412.19437, sec. 2.2). Rows whose token is
still a draft are computed again in the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor

from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.costs import read_by_a_pass
from specbench_ss.engine.decoder import DecodeState
from specbench_ss.engine.forward import ForwardPass
from specbench_ss.engine.kv_cache import Cache
from specbench_ss.engine.target import FINAL, Output, Target
from specbench_ss.engine.tree import MOST_NODES, DraftTree, indices
from specbench_ss.engine.verify import VerifyResult
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.draft_vocabulary import vocabulary_option, with_frequent_tokens
from specbench_ss.methods._shared.drafting import VOCABULARY, FeatureDecoder, Read, vocabulary_of
from specbench_ss.methods._shared.tree_growth import draw
from specbench_ss.methods.eagle.decode import BEAMS, TOTALS
from specbench_ss.methods.eagle.drafter import MOST_DEPTH
from specbench_ss.methods.eagle.slots import DynamicTree, Size, Slots
from specbench_ss.methods.mtp.checkpoint import COPIES, NATIVE, read_head, trained_steps
from specbench_ss.methods.mtp.heads import MTPDrafter, new_head
from specbench_ss.models.checkpoint import HUB_ID, public_name
from specbench_ss.models.tiny import randomise
from specbench_ss.options import Bounded, option

LENGTHS = (1, 2, 3, 4, 5, 6, 8)  # for tuning
TREE_NODES = 16  # default of a tree


@dataclass(frozen=True, slots=True)
class MTPOptions(Bounded):
    """Options of `mtp`."""

    owner: ClassVar[str] = "mtp"
    weights: str = option(
        "", "Folder with the MTP layer. Empty: the one bundled with the model, else the model's own folder."
    )
    num_speculative_tokens: Annotated[int, Ge(0), Le(MOST_DEPTH)] = option(
        0, "Drafted tokens per step, or levels of a tree. 0: as trained, or one per layer."
    )
    mode: Literal["chain", "tree"] = option(
        "chain", "Draft shape. chain: the best tokens, or sampled ones above temperature 0. tree: as EAGLE-2's."
    )
    nodes: Annotated[int, Ge(0), Le(MOST_NODES)] = option(
        0, f"Maximum number of drafted nodes per step. 0: all of a chain, {TREE_NODES} of a tree."
    )
    top_k: Annotated[int, Ge(1), Le(64)] = option(
        4, "With mode=tree: expanded nodes per level, and candidates of each."
    )
    draft_vocab: str = vocabulary_option()


class MTP(FeatureDecoder):
    """The target's MTP layers draft a chain, or a tree grown as EAGLE-2's."""

    name = "mtp"
    bundled_folder = "mtp"
    summary = "MTP: the multi-token-prediction layer of the target's own checkpoint drafts"
    paper = "DeepSeek-AI 2024, arXiv:2412.19437; Cai et al. 2025, arXiv:2509.18362"
    Options = MTPOptions
    node_options = ("nodes", "num_speculative_tokens")
    advisable = ("num_speculative_tokens", VOCABULARY)
    target_copies = COPIES
    drafter: MTPDrafter

    def __init__(
        self, target: Target, options: MTPOptions, drafter: MTPDrafter, config: dict[str, Any] | None = None
    ) -> None:
        super().__init__(target, options, drafter, config, (FINAL,))
        self.size = self.resolve_options(self.options, self.config, self.drafter, target)
        self.modules: int = self.drafter.shape.modules
        self.slots = Slots(self)  # of the first layer
        self.tree = DynamicTree(self.slots, self.size)
        self.later_caches = [Cache(1, 0) for _ in range(1, self.modules)]
        self.outputs: list[Tensor] = []  # [1, n, h] of each layer: states of rows that the next one lacks

    # -- loading ------------------------------------------------------------------------------------------------

    @classmethod
    def resolve_weights(cls, options: MTPOptions, base: ModelInfo) -> tuple[MTPOptions, str, dict[str, Any]]:
        """Return the options with the model's own folder or hub id as weights, if its type has MTP layers."""
        if not options.weights and base.config.model_type in NATIVE and not base.bundled_drafter(cls.bundled_folder):
            name = public_name(base)
            options = replace(options, weights=str(base.folder or (name if HUB_ID.fullmatch(name) else "")))
        return options, cls.bundled_folder, {}

    @classmethod
    def read(cls, options: Any, path: Path, base: ModelInfo, read: Read) -> tuple[MTPDrafter, dict[str, Any]]:
        return read_head(path, (base.hidden_size, base.vocab_size), read)

    @classmethod
    def resolve_options(cls, options: Any, config: Mapping[str, Any], drafter: Any, base: ModelInfo) -> Size:
        """Return the size of the chain or tree. Raise UserError for what several layers cannot draft."""
        modules, trained = drafter.shape.modules, trained_steps(config)
        if trained is not None and options.num_speculative_tokens > trained:
            allowed = f"1 to {trained}, as the layer was trained, or 0"
            raise UserError(f"mtp: num_speculative_tokens must be {allowed}, not {options.num_speculative_tokens}")
        levels = options.num_speculative_tokens or trained or modules
        if modules > 1 and options.mode == "tree":
            raise UserError(f"mtp: mode=tree needs a single MTP layer, there are {modules}; use mode=chain")
        if modules > 1 and levels > modules:
            problem = f"num_speculative_tokens is {levels}, there are {modules} layers, each for one token"
            raise UserError(f"mtp: {problem}")
        if options.mode == "chain":
            return Size(min(levels, options.nodes or levels), min(levels, options.nodes or levels) - 1, 1)
        k = min(options.top_k, vocabulary_of(options, drafter, base, cls.name).size)
        return Size(min(options.nodes or TREE_NODES, k + (levels - 1) * k * k), levels - 1, k)

    @classmethod
    def test_instances(cls, target: Target) -> Mapping[str, Callable[[], MTP]]:
        """Return random layers: chains by recursion on either state, a tree, and three layers in turn."""

        def build(modules: int = 1, output_normed: bool = True, **options: Any) -> MTP:
            head = new_head(target, modules, output_normed)
            randomise(with_frequent_tokens(head, target.vocab_size), 3, 0.15)
            return cls(target, MTPOptions(**options), head, {})

        part = str(target.vocab_size * 3 // 4)

        return {
            "chain": partial(build, num_speculative_tokens=3),
            "one": build,
            "state before the norm": partial(build, output_normed=False, num_speculative_tokens=4),
            "tree": partial(build, mode="tree", num_speculative_tokens=3, nodes=9, top_k=3),
            "in turn": partial(build, modules=3),
            "draft vocabulary": partial(build, num_speculative_tokens=3, draft_vocab=part),
            "draft vocabulary, tree": partial(build, mode="tree", num_speculative_tokens=2, nodes=6, draft_vocab=part),
        }

    def metadata(self) -> dict[str, Any]:
        s, o = self.size, self.options
        shape = {"nodes": s.drafted, "top_k": s.top_k} if o.mode == "tree" else {}
        sizes = {"num_speculative_tokens": s.depth + 1, "mode": o.mode, **shape, "modules": self.modules}
        return {**sizes, **super().metadata()}

    def search_space(self) -> Mapping[str, Sequence[Any]]:
        """Return lengths of the chain, and sizes of a tree."""
        most = self.modules if self.modules > 1 else trained_steps(self.config) or max(LENGTHS)
        lengths = {"num_speculative_tokens": [n for n in LENGTHS if n <= most]}
        sizes = self.vocabulary.search_space()
        if self.options.mode == "chain":
            return {**lengths, **sizes}
        return {"nodes": TOTALS, **lengths, "top_k": [k for k in BEAMS if k <= self.vocabulary.size], **sizes}

    def drafter_weights(self) -> list[Tensor]:
        """Return the weights of one layer, which a call of the drafter reads."""
        return read_by_a_pass(self.drafter.mtp_layers[0])

    # -- drafting -----------------------------------------------------------------------------------------------

    def max_tokens_per_step(self) -> int:
        return 1 + self.size.drafted

    def on_prefill(self, state: DecodeState) -> None:
        """Fill a row for every position of the prompt."""
        none = torch.empty(1, 0, self.target.hidden_size, dtype=self.target.dtype, device=self.target.device)
        self.outputs = [none] * self.modules
        self.target.empty(self.slots.cache, state.cache.capacity + self.size.slots)
        for cache in self.later_caches:
            self.target.empty(cache, state.cache.capacity + self.modules)
        self._extend(state, indices(state.ids[1:], self.target.device), self._features)
        self._features = []

    def update(self, state: DecodeState, result: VerifyResult, output: Output) -> None:
        """Fill a row for every newly accepted position."""
        self._extend(state, *self.accepted(result, output))

    def _extend(self, state: DecodeState, tokens: Tensor, features: Sequence[Tensor]) -> None:
        out = self.slots.extend(state, tokens, features)
        if self.modules > 1:
            kept = self.outputs[0] if self.size.depth else out[:, :0]  # no later layer reads them
            self.outputs[0] = torch.cat((kept, out), 1)

    def propose(self, state: DecodeState) -> DraftTree:
        """Draft a tree, or a chain; above temperature 0 each token of a chain is sampled from its distribution."""
        sampled = not state.sampling.greedy
        if self.options.mode == "tree" or (self.modules == 1 and not sampled):
            return self.tree.draft(state)
        tokens, qs = list[Tensor](), list[Tensor]()
        states = self._states_in_turn(state, tokens) if self.modules > 1 else self._recycled_states(tokens)
        for index in range(self.size.depth + 1):
            logits = self.slots.logits(next(states), index if self.modules > 1 else 0)[0]
            if sampled:
                qs.append(state.sampling.probs(logits))
            drafted = draw(qs[-1], state.rng)[:, 0] if sampled else logits.argmax(-1)
            tokens.append(self.vocabulary.token_ids(drafted))
        if self.modules == 1:
            self.slots.drop_drafted(state, self.size.depth)
        q = self.vocabulary.target_probs(torch.cat(qs)) if sampled else None
        return DraftTree.chain(state.root, torch.cat(tokens), q)

    def _recycled_states(self, tokens: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield the states [1, 1, h] of successive drafts from one layer; tokens: the drafts so far, each [1]."""
        states, itself = self.slots.newest, torch.ones(1, 1, dtype=torch.bool, device=self.target.device)
        yield states
        for _ in range(self.size.depth):  # the next position behind all cached ones
            states = self.slots.draft_level(tokens[-1], states, itself, 0)
            yield states

    def _states_in_turn(self, state: DecodeState, tokens: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield the last states [1, 1, h] of successive layers; tokens: the drafts so far, each [1]."""
        position, states = state.position, self.outputs[0]  # states of the rows up to position - 1
        yield states[:, -1:]
        for j, cache in enumerate(self.later_caches[: self.size.depth], 1):
            start = cache.get_seq_length()
            n, decided = position - start, state.ids[start + j + 1 :]
            ids = torch.cat((indices(decided, self.target.device), *tokens[max(0, j - n) :]))  # [n]
            later, inputs = partial(self._next_layer, j), (ids, states[:, -n:])
            (out,) = self.target.run_pass((self, "later", j), later, cache, inputs, ((0,), (1,)), n)
            cache.commit(len(decided))
            # layer j - 1 keeps the rows of decided tokens that layer j lacks
            self.outputs[j - 1] = states[:, len(decided) - n : 1 - j or None].clone()
            states = torch.cat((self.outputs[j], out), 1)
            state.num_draft_forwards += 1
            yield states[:, -1:]

    def _next_layer(self, index: int, current: ForwardPass, tokens: Tensor, states: Tensor) -> tuple[Tensor]:
        """Return the states [1, n, h] of layer `index` at the next n rows. tokens: [n]. states: [1, n, h]."""
        n, embedded = len(tokens), self.drafter.embed(tokens[None], self.target)
        rotary = self.rotary(current.positions(torch.arange(n, device=tokens.device)), states.dtype)
        layer, run = self.drafter.mtp_layers[index], partial(self.drafter, index=index)
        return (current.layers(layer, run, (embedded, states), current.causal_mask(n), rotary),)
