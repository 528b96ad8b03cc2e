"""Drafting heads on static trees (Medusa, Hydra): options, trees from accuracies, acceptance rules.

A tree is a list of choices; choice (1, 0) is the second-best token of head 0, then the best of head 1.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from annotated_types import Ge, Gt, Le
from msgspec import Meta
from torch import Tensor

from specbench_ss import user_files
from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.decoder import DecodeState
from specbench_ss.engine.layers.linear import PrepackedLinear, has_room
from specbench_ss.engine.target import Output, Target
from specbench_ss.engine.tree import MOST_NODES, AnyTopology, DraftTree, TreeTopology, indices, topology_of
from specbench_ss.engine.verify import VerifyResult
from specbench_ss.errors import UserError, os_reason
from specbench_ss.methods._shared.draft_vocabulary import vocabulary_option, with_frequent_tokens
from specbench_ss.methods._shared.drafting import VOCABULARY, DrafterDecoder, vocabulary_of
from specbench_ss.methods._shared.lossy_acceptance import accept_per_path, accept_typical
from specbench_ss.models.load import hash_weights
from specbench_ss.models.tiny import randomise
from specbench_ss.options import Bounded, option
from specbench_ss.user_files import check_ends


@dataclass(frozen=True, slots=True)
class HeadsOptions(Bounded):
    """Options of methods with drafting heads on a static tree."""

    weights: str = option("", "Folder or file with the heads. Empty: those bundled with the model.")
    tree: str = option(
        "auto",
        "Draft tree. auto: built from the accuracies in the heads' config.json, else the published one. "
        "published: the published one. Else a JSON file with a tree, or with accuracies from "
        "`ssbench train NAME --measure`.",
    )
    nodes: Annotated[int, Ge(0), Le(MOST_NODES)] = option(
        0, "Drafted nodes of an auto tree. 0: as the heads' folder advises, else as many as the published tree has."
    )
    heads: Annotated[int, Ge(-1)] = option(
        -1, "Number of heads in use (the first ones). 0: all. -1: as the heads' folder advises, else all."
    )
    accept: Literal["exact", "typical", "nucleus"] = option(
        "exact",
        "Acceptance rule when sampling. typical (Medusa sec. 2.3.1) and nucleus (per-path acceptance) are lossy.",
    )
    epsilon: Annotated[float, Gt(0)] = option(
        0.09,
        "With accept=typical: a drafted token of probability p is accepted if p is above the smaller of "
        "epsilon and alpha * exp(-H), with H the entropy of the model's distribution.",
    )
    alpha: Annotated[float, Gt(0)] = option(0.3, "With accept=typical: the factor before exp(-H); see epsilon.")
    draft_vocab: str = vocabulary_option()


Choice = tuple[int, ...]

# the 63 nodes published for 7B models (FasterDecoding/Medusa, medusa_choices.py), as branches: prefix -> ranks
_PUBLISHED: dict[Choice, int] = {
    (): 10, (0,): 10, (0, 0): 10, (1,): 7, (2,): 3, (3,): 2, (4,): 1, (5,): 1, (6,): 1, (7,): 1, (8,): 1, (9,): 1,
    (0, 1): 3, (0, 2): 2, (0, 3): 1, (0, 4): 1, (0, 5): 1, (0, 6): 1, (0, 7): 1, (1, 0): 2, (2, 0): 1, (0, 0, 0): 2,
}  # fmt: skip


def from_branches(branches: dict[Choice, int]) -> tuple[Choice, ...]:
    """Return the choices of a tree from the number of children of each prefix."""
    choices = ((*prefix, rank) for prefix, width in branches.items() for rank in range(width))
    return tuple(sorted(choices, key=lambda c: (len(c), c)))


PUBLISHED = from_branches(_PUBLISHED)
DECAY = 0.7  # of each depth; with 1 / (rank + 1) the last nodes of the published depths have about equal weights


@dataclass(frozen=True, slots=True)
class StaticTree:
    """A static tree: its topology, and for each drafted node its head and its rank in that head's top-k."""

    topology: TreeTopology
    heads: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def width(self) -> int:
        """Return the number of candidates needed of every head."""
        return max(self.ranks) + 1

    @property
    def depth(self) -> int:
        """Return the number of heads that the tree needs."""
        return max(self.heads) + 1

    def metadata(self) -> dict[str, Any]:
        nodes = [list(pair) for pair in zip(self.topology.parents[1:], self.ranks, strict=True)]
        digest = hashlib.sha256(json.dumps(nodes).encode()).hexdigest()[:16]
        return {"tree_nodes": len(self.ranks), "depth": self.depth, "tree_hash": digest}


