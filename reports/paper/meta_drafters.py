"""The papers' models and drafters on the meta device: parameters and FLOPs of real modules, without weights.

FLOPs are those that torch's counter sees: 2 for each multiply-add of a matrix product, attention included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from specbench_ss.engine.decoder import DecodeState
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import FINAL, Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.methods._shared.heads import PUBLISHED, Choice, tree_of
from specbench_ss.methods._shared.small_llama import llama_layer
from specbench_ss.methods.eagle.drafter import Eagle1Drafter, new_eagle
from specbench_ss.methods.hydra.decode import Hydra, HydraOptions
from specbench_ss.methods.hydra.heads import HydraHeads, Prefix
from specbench_ss.methods.medusa.decode import Medusa, MedusaOptions
from specbench_ss.methods.medusa.heads import MedusaHeads
from specbench_ss.methods.ss.config import SSOptions, StreamConfig
from specbench_ss.methods.ss.decode import SpeculativeStreaming
from specbench_ss.methods.ss.layers import Streams
from specbench_ss.methods.ss.tree import draft_tree

META = torch.device("meta")
CONTEXT = 512  # tokens in the cache; the papers do not give theirs
HEADS = 4  # of Medusa and Hydra (EMNLP N.1)
GAMMA, K, KEPT = 4, 3, 32  # of the streams: EMNLP sec. 3 and N.1
TOP_P = 64  # EMNLP H.1
LOSSLESS = StreamConfig(gamma=GAMMA, n_msa_layers=4, adapter_rank=8, prune_rank=8)  # EMNLP sec. 3, appendix M
SHARED = StreamConfig(gamma=GAMMA, n_msa_layers=4, adapter_rank=0, prune_rank=8, mode="shared", lora_rank=32)
EAGLE_ROWS = (1, 4, 8, 8, 3)  # nodes expanded at each depth of EAGLE's static 25-node tree
DRAFT = "OPT-125M"  # the draft model of EMNLP table 5


@dataclass(frozen=True, slots=True)
class PaperModel:
    """Published values of a model's config. hub: repository of the weights. kind: model type in transformers."""

    hub: str
    hidden: int
    inner: int
    layers: int
    heads: int
    vocab: int = 32000
    kv_heads: int = 0  # 0: as many as heads
    kind: str = "llama"


MODELS: dict[str, PaperModel] = {
    "Vicuna-7B": PaperModel("lmsys/vicuna-7b-v1.3", 4096, 11008, 32, 32),
    "Vicuna-13B": PaperModel("lmsys/vicuna-13b-v1.3", 5120, 13824, 40, 40),
    "Vicuna-33B": PaperModel("lmsys/vicuna-33b-v1.3", 6656, 17920, 60, 52),
    "Llama-2-Chat-7B": PaperModel("meta-llama/Llama-2-7b-chat-hf", 4096, 11008, 32, 32),
    "Llama-2-Chat-13B": PaperModel("meta-llama/Llama-2-13b-chat-hf", 5120, 13824, 40, 40),
    "Llama-2-7B": PaperModel("meta-llama/Llama-2-7b-hf", 4096, 11008, 32, 32),
    "Llama-13B": PaperModel("huggyllama/llama-13b", 5120, 13824, 40, 40),
    "OpenLlama-7B": PaperModel("openlm-research/open_llama_7b", 4096, 11008, 32, 32),
    "Mistral-7B": PaperModel("mistralai/Mistral-7B-Instruct-v0.1", 4096, 14336, 32, 32, kv_heads=8, kind="mistral"),
    "Phi-3": PaperModel("microsoft/Phi-3-mini-4k-instruct", 3072, 8192, 32, 32, 32064, kind="phi3"),
    "Phi-1.3B": PaperModel("microsoft/phi-1_5", 2048, 8192, 24, 32, 51200, kind="phi"),
    "OPT-1.3B": PaperModel("facebook/opt-1.3b", 2048, 8192, 24, 32, 50272, kind="opt"),
    "OPT-6.7B": PaperModel("facebook/opt-6.7b", 4096, 16384, 32, 32, 50272, kind="opt"),
    "OPT-125M": PaperModel("facebook/opt-125m", 768, 3072, 12, 12, 50272, kind="opt"),
    "Llama-68M": PaperModel("JackFram/llama-68m", 768, 3072, 2, 12),
}


