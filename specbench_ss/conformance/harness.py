"""Conformance kit: cases, checks and the decoder under test."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from specbench_ss.engine.checks import own_logits
from specbench_ss.engine.decoder import Decoder, DecoderWrapper, DecodeState, Generation
from specbench_ss.engine.generate import DecodeSession, StopParams
from specbench_ss.engine.kv_cache import Cache
from specbench_ss.engine.sampling import TOKEN, SamplingParams
from specbench_ss.engine.target import FINAL, Output, Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.engine.verify import VerifyResult
from specbench_ss.errors import first_line, place_of
from specbench_ss.time_limit import TimeIsOver, time_limit

# rows in addition to max_tokens_per_step(): the check `rows` alone reports that more are written
SPARE = 512
GOES_ON = 0.85  # chance that a forced path goes on to a child


@dataclass(slots=True)
class StepRecord:
    """One step. ids, lengths and cached are the values before it.

    cached: keys and values [layers, 2, kv_heads, len(ids) - 1, head_dim]. drafted: the tree as proposed. tree,
    logits [n, V]: as verified. result: the decoder's own, or the forced one.
    """

    ids: list[int]
    root: int
    lengths: list[int]
    cached: Tensor
    drafted: DraftTree
    tree: DraftTree | None = None
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    result: VerifyResult | None = None


@dataclass(slots=True)
class Trace:
    """One answer. extra_rows: the most rows that any pass wrote behind those of the tokens decided before it."""

    prompt: list[int]
    steps: list[StepRecord]
    generation: Generation
    extra_rows: int

    @property
    def tokens(self) -> list[int]:
        """Return the tokens of the answer."""
        return self.generation.tokens


def counts_of(generation: Generation) -> list[tuple[int, ...]]:
    """Return nodes, verified, depth and accepted of every step."""
    return [(s.draft_nodes, s.verified_nodes, s.draft_depth, s.accepted_tokens) for s in generation.steps]


class DecodingFailed(Exception):  # noqa: N818
    """Raised from the error that ended an answer. steps: what was seen until then."""

    def __init__(self, steps: list[StepRecord]) -> None:
        super().__init__()
        self.steps = steps


def _copied(tree: Any) -> Any:
    """Return a tree whose tokens no later pass overwrites."""
    return replace(tree, tokens=tree.tokens.clone()) if isinstance(tree, DraftTree) else tree


class RecordingCache(Cache):
    """Records how many rows are written behind those of the `decided` tokens."""

    decided = 0
    extra_rows = 0

    def check(self, start: int, end: int, layer: int) -> None:
        self.extra_rows = max(self.extra_rows, end - self.decided)
        super().check(start, end, layer)

    def set_limit(self, rows: int | None) -> None:
        """Set no limit: the check `rows` alone reports that too many rows are written."""

    def cached(self, rows: int) -> Tensor:
        """Return a copy of the first rows of every layer, [layers, 2, kv_heads, rows, head_dim]."""
        pairs = [(k, v) for k, v in zip(self.keys, self.values, strict=True) if k is not None and v is not None]
        return torch.stack([torch.stack((k[0, :, :rows], v[0, :, :rows])) for k, v in pairs])


class RecordingDecoder(DecoderWrapper):
    """Wraps another decoder and records everything that goes in and comes out.

    forced: accept a path through the draft that depends only on the tokens so far, as might happen at any temperature
    above 0. So blocks are long and of every form, whatever the weights.
    """

    name, summary = "watched", "another decoder, watched"

    def __init__(self, inner: Decoder, forced: bool = False) -> None:
        super().__init__(inner)
        self.forced = forced
        self.steps: list[StepRecord] = []

    def prefill(self, state: DecodeState, ids: Tensor) -> Output:
        _of(state).decided = ids.shape[1]
        return self.inner.prefill(state, ids)

    def propose(self, state: DecodeState) -> DraftTree:
        """Delegate to the wrapped decoder and record the draft."""
        cache, root = _of(state), int(state.root)
        cache.decided = state.position
        before = list(state.ids), root, list(cache.lengths), cache.cached(state.position)
        tree = self.inner.propose(state)
        self.steps.append(StepRecord(*before, _copied(tree)))
        return tree

    def forward(self, state: DecodeState, tree: DraftTree) -> Output:
        """Delegate to the wrapped decoder and record what was verified."""
        output = self.inner.forward(state, tree)
        self.steps[-1].tree, self.steps[-1].logits = _copied(output.tree or tree), output.logits[0].clone()
        return output

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        """Delegate to the wrapped decoder, or accept a forced path."""
        result = forced_path(state.ids, tree, output) if self.forced else self.inner.accept(state, tree, output)
        self.steps[-1].result = result
        return result

    def update(self, state: DecodeState, result: VerifyResult, output: Output) -> None:
        _of(state).decided = state.position
        self.inner.update(state, result, output)


def forced_path(ids: Sequence[int], tree: DraftTree, output: Output) -> VerifyResult:
    """Return a path down the tree and a next token that was not drafted there, drawn only from the ids so far."""
    rng = random.Random(f"{list(ids)}")
    children, drafted = tree.topology.children(), tree.tokens.tolist()
    path = [0]
    while children[path[-1]] and rng.random() < GOES_ON:
        path.append(rng.choice(children[path[-1]]))
    vocabulary = range(output.logits.shape[-1])
    refused = {drafted[child] for child in children[path[-1]]}
    token = rng.choice([w for w in vocabulary if w not in refused] or list(vocabulary))
    return VerifyResult(path, [*(drafted[i] for i in path[1:]), token], tree.tokens.new_tensor([token]))


def watched_cache(decoder: Decoder, tokens: int) -> RecordingCache:
    """Return a cache for these tokens and the rows that the decoder states."""
    target, rows = decoder.target, decoder.max_tokens_per_step()
    cache = RecordingCache(target.n_layers, tokens + (rows or 0) + SPARE, joined=not target.is_multi_device)
    cache.grows = rows is None
    return cache


def _of(state: DecodeState) -> RecordingCache:
    assert isinstance(state.cache, RecordingCache)
    return state.cache


CLOSE = 1e-4  # of the largest number: what float32 may lose by summing in another order, many times over
FIRST_ORDINARY_ID = 3  # ids below are special tokens


@dataclass(frozen=True, slots=True)
class Case:
    """The request of one trial. forced: acceptance is drawn from the tokens so far (`forced_path`)."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    forced: bool = False

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.prompt[:24]))
        more = f", ... {len(self.prompt)} tokens in all" if len(self.prompt) > 24 else ""
        s = self.sampling
        filters = (f", top-p {s.top_p:g}" if s.top_p < 1 else "") + (f", top-k {s.top_k}" if s.top_k else "")
        filters += f", {s.verification} verification" if s.verification != TOKEN else ""
        chosen = "temperature 0" if s.greedy else f"temperature {s.temperature:g}{filters}, seed {s.seed}"
        accepted = ", acceptance drawn at random" if self.forced else ""
        return f"prompt [{shown}{more}], at most {self.max_new_tokens} new tokens, {chosen}{accepted}"