def check_tree(tree: StaticTree, heads: int, vocab: int, method: str = "medusa") -> None:
    """Raise UserError if the tree needs more heads or candidates than there are.

    vocab: size of the draft vocabulary.
    """
    if tree.depth > heads:
        raise UserError(f"{method}: the tree is {tree.depth} deep, there are {heads} heads")
    if tree.width > vocab:
        raise UserError(f"{method}: the tree needs {tree.width} candidates, the draft vocabulary has {vocab}")


def tree_of(choices: Sequence[Choice], method: str = "draft tree") -> StaticTree:
    """Return the tree of choices. Raise UserError if a choice lacks its prefix, or there are none or too many."""
    ordered = sorted(set(choices), key=lambda c: (len(c), c))
    if not ordered:
        raise UserError(f"{method}: a tree needs at least one choice")
    if len(ordered) > MOST_NODES:
        raise UserError(f"{method}: a tree has at most {MOST_NODES} nodes, not {len(ordered)}")
    index: dict[Choice, int] = {(): 0}
    parents = [-1]
    for choice in ordered:
        if not choice or min(choice) < 0 or choice[:-1] not in index:
            raise UserError(f"{method}: choice {list(choice)} has no parent in the tree")
        index[choice] = len(parents)
        parents.append(index[choice[:-1]])
    return StaticTree(topology_of(tuple(parents)), tuple(len(c) - 1 for c in ordered), tuple(c[-1] for c in ordered))


def by_likelihood(choices: Sequence[Choice]) -> list[Choice]:
    """Sort choices, the likeliest first, where no accuracies are measured: rank r has the weight 1 / (r + 1)."""
    return sorted(choices, key=lambda choice: (-math.prod(DECAY / (rank + 1) for rank in choice), choice))


def best_tree(accuracies: Sequence[Sequence[float]], nodes: int) -> list[Choice]:
    """Return the `nodes` choices with the greatest expected acceptance: accuracies[head][rank], heads independent."""
    best: list[Choice] = []
    heap: list[tuple[float, Choice]] = [(-p, (rank,)) for rank, p in enumerate(accuracies[0])]
    heapq.heapify(heap)
    while heap and len(best) < nodes:
        score, choice = heapq.heappop(heap)
        best.append(choice)
        if len(choice) < len(accuracies):
            for rank, p in enumerate(accuracies[len(choice)]):
                heapq.heappush(heap, (score * p, (*choice, rank)))
    return best


class MeasuredAccuracies(msgspec.Struct, frozen=True):
    """Accuracies [head][rank] and advised tree size, from config.json or a file of measurements."""

    accuracies: list[Annotated[list[Annotated[float, Meta(ge=0, le=1)]], Meta(min_length=1)]] | None = None
    nodes: Annotated[int, Meta(ge=1, le=MOST_NODES)] | None = None


def read_measured(tree: str, config: Mapping[str, Any], method: str) -> MeasuredAccuracies:
    """Return accuracies and nodes of the config (tree=auto) or of a JSON file; empty if the file has a tree."""
    content: Any = config if tree == "auto" else {} if tree == "published" else _read_json(Path(tree), method)
    if not isinstance(content, Mapping) or not content.get("accuracies"):
        return MeasuredAccuracies()
    try:
        return user_files.convert(dict(content), MeasuredAccuracies)
    except ValueError as problem:
        raise UserError(f"{method}: {'config.json' if tree == 'auto' else tree}: {problem}") from None


