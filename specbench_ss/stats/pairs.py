"""Paired samples of a method and a baseline: speedups, acceptance and sums by question, with tasks as strata.

A prompt is one turn of one question. Only prompts count that both answered; repeats of a prompt are averaged, and sums
are by question, since its turns are not independent of each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from specbench_ss.stats.intervals import (
    FEWEST,
    Estimate,
    Floats,
    Interval,
    Strata,
    log_ratio,
    ratio_interval,
    speedup_interval,
    strata_of,
)


class Sample(Protocol):
    """One output of a method for one prompt. later: tokens of its steps. counted: how a server counted tokens.

    session: process that measured it. block: of its question, if other processes measured other questions.
    """

    @property
    def method(self) -> str: ...
    @property
    def repeat(self) -> int: ...
    @property
    def session(self) -> int: ...
    @property
    def block(self) -> int | None: ...
    @property
    def question_id(self) -> str: ...
    @property
    def turn(self) -> int: ...
    @property
    def category(self) -> str: ...
    @property
    def prompt(self) -> tuple[str, int, int]: ...
    @property
    def ok(self) -> bool: ...
    @property
    def tokens(self) -> int | None: ...
    @property
    def later(self) -> int: ...
    @property
    def steps(self) -> int | None: ...
    @property
    def wall_s(self) -> float | None: ...
    @property
    def counted(self) -> object: ...


S = TypeVar("S", bound=Sample)


def mean_acceptance_length(tokens: float | None, steps: float | None) -> float | None:
    """Return τ, tokens of steps / steps, from sums over samples; None without steps, or where one is not known."""
    return None if tokens is None or not steps else tokens / steps


class Pairs(Generic[S]):
    """Samples of a method and a baseline on the prompts that both answered.

    own, other: the samples of both, in the same order. questions: ids. strata: of the questions, by task. own_s,
    own_tokens, other_s, other_tokens: [prompts], means over repeats. n_sessions: number of processes that measured
    all of it. processes: how many took the times, whose effects are not measured: none with several sessions; None:
    two of servers, else one. levels: the samples are those of a load level, of which each repeat is taken for a
    session. Its processes may have been the same ones, so they still count.
    """

    def __init__(
        self, samples: Iterable[S], baseline: Iterable[S], *, processes: int | None = None, levels: bool = False
    ) -> None:
        samples, baseline = list(samples), list(baseline)
        self.own, self.other = _paired(samples, baseline)
        # of several blocks, with failed samples and those that only one of both answered
        self._in_blocks = len({sample.block for sample in (*samples, *baseline)} - {None}) > 1
        session_of = [sample.repeat if levels else sample.session for sample in self.own]
        numbers = sorted(set(session_of))
        self.n_sessions = max(1, len(numbers))
        self._session = np.searchsorted(numbers, session_of)  # of each sample
        self.processes = processes or (2 if any(sample.counted for sample in self.own) else 1)
        if self.n_sessions > 1 and not levels:
            self.processes = 0
        self._levels = levels
        prompts = list(dict.fromkeys((sample.question_id, sample.turn) for sample in self.own))
        self.questions = list(dict.fromkeys(question for question, _ in prompts))
        number = {question: i for i, question in enumerate(self.questions)}
        place = {prompt: i for i, prompt in enumerate(prompts)}
        self._question = np.array([number[question] for question, _ in prompts], dtype=np.int64)
        self._prompt = np.array([place[s.question_id, s.turn] for s in self.own], dtype=np.int64)  # of each sample
        self.own_s, self.own_tokens = (self._mean(self.own, name) for name in ("wall_s", "tokens"))
        self.other_s, self.other_tokens = (self._mean(self.other, name) for name in ("wall_s", "tokens"))

    @property
    def n_prompts(self) -> int:
        """Return the number of prompts."""
        return len(self.own_s)

    @cached_property
    def strata(self) -> Strata:
        """Return the stratum of each question, by its task."""
        task = {sample.question_id: sample.category for sample in self.own}
        return strata_of([task[question] for question in self.questions])

    @cached_property
    def blocks(self) -> tuple[Strata, ...]:
        """Return the block of each question [questions], if there are several blocks."""
        block = {sample.question_id: sample.block for sample in self.own}
        if self._levels or None in block.values():
            return ()
        of_each = np.array([block[question] for question in self.questions], dtype=np.int64)
        return (np.unique(of_each, return_inverse=True)[1],) if len(set(block.values())) > 1 else ()

    def by_question(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Return sums by question: the baseline's seconds and tokens, the method's, [questions] each."""
        columns = (self.other_s, self.other_tokens, self.own_s, self.own_tokens)
        a, b, c, d = (_grouped(self._question, column, len(self.questions)) for column in columns)
        return a, b, c, d

    def of_samples(self, values: Sequence[float] | Floats) -> Floats:
        """Return sums by question [questions] of values of the method's samples, in their order."""
        return _grouped(self._question[self._prompt], np.asarray(values, np.float64), len(self.questions))

    @property
    def tau(self) -> float | None:
        """Return the mean acceptance length of the method: tokens of steps / steps, pooled."""
        return tau_of(self.own)

    def speedup(self) -> float | None:
        """Return the ratio of times per token, baseline / method, each a ratio of sums."""
        a, b, c, d = (float(column.sum()) for column in self.by_question())
        return a / b / (c / d) if b and c and d else None

    def log_speedup(self) -> Estimate:
        """Return the logarithm of `speedup` with its error. Needs FEWEST questions."""
        other_s, other_tokens, own_s, own_tokens = self.by_question()
        return log_ratio((other_s, own_tokens), (other_tokens, own_s), self.strata, self.sessions(), self.blocks)

    def interval(self) -> Interval | None:
        """Return the 95% interval of `speedup`.

        It is None below FEWEST questions, for a load level that was measured once, and where both answered one block
        of several.
        """
        single = self.n_sessions == 1 if self._levels else self._in_blocks and not self.blocks
        if single:
            return None
        return speedup_interval(*self.by_question(), self.strata, self.processes, self.sessions(), self.blocks)

    def sessions(self) -> tuple[Floats, ...]:
        """Return by how much each session moves the logarithm of `speedup` [sessions], with sum 0; () for one."""
        return (self.pace(self.other) - self.pace(self.own),) if self.n_sessions > 1 else ()

    def pace(self, samples: Sequence[S]) -> Floats:
        """Return by how much each session moves the logarithm of seconds per token [sessions].

        samples: `own` or `other`.
        """
        seconds, tokens = (np.array([getattr(s, name) for s in samples], np.float64) for name in ("wall_s", "tokens"))
        return self._session_effects(seconds) - self._session_effects(tokens)

    def session_speedups(self) -> list[float]:
        """Return the speedup of each session alone."""
        both = list(zip(self.own, self.other, self._session.tolist(), strict=True))
        parts = ([pair[:2] for pair in both if pair[2] == n] for n in range(self.n_sessions))
        made = (Pairs(*zip(*part, strict=True)).speedup() for part in parts if part)
        return [speedup for speedup in made if speedup is not None]

    def faster_than(self, other_s: Floats) -> Interval | None:
        """Return the 95% interval of other seconds / the method's. other_s: [samples], in their order.

        An estimate below 1 needs no interval: it is that one number.
        """
        other, measured = self.of_samples(other_s), self.of_samples([sample.wall_s or 0.0 for sample in self.own])
        if len(measured) < FEWEST:
            return None
        estimate = float(other.sum() / measured.sum())
        if estimate <= 1:
            return estimate, estimate
        sessions: tuple[Floats, ...] = ()
        if self.n_sessions > 1:
            both = (np.asarray(other_s, np.float64), np.array([sample.wall_s or 0.0 for sample in self.own]))
            effects = [self._session_effects(seconds, means=False) for seconds in both]
            sessions = (effects[0] - effects[1],)
        return ratio_interval((other,), (measured,), self.processes, self.strata, sessions, self.blocks)

    def geomean(self) -> float | None:
        """Return the geometric mean over prompts of the ratio of seconds per token."""
        if not self.n_prompts:
            return None
        ratios = self.other_s / self.other_tokens * self.own_tokens / self.own_s
        return float(np.exp(np.log(ratios).mean()))

    def specbench(self) -> float | None:
        """Return Spec-Bench's speedup: mean over questions of tokens per second, method / baseline."""
        a, b, c, d = self.by_question()
        return float((d / c).mean() / (b / a).mean()) if len(a) else None

    def _session_effects(self, values: Floats, means: bool = True) -> Floats:
        """Return by how much each session moves the logarithm of a sum over prompts [sessions]. values: [samples].

        These are deviations from the mean of each prompt, so that sessions may lack prompts. means: the sum is one of
        means over the repeats of a prompt, else of all repeats.
        """
        many = np.bincount(self._prompt)
        mean = _grouped(self._prompt, values) / many
        centered, total = values - mean[self._prompt], float((mean if means else values).sum())
        if means:
            centered = centered / many[self._prompt]
        return _grouped(self._session, centered / total, self.n_sessions)

    def _mean(self, samples: Sequence[S], name: str) -> Floats:
        values = np.array([getattr(sample, name) for sample in samples], dtype=np.float64)
        return _grouped(self._prompt, values) / np.bincount(self._prompt)


