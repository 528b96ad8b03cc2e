"""Decoding loop of all methods: prefill, propose, forward, verify, commit, update.

Counting, cutting and timing happen only here, so that no method can count or stop differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import index
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

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
from specbench_ss.engine.tree import DeviceTopology, DraftTree, TreeTopology, indices
from specbench_ss.engine.verify import Candidates, VerifyResult, candidates, offers, verify
from specbench_ss.errors import UserError

PROBE_TOKENS = 4  # output tokens of the untimed NaN probe
DEFAULT_STEP_TOKENS = 64  # query tokens per step that the cache reserves if a method states none


@dataclass(frozen=True, slots=True)
class StopParams:
    """Stop conditions: max_new_tokens, one of stop_ids, or the token that completes a stop string."""

    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()


class StopChecker:
    """Find the end of the output, token by token."""

    def __init__(self, target: Target, limits: StopParams, prompt_tokens: int) -> None:
        room = target.context_length - prompt_tokens
        self.cap = min(limits.max_new_tokens, room)
        self.cap_reason: Finish = "length" if limits.max_new_tokens <= room else "context"
        self.limits, self.target = limits, target
        # a token has at least one byte and a character at most four: enough tokens for any stop string, plus one
        # character that may have begun before it
        self.tail = 4 * max(map(len, limits.stop_strings), default=0) + 4

    def cut(self, answer: list[int], new: Sequence[int]) -> tuple[int, Finish | None]:
        """Return the number of new tokens to keep after `answer`, and the finish reason (None: not finished)."""
        check_strings = bool(self.limits.stop_strings) and self._stopped(answer, new)
        for i, token in enumerate(new, start=1):
            if token in self.limits.stop_ids:
                return i, "eos"
            if check_strings and self._stopped(answer, new[:i]):
                return i, "stop"
            if len(answer) + i >= self.cap:
                return i, self.cap_reason
        return len(new), None

    def _stopped(self, answer: list[int], new: Sequence[int]) -> bool:
        """Return True if a stop string ends among the new tokens (none did before)."""
        text = self.target.decode_text([*answer[-self.tail :], *new])
        return any(s in text for s in self.limits.stop_strings)


class DecodeSession:
    """One request in the decoding loop. What a method returns is read once: later it may answer otherwise.

    began: `timing.now` at creation; the time since then counts as prefill. None: prefill time only.
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
        self.stop_checker = StopChecker(target, limits, len(prompt))
        self.rng = torch.Generator(target.device).manual_seed(sampling.seed)
        self.clock = Clock(*target.layer_devices)
        self.prompt, self.began = list(prompt), began
        self.ids = [*prompt]  # with the output; `state.ids`, which a method may change, is never read
        self.context = torch.empty(0)  # `ids` on the device, int64 [S] and room for more, for logits processors
        self.finish: Finish | None = None
        self.tokens_past_stop = 0
        self.candidates: list[Candidates] = []  # of every kept token, at a temperature above 0
        rows = decoder.max_tokens_per_step()
        self.rows = None if rows is None else index(rows)
        self.one_token = type(decoder).autoregressive
        self.max_logits: list[tuple[Tensor, list[int]]] = []  # of every step, for `check_logits`

    def run(self, on_step: Callable[[int], None] | None = None) -> Generation:
        """Return the output; the caller checks its counts."""
        state, prefill_s = self.prefill()
        steps: list[Step] = []
        while self.finish is None:
            steps.append(self.step(state))
            if on_step is not None:
                on_step(steps[-1].tokens)
        check_logits(self.max_logits, self.target.dtype)
        answer, prompt_tokens = [*map(index, self.ids[len(self.prompt) :])], len(self.prompt)
        self._check_token_ids(f"{self.decoder.name} answered with", answer)
        counts = (self.tokens_past_stop, state.num_draft_forwards)
        return Generation(answer, prompt_tokens, self.finish, prefill_s, 1, steps, *counts, offers(self.candidates))

    def prefill(self) -> tuple[DecodeState, float]:
        """Run the prompt and choose the first token."""
        self.clock.start()
        before = 0.0 if self.began is None else self.clock.started - self.began
        self._set_cache_limit(len(self.prompt))
        state = DecodeState([*self.prompt], len(self.prompt), torch.empty(0), self.cache, self.sampling, rng=self.rng)
        ids = torch.tensor([self.prompt], device=self.target.device)
        output, root = self.decoder.prefill(state, ids), DraftTree.root_only(ids[0, -1:])
        self.context = functional.pad(ids[0], (0, self.stop_checker.cap)) if self.target.processors else ids[0]
        self._process_logits(output, root, 0)
        first = self._read_result(verify(output.logits[0], root, self.sampling, self.rng), 1, 1)
        self._record_max_logits(first, output)
        self._extend(state, first.tokens)
        state.root = first.next_token
        state.hidden_states = {layer: t[:, -1:] for layer, t in output.hidden_states.items()}
        self.decoder.on_prefill(state)
        seconds, _ = self.clock.stop()
        _, self.finish = self.stop_checker.cut([], first.tokens)
        self.candidates = [] if self.sampling.greedy else [Candidates([0])]
        return state, before + seconds

    def step(self, state: DecodeState) -> Step:
        """Run one step: draft, verify, accept."""
        clock, position = self.clock, len(self.ids) - 1
        clock.start()
        self._set_cache_limit(position)
        tree = self._within_context(self.propose(state), position)
        drafted = replace(tree)  # what is counted, whatever the method makes of its tree
        nodes, depth = len(drafted) - 1, drafted.topology.deepest
        clock.mark()
        output = self._forward(state, tree)
        clock.mark()
        verified = drafted if output.tree is None else replace(_checked_tree("forward", output.tree))
        verified_nodes = len(verified) - 1
        self._process_logits(output, verified, len(self.ids) - len(self.prompt))
        given = self.decoder.accept(state, output.tree or tree, output)
        result = self._read_result(given, nodes + 1, verified_nodes + 1)
        self._record_max_logits(result, output)
        new, self.finish = self.stop_checker.cut(self.ids[len(self.prompt) :], result.tokens)
        self._commit(state, result, output, new)
        clock.mark()
        if self.finish is None:
            self._set_cache_limit(len(self.ids) - 1)
            self.decoder.update(state, given, output)
        clock.mark()
        total, (draft, forward, accept, update) = clock.stop()
        parts = (draft + update, forward, accept)
        host = max(0.0, total - sum(parts))
        if not self.sampling.greedy:
            self.candidates.append(candidates(verified, result.path[:new], self.sampling))
        if isinstance(drafted.topology, DeviceTopology):  # so far only a bound
            depth = drafted.topology.depth
        return Step(nodes, verified_nodes, depth, result.accepted, new, *parts, host, total)

    def propose(self, state: DecodeState) -> DraftTree:
        """Return the method's draft. Raises TypeError unless it is a DraftTree with tokens [n]."""
        return _checked_tree("propose", self.decoder.propose(state))

    def _forward(self, state: DecodeState, tree: DraftTree) -> Output:
        """Run the method's pass over the draft. Raises ValueError for token ids outside the vocabulary.

        They are checked only after the pass failed: a check before it would synchronise with the device in every step.
        """
        try:
            return self.decoder.forward(state, tree)
        except IndexError:
            self._check_token_ids("propose drafted", tree.tokens.tolist())
            raise

    def _process_logits(self, output: Output, tree: DraftTree, n_new: int) -> None:
        """Apply the logits processors to each node's logits. n_new: output tokens up to the root."""
        if (processors := self.target.processors) is not None:
            path, depths = tree.visibility()  # a node follows itself and its ancestors
            context = self.context[: len(self.ids)]
            output.logits = processors.process(output.logits[0], context, tree.tokens, path, n_new + depths)[None]

    def _extend(self, state: DecodeState, tokens: Sequence[int]) -> None:
        """Append kept tokens to the output, of which the state has a copy, and to the context of logits processors."""
        self.ids += tokens
        state.ids = [*self.ids]
        if self.target.processors is not None:
            self.context[len(self.ids) - len(tokens) : len(self.ids)] = indices(tokens, self.context.device)

    def _check_token_ids(self, prefix: str, tokens: Sequence[int]) -> None:
        """Raise ValueError for a token id outside the vocabulary. prefix: beginning of the message."""
        vocab_size = self.target.vocab_size
        unknown = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if unknown is not None:
            raise ValueError(f"{prefix} token {unknown}, the model has {vocab_size:,} tokens")

    def _read_result(self, given: VerifyResult, drafted: int, verified: int) -> VerifyResult:
        """Return a copy of what `accept` returned. Raises an error unless it is a result for so many nodes."""
        name = f"{self.decoder.name}: accept returned"
        if type(given) is not VerifyResult:
            raise TypeError(f"{name} {_type_name(given)}, not a VerifyResult")
        path, tokens, token = [*map(index, given.path)], [*map(index, given.tokens)], given.next_token  # of exact type
        if path[:1] != [0] or not 0 <= min(path) <= max(path) < verified:
            raise ValueError(f"{name} the path {path}; it begins with node 0, and the tree has {verified} nodes")
        if not tokens:
            raise ValueError(f"{name} no token; return the accepted ones and the next one")
        if type(token) is not Tensor or token.shape != (1,):
            raise TypeError(f"{name} next_token {_type_name(token)}; return a tensor [1], the last of `tokens`")
        if self.one_token and max(drafted, len(tokens)) > 1:
            raise ValueError(
                f"{self.decoder.name} sets autoregressive and drafts tokens; draft nothing, or do not set it"
            )
        if given.root not in (None, self.ids[-1]):
            raise ValueError(f"propose returned a tree under token {given.root}, not state.root, {self.ids[-1]}")
        return VerifyResult(path, tokens, token, None, given.max_logits, given.checked)

    def _record_max_logits(self, result: VerifyResult, output: Output) -> None:
        """Store each node's largest logit for the check in `run`, without a synchronisation.

        If the acceptance rule did not check its logits, they are checked here.
        """
        if not result.checked:
            max_logits = output.logits[0].amax(-1) if result.max_logits is None else result.max_logits
            self.max_logits.append((max_logits, result.path))

    def _set_cache_limit(self, decided: int) -> None:
        """Limit the KV cache to the decided tokens plus the method's max_tokens_per_step."""
        self.cache.set_limit(None if self.rows is None else decided + self.rows)

    def _within_context(self, tree: DraftTree, position: int) -> DraftTree:
        """Return the tree without nodes beyond the context length. position: of the root."""
        room = self.target.context_length - 1 - position
        if tree.topology.deepest <= room:
            return tree
        return tree.subtree([i for i, d in enumerate(tree.topology.depths) if d <= room])

    def _commit(self, state: DecodeState, result: VerifyResult, output: Output, n_tokens: int) -> None:
        """Commit tokens, root, hidden states and KV cache of the accepted path."""
        path, start = result.path, len(self.ids) - 1
        ranges = output.rows or [(0, self.target.n_layers, range(len(output.logits[0])))]
        for lo, hi, offsets in ranges:
            self.cache.compact(start, gather_offsets(offsets, path), lo, hi)
        self._extend(state, result.tokens[:n_tokens])
        state.root = result.next_token
        node = path[-1]
        state.hidden_states = {layer: t[:, node : node + 1] for layer, t in output.hidden_states.items()}
        self.tokens_past_stop += len(result.tokens) - n_tokens


