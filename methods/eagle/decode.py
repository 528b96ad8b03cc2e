"""EAGLE (static tree), EAGLE-2 and EAGLE-3 (dynamic trees).

EAGLE: Li et al. 2024 (ICML), sec. 4. EAGLE-2: Li et al. 2024 (EMNLP), sec. 4. EAGLE-3: Li et al. 2025 (NeurIPS).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from annotated_types import Ge, Le
from torch import Tensor

from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.forward import ForwardPass
from specbench_ss.engine.target import FINAL, Output, Target
from specbench_ss.engine.tree import MOST_NODES, DraftTree, indices
from specbench_ss.engine.verify import VerifyResult
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.draft_vocabulary import vocabulary_option, with_frequent_tokens
from specbench_ss.methods._shared.drafting import VOCABULARY, FeatureDecoder, Read, vocabulary_of
from specbench_ss.methods._shared.heads import (
    Choice,
    StaticTree,
    check_tree,
    from_branches,
    requested_tree,
    tree_of,
    tunable_nodes,
)
from specbench_ss.methods._shared.target_copies import EMBEDDING, EMBEDDING_AND_HEAD
from specbench_ss.methods._shared.tree_growth import draw
from specbench_ss.methods.eagle.checkpoint import (
    Readings,
    checked_layers,
    choose_layers,
    config_of,
    drafter_config,
    layers_of,
    published_name,
    read_drafter,
    vllm_config_of,
    vllm_tensors,
)
from specbench_ss.methods.eagle.drafter import MOST_DEPTH, Drafter, random_eagle, random_eagle3
from specbench_ss.methods.eagle.slots import DynamicTree, Size, Slots
from specbench_ss.models.checkpoint import own_fields, write_tensors
from specbench_ss.options import Bounded, option

NODES = (4, 6, 8, 10, 15, 20, 25, 31, 48)  # sizes of auto trees for tuning; 25 is the published one
TOTALS = (4, 6, 8, 12, 16, 24, 32, 48, 60)  # sizes of dynamic trees for tuning
BEAMS = (1, 2, 3, 4, 6, 10)
DEPTHS = (0, 1, 2, 3, 4, 5, 7)

# the 25 nodes published with EAGLE, as branches: prefix -> ranks
PUBLISHED: tuple[Choice, ...] = from_branches({
    (): 4, (0,): 3, (1,): 2, (2,): 2, (3,): 1, (0, 0): 3, (0, 1): 2, (0, 2): 2, (1, 0): 1, (0, 0, 0): 3,
    (0, 0, 0, 0): 2,
})  # fmt: skip

WEIGHTS_HELP = "Folder, file or hub id of the drafter. Empty: the one bundled with the model."


class EagleDecoder(FeatureDecoder):
    """Base of EAGLE's methods: a folder's drafter of one layer, and its slots of true hidden states.

    drafted_levels: number of levels of the draft tree. drafted_slots: most slots of drafted nodes in a step.
    """

    # of all methods that share a folder
    other_options: ClassVar[tuple[str, ...]] = ("nodes", "total_tokens", "depth", "top_k", VOCABULARY)
    can_export: ClassVar[bool] = True
    is_eagle3: ClassVar[bool] = False
    target_copies = EMBEDDING_AND_HEAD
    drafted_levels: int
    drafted_slots: int

    def __init__(
        self, target: Target, options: Any, drafter: Drafter, config: dict[str, Any], layers: Sequence[int] = (FINAL,)
    ) -> None:
        super().__init__(target, options, drafter, config, layers)
        self.slots, self.constructor_args = Slots(self), (self.layers,)

    @classmethod
    def layers_of(cls, options: Any, config: dict[str, Any], base: ModelInfo, path: Path) -> tuple[Readings, str]:
        """Return the target layers whose inputs are read, and the reason; two readings if config.json is ambiguous."""
        return ((FINAL,),), ""

    @classmethod
    def read(cls, options: Any, path: Path, base: ModelInfo, read: Read) -> tuple[Drafter, dict[str, Any]]:
        config = drafter_config(path, cls.name)
        layers = cls.layers_of(options, config, base, path)[0][0]
        return read_drafter(path, base, cls.name, len(layers) if cls.is_eagle3 else 0, read), config

    def export(self, folder: Path) -> dict[str, Any]:
        tensors, config = vllm_tensors(self.drafter), vllm_config_of(self.drafter, self.config, self.target)
        write_tensors(folder, tensors, config)
        return {"method": "eagle", "num_speculative_tokens": self.drafted_levels}

    def on_prefill(self, state: DecodeState) -> None:
        """Fill a slot for every position of the prompt."""
        self.target.empty(self.slots.cache, state.cache.capacity + self.drafted_slots)
        self.slots.extend(state, indices(state.ids[1:], self.target.device), self._features)
        self._features = []

    def update(self, state: DecodeState, result: VerifyResult, output: Output) -> None:
        """Fill a slot for every newly accepted position."""
        self.slots.extend(state, *self.accepted(result, output))


# -- EAGLE: a static tree ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Level:
    """One level of a static tree: m nodes, of which the k with children pass through the drafter."""

    parent: Tensor  # int64 [m], row of the parent in the pass before
    rank: Tensor  # int64 [m], rank among the candidates of that row
    sibling: Tensor  # int64 [m], index among the siblings
    inner: Tensor  # int64 [k], nodes with children
    inner_parent: Tensor  # int64 [k], rows of their parents
    visible: Tensor  # bool [k, rows so far], their ancestors and themselves among all rows


def levels_of(tree: StaticTree, device: torch.device) -> tuple[list[Level], Tensor]:
    """Return the levels of a static tree, and int64 [inner nodes], the node of each row of logits, root first."""
    topology, children = tree.topology, tree.topology.children()
    ancestors = topology.ancestors()
    inner_nodes: list[int] = []  # of all levels, in order
    previous, levels = [0], []
    for depth in range(1, topology.depth + 1):
        level = [i for i, d in enumerate(topology.depths) if d == depth]
        row = {node: i for i, node in enumerate(previous)}
        parents = [row[topology.parents[i]] for i in level]
        siblings = [children[topology.parents[i]].index(i) for i in level]
        inner = [n for n, i in enumerate(level) if children[i]]
        previous = [level[n] for n in inner]
        inner_nodes += previous
        visible = ancestors[previous][:, inner_nodes]
        ranks, inner_parents = [tree.ranks[i - 1] for i in level], [parents[n] for n in inner]
        parent, rank, sibling, inner_idx, inner_parent = (
            indices(x, device) for x in (parents, ranks, siblings, inner, inner_parents)
        )
        levels.append(Level(parent, rank, sibling, inner_idx, inner_parent, visible.to(device)))
    return levels, indices([0, *inner_nodes], device)


@dataclass(frozen=True, slots=True)
class EagleOptions(Bounded):
    """Options of `eagle`."""

    owner: ClassVar[str] = "eagle"
    weights: str = option("", WEIGHTS_HELP)
    tree: str = option(
        "auto",
        "Draft tree. auto: built from the accuracies in the drafter's config.json, else the published one. "
        "published: the published one. Else a JSON file with a tree or with measured accuracies.",
    )
    nodes: Annotated[int, Ge(0), Le(MOST_NODES)] = option(
        0, "Drafted nodes of an auto tree. 0: as the drafter's folder advises, else those of the published tree."
    )
    depth: Annotated[int, Ge(0), Le(MOST_DEPTH)] = option(
        0, "Maximum number of drafted levels. 0: all levels of the tree."
    )
    sample: Literal["on", "off"] = option(
        "off", "When sampling: sample candidates from the drafter's distribution, as published."
    )
    draft_vocab: str = vocabulary_option()


class Eagle(EagleDecoder):
    """EAGLE: static tree, with one drafter pass per level."""

    name = "eagle"
    summary = "EAGLE: one layer drafts features, static tree"
    paper = "Li et al. 2024, arXiv:2401.15077"
    Options = EagleOptions
    node_options = ("nodes", "tree")
    advisable = ("nodes", VOCABULARY)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.tree = self.resolve_options(self.options, self.config, self.drafter, self.target)
        self.levels, self.inner_nodes = levels_of(self.tree, self.target.device)
        self.siblings = max(map(len, self.tree.topology.children()))  # largest number of children of a node
        self.drafted_levels, self.drafted_slots = self.tree.depth, len(self.inner_nodes) - 1

    @classmethod
    def resolve_options(
        cls, options: EagleOptions, config: Mapping[str, Any], drafter: Any, base: ModelInfo
    ) -> StaticTree:
        depth = options.depth or MOST_DEPTH
        choices = requested_tree(options.tree, options.nodes, config, depth, cls.name, PUBLISHED, "levels")
        tree = tree_of(choices, cls.name)
        check_tree(tree, depth, vocabulary_of(options, drafter, base, cls.name).size, cls.name)
        return tree

    @classmethod
    def test_instances(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        """Return random drafters on the published tree and a deep one, with sampled candidates and fewer tokens."""

        def build(accuracies: list[list[float]], reduced: bool = False, **options: Any) -> Callable[[], Decoder]:
            def make() -> Decoder:
                drafter = with_frequent_tokens(random_eagle(target, reduced), target.vocab_size)
                return cls(target, EagleOptions(**options), drafter, {"accuracies": accuracies, "nodes": 9})

            return make

        uniform = [[0.4 / (r + 1) for r in range(min(4, target.vocab_size))] for _ in range(5)]
        chain, part = [[0.9]] * 7, str(target.vocab_size * 3 // 4)
        return {
            "published": build(uniform, tree="published"),
            "auto": build(uniform),
            "chain": build(chain, nodes=7),
            "sampled": build(uniform, tree="published", sample="on"),
            "reduced": build(uniform, True),
            "reduced and sampled": build(uniform, True, sample="on"),
            "draft vocabulary": build(uniform, draft_vocab=part),
            "draft vocabulary, sampled": build(uniform, draft_vocab=part, sample="on"),
        }

    def metadata(self) -> dict[str, Any]:
        return super().metadata() | self.tree.metadata() | {"sample": self.options.sample}

    def search_space(self) -> Mapping[str, Sequence[Any]]:
        """Return sizes of the tree, if it is built from accuracies, and depths."""
        nodes = {"nodes": NODES} if tunable_nodes(self.options.tree, self.config, self.name) else {}
        if self.options.tree not in ("auto", "published"):
            return nodes
        deepest = len(self.config["accuracies"]) if nodes else max(map(len, PUBLISHED))
        return {**nodes, "depth": range(1, deepest + 1), **self.vocabulary.search_space()}

    def max_tokens_per_step(self) -> int:
        return len(self.tree.topology.parents)

    def propose(self, state: DecodeState) -> DraftTree:
        """Draft each level of the static tree from the states of the level above."""
        slots, inputs = self.slots, (state.root, self.slots.newest)
        if self.options.sample == "on" and not state.sampling.greedy:
            tokens, q = self._sampled(state, *inputs)
        else:
            rows, q = max(1, self.drafted_slots), None
            (tokens,) = self.target.run_pass((self, "best"), self._best, slots.cache, inputs, rows=rows)
        slots.drop_drafted(state, sum(len(level.inner) > 0 for level in self.levels))
        return DraftTree(tokens, self.tree.topology, q)

    def _best(self, current: ForwardPass, root: Tensor, states: Tensor) -> tuple[Tensor]:
        """Return the tree's tokens [n], the most probable ones, from the newest slot's output [1, 1, h]."""
        rotary, tokens = self.slots.rotary_ahead(current, len(self.levels)), [root]
        for depth, level in enumerate(self.levels):
            ranked = self.slots.logits(states)[0].topk(self.tree.width).indices  # [rows, width]
            tokens.append(self.vocabulary.token_ids(ranked[level.parent, level.rank]))
            if len(level.inner):
                inner, parents = tokens[-1][level.inner], states[:, level.inner_parent]
                states = self.slots.descend(current, inner, parents, level.visible, rotary, depth)
        return (torch.cat(tokens),)

    def _sampled(self, state: DecodeState, root: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tree's tokens [n], drawn from q, and q [n, V] at nodes with children; rows of leaves are zero."""
        tokens, qs = [root], list[Tensor]()
        for depth, level in enumerate(self.levels):
            qs.append(state.sampling.probs(self.slots.logits(states)[0]))
            drawn = draw(qs[-1], state.rng, self.siblings)  # [rows, siblings]
            tokens.append(self.vocabulary.token_ids(drawn[level.parent, level.sibling]))
            if len(level.inner):
                inner, parents = tokens[-1][level.inner], states[:, level.inner_parent]
                states = self.slots.draft_level(inner, parents, level.visible, depth)
        q = self.vocabulary.target_probs(torch.cat(qs))
        every = q.new_zeros(len(self.tree.topology.parents), q.shape[-1])
        return torch.cat(tokens), every.index_copy_(0, self.inner_nodes, q)