@cache
def meta_target(name: str) -> Target:
    """Return a published model on the meta device: shapes and decoding code, no weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = MODELS[name]
    auto: Any = AutoModelForCausalLM
    shape = {
        "hidden_size": model.hidden, "num_hidden_layers": model.layers, "num_attention_heads": model.heads,
        "vocab_size": model.vocab,
    }  # fmt: skip
    if model.kind == "opt":
        shape |= {"ffn_dim": model.inner, "word_embed_proj_dim": model.hidden}
    else:
        shape |= {"intermediate_size": model.inner, "num_key_value_heads": model.kv_heads or model.heads}
    extra = {"sliding_window": None} if model.kind in ("mistral", "phi3") else {}
    config = AutoConfig.for_model(model.kind, **shape, **extra, pad_token_id=0)
    with META:
        built = auto.from_config(config, attn_implementation="sdpa")
    return Target(built, None, name)


def at_hand(hub: str) -> bool:
    """Return True if published weights are in the local hub cache, without a network request."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(hub, "config.json"), str)


# -- counting -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Overhead:
    """parameters: those beyond the base's. passes: forward passes of the drafter per draft.

    flops: those of all passes. one_node: those of a chain, which has one node on each level and nothing to prune.
    """

    parameters: int
    passes: int
    flops: int
    one_node: int