def tau_of(samples: Sequence[Sample]) -> float | None:
    """Return the mean acceptance length of samples; None where the steps of one are not known."""
    steps = [sample.steps for sample in samples]
    known = None if None in steps else sum(count or 0 for count in steps)
    return mean_acceptance_length(sum(sample.later for sample in samples), known)


class Together(NamedTuple):
    """Methods on the prompts that all of them answered.

    seconds, tokens: [methods, questions]. strata: of the questions. sessions: [methods, sessions], by how much each
    session moves the logarithm of a method's seconds per token. blocks: as `Pairs.blocks`.
    """

    seconds: Floats
    tokens: Floats
    strata: Strata
    sessions: Floats
    blocks: tuple[Strata, ...]


def together(samples: Sequence[Sequence[S]], levels: bool = False) -> Together:
    """Return seconds, tokens, sessions and blocks of every method.

    Only prompts count that all methods answered: a method that lacks blocks (`answered_blocks`) takes them from all.
    samples: of each method, at least one. levels: as `Pairs` takes it.
    """
    shared: Iterable[S] = samples[0]
    for of_method in samples:
        shared = _paired(shared, of_method)[0]
    pairs = [Pairs(shared, of_method, levels=levels) for of_method in samples]
    sums = [one.by_question() for one in pairs]
    seconds, tokens = (np.stack([of[column] for of in sums]) for column in (0, 1))
    sessions = np.stack([one.pace(one.other) for one in pairs])
    return Together(seconds, tokens, pairs[0].strata, sessions, pairs[0].blocks)


def answered_blocks(samples: Iterable[Sample]) -> set[int | None]:
    """Return the blocks in which at least one sample succeeded; {None} without blocks."""
    return {sample.block for sample in _good(samples).values()}


def _paired(samples: Iterable[S], baseline: Iterable[S]) -> tuple[list[S], list[S]]:
    """Return the samples of both that succeeded on both sides, in the order of the first."""
    by_prompt, baseline_by_prompt = _good(samples), _good(baseline)
    both = [key for key in by_prompt if key in baseline_by_prompt]
    return [by_prompt[key] for key in both], [baseline_by_prompt[key] for key in both]


def _good(samples: Iterable[S]) -> dict[tuple[str, int, int], S]:
    """Return the samples that succeeded, by prompt and repeat."""
    return {s.prompt: s for s in samples if s.ok and s.tokens and (s.wall_s or 0) > 0}


def _grouped(at: Any, values: Floats, groups: int = 0) -> Floats:
    """Return the sums of the values that have the same number in `at`."""
    return np.bincount(at, values, groups).astype(np.float64)