# -- EAGLE-2 and EAGLE-3: dynamic trees ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DynamicOptions(Bounded):
    """Options of `eagle2`."""

    owner: ClassVar[str] = "eagle2"
    weights: str = option("", WEIGHTS_HELP)
    total_tokens: Annotated[int, Ge(0), Le(MOST_NODES)] = option(
        0, "Number of verified nodes, the root included. 0: as the folder advises, else 60."
    )
    depth: Annotated[int, Ge(-1), Le(MOST_DEPTH)] = option(
        -1, "Number of drafted levels after the first. -1: as the folder advises, else as published."
    )
    top_k: Annotated[int, Ge(0), Le(64)] = option(
        0, "Expanded nodes per level, and candidates of each. 0: as the folder advises, else 10."
    )
    draft_vocab: str = vocabulary_option()

    def check_together(self) -> None:
        if self.total_tokens == 1:
            raise UserError(f"{self.owner}: total_tokens must be at least 2, since it counts the root")


@dataclass(frozen=True, slots=True)
class Eagle3Options(DynamicOptions):
    """Options of `eagle3`."""

    owner: ClassVar[str] = "eagle3"
    layers: str = option(
        "auto",
        "Target layers whose inputs the drafter reads, as in 2:16:29; the number of layers is the last layer's "
        "output, -1 the same after the final norm. "
        "auto: as in the checkpoint's configuration.",
    )


