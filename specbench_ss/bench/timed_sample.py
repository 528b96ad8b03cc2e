"""One timed sample: garbage collection and memory, running out of memory, the time limit."""

from __future__ import annotations

import contextlib
import gc
import re
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from specbench_ss.engine.decoder import Decoder, Generation, drop_caches
from specbench_ss.engine.generate import StopParams, probe_drafts
from specbench_ss.engine.layers import triton
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.errors import RunStopped, UserError, error_text, place_of
from specbench_ss.time_limit import TimeIsOver, time_limit

P = TypeVar("P")


@contextlib.contextmanager
def gc_disabled() -> Iterator[None]:
    """Collect garbage now and disable collection within the block, so that no pause falls into a timed sample."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Exclude existing objects from collection, so that collecting before each sample costs little."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def peak_memory(*devices: torch.device) -> Iterator[Callable[[], int | None]]:
    """Yield a function that returns, after the block, the peak of bytes allocated on CUDA devices beyond the start.

    It returns None without CUDA, and the sum over several devices. Memory that exists before, the weights of every
    method and the shared cache, belongs to no method.
    """
    gpus = [device for device in devices if device.type == "cuda"]
    for device in gpus:
        torch.cuda.reset_peak_memory_stats(device)
    before = sum(map(torch.cuda.memory_allocated, gpus))
    peak: list[int] = []
    yield lambda: peak[0] if peak else None
    if gpus:
        peak.append(sum(map(torch.cuda.max_memory_allocated, gpus)) - before)


SETTLED = 0.10  # spread of the last times per token, largest over smallest minus one
WINDOW = 3  # last times that have to agree
EXTRA_ROUNDS = 6  # on top of one round per prompt
MAX_NEW_TOKENS = 64  # of a warm-up request


def warm_up(
    methods: Collection[str],
    prompts: Sequence[P],
    sample: Callable[[str, P, int], float],
    warn: Callable[[str], None],
    failed: Callable[[str, BaseException], None],
) -> int:
    """Make one round per prompt, then repeat the last prompt until every method has settled; return the rounds.

    sample(label, prompt, max_new_tokens) -> seconds per token; a prompt is ids, or messages.
    failed(label, error): called for a method that fails; later rounds are without it.
    """
    times: dict[str, list[float]] = {label: [] for label in methods}

    def one_round(labels: Collection[str], prompt: P) -> None:
        for label in list(labels):
            try:
                times[label].append(sample(label, prompt, MAX_NEW_TOKENS))
            except (Exception, SystemExit) as e:
                del times[label]
                failed(label, e)

    for prompt in prompts:
        for own in times.values():
            own.clear()  # times of different prompts do not compare
        one_round(times, prompt)
    rounds = len(prompts)
    while prompts and rounds < len(prompts) + EXTRA_ROUNDS:
        restless = [label for label, own in times.items() if not settled(own)]
        if not restless:
            return rounds
        one_round(restless, prompts[-1])
        rounds += 1
    restless = [label for label, own in times.items() if not settled(own)]
    if restless:
        warn(f"times had not settled after warm-up: {', '.join(restless)}")
    return rounds


def settled(times: Sequence[float]) -> bool:
    """Return whether the last times agree."""
    last = times[-WINDOW:]
    return len(last) == WINDOW and max(last) <= (1 + SETTLED) * min(last)


OOM_PATTERNS = re.compile(  # texts of RuntimeErrors of torch that mean out of memory
    r"can't allocate memory"  # the allocator of CPUs
    r"|CUDA( driver)? error: out of memory"  # the driver, as at a launch or graph capture
    r"|\bCU[A-Z]+(_[A-Z]+)*_ALLOC(ATION)?_FAILED\b"  # cuBLAS, cuDNN, cuSOLVER
)
LESS = (
    "fewer drafted nodes, a smaller --max-new-tokens or --batch-size, --dtype bfloat16, --quantize or shorter prompts "
    "take less"
)


class OutOfMemory(UserError):  # noqa: N818 - not named like torch's, which it replaces
    """A request exceeds the memory. Its text names settings that take less."""


def ran_out(error: BaseException) -> bool:
    """Return whether an error means that memory ran out."""
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or (isinstance(error, RuntimeError) and OOM_PATTERNS.search(str(error)) is not None)


@contextmanager
def memory_given_back(decoder: Decoder) -> Iterator[None]:
    """Turn errors of exhausted memory within the block into OutOfMemory, after the method's memory is freed."""
    try:
        yield
    except Exception as error:
        if not ran_out(error):
            raise
        raise OutOfMemory(oom_message(error, decoder)) from None


