"""Configuration of speculative streams: trained shape and options of the methods."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le, Lt

from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.tree import MOST_NODES
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.draft_vocabulary import vocabulary_option
from specbench_ss.options import Bounded, option, value_text

StreamPosition = Literal["ahead", "same"]


@dataclass(frozen=True, slots=True)
class StreamConfig(Bounded):
    """Trained shape of the streams. Letters of the papers: N_s = n_msa_layers, R_s = adapter_rank, eta = init_rank.

    root_rank, parent_rank, keep_mlp and stream_position are not in the papers.
    """

    owner: ClassVar[str] = "ss"
    gamma: Annotated[int, Ge(1)] = 4  # number of streams
    n_msa_layers: Annotated[int, Ge(1)] = 4
    adapter_rank: Annotated[int, Ge(0)] = 8  # of the stream adapter, used in place of the MLP; 0 = the layer's MLP
    init_rank: Annotated[int, Ge(0)] = 0  # of f_eta (eq. 4); 0 = identity
    prune_rank: Annotated[int, Ge(1)] = 8  # of the pruning map o_theta
    prune_layer: int = -1  # -1 = N - N_s
    stream_init: Literal["embedding", "rotation"] = "embedding"  # embeddings P_j (eq. 4) or rotated values (eq. 8)
    rotation_step: Annotated[float, Ge(0), Le(math.pi / 2)] = 0.0  # radians per stream; 0 = the largest, pi / 2 N_max
    mode: Literal["lossless", "shared"] = "lossless"  # shared: LoRA in every layer for main and stream rows
    main_attends_streams: bool = False  # eq. 3 of the EMNLP text; False = eq. 1 of 2024
    lora_rank: Annotated[int, Ge(0)] = 0
    keep_mlp: bool = False  # use the MLP and the adapter
    root_rank: Annotated[int, Ge(0)] = 0  # of the map that conditions streams on the root; 0 = unconditioned
    parent_rank: Annotated[int, Ge(0)] = 0  # of the map that conditions children on their parent; 0 = unconditioned
    stream_position: StreamPosition = "ahead"  # stream j of a row at position i is at i + j (ahead) or i (same)

    def check_together(self) -> None:
        if self.mode == "lossless" and (self.main_attends_streams or self.lora_rank):
            raise UserError("ss: mode lossless does not support main_attends_streams and lora_rank; use mode shared")
        if self.keep_mlp and not self.adapter_rank:
            raise UserError("ss: keep_mlp requires an adapter_rank of at least 1")
        if self.mode == "shared" and not self.lora_rank:
            raise UserError("ss: mode shared requires a lora_rank of at least 1")

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a JSON-ready dict."""
        return asdict(self)

    def angle(self, context: int) -> float:
        """Return epsilon of eq. 8: at most pi / 2 N_max, with N_max = longest sequence + streams."""
        return self.rotation_step or math.pi / (2 * (context + self.gamma))

    def check_layers(self, layers: int, name: str = "ss") -> int:
        """Return N - N_s for a model of N layers. Raise UserError if streams or pruning do not fit."""
        first_msa_layer = layers - self.n_msa_layers
        if first_msa_layer < 0:
            raise UserError(f"{name}: {self.n_msa_layers} MSA layers, the model has {layers} layers")
        if self.prune_layer > first_msa_layer:
            raise UserError(
                f"{name}: the pruning layer {self.prune_layer} is above layer {first_msa_layer}, where streams begin"
            )
        return first_msa_layer


@dataclass(frozen=True, slots=True)
class SSOptions(Bounded):
    """Options of `ss` and `ss-shared`.

    0, -1 or auto mean: as the streams' folder advises, else as trained.
    """

    weights: str = option("", "Folder with the streams. Empty: those bundled with the model.")
    gamma: Annotated[int, Ge(0)] = option(
        0, "Number of streams in use, at most the trained number. 0: as the folder advises, else all."
    )
    k: Annotated[int, Ge(0)] = option(0, "Candidates per stream; 1 drafts a chain. 0: as the folder advises, else 3.")
    n_draft: Annotated[int, Ge(-1)] = option(
        -1,
        "Number of drafted nodes, the root not counted: the best by joint probability. 0: all. -1: as the folder "
        "advises, else all.",
    )
    n_keep: Annotated[int, Ge(0)] = option(
        0,
        "Number of nodes after pruning, the root included; no effect above n_draft. 0: as the folder advises, else 32.",
    )
    prune: Literal["auto", "on", "off"] = option(
        "auto", "Prune the tree at the pruning layer. auto: as the folder advises, else on."
    )
    prune_layer: Annotated[int, Ge(-1)] = option(-1, "Layer before which the tree is pruned. -1: as trained.")
    prune_threshold: Annotated[float, Ge(0), Lt(1)] = option(
        0.0, "Prune nodes with a transition probability below this."
    )
    mode: Literal["tree", "chain"] = option("tree", "Draft shape: a tree, or a chain with the single best path (k=1).")
    stream_attention_top_p: Annotated[int, Ge(0)] = option(
        0, "Number of keys that a stream attends to: those with the most attention of the main stream. 0: all."
    )
    sample: Literal["on", "off"] = option(
        "off",
        "When sampling: sample candidates from the streams' distributions (eq. 9) instead of taking the "
        "best ones. Such a tree is not pruned, since pruning sampled nodes would not be exact.",
    )
    n_msa_layers: int = option(
        -1, "Number of top layers that streams pass. Only as trained, else an error. -1: as trained."
    )
    adapter_rank: int = option(-1, "Rank of the stream adapters. Only as trained, else an error. -1: as trained.")
    lora_rank: int = option(-1, "Rank of the LoRA of shared mode. Only as trained, else an error. -1: as trained.")
    main_attends_streams: Literal["auto", "on", "off"] = option(
        "auto",
        "Let the main stream attend to its streams (shared mode, eq. 3). Only as trained, else an error. "
        "auto: as trained.",
    )
    stream_init: Literal["auto", "embedding", "rotation"] = option(
        "auto", "How streams are distinguished. Only as trained, else an error. auto: as trained."
    )
    root: Literal["auto", "on", "off"] = option(
        "auto",
        "Condition streams on the newly accepted token (an extension, not in the papers). on, off: use the bundled "
        "weights that were trained so; an error if given weights were trained otherwise. auto: as the bundled folder "
        "advises, or as the weights were trained.",
    )
    parent: Literal["auto", "on", "off"] = option(
        "auto",
        "Condition the children of a node on its token (an extension, not in the papers). on, off, auto: as for root.",
    )
    nodes: Annotated[int, Ge(0)] = option(
        0,
        "Node budget: the best nodes of the whole tree, not pruned; advised values of k, gamma, n_draft, n_keep and "
        "prune are then ignored. 0: n_draft.",
    )
    draft_vocab: str = vocabulary_option()

    def check_together(self) -> None:
        """Refuse two options for the number of nodes."""
        if self.nodes and self.n_draft >= 0:
            raise UserError("ss: nodes and n_draft are the same limit; give one of them")