def requested_tree(
    tree: str,
    nodes: int,
    config: Mapping[str, Any],
    deepest: int,
    method: str,
    published: Sequence[Choice] = PUBLISHED,
    unit: str = "heads",
) -> list[Choice]:
    """Return the tree that the options request, at most `deepest` levels deep. Raise UserError naming the method.

    Args:
        tree: auto (from the drafter's config, else published), published, or a JSON file of a tree or accuracies.
        nodes: size of a tree built from accuracies, 0 = as the accuracies' file advises.
    """
    measured = read_measured(tree, config, method)
    if measured.accuracies:
        return best_tree(measured.accuracies[:deepest], nodes or measured.nodes or len(published))
    if tree not in ("auto", "published"):
        return read_tree(Path(tree), deepest, method, unit)
    choices = [c for c in published if len(c) <= deepest]
    return by_likelihood(choices)[:nodes] if nodes and tree == "auto" else choices


def tunable_nodes(tree: str, config: Mapping[str, Any], method: str) -> bool:
    """Return True if the tree is built from accuracies, so that it can have any number of nodes."""
    exists = tree in ("auto", "published") or Path(tree).is_file()
    return exists and bool(read_measured(tree, config, method).accuracies)


def read_tree(path: Path, heads: int, method: str, unit: str = "heads") -> list[Choice]:
    """Return choices from a JSON file: a list of lists of ranks.

    Raise UserError for another content, and for a choice with more levels than heads in use.
    """
    try:
        choices = user_files.convert(_read_json(path, method), list[Choice])
    except ValueError as problem:
        expected = "a list of choices, each a list of ranks from 0, as in [[0], [0, 0], [1]]"
        raise UserError(f"{method}: cannot read tree {path}: {problem}; a tree is {expected}") from None
    deepest = max(map(len, choices), default=0)
    if deepest > heads:
        raise UserError(f"{method}: the tree {path} is {deepest} deep, there are {heads} {unit} to draft with")
    return choices


def _read_json(path: Path, method: str) -> Any:
    check_ends(path)
    try:
        return user_files.parse(path.read_bytes())
    except (OSError, ValueError) as error:
        reason = os_reason(error) if isinstance(error, OSError) else error
        raise UserError(f"{method}: cannot read tree {path}: {reason}") from None


def prepacked(heads: Sequence[tuple[Tensor, Tensor | None]], target: Target) -> list[PrepackedLinear]:
    """Return LM heads, weight and bias, for a CPU, where torch may be slow for one row of bfloat16."""
    pack = target.prepack if has_room(sum(w.numel() * w.element_size() for w, _ in heads)) else None
    return [PrepackedLinear(*head, pack) for head in heads] if target.device_type == "cpu" else []


MOST_FUSED = 9
"""Most tokens, verified and drafted, for which one LM-head matmul is cheaper than two.

Measured with SmolLM2 on two cores with AVX-512 (docs/log.md).
"""
ACCURACIES = [[0.5 / (rank + 1) for rank in range(6)] for _ in range(4)]  # of test instances
NODES = (4, 6, 8, 10, 15, 20, 31, 48, 63)  # sizes of auto trees for tuning; 63 is the published one