def oom_message(error: BaseException, decoder: Decoder) -> str:
    """Return the text of an error for a record. If memory ran out, free the method's memory first."""
    if not ran_out(error):
        return error_text(error)
    _give_back(error, decoder)
    wanted = re.search(r"[Tt]ried to allocate (\d[\d.]* \w+)", str(error))
    more = f" ({wanted[1]} more were wanted)" if wanted else ""
    full = re.search(r"GPU (\d+) has", str(error)) if decoder.target.is_multi_device else None  # which one of them
    where = f"cuda:{full[1]}" if full else decoder.target.device_names
    return f"out of memory on {where}{more}: {LESS}"


def _give_back(error: BaseException, decoder: Decoder) -> None:
    """Free the tensors of the failed pass, the method's caches and the blocks that torch has cached."""
    seen: BaseException | None = error
    while seen is not None:  # the error references the frames with the tensors of the pass
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__context__
    drop_caches(decoder)
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


TRIES = 4  # at most, of a sample during which a CUDA graph is captured or a kernel compiled
OnTokens = Callable[[int], None] | None
Decode = Callable[[Decoder, list[int], StopParams, SamplingParams, OnTokens], Generation]


def recorded(target: Target) -> int:
    """Return the number of graph captures and compiled kernels so far, each of which takes time within a sample."""
    passes = getattr(target, "graphs", None)
    return triton.n_variants() + (0 if passes is None else int(passes.n_capture_attempts))


def n_attempts(target: Target, stateful: bool) -> Iterator[None]:
    """Yield before each try of a sample: again, at most TRIES times, while time goes into what `recorded` counts.

    target: the method's model. A stateful method has one try, since it would remember the prompt.
    """
    for _ in range(1 if stateful else TRIES):
        before = recorded(target)
        yield
        if recorded(target) == before:
            return


def eager_fallbacks(target: Target) -> Counter[str] | None:
    """Return the number of eager passes of a model with CUDA graphs so far, by reason; None without graphs."""
    passes = getattr(target, "graphs", None)
    return None if passes is None else Counter(passes.fallbacks)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt for one method. label: the method's, for messages."""

    label: str
    decoder: Decoder
    prompt: list[int]
    limits: StopParams
    sampling: SamplingParams


class RequestRunner:
    """Decodes requests. timeout: seconds for one request; None is no limit. place: the run's directory."""

    def __init__(self, decode: Decode, target: Target, timeout: float | None, place: Path) -> None:
        self.decode, self.target, self.timeout, self.place = decode, target, timeout, place

    def answer(self, asked: Request, on_tokens: OnTokens = None) -> Generation:
        """Decode one request. Raises TimeoutError after the timeout, and OutOfMemory if memory runs out."""
        with memory_given_back(asked.decoder), self.in_time(asked.label):
            return self.decode(asked.decoder, asked.prompt, asked.limits, asked.sampling, on_tokens)

    def probe(self, asked: Request) -> None:
        """Raise NotFinite if drafts are chosen from NaN or infinity. Call it outside measurements.

        It has its own time limit, which ends it without a finding.
        """
        with contextlib.suppress(TimeoutError), self.in_time(asked.label):
            probe_drafts(asked.decoder, asked.prompt, asked.limits, asked.sampling)

    @contextlib.contextmanager
    def in_time(self, label: str, requests: int = 1) -> Iterator[None]:
        """Limit the time of the block to that of so many requests. Raises TimeoutError after it."""
        longest = None if self.timeout is None else requests * self.timeout
        over = f"no answer within {longest:g} s" if longest is not None else ""
        resumable = f"{self.place} is complete so far, and --resume continues"
        try:
            message = f"{label}: {over}, and it cannot be interrupted; {resumable}"
            with time_limit(longest, lambda: message, RunStopped.exit_code):
                yield
        except TimeIsOver:
            self.target.drop_cache()  # it may have been left half-written
            raise TimeoutError(over) from None
        except (Exception, SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # of a class of the plugin's own
            raise RuntimeError(f"it raised {error_text(error)}{place_of(error)}") from error