class DraftProbe(DecodeSession):
    """A request that also exposes the draft probabilities to a `NonFiniteDetector`."""

    def propose(self, state: DecodeState) -> DraftTree:
        """Return the method's draft."""
        tree = super().propose(state)
        if tree.draft_probs is not None:
            tree.draft_probs.max()  # a selection operator for the `NonFiniteDetector`
        return tree


def gather_offsets(offsets: Sequence[int] | Tensor, path: list[int]) -> Sequence[int] | Tensor:
    """Return the offsets of the nodes of a path; offsets on a GPU stay there."""
    if not isinstance(offsets, torch.Tensor):
        return [offsets[i] for i in path]
    selected = offsets[indices(path, offsets.device)]
    return cast("list[int]", selected.tolist()) if selected.device.type == "cpu" else selected


def _checked_tree(hook: str, tree: object) -> DraftTree:
    """Return the tree that a method's hook returned. Raises TypeError unless it is a DraftTree with tokens [n]."""
    if type(tree) is not DraftTree or type(tree.topology) not in (TreeTopology, DeviceTopology):
        raise TypeError(f"{hook} returned {_type_name(tree)}, not a DraftTree")
    if type(tree.tokens) is not Tensor or tree.tokens.shape != (len(tree),):
        raise TypeError(f"{hook} returned a DraftTree of {len(tree)} nodes with tokens {_type_name(tree.tokens)}")
    return tree


