"""Every lossless method with random weights, in many shapes: what the laws are tested on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from specbench_ss.decoder import Decoder
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.medusa import Medusa, MedusaOptions
from specbench_ss.methods.medusa.heads import MedusaHeads
from specbench_ss.methods.medusa.trees import PUBLISHED, tree_of
from specbench_ss.methods.ss import SpeculativeStreaming
from specbench_ss.methods.ss.config import StreamConfig
from specbench_ss.methods.ss.options import SSOptions
from specbench_ss.methods.ss.streams import Streams
from specbench_ss.target import Target


def randomise(module: nn.Module, seed: int, std: float = 0.3) -> None:
    """Weights that draft something else than the identity does."""
    generator = torch.Generator().manual_seed(seed)
    for p in module.parameters():
        nn.init.normal_(p, std=std, generator=generator)


def medusa(target: Target, heads: int = 3, own_unembed: bool = True) -> Medusa:
    """Random heads on the published tree, as deep as there are heads."""
    module = MedusaHeads(heads, 1, target.hidden_size, target.vocab_size, own_unembed)
    randomise(module, 1)
    choices = [c for c in PUBLISHED if len(c) <= heads and max(c) < target.vocab_size]
    return Medusa(target, MedusaOptions(), module, tree_of(choices))


def streaming(target: Target, config: StreamConfig, options: SSOptions) -> SpeculativeStreaming:
    """Random streams."""
    module = Streams(config, target.hidden_size)
    randomise(module, 2)
    return SpeculativeStreaming(target, options, module, {})


TWO_LAYERS = StreamConfig(gamma=3, n_msa_layers=2, init_rank=2)
ROTATED = StreamConfig(gamma=3, n_msa_layers=2, adapter_rank=0, stream_init="rotation", rotation_step=0.4)
EARLY_PRUNING = StreamConfig(gamma=2, n_msa_layers=1, prune_layer=1)

VARIANTS: dict[str, Callable[[Target], Decoder]] = {
    "ar": Autoregressive,
    "medusa": medusa,
    "medusa-shared-head": lambda t: medusa(t, 4, own_unembed=False),
    "ss": lambda t: streaming(t, TWO_LAYERS, SSOptions(k=2, n_keep=6)),
    "ss-unpruned": lambda t: streaming(t, TWO_LAYERS, SSOptions(k=2, prune="off")),
    "ss-chain": lambda t: streaming(t, TWO_LAYERS, SSOptions(mode="chain")),
    "ss-best-nodes": lambda t: streaming(t, TWO_LAYERS, SSOptions(k=3, n_draft=9, n_keep=5)),
    "ss-threshold": lambda t: streaming(t, TWO_LAYERS, SSOptions(k=2, prune_threshold=0.05)),
    "ss-one-kept": lambda t: streaming(t, TWO_LAYERS, SSOptions(k=2, n_keep=1)),
    "ss-early-pruning": lambda t: streaming(t, EARLY_PRUNING, SSOptions(k=3, n_keep=4)),
    "ss-rotation": lambda t: streaming(t, ROTATED, SSOptions(k=2, n_keep=6)),
    "ss-top-p": lambda t: streaming(t, TWO_LAYERS, SSOptions(k=2, n_keep=6, stream_attention_top_p=3)),
    "ss-fewer-streams": lambda t: streaming(t, TWO_LAYERS, SSOptions(gamma=1, k=3)),
}


def variants(target: Target) -> Iterator[tuple[str, Decoder]]:
    """All of them, bound to a target."""
    for name, make in VARIANTS.items():
        yield name, make(target)
