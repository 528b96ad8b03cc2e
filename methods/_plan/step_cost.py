"""Time of a step by its kind of drafter and its number of draft tokens, next to a step of `ar`.

No trained weights are needed: acceptance is forced, and the output repeats the prompt's text, so that methods which
copy find a match. Every step keeps two tokens if it drafts any. Steps of the drafter and of `ar` over the same context
are made in turn, some in a row: alone among steps of the other, each would find the processor's caches filled by it.
Several requests take their steps together, as `ssbench run --batch-size` makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from specbench_ss.engine.batch_runner import next_step, run_concurrently
from specbench_ss.engine.batching import BatchEngine, shared
from specbench_ss.engine.decoder import Decoder, DecoderWrapper, DecodeState, Step, models_of
from specbench_ss.engine.generate import DecodeSession, StopParams, kv_cache_size
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Output, Target
from specbench_ss.engine.timing import now
from specbench_ss.engine.tree import DraftTree
from specbench_ss.engine.verify import VerifyResult, verify
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.draft_vocabulary import with_frequent_tokens
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
KIND_OF = {  # methods, and names of other tools -> kind of drafter with about the same cost
    **dict.fromkeys(("pld", "suffix", "recycling", "ngram"), LOOKUP),
    **dict.fromkeys(("medusa", "medusa2"), MEDUSA),
    **dict.fromkeys(("eagle", "eagle2", "eagle3", "mtp"), EAGLE),
    **dict.fromkeys(("sd", "draft_model"), SD),
    "ss": SS,
}
LEAST_CONTEXT = 8  # tokens
KEPT = 2  # tokens that a step keeps, where it drafts any
STREAMS = 4
RANKS = [[0.5 / (rank + 1) for rank in range(10)]] * 4  # of Medusa's tree: any will do, its size is what counts
WARMUP = 3  # steps that are not counted
IN_A_ROW = 6  # steps of one before those of the other; the first one finds the caches of the other, and is left out
GROUPS = 4  # parts of steps whose numbers of draft tokens are measured, where they vary
TEXT = tuple(range(5, 45))  # token ids of a prompt, repeated; any will do where a method copies no text
GREEDY = SamplingParams()


class Chain(Decoder):
    """Decoder that verifies a chain of the same token, for the cost of verification alone."""

    name, summary = LOOKUP, "a chain that nobody drafted"

    def __init__(self, target: Target, nodes: int) -> None:
        super().__init__(target)
        self.drafted = torch.full((nodes,), 5, device=target.device)

    def propose(self, state: DecodeState) -> DraftTree:
        """Return the chain."""
        return DraftTree.chain(state.root, self.drafted)

    def max_tokens_per_step(self) -> int:
        """Return the tokens of the chain and the root."""
        return 1 + len(self.drafted)

    def clone(self) -> Chain:
        """Return a chain of the same length."""
        return Chain(self.target, len(self.drafted))


class Forced(DecoderWrapper):
    """Wrapper of a decoder whose steps keep KEPT tokens in any case, and continue a repeated text.

    nodes: draft tokens that a step verifies at most; None: all.
    """

    name, summary = "forced", "another decoder with forced acceptance"

    def __init__(self, inner: Decoder, text: Sequence[int], nodes: int | None = None) -> None:
        super().__init__(inner)
        self.text, self.nodes = list(text), nodes
        self.on_device = torch.tensor(self.text, device=inner.target.device)

    def propose(self, state: DecodeState) -> DraftTree:
        """Return the method's draft without the nodes beyond the limit."""
        tree = self.inner.propose(state)
        return tree if self.nodes is None or len(tree) <= self.nodes + 1 else tree.subtree(range(self.nodes + 1))

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        """Verify, so that its time is in the step; then keep the first child of the root, and what follows it."""
        honest = verify(output.logits[0], tree, state.sampling, state.rng)
        path = [0, *tree.topology.children()[0][: KEPT - 1]]
        positions = [(len(state.ids) + i) % len(self.text) for i in range(len(path))]
        last = self.on_device[positions[-1] : positions[-1] + 1]
        return VerifyResult(path, [self.text[i] for i in positions], last, honest.root, honest.max_logits)


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
        heads = with_frequent_tokens(heads, target.vocab_size)
        return Medusa(target, MedusaOptions(nodes=nodes, draft_vocab=vocab), heads, {"accuracies": RANKS})
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
    """Medians over steps, in milliseconds. nodes: drafted tokens. ratio: step_ms / ar_ms.

    draft_ms, verify_ms: parts of step_ms; None for several requests, whose parts overlap.
    """

    nodes: int
    step_ms: float
    ar_ms: float
    ratio: float
    draft_ms: float | None
    verify_ms: float | None


def growth(steps: int) -> int:
    """Return by how many tokens the context grows while so many steps are measured, warm-up included."""
    return (steps + WARMUP) * KEPT