def _type_name(value: object) -> str:
    """Return the type of a value with its article and shape: 'None', 'a list', 'a Tensor [3]'."""
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
    """Decode one prompt (`decode`), then probe the drafts if none was accepted or decoding failed.

    The probe decodes the first tokens again (untimed) and checks the drafter's logits for NaN: argmax over NaN is a
    valid token id. Raises the errors of `decode` and `probe_drafts`.
    """
    return with_nan_probe(
        lambda: decode(decoder, prompt, limits, sampling, on_step),
        lambda: probe_drafts(decoder, prompt, limits, sampling),
    )


def with_nan_probe(answer: Callable[[], Generation], probe: Callable[[], None]) -> Generation:
    """Return the result of `answer`; call `probe` if it fails or if no draft token was accepted."""
    try:
        generation = answer()
    except (UserError, TimeoutError):
        raise
    except Exception:
        probe()
        raise
    if generation.all_drafts_rejected:
        probe()
    return generation


def decode(
    decoder: Decoder,
    prompt: Sequence[int],
    limits: StopParams,
    sampling: SamplingParams,
    on_step: Callable[[int], None] | None = None,
    session: type[DecodeSession] = DecodeSession,
) -> Generation:
    """Decode one prompt: the part that a run measures.

    on_step: called after each step, outside its time, with the number of tokens that it kept. Raises UserError for an
    empty prompt or one that leaves no room in the context, and NotFinite (a UserError) for NaN or infinity in the
    target's logits or the draft's probabilities.
    """
    began = now()  # first, so that any work of the method counts as its time
    target = decoder.target
    check_prompt(target, prompt)
    with torch.inference_mode():
        tokens = max(len(prompt) + limits.max_new_tokens, target.longest_request)
        cache = target.request_cache(*kv_cache_size(decoder, tokens))
        try:
            generation = session(decoder, prompt, limits, sampling, cache, began).run(on_step)
        except BaseException:
            drop_caches(decoder)  # CUDA graphs read padded keys, which must not hold NaN
            raise
        cache.zero_()  # the next request's method could read this one's tokens behind its own rows
    generation.check()
    return generation


