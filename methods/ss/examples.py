"""Speculative Streaming with random streams, lossless and shared: what the laws are tried on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from specbench_ss.engine.decoder import Decoder
from specbench_ss.engine.target import Target
from specbench_ss.methods._shared.fine_tuned import fine_tuned
from specbench_ss.methods.ss.options import SharedAROptions, SSOptions
from specbench_ss.methods.ss.stream_config import StreamConfig
from specbench_ss.methods.ss.streams import Streams
from specbench_ss.models.tiny import randomise

TWO_LAYERS = StreamConfig(gamma=3, n_msa_layers=2, init_rank=2)
ROTATED = StreamConfig(gamma=3, n_msa_layers=2, adapter_rank=0, stream_init="rotation", rotation_step=0.4)
ROOTED = StreamConfig(gamma=3, n_msa_layers=2, root_rank=4)
CONDITIONED = StreamConfig(gamma=3, n_msa_layers=2, root_rank=4, parent_rank=4)
SAME_POSITION = StreamConfig(gamma=3, n_msa_layers=2, stream_position="same")
BESIDE_MLP = StreamConfig(gamma=3, n_msa_layers=2, keep_mlp=True)
EARLY_PRUNING = StreamConfig(gamma=2, n_msa_layers=1, prune_layer=1)
SHARED = StreamConfig(gamma=3, n_msa_layers=2, adapter_rank=0, mode="shared", lora_rank=4)
ATTENDING = StreamConfig(gamma=3, n_msa_layers=2, adapter_rank=0, mode="shared", lora_rank=4, main_attends_streams=True)
D = TypeVar("D", bound=Decoder)
Made = Callable[..., D]  # a class of methods/ss, which takes target, options, streams


def random_streams(target: Target, config: StreamConfig) -> Streams:
    """Streams that draft something."""
    module = Streams(config, target.hidden_size)
    randomise(module, 2)
    return module


def streaming(method: Made[D], target: Target, config: StreamConfig, options: SSOptions) -> D:
    """Lossless mode."""
    return method(target, options, random_streams(target, config))


def shapes(method: Made[D], target: Target) -> dict[str, Callable[[], D]]:
    """Trees, chains, pruning early and late, and the ways in which streams begin and attend."""

    def made(config: StreamConfig, **options: Any) -> Callable[[], D]:
        return lambda: streaming(method, target, config, SSOptions(**options))

    return {
        "tree": made(TWO_LAYERS, k=2, n_keep=6),
        "unpruned": made(TWO_LAYERS, k=2, prune="off"),
        "chain": made(TWO_LAYERS, mode="chain"),
        "best-nodes": made(TWO_LAYERS, k=3, n_draft=9, n_keep=5),
        "threshold": made(TWO_LAYERS, k=2, prune_threshold=0.05),
        "one-kept": made(TWO_LAYERS, k=2, n_keep=1),
        "early-pruning": made(EARLY_PRUNING, k=3, n_keep=4),
        "rotation": made(ROTATED, k=2, n_keep=6),
        "top-p": made(TWO_LAYERS, k=2, n_keep=6, stream_attention_top_p=3),
        "root": made(ROOTED, k=2, n_keep=6),
        "root-chain": made(ROOTED, mode="chain", gamma=2),
        "parent": made(CONDITIONED, k=3, n_draft=9, n_keep=6),
        "parent-chain": made(CONDITIONED, mode="chain", gamma=2),
        "same-position": made(SAME_POSITION, k=2, n_keep=6),
        "beside-mlp": made(BESIDE_MLP, k=2, n_keep=6),
        "fewer-streams": made(TWO_LAYERS, gamma=1, k=3),
        "drawn": made(TWO_LAYERS, k=3, n_draft=9, n_keep=5, sample="on"),
    }


def shared_shapes(method: Made[D], target: Target) -> dict[str, Callable[[], D]]:
    """Of another model than the target: without and with eq. 3, which sliding windows do not have."""
    tuned, attending = fine_tuned(target), not any(target.windows)

    def made(config: StreamConfig, **options: Any) -> Callable[[], D]:
        return lambda: method(tuned, SSOptions(k=2, n_keep=6, **options), random_streams(tuned, config))

    shapes = {"tree": made(SHARED), "chain": made(SHARED, mode="chain")}
    if not attending:
        return shapes
    return {"eq-3": made(ATTENDING), **shapes, "eq-3-chain": made(ATTENDING, mode="chain", gamma=2)}


def shared_ar_shapes(method: Made[D], target: Target) -> dict[str, Callable[[], D]]:
    """The same models, a token at a time."""
    tuned, attending = fine_tuned(target), not any(target.windows)

    def made(config: StreamConfig, **options: Any) -> Callable[[], D]:
        return lambda: method(tuned, SharedAROptions(**options), random_streams(tuned, config))

    return ({"eq-3": made(ATTENDING)} if attending else {}) | {"plain": made(SHARED)}