class Eagle2(EagleDecoder):
    """EAGLE-2: dynamic tree; each level expands the top_k nodes of the greatest path probability."""

    name = "eagle2"
    bundled_folder = "eagle"
    summary = "EAGLE-2: EAGLE's drafter, dynamic tree"
    paper = "Li et al. 2024, arXiv:2406.16858"
    Options: ClassVar[Any] = DynamicOptions
    node_options: ClassVar[tuple[str, ...]] = ("total_tokens",)
    advisable: ClassVar[tuple[str, ...]] = ("total_tokens", "depth", "top_k", VOCABULARY)
    published_depth: ClassVar[int] = 5

    @classmethod
    def with_nodes(cls, given: Mapping[str, str], nodes: int) -> dict[str, str]:
        """Return the options with `total_tokens`, which counts the root, and the published depth and top_k.

        A tree of n nodes has at most n levels of at most n nodes: more would only cost time.
        """
        depth, top_k = max(1, min(cls.published_depth, nodes - 1)), min(10, nodes)
        return {"depth": str(depth), "top_k": str(top_k)} | super().with_nodes(given, nodes + 1)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.size = self.resolve_options(self.options, self.config, self.drafter, self.target)
        self.tree = DynamicTree(self.slots, self.size)
        self.drafted_levels, self.drafted_slots = self.size.depth + 1, self.size.slots

    @classmethod
    def resolve_options(cls, options: Any, config: Mapping[str, Any], drafter: Any, base: ModelInfo) -> Size:
        """Return the tree's size."""
        depth = cls.published_depth if options.depth < 0 else options.depth
        k = min(options.top_k or 10, vocabulary_of(options, drafter, base, cls.name).size)
        total = options.total_tokens or 60
        return Size(min(total - 1, k + depth * k * k), depth, k)

    @classmethod
    def test_instances(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:

        def make(**options: Any) -> Callable[[], Decoder]:
            def build() -> Decoder:
                drafter = with_frequent_tokens(random_eagle(target), target.vocab_size)
                return cls(target, DynamicOptions(**options), drafter, {})

            return build

        return {
            "published": make(),
            "small": make(total_tokens=7, depth=2, top_k=3),
            "chain": make(total_tokens=5, depth=4, top_k=1),
            "one level": make(depth=0, top_k=4),
            "draft vocabulary": make(total_tokens=7, depth=2, top_k=3, draft_vocab=str(target.vocab_size * 3 // 4)),
        }

    def metadata(self) -> dict[str, Any]:
        s = self.size
        return super().metadata() | {"total_tokens": s.drafted + 1, "depth": s.depth, "top_k": s.top_k}

    def search_space(self) -> Mapping[str, Sequence[Any]]:
        s, vocab = self.size, self.vocabulary.size
        most = s.top_k + s.depth * s.top_k**2
        return {
            "total_tokens": [n for n in TOTALS if n <= most + 1],
            "depth": DEPTHS,
            "top_k": [k for k in BEAMS if k <= vocab],
            **self.vocabulary.search_space(),
        }

    def max_tokens_per_step(self) -> int:
        return 1 + self.size.drafted

    def propose(self, state: DecodeState) -> DraftTree:
        return self.tree.draft(state)


class Eagle3(Eagle2):
    """EAGLE-3: EAGLE-2's tree; the drafter reads several target layers and has its own LM head."""

    name = "eagle3"
    bundled_folder = "eagle3"
    is_eagle3 = True
    target_copies = EMBEDDING  # its LM head is its own
    summary = "EAGLE-3: features of three levels, training-time test, dynamic tree"
    paper = "Li et al. 2025, arXiv:2503.01840"
    Options = Eagle3Options
    published_depth = 7

    @classmethod
    def layers_of(cls, options: Any, config: dict[str, Any], base: ModelInfo, path: Path) -> tuple[Readings, str]:
        """Return the layers of the option `layers`, else of config.json."""
        if options.layers != "auto":
            try:
                numbers = [int(part) for part in options.layers.split(":")]
            except ValueError:
                allowed = "numbers as in 2:16:29, or auto"
                raise UserError(f"eagle3: layers must be {allowed}, not {options.layers!r}") from None
            return (checked_layers(numbers, base, "layers"),), ""
        try:
            return layers_of(config, base)
        except UserError as error:
            raise UserError(f"{error} ({path})") from None

    @classmethod
    def build(cls, target: Target, options: Any, drafter: Drafter, config: dict[str, Any], path: Path) -> Self:
        """Return the decoder; of two possible readings of config.json, the one whose drafts are accepted more often."""
        readings, reason = cls.layers_of(options, config, target, path)
        index, reason, certain = choose_layers(target, drafter, readings, reason)
        decoder = cls(target, options, drafter, config, readings[index])
        texts = [":".join(map(str, layers)) for layers in readings]
        decoder.measured = {"reads layers": f"{texts[index]}, since {reason}"} if reason else {}
        if not certain:
            doubt = f"eagle3: {reason}, which does not decide: set layers={texts[0]} (inputs) or {texts[1]} (outputs)"
            decoder.load_warnings = (f"{doubt} ({path})",)
            warnings.warn(decoder.load_warnings[0], stacklevel=2)
        return decoder

    def export(self, folder: Path) -> dict[str, Any]:
        config = config_of(self.drafter, self.layers, self.drafted_levels, self.target)
        tensors = {published_name(name): tensor for name, tensor in vllm_tensors(self.drafter).items()}
        write_tensors(folder, tensors, {**config, **own_fields(self.config)})
        return {"method": "eagle3", "num_speculative_tokens": self.drafted_levels}

    @classmethod
    def test_instances(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:

        def make(reduced: bool, **options: Any) -> Callable[[], Decoder]:
            def build() -> Decoder:
                drafter, config, layers = random_eagle3(target, reduced)
                return cls(target, Eagle3Options(**options), drafter, config, layers)

            return build

        return {
            "published": make(True),
            "small": make(False, total_tokens=7, depth=2, top_k=3),
            "chain": make(True, total_tokens=5, depth=4, top_k=1),
        }