class TinyModel:
    """A tiny target with what the methods on it share: fresh logits that were computed, and its state before them."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.fresh: dict[tuple[int, int, tuple[int, ...]], Tensor] = {}
        self.owners: list[object] = []  # whose ids are keys of `fresh`: kept alive
        self.before = self.now()

    def now(self) -> Tensor:
        """Return the target's own logits [V] on a fixed prompt."""
        return own_logits(self.target)


class Untested(Exception):  # noqa: N818
    """A check had nothing to test in a case."""


class Subject:
    """One test instance of a method on one tiny target: what a check is tested on.

    own_model: test a method that is not lossless against its own `next_logits`, since others are compared with it.
    number: the number of the instance, from 0. whole: try the costly cases too.
    """

    def __init__(
        self,
        instance: str,
        tiny_model: TinyModel,
        make: Callable[[], Decoder],
        own_model: bool = False,
        number: int = 0,
        whole: bool = True,
    ) -> None:
        self.instance, self.tiny_model, self.target = instance, tiny_model, tiny_model.target
        self.make, self.own_model, self.number, self.whole = make, own_model, number, whole
        self.answers = self.steps = self.longest = 0
        self.untested = dict[str, None]()  # of the check that is tested: cases and positions that it could not test
        self._traces: dict[tuple[Case, StopParams], Trace] = {}
        self.restart_time: Callable[[], None] = lambda: None  # called when a request begins, since its time is limited

    def __str__(self) -> str:
        target = self.target
        return f"{self.instance} on {target.name} ({target.n_layers} layers, {target.vocab_size} tokens)"

    def decoder(self) -> Decoder:
        """Make a new decoder, always with the same weights, even where they are drawn at random."""
        with seeded(0):
            return self.make()

    @cached_property
    def one(self) -> Decoder:
        """Return a decoder that is used for its metadata alone."""
        return self.decoder()

    @property
    def exact(self) -> bool:
        """Return True if the output is compared with `next_logits`."""
        return self.one.lossless or self.own_model

    def watch(self, case: Case, limits: StopParams | None = None, decoder: Decoder | None = None) -> Trace:
        """Answer the case with a new decoder, or with the given one.

        The answer of a new decoder is made only once, however many checks ask for it.
        """
        limits = limits or StopParams(case.max_new_tokens)
        if decoder is None and (case, limits) in self._traces:
            return self._traces[case, limits]
        trace = self.answer(
            RecordingDecoder(decoder or self.decoder(), case.forced), case.prompt, limits, case.sampling
        )
        self.longest = max([self.longest, *(s.accepted_tokens + 1 for s in trace.generation.steps)])
        if decoder is None:
            self._traces[case, limits] = trace
        return trace

    @torch.inference_mode()
    def answer(
        self, watched: RecordingDecoder, prompt: Sequence[int], limits: StopParams, sampling: SamplingParams
    ) -> Trace:
        """Answer one prompt by the loop that every run uses. Raises DecodingFailed from whatever error ends it."""
        self.restart_time()
        cache = watched_cache(watched, min(watched.target.context_length, len(prompt) + limits.max_new_tokens))
        try:
            generation = DecodeSession(watched, prompt, limits, sampling, cache).run()
        except (Exception, SystemExit) as error:
            raise DecodingFailed(watched.steps) from error
        self.answers, self.steps = self.answers + 1, self.steps + len(watched.steps)
        return Trace(list(prompt), watched.steps, generation, cache.extra_rows)

    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
        """Return float32 logits [V] from a fresh pass of the method's own model, computed once for each text.

        The pass of a target shows the logits of all beginnings of the text too, so ask for the longest first.
        """
        plain = type(self.one).next_logits is Decoder.next_logits
        owner: object = self.one.target if plain else self.one
        prompt_length = 0 if plain else len(prompt)  # a method's own model may treat prompt and answer differently
        ids, fresh = (*prompt, *answer), self.tiny_model.fresh
        if (id(owner), prompt_length, ids) not in fresh:
            self.tiny_model.owners.append(owner)
            if plain:
                rows = every_logits(self.one.target, ids)
                fresh |= {(id(owner), prompt_length, ids[: n + 1]): row for n, row in enumerate(rows)}
            else:
                with torch.inference_mode():
                    fresh[id(owner), prompt_length, ids] = self.one.next_logits(prompt, answer)
        return fresh[id(owner), prompt_length, ids]

    def fresh_rows(self, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
        """Return these tokens' keys and values from a fresh pass, [layers, 2, kv_heads, tokens, head_dim]."""
        n = len(prompt) + len(answer)
        cache = watched_cache(self.one, n + len(answer) * (self.one.max_tokens_per_step() or 0))
        with torch.inference_mode():
            self.one.next_logits(prompt, answer, cache)
        return cache.cached(n)

    @property
    def shows_rows(self) -> bool:
        """Return True if a fresh pass fills the cache that it is given."""
        return "cache" in inspect.signature(self.one.next_logits).parameters

    def wrong_token(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        """Describe the first token that is not the most probable one; '' where all are."""
        self.logits(prompt, tokens[:-1])  # one pass for all of them
        for i, token in enumerate(tokens):
            logits = self.logits(prompt, tokens[:i])
            best = int(logits.argmax())
            if float(logits[best] - logits[token]) > CLOSE * max(1.0, float(logits.abs().max())):
                return (
                    f"token {i + 1} of {list(tokens)} is {token} (logit {float(logits[token]):.4f}); a fresh pass has "
                    f"{best} first ({float(logits[best]):.4f})"
                )
        return ""

    def random_prompt(self, length: int, seed: int = 5) -> tuple[int, ...]:
        """Return random tokens of the vocabulary, without the special ones."""
        rng = random.Random(seed)
        return tuple(rng.randrange(FIRST_ORDINARY_ID, self.target.vocab_size) for _ in range(length))


@contextmanager
def seeded(number: int) -> Iterator[None]:
    """Set torch's generator of the CPU, and set it back.

    `torch.manual_seed` would keep a stack trace for each device that was not used so far, which takes milliseconds.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(number)
        yield


@torch.inference_mode()
def every_logits(target: Target, ids: Sequence[int]) -> Tensor:
    """Return float32 logits [S, V] after every beginning of these S ids, from a fresh pass of the target."""
    output = target.prefill(torch.tensor([list(ids)], device=target.device), target.new_cache(len(ids)), every=True)
    return target.logits(output.hidden_states[FINAL])[0].float()


def max_difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two tensors, or 0 where it is within rounding; NaN counts as infinity."""
    largest = float((found.float() - expected).abs().max().nan_to_num(torch.inf))
    return 0.0 if largest <= CLOSE * (1 + float(expected.abs().max())) else largest


@dataclass(frozen=True, slots=True)
class Check:
    """One property that a method must have.

    text: the property, as a phrase. cases: returns the requests to try. test: returns a text on what is wrong in a
    case, or ''. exempt: returns why the check does not apply to a method, or ''. on: the models of every architecture
    ("large"), or the one with a vocabulary of seven, where rare events happen soon ("small"), or the one with a long
    context and thousands of words ("long"). suffices: returns whether a tested case alone makes the check a tested one.
    """

    name: str
    text: str
    cases: Callable[[Subject], Iterable[Case]]
    test: Callable[[Subject, Case], str]
    exempt: Callable[[Subject], str] = lambda subject: ""
    on: tuple[Literal["large", "small", "long"], ...] = ("large",)
    suffices: Callable[[Case], bool] = lambda case: True


class CheckFailed(AssertionError):  # noqa: N818
    """Raised if a method fails a check. check: its name. problem: what is wrong in the example."""

    def __init__(self, check: Check, subject: Subject, example: Case, problem: str) -> None:
        self.check, self.instance, self.example, self.problem = check.name, str(subject), example, problem
        super().__init__(
            f"check '{check.name}' failed: {check.text}\n"
            f"  instance  {subject}\n  example   {example}\n  found     {problem}"
        )


STUCK = "no end within"


def first_failure(check: Check, subject: Subject, timeout: float | None = None) -> CheckFailed | None:
    """Try every case of a check. Return the first failure, or None if all pass.

    timeout: seconds of one request, after which the trial fails.
    Raises Untested if there were cases, and nothing to test in any of those that suffice.
    """
    sufficient = False
    over = f"{STUCK} {timeout:g} s" if timeout is not None else ""
    stuck = f"check {check.name!r}, {subject}: {over}, and it cannot be interrupted"
    for case in check.cases(subject):
        try:
            with time_limit(timeout, lambda: stuck) as subject.restart_time:
                problem = attempt(check, subject, case)
        except TimeIsOver as error:
            return CheckFailed(check, subject, case, f"{over}{place_of(error, of_any=True)}")
        except Untested as reason:
            subject.untested[str(reason)] = None
            continue
        if problem:
            return CheckFailed(check, subject, case, problem)
        sufficient = sufficient or check.suffices(case)
    if subject.untested and not sufficient:
        raise Untested
    return None


def attempt(check: Check, subject: Subject, case: Case) -> str:
    """Return what is wrong in this case, or '' for nothing. Any exception counts as wrong."""
    try:
        return check.test(subject, case)
    except (Untested, KeyboardInterrupt, TimeIsOver):
        raise
    except BaseException as error:  # whatever a method may raise
        raised = error.__cause__ if isinstance(error, DecodingFailed) and error.__cause__ else error
        return f"{first_line(raised)}{place_of(raised, of_any=True)}"
