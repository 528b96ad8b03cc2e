"""The drafters that the ACL paper compares (figures 8 and 9), on the meta device: parameters, and FLOPs of one draft.

FLOPs are those that torch's counter sees in the forward pass: 2 for each multiply-add of a matrix product, attention
included. Speculative Streaming, Medusa and the draft model run this project's own decoding code.
"""

from __future__ import annotations

import torch

from specbench_ss.engine.target import Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.methods._shared.static_trees import PUBLISHED, tree_of
from specbench_ss.methods.medusa.decoding import Medusa
from specbench_ss.methods.medusa.heads import MedusaHeads
from specbench_ss.methods.medusa.options import MedusaOptions
from specbench_ss.methods.ss.decoding import SpeculativeStreaming
from specbench_ss.methods.ss.drafting import draft_tree
from specbench_ss.methods.ss.options import SSOptions
from specbench_ss.methods.ss.stream_config import StreamConfig
from specbench_ss.methods.ss.streams import Streams
from specbench_ss.reports.paper.meta_device import HEADS, META, Overhead, count, flops, meta_state
from specbench_ss.reports.paper.paper_models import meta_target
from specbench_ss.reports.paper.rival_costs import eagle, hydra

GAMMA, K, KEPT = 4, 3, 32  # ACL sec. 3 and N.1
TOP_P = 64  # ACL H.1


LOSSLESS = StreamConfig(gamma=GAMMA, n_msa_layers=4, adapter_rank=8, prune_rank=8)  # ACL sec. 3, appendix M
SHARED = StreamConfig(gamma=GAMMA, n_msa_layers=4, adapter_rank=0, prune_rank=8, mode="shared", lora_rank=32)


def meta_streams(hidden: int, config: StreamConfig = LOSSLESS) -> Streams:
    """Return streams as published: gamma h + 2 R_s h N_s + 2 theta h parameters.

    Shared streams, without the baseline's LoRA, have 20 h.
    """
    with META:
        return Streams(config, hidden)


def meta_heads(hidden: int, vocab: int) -> MedusaHeads:
    """Return four Medusa heads of one residual block each (ACL N.1)."""
    with META:
        return MedusaHeads(HEADS, 1, hidden, vocab)


def streaming(target: Target, top_p: int = 0) -> Overhead:
    """Return what the fused pass costs beyond verifying the same tree: streams, draft logits, early exit.

    top_p: number of tokens that streams attend to (ACL H.1); 0 means all.
    """
    streams = meta_streams(target.hidden_size)
    options = SSOptions(k=K, prune="off", stream_attention_top_p=top_p)
    decoder = SpeculativeStreaming(target, options, streams)
    logits = torch.empty(GAMMA, target.vocab_size, device=META)
    root = torch.empty(1, dtype=torch.long, device=META)
    full = draft_tree(root, logits, K, 0)
    final = torch.empty(GAMMA, target.hidden_size, device=META)
    drafting = flops(lambda: target.logits(final))
    # any ancestor-closed choice of so many nodes has these shapes
    all_kept, one = (drafting + beside(target, decoder, full.select(range(nodes))) for nodes in (KEPT, 1))
    return Overhead(count(streams), 1, all_kept + early_exit(target, streams, full), one)


def beside(target: Target, decoder: SpeculativeStreaming, tree: DraftTree) -> int:
    """Return what a fused pass over this tree costs beyond a plain one: the streams beside its nodes."""
    fused = flops(lambda: decoder.forward(meta_state(target), tree))
    return fused - flops(lambda: target.forward_tree(tree, meta_state(target).cache))


def early_exit(target: Target, streams: Streams, tree: DraftTree) -> int:
    """Return the FLOPs of the early-exit logits at every node with children (sec. 2.3)."""
    inner = len(set(tree.shape.parents[1:]))
    states = torch.empty(inner, target.hidden_size, device=META)
    return flops(lambda: target.logits(target.family.norm(streams.early_exit(states))))


def medusa(target: Target) -> Overhead:
    """Return the costs of four Medusa heads with the published tree. A chain costs as much: each head runs once."""
    heads = meta_heads(target.hidden_size, target.vocab_size)
    decoder = Medusa(target, MedusaOptions(), heads, tree_of(PUBLISHED))
    drafting = flops(lambda: decoder.propose(meta_state(target)))
    return Overhead(count(heads), 1, drafting, drafting)


def draft_model(name: str = "Llama-68M", gamma: int = GAMMA) -> Overhead:
    """Return the costs of a chain of gamma tokens from a model of its own."""
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
        "Hydra": hydra(target, model, plus=False),
        "Hydra++": hydra(target, model, plus=True),
        "Eagle": eagle(target, model),
        "SS-Lossless": streaming(target, TOP_P),
        "SS-Lossless, full attention": streaming(target),
    }
