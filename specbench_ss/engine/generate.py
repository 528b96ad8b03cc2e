"""The decoding loop, once for all methods: prefill, propose, forward, verify, commit, update.

Every count, cut and time is made here, so that no method can count or stop differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from specbench_ss.engine.checks import NotFinite, check_logits, why
from specbench_ss.engine.decoder import (
    Decoder,
    DecodeState,
    Finish,
    Generation,
    NonFiniteDetector,
    Step,
    drop_caches,
    eager_passes,
)
from specbench_ss.engine.kv_cache import Cache
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Output, Target
from specbench_ss.engine.timing import Clock, now
from specbench_ss.engine.tree import DraftTree, indices
from specbench_ss.engine.verify import Candidates, VerifyResult, candidates, offers, verify
from specbench_ss.errors import UserError

PROBED = 4  # tokens of an answer that is begun once more, to see what its drafts are chosen from
DEFAULT_STEP_TOKENS = 64  # rows of a step that the cache reserves where a method does not say how many it needs


@dataclass(frozen=True, slots=True)
class StopParams:
    """Where an answer ends: after max_new_tokens, after one of stop_ids, or with the token completing a stop string."""

    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()


class StopChecker:
    """Decides, token by token, where the answer ends."""

    def __init__(self, target: Target, limits: StopParams, prompt_tokens: int) -> None:
        room = target.context_length - prompt_tokens
        self.cap = min(limits.max_new_tokens, room)
        self.cap_reason: Finish = "length" if limits.max_new_tokens <= room else "context"
        self.limits, self.target = limits, target
        # a token holds at least one byte, a character at most four: so many tokens may hold a stop string, and as
        # many as a character may have begun before it
        self.tail = 4 * max(map(len, limits.stop_strings), default=0) + 4

    def cut(self, answer: list[int], new: Sequence[int]) -> tuple[int, Finish | None]:
        """How many of the new tokens are kept after `answer`, and why it ends there (None: it goes on)."""
        watch = bool(self.limits.stop_strings) and self._stopped(answer, new)
        for i, token in enumerate(new, start=1):
            if token in self.limits.stop_ids:
                return i, "eos"
            if watch and self._stopped(answer, new[:i]):
                return i, "stop"
            if len(answer) + i >= self.cap:
                return i, self.cap_reason
        return len(new), None

    def _stopped(self, answer: list[int], new: Sequence[int]) -> bool:
        """Whether a stop string ends among the new tokens (none has before)."""
        text = self.target.decode_text([*answer[-self.tail :], *new])
        return any(s in text for s in self.limits.stop_strings)


class DecodeSession:
    """One request on its way through the loop.

    began: when it was made, by `timing.now`; the time since then is part of its prefill. None: from the prefill.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompt: Sequence[int],
        limits: StopParams,
        sampling: SamplingParams,
        cache: Cache,
        began: float | None = None,
    ) -> None:
        target = decoder.target
        self.decoder, self.target, self.cache, self.sampling = decoder, target, cache, sampling
        self.cutter = StopChecker(target, limits, len(prompt))
        self.rng = torch.Generator(target.device).manual_seed(sampling.seed)
        self.clock = Clock(*target.layer_devices)
        self.prompt, self.began = list(prompt), began
        self.finish: Finish | None = None
        self.tokens_past_stop = 0
        self.candidates: list[Candidates] = []  # of every kept token, at a temperature above 0
        self.rows = decoder.max_tokens_per_step()
        self.one_token = type(decoder).autoregressive
        self.largest: list[tuple[Tensor, list[int]]] = []  # of every step, for `check_logits`

    def run(self, on_step: Callable[[int], None] | None = None) -> Generation:
        """Return the answer; whether its counts add up is not checked."""
        state, prefill_s = self.prefill()
        steps: list[Step] = []
        while self.finish is None:
            steps.append(self.step(state))
            if on_step is not None:
                on_step(steps[-1].tokens)
        check_logits(self.largest, self.target.dtype)
        answer, prompt_tokens = state.ids[len(self.prompt) :], len(self.prompt)
        self._check_known(f"{self.decoder.name} answered with", answer)
        counts = (self.tokens_past_stop, state.num_draft_forwards)
        return Generation(answer, prompt_tokens, self.finish, prefill_s, 1, steps, *counts, offers(self.candidates))

    def prefill(self) -> tuple[DecodeState, float]:
        """Run the prompt; the first token comes from here."""
        self.clock.start()
        before = 0.0 if self.began is None else self.clock.started - self.began
        self._allow(len(self.prompt))
        state = DecodeState(self.prompt, len(self.prompt), torch.empty(0), self.cache, self.sampling, rng=self.rng)
        ids = torch.tensor([self.prompt], device=self.target.device)
        output = self.decoder.prefill(state, ids)
        first = verify(output.logits[0], DraftTree.root_only(ids[0, -1:]), self.sampling, self.rng)
        self._record_max_logits(first, output)
        state.ids, state.root = [*self.prompt, *first.tokens], first.next_token
        state.hidden_states = {layer: t[:, -1:] for layer, t in output.hidden_states.items()}
        self.decoder.on_prefill(state)
        seconds, _ = self.clock.stop()
        _, self.finish = self.cutter.cut([], first.tokens)
        self.candidates = [] if self.sampling.greedy else [Candidates([0])]
        return state, before + seconds

    def step(self, state: DecodeState) -> Step:
        """Make one step: draft, verify, accept."""
        clock = self.clock
        clock.start()
        self._allow(state.position)
        tree = self._within_context(self.propose(state), state)
        clock.mark()
        output = self._forward(state, tree)
        clock.mark()
        kept = output.tree or tree
        verdict = self.decoder.accept(state, kept, output)
        self._check_kept(len(tree), verdict, state.ids[-1])
        self._record_max_logits(verdict, output)
        new, self.finish = self.cutter.cut(state.ids[state.prompt_tokens :], verdict.tokens)
        self._commit(state, verdict, output, new)
        clock.mark()
        if self.finish is None:
            self._allow(state.position)
            self.decoder.update(state, verdict, output)
        clock.mark()
        total, (draft, forward, accept, update) = clock.stop()
        parts = (draft + update, forward, accept)
        host = max(0.0, total - sum(parts))
        if not self.sampling.greedy:
            self.candidates.append(candidates(kept, verdict.path[:new]))
        return Step(len(tree) - 1, len(kept) - 1, tree.topology.depth, verdict.accepted, new, *parts, host, total)

    def propose(self, state: DecodeState) -> DraftTree:
        """Return the method's draft. Raises TypeError for what is none."""
        tree = self.decoder.propose(state)
        if not isinstance(tree, DraftTree):
            raise TypeError(f"propose returned {_named(tree)}, not a DraftTree")
        if not (isinstance(tree.tokens, torch.Tensor) and tree.tokens.shape == (len(tree),)):
            raise TypeError(f"propose returned a DraftTree of {len(tree)} nodes whose tokens are {_named(tree.tokens)}")
        return tree

    def _forward(self, state: DecodeState, tree: DraftTree) -> Output:
        """Run the method's pass over the draft. Raises ValueError for tokens that the model lacks, where that shows.

        They are looked for when the pass has failed: asking before would make every step wait for the device.
        """
        try:
            return self.decoder.forward(state, tree)
        except IndexError:
            self._check_known("propose drafted", tree.tokens.tolist())
            raise

    def _check_known(self, said: str, tokens: Sequence[int]) -> None:
        """Raise ValueError for a token that the model lacks. said: what was done with it, in words."""
        words = self.target.vocab_size
        unknown = next((token for token in tokens if not 0 <= token < words), None)
        if unknown is not None:
            raise ValueError(f"{said} token {unknown}, the model has {words:,} tokens")

    def _check_kept(self, nodes: int, verdict: VerifyResult, root: int) -> None:
        """Raise ValueError for a step that keeps no token, another root, and drafts of an autoregressive method."""
        name = self.decoder.name
        if not isinstance(verdict, VerifyResult) or verdict.path[:1] != [0]:
            raise TypeError(
                f"{name}: accept returned {_named(verdict)}; return a Verdict whose path begins with node 0"
            )
        kept = len(verdict.tokens)
        if not kept:
            raise ValueError(f"{name}: accept returned no token; return the accepted ones and the next one")
        if self.one_token and max(nodes, kept) > 1:
            raise ValueError(f"{name} sets autoregressive and drafts tokens; draft nothing, or do not set it")
        if verdict.root not in (None, root):
            raise ValueError(f"propose returned a tree under token {verdict.root}, not state.root, {root}")

    def _record_max_logits(self, verdict: VerifyResult, output: Output) -> None:
        """Keep what `run` looks at when the answer is complete: nothing is waited for here.

        A rule that neither gives the largest logits nor has looked at its rows by itself is not taken at its word.
        """
        if not verdict.checked:
            largest = output.logits[0].amax(-1) if verdict.largest is None else verdict.largest
            self.largest.append((largest, verdict.path))

    def _allow(self, decided: int) -> None:
        """Rows of these decided tokens, and as many as the method says that it needs."""
        self.cache.set_limit(None if self.rows is None else decided + self.rows)

    def _within_context(self, tree: DraftTree, state: DecodeState) -> DraftTree:
        """Without the nodes whose position the model does not have."""
        room = self.target.context_length - 1 - state.position
        if tree.topology.deepest <= room:
            return tree
        return tree.subtree([i for i, d in enumerate(tree.topology.depths) if d <= room])

    def _commit(self, state: DecodeState, verdict: VerifyResult, output: Output, kept: int) -> None:
        """Tokens, root, taps and cache of the accepted path."""
        path, start = verdict.path, state.position
        ranges = output.rows or [(0, self.target.n_layers, range(len(output.logits[0])))]
        for lo, hi, offsets in ranges:
            self.cache.compact(start, gather_offsets(offsets, path), lo, hi)
        state.ids = state.ids + verdict.tokens[:kept]
        state.root = verdict.next_token
        node = path[-1]
        state.hidden_states = {layer: t[:, node : node + 1] for layer, t in output.hidden_states.items()}
        self.tokens_past_stop += len(verdict.tokens) - kept


