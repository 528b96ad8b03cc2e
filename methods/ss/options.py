"""Options of `ss` and `ss-shared`: those of a step, and those that only a training can change."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from specbench_ss.decoding.outline import Outline
from specbench_ss.decoding.tree import MOST_NODES
from specbench_ss.errors import UserError
from specbench_ss.methods.ss.stream_config import StreamConfig

LEAST = {"gamma": 0, "k": 0, "n_draft": -1, "n_keep": 0, "prune_layer": -1, "stream_attention_top_p": 0}
TRAINED = ("n_msa_layers", "adapter_rank", "lora_rank")


@dataclass(frozen=True, slots=True)
class SSOptions:
    """0, -1 or auto = as trained, or as the checkpoint advises. Raises ValueError for what no checkpoint can mean."""

    weights: str = field(default="", metadata={"help": "folder with the streams; empty = those of the model"})
    gamma: int = field(default=0, metadata={"help": "streams used per step, at most the trained number; 0 = all"})
    k: int = field(default=0, metadata={"help": "candidates per stream; 1 = chain; 0 = the checkpoint's"})
    n_draft: int = field(
        default=-1,
        metadata={"help": "draft only this many nodes, the best by joint probability; 0 = all, -1 = the checkpoint's"},
    )
    n_keep: int = field(default=0, metadata={"help": "most nodes after pruning, root included; 0 = the checkpoint's"})
    prune: Literal["on", "off"] = field(default="on", metadata={"help": "prune the tree at the pruning layer"})
    prune_layer: int = field(default=-1, metadata={"help": "prune before this layer; -1 = as trained"})
    prune_threshold: float = field(default=0.0, metadata={"help": "drop nodes of smaller transition probability"})
    mode: Literal["tree", "chain"] = field(default="tree", metadata={"help": "chain = the single best path (k=1)"})
    stream_attention_top_p: int = field(
        default=0, metadata={"help": "streams see the p tokens their main row attends to most; 0 = all"}
    )
    n_msa_layers: int = field(default=-1, metadata={"help": "as trained (-1), or an error"})
    adapter_rank: int = field(
        default=-1, metadata={"help": "rank of the stream adapters: as trained (-1), or an error"}
    )
    lora_rank: int = field(default=-1, metadata={"help": "rank of the LoRA (shared): as trained (-1), or an error"})
    main_attends_streams: Literal["auto", "on", "off"] = field(
        default="auto", metadata={"help": "main sees its streams (shared, eq. 3): as trained (auto), or an error"}
    )
    stream_init: Literal["auto", "embedding", "rotation"] = field(
        default="auto", metadata={"help": "what tells streams apart: as trained (auto), or an error"}
    )

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not 0 <= self.prune_threshold < 1:
            raise ValueError(f"prune_threshold must be 0 or more and below 1, not {self.prune_threshold}")


def check_trained(options: SSOptions, config: StreamConfig, name: str) -> None:
    """Raise UserError where the user asks for what these streams were not trained with."""
    asked: dict[str, Any] = {n: getattr(options, n) for n in TRAINED if getattr(options, n) >= 0}
    if options.main_attends_streams != "auto":
        asked["main_attends_streams"] = options.main_attends_streams == "on"
    if options.stream_init != "auto":
        asked["stream_init"] = options.stream_init
    for field_name, value in asked.items():
        have = getattr(config, field_name)
        if have != value:
            raise UserError(f"{name}: these streams were trained with {field_name} {have}, not {value}")


@dataclass(frozen=True, slots=True)
class Settings:
    """Options, checkpoint and its advice made one: what a step does."""

    gamma: int
    k: int
    n_draft: int
    n_keep: int
    prune: bool
    prune_layer: int
    threshold: float
    top_p: int

    def most_rows(self) -> int:
        """Rows of a step: the whole tree below the pruning layer, kept nodes with their streams above it."""
        nodes: int = 1 + sum(self.k**g for g in range(1, self.gamma + 1))
        nodes = min(nodes, 1 + self.n_draft) if self.n_draft else nodes
        kept = min(nodes, self.n_keep) if self.prune else nodes
        return max(nodes, kept * (1 + self.gamma))


def resolve(options: SSOptions, config: StreamConfig, advice: dict[str, int], base: Outline, name: str) -> Settings:
    """Raises UserError, naming the method, for what cannot be: gamma or k of zero or too large, pruning too high up."""
    lo = config.check_layers(base.n_layers, name)
    if not 0 <= options.gamma <= config.gamma:
        raise UserError(f"{name}: gamma must be 1 to {config.gamma} (as trained), not {options.gamma}")
    gamma = options.gamma or config.gamma
    k = 1 if options.mode == "chain" else options.k or advice.get("k", 3)
    n_draft = options.n_draft if options.n_draft >= 0 else advice.get("n_draft", 0)
    n_keep = options.n_keep or advice.get("n_keep", 32)
    trained_at = lo if config.prune_layer < 0 else config.prune_layer
    layer = trained_at if options.prune_layer < 0 else options.prune_layer
    if min(k, n_keep) < 1:
        raise UserError(f"{name}: k and n_keep must be at least 1")
    if k > base.vocab_size or k**gamma > MOST_NODES:
        raise UserError(f"{name}: k={k} with gamma={gamma} makes a tree of more than {MOST_NODES} nodes")
    if layer > lo:
        raise UserError(f"{name}: the pruning layer {layer} is above layer {lo}, where streams begin")
    return Settings(
        gamma, k, n_draft, n_keep, options.prune == "on", layer, options.prune_threshold, options.stream_attention_top_p
    )


@dataclass(frozen=True, slots=True)
class SharedAROptions:
    """Which model: what the output of ss-shared depends on."""

    weights: str = field(default="", metadata={"help": "folder as for ss-shared; empty = the model's own"})
    gamma: int = field(default=0, metadata={"help": "as for ss-shared"})
    stream_attention_top_p: int = field(default=0, metadata={"help": "as for ss-shared"})

    def __post_init__(self) -> None:
        self.step()  # raises for values that ss-shared has not either

    def step(self) -> SSOptions:
        """One candidate a stream, nothing pruned."""
        return SSOptions(gamma=self.gamma, k=1, prune="off", stream_attention_top_p=self.stream_attention_top_p)