class TreeHeads(DrafterDecoder):
    """Heads on a static tree, which read the last state. At T=0 every acceptance rule is greedy."""

    Options: ClassVar[type[Any]] = HeadsOptions
    advisable = ("nodes", "heads", VOCABULARY)
    node_options = ("nodes", "tree")

    def __init__(
        self,
        target: Target,
        options: Any,
        drafter: Any,
        config: dict[str, Any] | None = None,
        tree: StaticTree | None = None,
    ) -> None:
        super().__init__(target, options, drafter, config)
        self.tree = tree or self.resolve_options(options, self.config, drafter, target)
        check_tree(self.tree, drafter.count, self.vocabulary.size, self.name)
        drafter.products = drafter.products or prepacked(drafter.lm_heads(), target)
        self.depth, self.lossless = self.tree.depth, options.accept == "exact"

    @classmethod
    def resolve_options(
        cls, options: HeadsOptions, config: Mapping[str, Any], drafter: Any, base: ModelInfo
    ) -> StaticTree:
        """Return the tree that the options request, no deeper than the number of heads in use."""
        count = drafter.count
        if options.heads > count:
            raise UserError(f"{cls.name}: heads must be 1 to {count}, or 0 for all, not {options.heads}")
        heads = options.heads if options.heads > 0 else count
        tree = tree_of(requested_tree(options.tree, options.nodes, config, heads, cls.name), cls.name)
        check_tree(tree, count, vocabulary_of(options, drafter, base, cls.name).size, cls.name)
        return tree

    @classmethod
    def example(cls, target: Target, drafter: Any, config: Mapping[str, Any], options: Any) -> Self:
        """Return random heads on the tree of the options, built from accuracies; None = the published tree."""
        randomise(with_frequent_tokens(drafter, target.vocab_size), 1)
        if options is None:
            choices = [c for c in PUBLISHED if len(c) <= drafter.count and max(c) < target.vocab_size]
            return cls(target, cls.Options(), drafter, dict(config), tree_of(choices))
        return cls(target, options, drafter, {**config, "accuracies": ACCURACIES[: drafter.count], "nodes": 5})

    # -- options and metadata -----------------------------------------------------------------------------------

    def search_space(self) -> Mapping[str, Sequence[Any]]:
        """Return the tree's size, if it is built from accuracies, and its depth."""
        nodes = {"nodes": NODES} if tunable_nodes(self.options.tree, self.config, self.name) else {}
        heads = {"heads": range(1, self.drafter.count + 1)}
        sizes = self.vocabulary.search_space()
        return {**nodes, **(heads if nodes or self.options.tree in ("auto", "published") else {}), **sizes}

    def metadata(self) -> dict[str, Any]:
        """Return the tree, the heads' hash, and the acceptance rule unless it is exact."""
        o = self.options
        rule = {} if o.accept == "exact" else {"accept": o.accept}
        return {
            **self.tree.metadata(),
            "heads_hash": hash_once(self.drafter),
            **self.vocabulary.metadata(),
            **rule,
            **({"epsilon": o.epsilon, "alpha": o.alpha} if o.accept == "typical" else {}),
        }

    def max_tokens_per_step(self) -> int:
        return len(self.tree.topology.parents)

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        o, logits = self.options, output.logits[0]
        if o.accept == "typical":
            return accept_typical(logits, tree, state.sampling, o.epsilon, o.alpha)
        if o.accept == "nucleus":
            return accept_per_path(logits, tree, state.sampling, state.rng)
        return super().accept(state, tree, output)


def hash_once(module: Any) -> str:
    """Return the hash of a module's weights, which takes a while for large heads; they do not change."""
    if not hasattr(module, "weights_hash"):
        module.weights_hash = hash_weights(module)
    found: str = module.weights_hash
    return found


def best_marginal_nodes(
    logits: Tensor, k: int, nodes: int, owner: str, certain_first: bool = False
) -> tuple[Tensor, AnyTopology]:
    """Return token ids [n] and topology of the greatest path probabilities, with positions treated as independent.

    It is Medusa's tree, rebuilt in each step (DDTree over DFlash). The positions' top probabilities are copied to the
    host once.

    logits: [positions, V]. certain_first: the first position has one token, its top one. owner: method, for errors.
    """
    k = min(k, logits.shape[-1])
    top = logits.topk(k, dim=-1)  # [positions, k]
    probs = (top.values.float() - logits.float().logsumexp(-1, keepdim=True)).exp().tolist()
    if certain_first:
        probs[0] = [1.0] + [0.0] * (k - 1)
        nodes = min(nodes, 1 + sum(k**depth for depth in range(1, len(probs))))
    tree = tree_of(best_tree(probs, nodes), owner)
    at = indices([position * k + rank for position, rank in zip(tree.heads, tree.ranks, strict=True)], logits.device)
    return top.indices.flatten()[at], tree.topology