def count(module: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(p.numel() for p in module.parameters())


def flops(work: Callable[[], Any], learning: bool = False) -> int:
    """Return the FLOPs that torch's counter sees while `work` runs. learning: it computes gradients."""
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(learning):
        work()
    return int(counter.get_total_flops())


def meta_state(target: Target, rows: int = 256) -> DecodeState:
    """Return the state of a request that has reached CONTEXT tokens, with room for this many rows."""
    cache = target.new_cache(CONTEXT + rows)
    cache.commit(CONTEXT)
    root = torch.empty(1, dtype=torch.long, device=META)
    return DecodeState([0] * (CONTEXT + 1), CONTEXT, root, cache, SamplingParams(), {FINAL: _states(target, 1)})


def _states(target: Target, rows: int) -> Tensor:
    return torch.empty(1, rows, target.hidden_size, device=META, dtype=target.dtype)


MODULES: dict[str, Callable[[int, int], nn.Module]] = {  # by hidden size and vocabulary, what a method adds
    "Medusa": lambda hidden, vocab: MedusaHeads(HEADS, 1, hidden, vocab),  # EMNLP N.1
    "Hydra": lambda hidden, vocab: HydraHeads(HEADS, 1, hidden, vocab, tied=True),
    "Hydra++": lambda hidden, vocab: HydraHeads(HEADS, 4, hidden, vocab, tied=True),
    "SS-Shared": lambda hidden, vocab: Streams(SHARED, hidden),  # 20 h, the baseline's LoRA left out
    "SS-Lossless": lambda hidden, vocab: Streams(LOSSLESS, hidden),  # gamma h + 2 R_s h N_s + 2 theta h
}


def module(method: str, hidden: int, vocab: int) -> Any:
    """Return what a method adds to a target of this size, on the meta device."""
    with META:
        return MODULES[method](hidden, vocab)


def meta_eagle(target: Target) -> Eagle1Drafter:
    """Return EAGLE's drafter: a fusion layer and one decoder layer of the base's shape, without its first norm."""
    with META:
        return new_eagle(target)[0]


def added_parameters(model: str, method: str) -> int:
    """Count the parameters that the method adds to a published model."""
    if method == "2-Model SD":
        return int(meta_target(DRAFT).parameter_count)
    if method == "Eagle":
        return count(meta_eagle(meta_target(model)))
    return count(module(method, MODELS[model].hidden, MODELS[model].vocab))


# -- drafters -----------------------------------------------------------------------------------------------------


def streaming(target: Target, top_p: int = 0) -> Overhead:
    """Return what the fused pass costs beyond verifying the same tree: streams, draft logits, early exit.

    top_p: number of tokens that streams attend to (EMNLP H.1); 0 means all.
    """
    streams = module("SS-Lossless", target.hidden_size, target.vocab_size)
    decoder = SpeculativeStreaming(target, SSOptions(k=K, prune="off", stream_attention_top_p=top_p), streams)
    logits = torch.empty(GAMMA, target.vocab_size, device=META)
    full = draft_tree(torch.empty(1, dtype=torch.long, device=META), logits, K, 0)
    drafting = flops(lambda: target.logits(torch.empty(GAMMA, target.hidden_size, device=META)))
    # any ancestor-closed choice of this number of nodes has these shapes
    kept, one = (drafting + _streams_flops(target, decoder, full.subtree(range(nodes))) for nodes in (KEPT, 1))
    inner = torch.empty(len(set(full.topology.parents[1:])), target.hidden_size, device=META)  # nodes with children
    early_exit = flops(lambda: target.logits(target.family.norm(streams.early_exit(inner))))  # sec. 2.3
    return Overhead(count(streams), 1, kept + early_exit, one)


def _streams_flops(target: Target, decoder: SpeculativeStreaming, tree: DraftTree) -> int:
    """Return the FLOPs of the streams in a fused pass over this tree."""
    fused = flops(lambda: decoder.forward(meta_state(target), tree))
    return fused - flops(lambda: target.forward_tree(tree, meta_state(target).cache))


def medusa(target: Target) -> Overhead:
    """Return the costs of four Medusa heads with the published tree. A chain costs as much: each head runs once."""
    heads = module("Medusa", target.hidden_size, target.vocab_size)
    decoder = Medusa(target, MedusaOptions(), heads, tree=tree_of(PUBLISHED))
    drafting = flops(lambda: decoder.propose(meta_state(target)))
    return Overhead(count(heads), 1, drafting, drafting)


def hydra(target: Target, plus: bool) -> Overhead:
    """Return the costs of four heads, one after the other, on Medusa's published tree.

    plus: Hydra++, which has four blocks a head and a prefix layer that runs once a draft, on the newest state.
    """
    heads = module("Hydra++" if plus else "Hydra", target.hidden_size, target.vocab_size)
    parameters, prefix_flops = count(heads), 0
    if plus:
        with META:
            prefix = Prefix(llama_layer(target))
        parameters += count(prefix)
        state, rotary = meta_state(target), _rotary(prefix.config.head_dim or 0, 1)
        prefix_flops = flops(lambda: prefix(_states(target, 1), state.cache, None, rotary))

    def drafting(choices: Sequence[Choice]) -> int:
        decoder, state = Hydra(target, HydraOptions(), heads, tree=tree_of(choices)), meta_state(target)
        decoder.on_prefill(state)
        return prefix_flops + flops(lambda: decoder.propose(state))

    return Overhead(parameters, HEADS, drafting(PUBLISHED), drafting([(0,) * n for n in range(1, HEADS + 1)]))


def eagle(target: Target) -> Overhead:
    """Return the costs of five passes of the layer over the static tree, each with the base's LM head."""
    drafter = meta_eagle(target)

    def level(rows: int) -> int:
        state, x, rotary = meta_state(target), _states(target, rows), _rotary(drafter.config.head_dim, rows)
        mask = target.block_mask(torch.ones(rows, rows, dtype=torch.bool, device=META), CONTEXT)
        return flops(lambda: drafter.logits(drafter(x, x, state.cache, mask, rotary), target))

    levels = len(EAGLE_ROWS)
    return Overhead(count(drafter), levels, sum(map(level, EAGLE_ROWS)), levels * level(1))


def _rotary(head_dim: int, rows: int) -> tuple[Tensor, Tensor]:
    table = torch.empty(1, rows, head_dim, device=META)
    return table, table


def draft_model(name: str = "Llama-68M", gamma: int = GAMMA) -> Overhead:
    """Return the costs of a chain of gamma tokens from a separate model."""
    target = meta_target(name)
    state = meta_state(target)
    one = flops(lambda: target.forward_tree(DraftTree.root_only(state.root), state.cache))
    return Overhead(target.parameter_count, gamma, gamma * one, gamma * one)


def all_overheads(model: str) -> dict[str, Overhead]:
    """Return the costs of every drafter of figures 8 and 9 at one base."""
    target = meta_target(model)
    return {
        "2-Model SD": draft_model(),
        "Medusa": medusa(target),
        "Hydra": hydra(target, plus=False),
        "Hydra++": hydra(target, plus=True),
        "Eagle": eagle(target),
        "SS-Lossless": streaming(target, TOP_P),
        "SS-Lossless, full attention": streaming(target),
    }
