"""Watch a decoder while it answers: what it drafted, what was accepted, what the cache held after every step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specbench_ss.decoding.cache import Cache
from specbench_ss.decoding.decoder import Decoder, State
from specbench_ss.decoding.generation import Generation
from specbench_ss.decoding.loop import Limits, Session
from specbench_ss.decoding.sampling import Sampling
from specbench_ss.decoding.target import Output
from specbench_ss.decoding.tree import DraftTree
from specbench_ss.decoding.verify import Verdict
from specbench_ss.decoding.wrapped import Wrapped

SPARE = 512  # rows more than max_rows() asks for: that more are written is noted, and is one law's business alone
GOES_ON = 0.85  # chance that a forced path goes on to a child


@dataclass(slots=True)
class Seen:
    """One step. ids, lengths and held describe the time before it.

    held: keys and values [layers, 2, kv_heads, len(ids) - 1, head_dim]. drafted: the tree as proposed. tree, logits [n,
    V]: as verified. verdict: the decoder's own, or the forced one.
    """

    ids: list[int]
    root: int
    lengths: list[int]
    held: Tensor
    drafted: DraftTree
    tree: DraftTree | None = None
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    verdict: Verdict | None = None


@dataclass(slots=True)
class Trace:
    """One answer. excess: the most rows that any pass put behind those of the tokens that were decided before it."""

    prompt: list[int]
    steps: list[Seen]
    generation: Generation
    excess: int

    @property
    def tokens(self) -> list[int]:
        """Return the tokens of the answer."""
        return self.generation.tokens

    @property
    def counts(self) -> list[tuple[int, int, int, int]]:
        """Return nodes, verified, depth and accepted of every step."""
        return [(s.nodes, s.verified, s.depth, s.accepted) for s in self.generation.steps]


class Unanswered(Exception):  # noqa: N818
    """Raised from the error that ended an answer. steps: what was seen until then."""

    def __init__(self, steps: list[Seen]) -> None:
        super().__init__()
        self.steps = steps


class WatchedCache(Cache):
    """Records how many rows are written behind those of the `decided` tokens."""

    decided = 0
    excess = 0

    def check(self, start: int, end: int, layer: int) -> None:
        """Make room as any cache does, and record how many rows there are."""
        self.excess = max(self.excess, end - self.decided)
        super().check(start, end, layer)

    def allow(self, rows: int | None) -> None:
        """Set no limit: that too many rows are written is one law's business alone."""

    def held(self, rows: int) -> Tensor:
        """Return a copy of the first rows of every layer, [layers, 2, kv_heads, rows, head_dim]."""
        pairs = [(k, v) for k, v in zip(self.keys, self.values, strict=True) if k is not None and v is not None]
        return torch.stack([torch.stack((k[0, :, :rows], v[0, :, :rows])) for k, v in pairs])


class Watched(Wrapped):
    """Wraps another decoder and records everything that goes in and comes out.

    forced: accept a path through the draft that depends only on the tokens so far, as might happen at any temperature
    above 0. So blocks are long and of every form, whatever the weights.
    """

    name, summary = "watched", "another decoder, watched"

    def __init__(self, inner: Decoder, forced: bool = False) -> None:
        super().__init__(inner)
        self.forced = forced
        self.steps: list[Seen] = []

    def prefill(self, state: State, ids: Tensor) -> Output:
        """Delegates to the wrapped decoder."""
        _of(state).decided = ids.shape[1]
        return self.inner.prefill(state, ids)

    def propose(self, state: State) -> DraftTree:
        """Delegates to the wrapped decoder, and records the draft."""
        cache, root = _of(state), int(state.root)
        cache.decided = state.position
        before = list(state.ids), root, list(cache.lengths), cache.held(state.position)
        tree = self.inner.propose(state)
        self.steps.append(Seen(*before, tree))
        return tree

    def forward(self, state: State, tree: DraftTree) -> Output:
        """Delegates to the wrapped decoder, and records what was verified."""
        output = self.inner.forward(state, tree)
        self.steps[-1].tree, self.steps[-1].logits = output.tree or tree, output.logits[0].clone()
        return output

    def accept(self, state: State, tree: DraftTree, output: Output) -> Verdict:
        """Delegates to the wrapped decoder, or accepts a forced path."""
        verdict = forced_path(state.ids, tree, output) if self.forced else self.inner.accept(state, tree, output)
        self.steps[-1].verdict = verdict
        return verdict

    def observe(self, state: State, verdict: Verdict, output: Output) -> None:
        """Delegates to the wrapped decoder."""
        _of(state).decided = state.position
        self.inner.observe(state, verdict, output)


def forced_path(ids: Sequence[int], tree: DraftTree, output: Output) -> Verdict:
    """Return a path down the tree and a next token that was not drafted there, drawn only from the ids so far."""
    rng = random.Random(f"{list(ids)}")
    children, drafted = tree.shape.children(), tree.tokens.tolist()
    path = [0]
    while children[path[-1]] and rng.random() < GOES_ON:
        path.append(rng.choice(children[path[-1]]))
    words = range(output.logits.shape[-1])
    refused = {drafted[child] for child in children[path[-1]]}
    token = rng.choice([w for w in words if w not in refused] or list(words))
    return Verdict(path, [*(drafted[i] for i in path[1:]), token], tree.tokens.new_tensor([token]))


@torch.inference_mode()
def watch(watched: Watched, prompt: Sequence[int], limits: Limits, sampling: Sampling) -> Trace:
    """Answer one prompt by the loop that every run uses. Raises Unanswered from whatever error ends it."""
    target = watched.target
    room = min(target.context_length, len(prompt) + limits.max_new_tokens)
    cache = WatchedCache(target.n_layers, room + (watched.max_rows() or 0) + SPARE, joined=not target.divided)
    cache.grows = watched.max_rows() is None
    try:
        generation = Session(watched, prompt, limits, sampling, cache).run()
    except (Exception, SystemExit) as error:
        raise Unanswered(watched.steps) from error
    return Trace(list(prompt), watched.steps, generation, cache.excess)


def _of(state: State) -> WatchedCache:
    assert isinstance(state.cache, WatchedCache)
    return state.cache
