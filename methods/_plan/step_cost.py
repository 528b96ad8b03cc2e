"""Time of a step by its kind of drafter and its number of draft tokens, next to a step of `ar`.

No trained weights are needed: drafters are untrained, and acceptance is forced. Every step keeps two tokens if it
drafts any, so contexts grow equally. Steps of the drafter and of `ar` over the same context are made in turn, some
in a row: alone among steps of the other, each would find the processor's caches filled by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import torch

from specbench_ss.engine.decoder import Decoder, DecoderWrapper, DecodeState, Step
from specbench_ss.engine.generate import DecodeSession, StopParams
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Output, Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.engine.verify import VerifyResult, verify
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.draft_vocabulary import with_frequent_tokens
from specbench_ss.methods._shared.heads import best_tree, tree_of
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.eagle.decode import DynamicOptions, Eagle2
from specbench_ss.methods.eagle.drafter import new_eagle
from specbench_ss.methods.medusa.decode import Medusa, MedusaOptions
from specbench_ss.methods.medusa.heads import MedusaHeads
from specbench_ss.methods.sd.decode import TwoModel, TwoModelOptions
from specbench_ss.methods.ss.config import SSOptions, StreamConfig
from specbench_ss.methods.ss.decode import SpeculativeStreaming
from specbench_ss.methods.ss.layers import Streams

LOOKUP, MEDUSA, SS, EAGLE, SD = "lookup", "medusa", "ss", "eagle", "sd"
KEPT = 2  # tokens that a step keeps, where it drafts any
STREAMS = 4
RANKS = [[0.5 / (rank + 1) for rank in range(10)]] * 4  # of Medusa's tree: any will do, its size is what counts
WARMUP = 3  # steps that are not counted
IN_A_ROW = 6  # steps of one before those of the other; the first one finds the caches of the other, and is left out


class Chain(Decoder):
    """Decoder that verifies a chain of the same token, for the cost of verification alone."""

    name, summary = LOOKUP, "a chain that nobody drafted"

    def __init__(self, target: Target, nodes: int) -> None:
        super().__init__(target)
        self.drafted = torch.full((nodes,), 5, device=target.device)

    def propose(self, state: DecodeState) -> DraftTree:
        """Return the chain."""
        return DraftTree.chain(state.root, self.drafted)


class Forced(DecoderWrapper):
    """Wrapper of a decoder whose steps keep KEPT tokens in any case."""

    name, summary = "forced", "another decoder with forced acceptance"

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        """Verify, so that its time is in the step; then keep the first child of the root, and what follows it."""
        honest = verify(output.logits[0], tree, state.sampling, state.rng)
        path = [0, *tree.topology.children()[0][: KEPT - 1]]
        tokens = [honest.tokens[-1]] * len(path)  # their values are irrelevant
        return VerifyResult(path, tokens, honest.next_token, honest.root, honest.max_logits)


def untrained(
    kind: str, target: Target, nodes: int, draft_vocab: int = 0, draft: Target | None = None, own_heads: bool = False
) -> Decoder:
    """Return an untrained method that drafts up to `nodes` tokens. Raises UserError if the target cannot have it.

    Args:
        kind: `lookup` (drafts cost nothing), `medusa` (four heads), `ss` (four streams in the last four layers),
            `eagle` (one layer, with the levels of EAGLE-2) or `sd` (a chain of `draft`).
        target: model to verify with.
        nodes: draft tokens per step.
        draft_vocab: ids among which is drafted; 0: all.
        draft: draft model of `sd`.
        own_heads: Medusa's heads have LM heads of their own instead of the target's.
    """
    torch.manual_seed(0)
    vocab = str(draft_vocab) if draft_vocab else ""
    if kind == LOOKUP:
        return Chain(target, nodes)
    if kind in (MEDUSA, EAGLE):
        target.require_hidden_eq_embedding(kind)
    if kind == MEDUSA:
        heads = MedusaHeads(len(RANKS), 1, target.hidden_size, target.vocab_size, own_unembed=own_heads)
        heads, tree = with_frequent_tokens(heads, target.vocab_size), tree_of(best_tree(RANKS, nodes))
        return Medusa(target, MedusaOptions(draft_vocab=vocab), heads, tree=tree)
    if kind == EAGLE:
        drafter, config = new_eagle(target)
        size = Eagle2.with_nodes({}, nodes)
        depth, top_k = int(size["depth"]), int(size["top_k"])
        options = DynamicOptions(total_tokens=nodes + 1, depth=depth, top_k=top_k, draft_vocab=vocab)
        return Eagle2(target, options, with_frequent_tokens(drafter, target.vocab_size), config)
    if kind == SS:
        target.require_layer_access(SS)
        shape = StreamConfig(gamma=STREAMS, n_msa_layers=min(4, target.n_layers - 1), adapter_rank=8, prune_rank=8)
        streams = with_frequent_tokens(Streams(shape, target.hidden_size), target.vocab_size)
        return SpeculativeStreaming(target, SSOptions(k=4, n_draft=nodes, prune="off", draft_vocab=vocab), streams)
    if draft is None:
        raise UserError("the kind sd needs a draft model")
    frequent = torch.arange(draft.vocab_size - 1, -1, -1)
    return TwoModel(target, TwoModelOptions(gamma=nodes, draft_vocab=vocab), draft, frequent)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Medians over steps, in milliseconds. nodes: drafted tokens. ratio: step_ms / ar_ms."""

    nodes: int
    step_ms: float
    ar_ms: float
    ratio: float
    draft_ms: float
    verify_ms: float


@torch.inference_mode()
def step_cost(decoder: Decoder, context: int, rows: int, steps: int) -> StepCost:
    """Measure steps of a decoder and of `ar` in turn.

    Args:
        decoder: method to measure.
        context: tokens before the first step.
        rows: most rows that a step writes into the KV cache, of streams too.
        steps: number of steps.
    """
    prompt = [5 + i % 40 for i in range(context)]
    room = (steps + WARMUP) * KEPT + 2 * rows
    runs = [session(Forced(one), prompt, room) for one in (decoder, Autoregressive(decoder.target))]
    taken: tuple[list[Step], list[Step]] = [], []
    for done in range(0, steps + WARMUP, IN_A_ROW):
        for (one, state), own in zip(runs, taken, strict=True):
            own += [one.step(state) for _ in range(min(IN_A_ROW, steps + WARMUP - done))][done > 0 :]
    own, ar = (made[WARMUP:] for made in taken)
    step_ms, ar_ms = (1e3 * median(step.total_s for step in made) for made in (own, ar))
    return StepCost(
        nodes=int(median(step.draft_nodes for step in own)),
        step_ms=step_ms,
        ar_ms=ar_ms,
        ratio=step_ms / ar_ms,
        draft_ms=1e3 * median(step.draft_s for step in own),
        verify_ms=1e3 * median(step.verify_s for step in own),
    )


def session(decoder: Decoder, prompt: list[int], room: int) -> tuple[DecodeSession, DecodeState]:
    """Return a prefilled request with its own cache, and its state. room: rows behind the prompt."""
    capacity = len(prompt) + room
    target = decoder.target
    cache = target.new_cache(capacity if target.graphs is None else target.graphs.room(capacity))
    begun = DecodeSession(decoder, prompt, StopParams(1 << 20), SamplingParams(), cache)
    return begun, begun.prefill()[0]