class DraftProbe(DecodeSession):
    """One request whose drafts are watched: the probabilities that they were drawn from count among what is chosen."""

    def propose(self, state: DecodeState) -> DraftTree:
        """Return the method's draft."""
        tree = super().propose(state)
        if tree.draft_probs is not None:
            tree.draft_probs.max()  # which a `NonFiniteDetector` looks at
        return tree


def gather_offsets(offsets: Sequence[int] | Tensor, path: list[int]) -> Sequence[int] | Tensor:
    """Return the offsets of these nodes; where they are on a device that is waited for, they stay there."""
    if not isinstance(offsets, torch.Tensor):
        return [offsets[i] for i in path]
    found = offsets[indices(path, offsets.device)]
    return cast("list[int]", found.tolist()) if found.device.type == "cpu" else found


def _named(value: object) -> str:
    """'None', 'a list', 'a Tensor [3]': what was given instead of something else."""
    if value is None:
        return "None"
    shape = f" {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
    kind = type(value).__name__
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}{shape}"


def generate(
    decoder: Decoder,
    prompt: Sequence[int],
    limits: StopParams,
    sampling: SamplingParams,
    on_step: Callable[[int], None] | None = None,
) -> Generation:
    """Answer one prompt as `decode` does, and then look at the drafts of an answer that calls for it.

    An answer to which no draft contributed, or that failed, is begun once more, untimed, to see what the drafts were
    chosen from: of NaN, too, there is a best. Raises what `decode` and `probe_drafts` raise.
    """
    return with_nan_probe(
        lambda: decode(decoder, prompt, limits, sampling, on_step),
        lambda: probe_drafts(decoder, prompt, limits, sampling),
    )