class Requests:
    """Concurrent requests of one method, all at the same context, after prefill.

    Raises UserError if the method does not support several.

    Args:
        decoder: method that decodes them.
        text: token ids that the prompt and the output repeat.
        context: tokens before the first step.
        steps: number of steps for which the KV cache has room.
        batch_size: number of requests.
        nodes: draft tokens that a step verifies at most; None: all.
        sampling: of the verification.
    """

    def __init__(
        self,
        decoder: Decoder,
        text: Sequence[int],
        context: int,
        steps: int,
        batch_size: int = 1,
        nodes: int | None = None,
        sampling: SamplingParams = GREEDY,
    ) -> None:
        self.decoders = [decoder] if batch_size == 1 else BatchEngine(decoder, batch_size).decoders
        prompt = [text[i % len(text)] for i in range(context)]
        wrapped = [Forced(one, text, nodes) for one in self.decoders]
        self.requests = [_prefilled(one, prompt, steps * KEPT, sampling) for one in wrapped]

    def advance(self, steps: int) -> list[tuple[float, Step]]:
        """Make steps of all requests together; return seconds of each, and the step of the first request."""
        if len(self.requests) == 1:
            begun, state = self.requests[0]
            return [(step.total_s, step) for step in (begun.step(state) for _ in range(steps))]
        jobs = [partial(_steps_together, *request, steps) for request in self.requests]
        with shared(models_of(self.decoders)):
            made: dict[int, list[tuple[float, Step]]] = dict(run_concurrently(jobs, len(jobs)))
        return made[0]


def _prefilled(
    decoder: Decoder, prompt: list[int], tokens: int, sampling: SamplingParams
) -> tuple[DecodeSession, DecodeState]:
    """Return a prefilled request with its own cache, and its state. tokens: of its output, at most."""
    target = decoder.target
    capacity, _, _ = kv_cache_size(decoder, len(prompt) + tokens)
    cache = target.new_cache(capacity if target.graphs is None else target.graphs.room(capacity))
    begun = DecodeSession(decoder, prompt, StopParams(1 << 20), sampling, cache)
    return begun, begun.prefill()[0]


def _steps_together(begun: DecodeSession, state: DecodeState, steps: int) -> list[tuple[float, Step]]:
    """Make steps of one of several requests; return the seconds in which all made each, and this request's step."""
    times, made = [], []
    for _ in range(steps):
        next_step()
        times.append(now())
        made.append(begun.step(state))
    next_step()
    times.append(now())
    return [(end - start, step) for start, end, step in zip(times, times[1:], made, strict=False)]


@torch.inference_mode()
def step_cost(
    decoder: Decoder,
    context: int,
    steps: int,
    batch_size: int = 1,
    *,
    nodes: int | None = None,
    text: Sequence[int] = TEXT,
    sampling: SamplingParams = GREEDY,
) -> StepCost:
    """Measure steps of a decoder and of `ar` in turn.

    Raises UserError if the method does not support several requests.

    Args:
        decoder: method to measure.
        context: tokens before the first step.
        steps: number of steps.
        batch_size: requests that take each step together.
        nodes: draft tokens that a step verifies at most; None: all.
        text: token ids that the prompt and the output repeat.
        sampling: of the verification.
    """
    pair = (decoder, nodes), (Autoregressive(decoder.target), None)
    made = [Requests(one, text, context, steps + WARMUP, batch_size, limit, sampling) for one, limit in pair]
    taken: tuple[list[tuple[float, Step]], ...] = [], []
    for done in range(0, steps + WARMUP, IN_A_ROW):
        for requests, own in zip(made, taken, strict=True):
            own += requests.advance(min(IN_A_ROW, steps + WARMUP - done))[done > 0 :]
    own, ar = (steps_of[WARMUP:] for steps_of in taken)
    step_ms, ar_ms = (1e3 * median(seconds for seconds, _ in steps_of) for steps_of in (own, ar))
    alone = batch_size == 1
    return StepCost(
        nodes=int(median(step.draft_nodes for _, step in own)),
        step_ms=step_ms,
        ar_ms=ar_ms,
        ratio=step_ms / ar_ms,
        draft_ms=1e3 * median(step.draft_s for _, step in own) if alone else None,
        verify_ms=1e3 * median(step.verify_s for _, step in own) if alone else None,
    )


def node_groups(drafted: Sequence[int] | np.ndarray[Any, Any]) -> list[tuple[int, float]]:
    """Return at most GROUPS pairs (draft tokens, share of the steps) that stand for the draft tokens of all steps."""
    counts, often = np.unique(drafted, return_counts=True)
    if len(counts) <= GROUPS:
        return [(int(n), float(times / len(drafted))) for n, times in zip(counts, often, strict=True)]
    parts = np.array_split(np.sort(drafted), GROUPS)
    return [(round(float(part.mean())), len(part) / len(drafted)) for part in parts]
