"""What a law is, what it is tested on, and what is said where it is broken."""

from __future__ import annotations

import inspect
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from specbench_ss.decoding.decoder import Decoder
from specbench_ss.decoding.loop import Limits
from specbench_ss.decoding.sampling import Sampling
from specbench_ss.decoding.target import FINAL, Target
from specbench_ss.testing.watched_decoder import SPARE, Trace, Watched, WatchedCache, watch

CLOSE = 1e-4  # of the largest number: what float32 may lose by summing in another order, many times over
FIRST = 3  # ids below are special tokens


@dataclass(frozen=True, slots=True)
class Case:
    """The request of one trial. forced: acceptance is drawn from the tokens so far (`watched_decoder.forced_path`)."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    forced: bool = False

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.prompt[:24]))
        more = f", ... {len(self.prompt)} tokens in all" if len(self.prompt) > 24 else ""
        s = self.sampling
        filters = (f", top-p {s.top_p:g}" if s.top_p < 1 else "") + (f", top-k {s.top_k}" if s.top_k else "")
        chosen = "temperature 0" if s.greedy else f"temperature {s.temperature:g}{filters}, seed {s.seed}"
        accepted = ", acceptance drawn at random" if self.forced else ""
        return f"prompt [{shown}{more}], at most {self.max_new_tokens} new tokens, {chosen}{accepted}"


class Place:
    """A tiny target with what the methods on it share: fresh logits that were computed, and its state before them."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.fresh: dict[tuple[int, int, tuple[int, ...]], Tensor] = {}
        self.owners: list[object] = []  # whose ids are keys of `fresh`: kept alive
        self.before = self.now()

    def now(self) -> Tensor:
        """Return the target's own logits [V] on a fixed prompt."""
        return self.target.next_logits([3, 4, 5, 3])


class OutOfTime(Exception):  # noqa: N818
    """Raised where a trial took longer than it was given."""


class Untested(Exception):  # noqa: N818
    """A law had nothing to test in a case."""