def check_trained(options: SSOptions, config: StreamConfig, name: str) -> None:
    """Raise UserError for options that differ from the training of these streams."""
    fixed = ("n_msa_layers", "adapter_rank", "lora_rank", "main_attends_streams", "stream_init")
    trained = {key: getattr(config, key) for key in fixed}
    trained |= {"root": config.root_rank > 0, "parent": config.parent_rank > 0}
    for key, value in trained.items():
        requested = getattr(options, key)
        if requested not in (-1, "auto", value_text(value), value):
            raise UserError(f"{name}: {key}={requested} does not fit these streams, trained with {value_text(value)}")


def full_size(gamma: int, k: int) -> int:
    """Return the number of drafted nodes of the full tree: sum of k^g over its levels."""
    return sum(k**g for g in range(1, gamma + 1))


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a step, resolved from options and checkpoint."""

    gamma: int
    k: int
    n_draft: int
    n_keep: int
    prune: bool
    prune_layer: int
    threshold: float
    top_p: int
    sample: bool = False

    def most_tokens(self) -> int:
        """Return the query tokens of a step: the full tree below pruning, kept nodes with streams above it."""
        nodes = 1 + full_size(self.gamma, self.k)
        nodes = min(nodes, 1 + self.n_draft) if self.n_draft else nodes
        kept = min(nodes, self.n_keep) if self.prune and not self.sample else nodes
        return max(nodes, kept * (1 + self.gamma))


def resolve(options: SSOptions, config: StreamConfig, base: ModelInfo, name: str) -> Settings:
    """Return the settings of a step. Raise UserError if gamma, k or the pruning layer is too large.

    options: with the folder's advice.
    """
    pruned = config if options.prune_layer < 0 else replace(config, prune_layer=options.prune_layer)
    first_msa_layer = pruned.check_layers(base.n_layers, name)
    layer = first_msa_layer if pruned.prune_layer < 0 else pruned.prune_layer
    if options.gamma > config.gamma:
        raise UserError(f"{name}: gamma must be 1 to {config.gamma} (as trained), not {options.gamma}")
    gamma, n_draft = options.gamma or config.gamma, options.nodes or max(options.n_draft, 0)
    if n_draft and not config.main_attends_streams:  # under eq. 3 every stream changes the main rows
        gamma = min(gamma, n_draft)  # a tree of n nodes has at most n levels
    k = 1 if options.mode == "chain" else options.k or 3
    if k > base.vocab_size or full_size(gamma, k) > MOST_NODES:
        raise UserError(f"{name}: k={k} with gamma={gamma} makes a tree of more than {MOST_NODES} nodes")
    n_keep = options.n_keep or (options.nodes + 1 if options.nodes else 32)
    return Settings(
        gamma, k, n_draft, n_keep, options.prune != "off", layer, options.prune_threshold,
        options.stream_attention_top_p, options.sample == "on",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SharedAROptions(Bounded):
    """Options of `ss-shared-ar`, on which the output of `ss-shared` depends."""

    weights: str = option("", "Folder as for `ss-shared`. Empty: the one bundled with the model.")
    gamma: Annotated[int, Ge(0)] = option(0, "Number of streams, if the main stream attends to them (eq. 3). 0: all.")
    stream_attention_top_p: Annotated[int, Ge(0)] = option(
        0, "Number of keys that a stream attends to: those with the most attention of the main stream. 0: all."
    )

    def step(self) -> SSOptions:
        """Return options of a step with one candidate per stream and without pruning."""
        return SSOptions(gamma=self.gamma, k=1, prune="off", stream_attention_top_p=self.stream_attention_top_p)