def with_nan_probe(answer: Callable[[], Generation], probe: Callable[[], None]) -> Generation:
    """Return what `answer` gives. Where it fails, or no draft contributed to it, `probe` is called first."""
    try:
        result = answer()
    except (UserError, TimeoutError):
        raise
    except Exception:
        probe()
        raise
    if result.all_drafts_rejected:
        probe()
    return result


def decode(
    decoder: Decoder,
    prompt: Sequence[int],
    limits: StopParams,
    sampling: SamplingParams,
    on_step: Callable[[int], None] | None = None,
    session: type[DecodeSession] = DecodeSession,
) -> Generation:
    """Answer one prompt, and do nothing else: what a run measures.

    on_step: called after each step, outside its time, with the number of tokens that it kept. Raises UserError for an
    empty prompt or one that leaves no room in the context, and NotFinite, which is one too, where the target's logits
    or the draft's probabilities are not finite.
    """
    began = now()  # before anything of the method is read: what it does then is part of its time
    target = decoder.target
    check_prompt(target, prompt)
    with torch.inference_mode():
        cache = target.request_cache(*kv_cache_size(decoder, prompt, limits))
        try:
            result = session(decoder, prompt, limits, sampling, cache, began).run(on_step)
        except BaseException:
            drop_caches(decoder)  # a replayed pass reads padded keys: NaN must not stay in them
            raise
    result.check()
    return result


def check_prompt(target: Target, prompt: Sequence[int]) -> None:
    """Raise UserError for an empty prompt, or one that leaves no room in the context."""
    if not prompt:
        raise UserError("the prompt is empty")
    if len(prompt) >= target.context_length:
        raise UserError(
            f"the prompt has {len(prompt)} tokens, the context of {target.name!r} holds {target.context_length}"
        )


def kv_cache_size(decoder: Decoder, prompt: Sequence[int], limits: StopParams) -> tuple[int, bool]:
    """Return the rows of a cache for the prompt and its answer, and whether the cache may have to grow."""
    stated = decoder.max_tokens_per_step()
    most = min(decoder.target.context_length, len(prompt) + limits.max_new_tokens)
    return most + (DEFAULT_STEP_TOKENS if stated is None else stated), stated is None


def probe_drafts(decoder: Decoder, prompt: Sequence[int], limits: StopParams, sampling: SamplingParams) -> None:
    """Begin the answer once more, slowly. Raises NotFinite where a token is chosen from NaN or infinity, nothing else.

    A method that remembers prompts is left alone: it would know this one twice.
    """
    if decoder.stateful:
        return
    seen = NonFiniteDetector()  # type: ignore[no-untyped-call]
    with suppress(Exception), eager_passes(decoder), seen:  # what is chosen in a replay is not seen
        decode(decoder, prompt, replace(limits, max_new_tokens=PROBED), sampling, session=DraftProbe)
    if seen.found:
        raise NotFinite(f"{decoder.name}: what it drafts from is not finite: {why(decoder.target.dtype)}")
