"""Configuration of speculative streams: their trained shape, and a method's options."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le, Lt

from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.tree import MOST_NODES
from specbench_ss.errors import UserError
from specbench_ss.options import Bounded, option, value_text

StreamPosition = Literal["ahead", "same"]


@dataclass(frozen=True, slots=True)
class StreamConfig(Bounded):
    """Letters of the papers: gamma streams, N_s MSA layers, adapter_rank R_s, init_rank eta, prune_rank theta.

    adapter_rank: of the stream adapter that stands in place of the MLP; 0 = streams pass the layer's own MLP. keep_mlp:
    the adapter stands beside the MLP, which is not in the papers.
    init_rank: of f_eta (eq. 4), 0 = identity. prune_layer -1 = N - N_s. stream_init: what tells streams apart,
    embeddings P_j (eq. 4) or values turned by rotation_step * j radians (eq. 8; 0 = the largest, pi / 2 N_max).
    mode shared: LoRA of lora_rank in every layer, used by main and stream alike; main_attends_streams: eq. 3 of the
    ACL text (False = eq. 1 of 2024). root_rank: of the map by which finished streams learn the token that the main
    stream has decided meanwhile; 0 = they do not, as in the papers. parent_rank: of the map by which the guesses of a
    node's children learn the node's token; 0 = all nodes of a level have the same children, as in the papers.
    stream_position, which the papers leave open: stream j of a row at position i stands at i + j (ahead) or i (same).
    """

    owner: ClassVar[str] = "ss"
    gamma: Annotated[int, Ge(1)] = 4
    n_msa_layers: Annotated[int, Ge(1)] = 4
    adapter_rank: Annotated[int, Ge(0)] = 8
    init_rank: Annotated[int, Ge(0)] = 0
    prune_rank: Annotated[int, Ge(1)] = 8
    prune_layer: int = -1
    stream_init: Literal["embedding", "rotation"] = "embedding"
    rotation_step: Annotated[float, Ge(0), Le(math.pi / 2)] = 0.0
    mode: Literal["lossless", "shared"] = "lossless"
    main_attends_streams: bool = False
    lora_rank: Annotated[int, Ge(0)] = 0
    keep_mlp: bool = False
    root_rank: Annotated[int, Ge(0)] = 0
    parent_rank: Annotated[int, Ge(0)] = 0
    stream_position: StreamPosition = "ahead"

    def check_together(self) -> None:
        if self.mode == "lossless" and (self.main_attends_streams or self.lora_rank):
            raise UserError(
                "ss: main_attends_streams and lora_rank belong to mode shared; lossless leaves the base alone"
            )
        if self.keep_mlp and not self.adapter_rank:
            raise UserError("ss: without a stream adapter streams pass the MLP anyway: keep_mlp wants an adapter_rank")
        if self.mode == "shared" and not self.lora_rank:
            raise UserError("ss: mode shared trains LoRA adapters: lora_rank must be at least 1")

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    def angle(self, context: int) -> float:
        """epsilon of eq. 8: at most pi / 2 N_max, where N_max counts the longest sequence and the streams."""
        return self.rotation_step or math.pi / (2 * (context + self.gamma))

    def check_layers(self, layers: int, name: str = "ss") -> int:
        """N - N_s for a model of N layers. Raises UserError, naming the method, where streams or pruning do not fit."""
        lo = layers - self.n_msa_layers
        if lo < 0:
            raise UserError(f"{name}: {self.n_msa_layers} MSA layers, the model has {layers} layers")
        if self.prune_layer > lo:
            raise UserError(f"{name}: the pruning layer {self.prune_layer} is above layer {lo}, where streams begin")
        return lo


@dataclass(frozen=True, slots=True)
class SSOptions(Bounded):
    """Options of `ss` and `ss-shared`. Raises UserError for values beyond their bounds.

    0, -1 or auto mean: as the streams' folder advises, else as they were trained.
    """

    weights: str = option("", "Folder with the streams. Empty: those that came with the model.")
    gamma: Annotated[int, Ge(0)] = option(
        0, "How many streams a step uses, at most as many as were trained. 0: as the folder advises, else all."
    )
    k: Annotated[int, Ge(0)] = option(0, "Candidates of a stream; 1 drafts a chain. 0: as the folder advises, else 3.")
    n_draft: Annotated[int, Ge(-1)] = option(
        -1, "How many nodes are drafted, the best by joint probability. 0: all. -1: as the folder advises, else all."
    )
    n_keep: Annotated[int, Ge(0)] = option(
        0, "How many nodes stay after pruning, the root included. 0: as the folder advises, else 32."
    )
    prune: Literal["auto", "on", "off"] = option(
        "auto", "Whether the tree is pruned at the pruning layer. auto: as the folder advises, else on."
    )
    prune_layer: Annotated[int, Ge(-1)] = option(-1, "Layer before which the tree is pruned. -1: as trained.")
    prune_threshold: Annotated[float, Ge(0), Lt(1)] = option(
        0.0, "Prune nodes whose transition probability is below this."
    )
    mode: Literal["tree", "chain"] = option(
        "tree", "Form of the draft: a tree, or as a chain the single best path (k=1)."
    )
    stream_attention_top_p: Annotated[int, Ge(0)] = option(
        0, "Streams see only so many tokens, those that their main row attends to most. 0: all."
    )
    sample: Literal["on", "off"] = option(
        "off",
        "Where tokens are sampled: draw candidates from the streams' distributions (eq. 9), instead of the "
        "best ones. Such a tree is not pruned: a choice by what was drawn would not be exact.",
    )
    n_msa_layers: int = option(
        -1, "Number of top layers that streams pass. Only as trained, else an error. -1: as trained."
    )
    adapter_rank: int = option(-1, "Rank of the stream adapters. Only as trained, else an error. -1: as trained.")
    lora_rank: int = option(-1, "Rank of the LoRA of shared mode. Only as trained, else an error. -1: as trained.")
    main_attends_streams: Literal["auto", "on", "off"] = option(
        "auto",
        "Whether the main stream sees its streams (shared mode, eq. 3). Only as trained, else an error. "
        "auto: as trained.",
    )
    stream_init: Literal["auto", "embedding", "rotation"] = option(
        "auto", "What tells streams apart. Only as trained, else an error. auto: as trained."
    )
    root: Literal["auto", "on", "off"] = option(
        "auto",
        "Whether streams learn the token that the main stream has decided, which is not in the papers. on: "
        "the weights of that kind that came with the model. Only as trained, else an error. auto: as the folder "
        "advises that came with the model, else as trained.",
    )
    parent: Literal["auto", "on", "off"] = option(
        "auto",
        "Whether a node's children learn the node's token, which is not in the papers. on: the weights of "
        "that kind that came with the model. Only as trained, else an error. auto: as of root.",
    )


def check_trained(options: SSOptions, config: StreamConfig, name: str) -> None:
    """Raise UserError where the user asks for what these streams were not trained with."""
    fixed = ("n_msa_layers", "adapter_rank", "lora_rank", "main_attends_streams", "stream_init")
    trained = {key: getattr(config, key) for key in fixed}
    trained |= {"root": config.root_rank > 0, "parent": config.parent_rank > 0}
    for key, have in trained.items():
        asked = getattr(options, key)
        if asked not in (-1, "auto", value_text(have), have):
            raise UserError(f"{name}: {key}={asked} is not as these streams were trained, {value_text(have)} is")


def full_size(gamma: int, k: int) -> int:
    """Return the number of drafted nodes of the whole tree: sum of k^g over its levels."""
    return sum(k**g for g in range(1, gamma + 1))


@dataclass(frozen=True, slots=True)
class Settings:
    """Options and checkpoint made one: what a step does."""

    gamma: int
    k: int
    n_draft: int
    n_keep: int
    prune: bool
    prune_layer: int
    threshold: float
    top_p: int
    sample: bool = False

    def most_rows(self) -> int:
        """Rows of a step: the whole tree below the pruning layer, kept nodes with their streams above it."""
        nodes = 1 + full_size(self.gamma, self.k)
        nodes = min(nodes, 1 + self.n_draft) if self.n_draft else nodes
        kept = min(nodes, self.n_keep) if self.prune and not self.sample else nodes
        return max(nodes, kept * (1 + self.gamma))


def resolve(options: SSOptions, config: StreamConfig, base: ModelInfo, name: str) -> Settings:
    """Return what a step does. Raises UserError, naming the method, for gamma or k too large, or pruning too high up.

    options: with the folder's advice taken.
    """
    lo = config.check_layers(base.n_layers, name)
    if options.gamma > config.gamma:
        raise UserError(f"{name}: gamma must be 1 to {config.gamma} (as trained), not {options.gamma}")
    gamma = options.gamma or config.gamma
    k = 1 if options.mode == "chain" else options.k or 3
    trained_at = lo if config.prune_layer < 0 else config.prune_layer
    layer = trained_at if options.prune_layer < 0 else options.prune_layer
    if k > base.vocab_size or k**gamma > MOST_NODES:
        raise UserError(f"{name}: k={k} with gamma={gamma} makes a tree of more than {MOST_NODES} nodes")
    if layer > lo:
        raise UserError(f"{name}: the pruning layer {layer} is above layer {lo}, where streams begin")
    return Settings(
        gamma, k, max(options.n_draft, 0), options.n_keep or 32, options.prune != "off", layer, options.prune_threshold,
        options.stream_attention_top_p, options.sample == "on",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SharedAROptions(Bounded):
    """Options of `ss-shared-ar`: which model it is. They are what the output of `ss-shared` depends on."""

    weights: str = option("", "Folder as for `ss-shared`. Empty: the one that came with the model.")
    gamma: Annotated[int, Ge(0)] = option(
        0, "How many streams run along, where the main stream sees them (eq. 3). 0: all of them."
    )
    stream_attention_top_p: Annotated[int, Ge(0)] = option(
        0, "Streams see only so many tokens, those that their main row attends to most. 0: all."
    )

    def step(self) -> SSOptions:
        """One candidate a stream, nothing pruned."""
        return SSOptions(gamma=self.gamma, k=1, prune="off", stream_attention_top_p=self.stream_attention_top_p)