def check_prompt(target: Target, prompt: Sequence[int]) -> None:
    """Raise UserError for an empty prompt, or one that leaves no room in the context."""
    if not prompt:
        raise UserError("the prompt is empty")
    if len(prompt) >= target.context_length:
        raise UserError(
            f"the prompt has {len(prompt)} tokens, the context of {target.name!r} holds {target.context_length}"
        )


def kv_cache_size(decoder: Decoder, tokens: int) -> tuple[int, int, bool]:
    """Return the KV cache rows of so many tokens, those of the context, and whether the cache may have to grow."""
    stated, target = decoder.max_tokens_per_step(), decoder.target
    step = DEFAULT_STEP_TOKENS if stated is None else stated
    return min(target.context_length, tokens) + step, target.context_length + step, stated is None


def probe_drafts(decoder: Decoder, prompt: Sequence[int], limits: StopParams, sampling: SamplingParams) -> None:
    """Decode the first tokens again, eagerly. Raises only NotFinite, if a token is selected from NaN or infinity.

    Skipped for methods with cross-request state.
    """
    if decoder.stateful:
        return
    detector = NonFiniteDetector()  # type: ignore[no-untyped-call]
    with suppress(Exception), eager_passes(decoder), detector:  # operators within a CUDA graph are not dispatched
        decode(decoder, prompt, replace(limits, max_new_tokens=PROBE_TOKENS), sampling, session=DraftProbe)
    if detector.found:
        raise NotFinite(f"{decoder.name}: the drafter's scores are not finite: {why(decoder.target.dtype)}")
