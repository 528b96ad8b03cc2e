"""Decoding with DSpark's drafter (arXiv:2607.05147): a block in one pass, corrected token by token.

Token k + 1 is drafted from the block's logits and from the token before it, so that q, against which it is verified, is
known on the drafted path alone. The confidence head may shorten what is verified.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Le, Lt
from torch import Tensor

from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods.block_drafters import dspark
from specbench_ss.methods.block_drafters.decode import BlockDraftOptions, DFlash
from specbench_ss.methods.block_drafters.dflash import MOST_BLOCK
from specbench_ss.methods.block_drafters.verified_length import StepTimes, threshold_length
from specbench_ss.options import option

MEASURED_PROMPT, MEASURED_STEPS, ROUNDS = 256, 6, 2  # of each length: tokens, steps of a request, requests


@dataclass(frozen=True, slots=True)
class DSparkOptions(BlockDraftOptions):
    """Options of `dspark`."""

    owner: ClassVar[str] = "dspark"
    sample: Literal["on", "off"] = option(
        "on", "When sampling with mode=chain: sample drafts from their distributions, as published."
    )
    block_size: Annotated[int, Ge(0), Le(MOST_BLOCK)] = option(
        0, "Positions of a block, each of which drafts a token; at most the trained number. 0: as trained."
    )
    verified_length: Literal["full", "measured"] = option(
        "full",
        "Drafted tokens of a chain that are verified. full: all. measured: as many as yield the most tokens per second "
        "by the confidence head and by times of steps, which are measured when the method is loaded.",
    )
    confidence_threshold: Annotated[float, Ge(0), Lt(1)] = option(
        0.0, "With mode=chain: a chain ends before the first token with less confidence. 0: no threshold."
    )

    @property
    def reads_confidence(self) -> bool:
        """Return True if the confidence head decides how many tokens are verified."""
        return self.verified_length == "measured" or self.confidence_threshold > 0

    def check_together(self) -> None:
        if self.reads_confidence and self.mode == "tree":
            raise UserError("dspark: verified_length=measured and confidence_threshold need mode=chain")
        if self.verified_length == "measured" and self.confidence_threshold:
            raise UserError("dspark: verified_length=measured and confidence_threshold exclude each other")


class DSpark(DFlash):
    """DSpark: DFlash's block, a bias by the token before each position, and a length by estimated acceptance.

    step_times: of this object's drafts, for verified_length=measured. measured_times: by number of drafted tokens,
    shared by objects with the same drafter; those of this object are measured if they are missing. fixed_length: number
    of verified tokens during the measurement.
    """

    name = "dspark"
    summary = "DSpark: a block in one pass, each token corrected by the one before"
    paper = "Cheng et al. 2026, arXiv:2607.05147"
    Options = DSparkOptions
    network: ClassVar[Any] = dspark
    vllm: ClassVar = {"method": "dspark"}
    reduced_args, reduced_size = {"kind": "gated", "confidence": False}, 3
    more_instances: ClassVar = {
        "rnn": ({"kind": "rnn"}, {}),
        "rnn tree": ({"kind": "rnn"}, {"mode": "tree", "nodes": 9, "k": 3}),
        "no Markov head": ({"rank": 0}, {"confidence_threshold": 0.4}),
        "measured": ({}, {"verified_length": "measured"}),
        "top-1": ({}, {"sample": "off", "confidence_threshold": 0.3}),
    }
    step_times: StepTimes | None = None
    fixed_length: int | None = None

    def __init__(
        self,
        target: Target,
        options: Any,
        drafter: Any,
        config: dict[str, Any] | None = None,
        measured_times: dict[int, StepTimes] | None = None,
    ) -> None:
        super().__init__(target, options, drafter, config)
        self.measured_times = {} if measured_times is None else measured_times
        self.constructor_args = (self.measured_times,)
        if options.verified_length == "measured":
            if self.chain_length not in self.measured_times:
                self.measured_times[self.chain_length] = self._measure()
            self.step_times = self.measured_times[self.chain_length]
            seconds = self.step_times.seconds
            relative = ", ".join(f"{t / seconds[0]:.2f}" for t in seconds)
            self.measured = {"relative step times": f"{relative} with 0, 1, .. verified tokens"}

    @classmethod
    def test_instances(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        """Return the instances of block drafters, whose chain samples here; one has stated times of steps."""
        instances = {name: make for name, make in super().test_instances(target).items() if name != "sampled"}

        def with_times() -> Decoder:
            drafter, options = dspark.random_drafter(target), cls.Options(verified_length="measured")
            length = cls.resolve_options(options, {}, drafter, target) - drafter.shape.first
            times = StepTimes(tuple(2.0 + 0.4 * n for n in range(length + 1)))
            return cls(target, options, drafter, {}, {length: times})

        return {**instances, "measured": with_times}

    @classmethod
    def resolve_options(cls, options: Any, config: Mapping[str, Any], drafter: Any, base: ModelInfo) -> int:
        """Return the block size. Raise UserError if the drafter was not trained for the options."""
        if options.reads_confidence and not drafter.shape.confidence:
            needed = "verified_length=measured and confidence_threshold"
            raise UserError(f"dspark: {needed} need a confidence head, which the drafter lacks")
        return super().resolve_options(options, config, drafter, base)

    @torch.inference_mode()
    def _measure(self) -> StepTimes:
        """Measure the median greedy step behind a prompt of random tokens, for each number of verified tokens.

        The first round warms up. Times never fall with the number of tokens: a shorter one counts as noise.
        """
        size, generator = min(MEASURED_PROMPT, self.target.context_length // 2), torch.Generator().manual_seed(0)
        prompt = torch.randint(self.target.vocab_size, (size,), generator=generator).tolist()
        seconds: list[list[float]] = [[] for _ in range(self.chain_length + 1)]
        for measured in range(1 + ROUNDS):
            for length, times in enumerate(seconds):
                self.fixed_length = length
                limits = StopParams(1 + MEASURED_STEPS * (length + 1))
                steps = generate(self, prompt, limits, SamplingParams()).steps
                times.extend(step.total_s for step in steps[:MEASURED_STEPS] if measured)
        self.fixed_length = None
        return StepTimes(tuple(accumulate((statistics.median(times) for times in seconds), max)))

    def metadata(self) -> dict[str, Any]:
        shape = self.drafter.shape
        heads = {"markov_rank": shape.markov_rank, "markov_kind": shape.markov_kind, "confidence": shape.confidence}
        rules = {name: getattr(self.options, name) for name in ("verified_length", "confidence_threshold")}
        return {**super().metadata(), **heads, **rules}

    def search_space(self) -> Mapping[str, Sequence[Any]]:
        o = self.options
        chooses = o.mode == "chain" and self.drafter.shape.confidence and not o.confidence_threshold
        return {**super().search_space(), **({"verified_length": ("full", "measured")} if chooses else {})}

    def _length(self, state: DecodeState, states: Tensor, tokens: Tensor) -> int:
        """Return the number of tokens to verify; one host synchronisation if the confidence head decides."""
        if not self.options.reads_confidence:
            return super()._length(state, states, tokens)
        confidence = self.drafter.confidence(states[: len(tokens) - 1], tokens[:-1]).sigmoid().tolist()
        if self.fixed_length is not None:
            return self.fixed_length
        times = self.step_times
        if times is None or self.options.confidence_threshold:  # without times: all tokens, above a threshold of 0
            return threshold_length(confidence, self.options.confidence_threshold)
        return times.best_length(confidence) if state.sampling.greedy else times.stopping_length(confidence)