class Subject:
    """One shape of a method on one tiny target: what a law is tested on.

    own_model: hold a method that is not lossless to its own `next_logits`, since others are compared with it.
    number: the number of the shape, from 0. whole: try the costly cases too.
    """

    def __init__(
        self,
        shape: str,
        place: Place,
        make: Callable[[], Decoder],
        own_model: bool = False,
        number: int = 0,
        whole: bool = True,
    ) -> None:
        self.shape, self.place, self.target = shape, place, place.target
        self.make, self.own_model, self.number, self.whole = make, own_model, number, whole
        self.answers = self.steps = self.longest = 0
        self.untested = dict[str, None]()  # of the law that is tested: cases and positions that it could not test
        self.until = math.inf  # when nothing more is asked, by time.monotonic()
        self._one: Decoder | None = None
        self._traces: dict[tuple[Case, Limits], Trace] = {}

    def __str__(self) -> str:
        target = self.target
        return f"{self.shape} on {target.name} ({target.n_layers} layers, {target.vocab_size} words)"

    def decoder(self) -> Decoder:
        """Make a new decoder, always with the same weights, even where they are drawn at random."""
        with seeded(0):
            return self.make()

    @property
    def one(self) -> Decoder:
        """A decoder that answers nothing and is only asked what it says of itself."""
        self._one = self._one or self.decoder()
        return self._one

    @property
    def exact(self) -> bool:
        """Whether its output is compared with `next_logits`."""
        return self.one.lossless or self.own_model

    def watch(self, case: Case, limits: Limits | None = None, decoder: Decoder | None = None) -> Trace:
        """Answer the case with a new decoder, or with the given one.

        The answer of a new decoder is made only once, however many laws ask for it.
        """
        limits = limits or Limits(case.max_new_tokens)
        if decoder is not None:
            return self._watch(decoder, case, limits)
        if (case, limits) not in self._traces:
            self._traces[case, limits] = self._watch(self.decoder(), case, limits)
        return self._traces[case, limits]

    def _watch(self, decoder: Decoder, case: Case, limits: Limits) -> Trace:
        trace = self.answer(Watched(decoder, case.forced), case.prompt, limits, case.sampling)
        self.longest = max([self.longest, *(s.accepted + 1 for s in trace.generation.steps)])
        return trace

    def answer(self, watched: Watched, prompt: Sequence[int], limits: Limits, sampling: Sampling) -> Trace:
        """Call `watched_decoder.watch` and count the answer. Raises OutOfTime after the time `until`."""
        if time.monotonic() > self.until:
            raise OutOfTime
        trace = watch(watched, prompt, limits, sampling)
        self.answers, self.steps = self.answers + 1, self.steps + len(trace.steps)
        return trace

    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
        """Return float32 logits [V] from a fresh pass of the method's own model, computed once for each text.

        The pass of a target shows the logits of all beginnings of the text too, so ask for the longest first.
        """
        plain = type(self.one).next_logits is Decoder.next_logits
        owner: object = self.one.target if plain else self.one
        said = 0 if plain else len(prompt)  # where a model of a method's own may treat prompt and answer differently
        ids, fresh = (*prompt, *answer), self.place.fresh
        if (id(owner), said, ids) not in fresh:
            self.place.owners.append(owner)
            if plain:
                rows = every_logits(self.one.target, ids)
                fresh |= {(id(owner), said, ids[: n + 1]): row for n, row in enumerate(rows)}
            else:
                fresh[id(owner), said, ids] = _fresh_logits(self.one, prompt, answer)
        return fresh[id(owner), said, ids]

    def fresh_rows(self, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
        """Return these tokens' keys and values from a fresh pass, [layers, 2, kv_heads, tokens, head_dim]."""
        one, n = self.one, len(prompt) + len(answer)
        room = n + (len(answer) + 1) * (one.max_rows() or 0) + SPARE
        cache = WatchedCache(one.target.n_layers, room, joined=not one.target.divided)
        cache.grows = one.max_rows() is None
        _fresh_logits(one, prompt, answer, cache)
        return cache.held(n)

    @property
    def shows_rows(self) -> bool:
        """Whether its fresh pass fills the cache that it is given."""
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
        return tuple(rng.randrange(FIRST, self.target.vocab_size) for _ in range(length))


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
    return target.logits(output.taps[FINAL])[0].float()


@torch.inference_mode()
def _fresh_logits(
    decoder: Decoder, prompt: Sequence[int], answer: Sequence[int], cache: WatchedCache | None = None
) -> Tensor:
    return decoder.next_logits(prompt, answer) if cache is None else decoder.next_logits(prompt, answer, cache)


@dataclass(frozen=True, slots=True)
class Law:
    """One property that a method must have.

    cases: returns what is tried. test: returns what is wrong in a case, in words, or '' for nothing. exempt: returns
    why a method is not held to the law, or '' where it is. on: the models of every architecture ("large"), or the one
    with a vocabulary of seven, where rare events happen soon ("small"), or the one with a long context and thousands of
    words ("long"). exact_length: the law is about the prompt's
    length, so a smaller example keeps it.
    """

    name: str
    says: str
    cases: Callable[[Subject], Iterable[Case]]
    test: Callable[[Subject, Case], str]
    exempt: Callable[[Subject], str] = lambda subject: ""
    on: tuple[Literal["large", "small", "long"], ...] = ("large",)
    exact_length: bool = False


class LawBroken(AssertionError):  # noqa: N818
    """Raised where a method breaks a law. law: its name. example: the smallest one found.

    problem: what is wrong there.
    """

    def __init__(self, law: Law, subject: Subject, example: Case, problem: str) -> None:
        self.law, self.shape, self.example, self.problem = law.name, str(subject), example, problem
        super().__init__(
            f"law '{law.name}' is broken: {law.says}\n  shape    {subject}\n  example  {example}\n  found    {problem}"
        )
