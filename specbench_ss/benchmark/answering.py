"""One request of a run: asked for within a limit on time, and looked at afterwards. Knows no method by name."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from specbench_ss.benchmark.out_of_memory import memory_given_back
from specbench_ss.decoding.decoder import Decoder
from specbench_ss.decoding.generation import Generation
from specbench_ss.decoding.loop import Limits
from specbench_ss.decoding.sampling import Sampling
from specbench_ss.decoding.target import Target
from specbench_ss.time_limit import TimeIsOver, time_limit

TRIES = 4  # at most, of an answer during which a pass is recorded
OnTokens = Callable[[int], None] | None
Decode = Callable[[Decoder, list[int], Limits, Sampling, OnTokens], Generation]


def recorded(target: Target) -> int:
    """Return how often a pass of a model was recorded so far, or proven: that takes time within an answer."""
    passes = getattr(target, "passes", None)
    return 0 if passes is None else int(passes.tried)


def tries(target: Target, remembers: bool) -> Iterator[None]:
    """Yield before each try of an answer that is measured: again, a few times at most, while a pass is recorded in it.

    target: the method's model. A method that remembers prompts has one try: it would have seen the next one's prompt.
    """
    for _ in range(1 if remembers else TRIES):
        before = recorded(target)
        yield
        if recorded(target) == before:
            return


def unreplayed(target: Target) -> Counter[str] | None:
    """Return how many passes of a model ran eagerly so far, where others are replayed, by reason.

    None where nothing is replayed.
    """
    passes = getattr(target, "passes", None)
    return None if passes is None else Counter(passes.declined)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt for one method. label: the method's, for messages."""

    label: str
    decoder: Decoder
    prompt: list[int]
    limits: Limits
    sampling: Sampling


class Answering:
    """Answers requests. timeout: seconds that one may take; None is no limit. place: the run's directory."""

    def __init__(self, decode: Decode, target: Target, timeout: float | None, place: Path) -> None:
        self.decode, self.target, self.timeout, self.place = decode, target, timeout, place

    def answer(self, asked: Request, on_tokens: OnTokens = None) -> Generation:
        """Decode, and do nothing else.

        Raises TimeoutError where it takes longer than it may, and OutOfMemory where it takes more memory than there is.
        """
        with memory_given_back(asked.decoder), self.in_time(asked.label):
            return self.decode(asked.decoder, asked.prompt, asked.limits, asked.sampling, on_tokens)

    @contextlib.contextmanager
    def in_time(self, label: str, requests: int = 1) -> Iterator[None]:
        """Within: so many requests may take their time together. Raises TimeoutError where they take longer."""
        longest = None if self.timeout is None else requests * self.timeout
        over = f"no answer within {longest:g} s" if longest is not None else ""
        resumable = f"what is in {self.place} is whole, and --resume goes on"
        try:
            told = f"{label}: {over}, and it cannot be interrupted; {resumable}"
            with time_limit(longest, lambda: told):
                yield
        except TimeIsOver:
            self.target.drop_cache()  # it may have been left half-written
            raise TimeoutError(over) from None
