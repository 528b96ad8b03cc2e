"""Draft and acceptance counts of serving engines, of a request and of /metrics, in one form.

A step is one forward pass of the target model. vLLM, llama.cpp and TensorRT-LLM count only steps that had a draft and
count accepted tokens before an output is cut at its end; SGLang counts every step. `SpecCounts.steps` makes the mean
acceptance length of all of them that of a run in this process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import Annotated, Any

import msgspec
import numpy as np

from specbench_ss.user_files import Count

DEEPEST = 1024  # tokens of a draft
Counts = Annotated[list[Count], msgspec.Meta(max_length=DEEPEST + 1)]
Lengths = list[Annotated[int, msgspec.Meta(ge=0, le=DEEPEST)]]
PAST_END = 64  # allowed accepted tokens beyond the end of an output: engines count them before they cut it


@dataclass(frozen=True, slots=True)
class SpecCounts:
    """Counts of speculative decoding, of one output or of several.

    drafts: steps that had a draft; None if the engine does not count them. drafted: tokens of these drafts; None if the
    engine does not count them. accepted: tokens of the drafts that the target confirmed. accepted_per_pos[i]: drafts
    whose token i + 1 was accepted; it may end at the deepest acceptance. drafted_per_pos[i]: drafts that had a token
    i + 1. None: not reported.
    """

    drafts: int | None
    drafted: int | None
    accepted: int
    accepted_per_pos: tuple[int, ...] | None = None
    drafted_per_pos: tuple[int, ...] | None = None

    def steps(self, later: int, chunks: int = 0) -> int:
        """Return the steps of one output. later: its tokens after the first one, which is the prefill's.

        A step without a draft yields one token. Accepted tokens beyond the end of the output make the difference too
        small, but there were at least as many steps as drafts, and as later chunks of an engine that streams a chunk
        per step. chunks: of such an engine, else 0.
        """
        return max(self.drafts or 0, later - self.accepted, chunks - 1, min(later, 1))

    def fault(self, tokens: int, outputs: int = 1) -> str:
        """Return what is impossible in the counts of outputs with so many tokens together, or ''.

        Every step yields a token; one more may be an end token that is not counted.
        """
        if self.accepted > tokens + PAST_END * outputs:
            return f"counts {self.accepted} accepted tokens in an answer of {tokens} tokens"
        if self.drafts is not None and self.drafts > tokens + outputs:
            return f"counts {self.drafts} steps in an answer of {tokens} tokens"
        if self.drafted is not None and self.drafted > DEEPEST * (tokens + outputs):
            return f"counts {self.drafted} drafted tokens in an answer of {tokens} tokens"
        if sum(self.accepted_per_pos or ()) > self.accepted:
            return f"counts {self.accepted} accepted tokens, and more by position"
        if self.drafted is not None and sum(self.drafted_per_pos or ()) > self.drafted:
            return f"counts {self.drafted} drafted tokens, and more by position"
        if self.drafted is not None and self.accepted > self.drafted:
            return f"counts {self.accepted} of {self.drafted} drafted tokens as accepted"
        if self.drafted is not None and self.drafts is not None and self.drafts > self.drafted:
            return f"counts {self.drafts} drafts of {self.drafted} tokens together"
        return ""


NONE = SpecCounts(0, 0, 0)  # of an engine that does not speculate


class _VllmSpec(msgspec.Struct):
    num_spec_steps: Count
    num_accepted_draft_tokens: Count
    num_draft_tokens: Count
    acceptance_histogram: Counts | None = None
    per_step_drafted: Lengths | None = None


class VllmMetrics(msgspec.Struct):
    """`metrics` of vLLM's last event (`--per-request-spec-decode-metrics`)."""

    speculative_decoding: _VllmSpec | None = None


class _SglangSpec(msgspec.Struct):
    spec_verify_ct: Count
    spec_num_correct_drafts: Count | None = None
    spec_num_proposed_drafts: Count | None = None
    spec_correct_drafts_histogram: Counts | None = None


class SglangExtension(msgspec.Struct):
    """`sglext` of SGLang's last event (`return_spec_tokens_details`)."""

    spec_tokens_details: _SglangSpec | None = None


class TrtSpec(msgspec.Struct):
    """`speculative_decoding` of a choice of TensorRT-LLM."""

    num_spec_steps: Count
    total_accepted_draft_tokens: Count
    total_draft_tokens: Count
    acceptance_histogram: Counts | None = None


class Timings(msgspec.Struct):
    """llama.cpp's counts of a request; it leaves them out if nothing was drafted."""

    draft_n: Count | None = None
    draft_n_accepted: Count | None = None


Report = VllmMetrics | SglangExtension | TrtSpec | Timings


def of_request(report: Report) -> SpecCounts | None:
    """Return the counts that an engine sent with an output; None if it sent none."""
    match report:
        case VllmMetrics(speculative_decoding=_VllmSpec() as spec):
            per_pos = _per_pos(spec.acceptance_histogram)
            return SpecCounts(
                spec.num_spec_steps,
                spec.num_draft_tokens,
                spec.num_accepted_draft_tokens,
                per_pos,
                None if spec.per_step_drafted is None else _per_pos(np.bincount(spec.per_step_drafted).tolist()),
            )
        case SglangExtension(spec_tokens_details=_SglangSpec(spec_num_correct_drafts=int(accepted)) as details):
            per_pos = _per_pos(details.spec_correct_drafts_histogram)
            return SpecCounts(details.spec_verify_ct, details.spec_num_proposed_drafts, accepted, per_pos)
        case TrtSpec():
            per_pos = _per_pos(report.acceptance_histogram)
            drafted, accepted = report.total_draft_tokens, report.total_accepted_draft_tokens
            return SpecCounts(report.num_spec_steps, drafted, accepted, per_pos)
        case Timings():
            return SpecCounts(None if report.draft_n else 0, report.draft_n or 0, report.draft_n_accepted or 0)
    return None


def _per_pos(histogram: Sequence[int] | None) -> tuple[int, ...] | None:
    """Return how many drafts reached each position. histogram[i]: drafts of i tokens, drafted or accepted."""
    return None if histogram is None else tuple(reversed(list(accumulate(reversed(histogram[1:])))))


@dataclass(frozen=True, slots=True)
class MetricNames:
    """Names of an engine's counters on its page /metrics, without `_total`. Empty: it has no such counter."""

    generated: str
    drafts: str
    drafted: str = ""
    accepted: str = ""
    per_pos: str = ""


ENGINES = {
    "vLLM": MetricNames(
        "vllm:generation_tokens",
        "vllm:spec_decode_num_drafts",
        "vllm:spec_decode_num_draft_tokens",
        "vllm:spec_decode_num_accepted_tokens",
        "vllm:spec_decode_num_accepted_tokens_per_pos",
    ),
    "llama.cpp": MetricNames(
        "llamacpp:tokens_predicted",
        "llamacpp:spec_decode_num_drafts",
        "llamacpp:spec_decode_num_draft_tokens",
        "llamacpp:spec_decode_num_accepted_tokens",
        "llamacpp:spec_decode_num_accepted_tokens_per_pos",
    ),
    "SGLang": MetricNames("sglang:generation_tokens", "sglang:spec_verify_calls"),
}


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters of an engine since its start. generated: tokens of all its outputs."""

    generated: int
    drafts: int
    drafted: int | None
    accepted: int | None
    accepted_per_pos: tuple[int, ...] = ()

    def since(self, before: Reading, outputs: int) -> SpecCounts | None:
        """Return the counts of the outputs that ended since an earlier reading; None after a restart of the engine."""
        generated, drafts = self.generated - before.generated, self.drafts - before.drafts
        if self.accepted is None or before.accepted is None:  # every output has a first token, every step one more
            accepted, drafted = (generated - outputs - drafts if drafts else 0), None if drafts else 0
        else:
            accepted, drafted = self.accepted - before.accepted, (self.drafted or 0) - (before.drafted or 0)
        longer = zip_longest(self.accepted_per_pos, before.accepted_per_pos, fillvalue=0)
        per_pos = tuple(now - then for now, then in longer)
        if min(generated, drafts, accepted, drafted or 0, *per_pos) < 0:
            return None
        return SpecCounts(drafts, drafted, accepted, per_pos or None)


MOST_LINES = 10_000  # of an engine's counters


def read_metrics(text: str, model: str) -> Reading | str:
    """Return the counters of a model, or the reason why there are none.

    Samples of several processes of an engine are summed. Those with the label of another model are left out, unless the
    page has one model alone: an engine labels them with the first of its served names.
    """
    try:
        sums, per_pos = _sums(text, model)
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return "its /metrics is not in Prometheus format, or too long"
    values = [*sums.values(), *per_pos.values()]
    if not all(0 <= value <= 2**53 and value.is_integer() for value in values):
        return "its /metrics has counts that are not integers"
    if not all(0 <= position < DEEPEST for position in per_pos):
        return f"its /metrics has draft positions that are not from 0 to {DEEPEST - 1}"
    for names in ENGINES.values():
        if names.generated in sums:
            return _reading(names, {name: int(value) for name, value in sums.items()}, per_pos)
    known = ", ".join(names.generated for names in ENGINES.values())
    return f"its /metrics has none of {known}"


def _reading(names: MetricNames, sums: Mapping[str, int], per_pos: Mapping[int, float]) -> Reading | str:
    speculates = names.drafts in sums
    accepted, drafted = sums.get(names.accepted, 0), sums.get(names.drafted, 0)
    if names.accepted and accepted > drafted:
        return f"its /metrics counts {accepted} of {drafted} drafted tokens as accepted"
    counted = bool(names.accepted) or not speculates
    return Reading(
        sums[names.generated],
        sums.get(names.drafts, 0),
        drafted if counted else None,
        accepted if counted else None,
        tuple(int(per_pos.get(i, 0)) for i in range(max(per_pos, default=-1) + 1)),
    )


def _sums(text: str, model: str) -> tuple[dict[str, float], dict[int, float]]:
    """Return the sums of the engine's counters of a model by name, and of accepted tokens by position."""
    from prometheus_client.parser import text_string_to_metric_families

    wanted = {name: names for names in ENGINES.values() for name in _names(names)}
    lines = [line for line in text.split("\n") if line.startswith(tuple(wanted))]  # the parser is slow
    if len(lines) > MOST_LINES:
        raise ValueError(f"more than {MOST_LINES} lines of counters")
    samples = [
        (sample.name.removesuffix("_total"), sample)
        for family in text_string_to_metric_families("\n".join(lines) + "\n")
        for sample in family.samples
        if sample.name.removesuffix("_total") in wanted
    ]
    models = {sample.labels["model_name"] for _, sample in samples if "model_name" in sample.labels}
    only = models if len(models) == 1 else {model}
    sums: defaultdict[str, float] = defaultdict(float)
    per_pos: defaultdict[int, float] = defaultdict(float)
    for name, sample in samples:
        if "model_name" in sample.labels and sample.labels["model_name"] not in only:
            continue
        if name == wanted[name].per_pos:
            per_pos[int(sample.labels["position"])] += sample.value
        else:
            sums[name] += sample.value
    return dict(sums), dict(per_pos)


def _names(names: MetricNames) -> list[str]:
    return [name for name in (names.generated, names.drafts, names.drafted, names.accepted, names.per_pos) if name]


def spec_request(engine: str) -> dict[str, Any]:
    """Return the fields of a request by which an engine reports the counts and token ids of its output."""
    return {
        "vLLM": {"return_token_ids": True},
        "SGLang": {"return_spec_tokens_details": True, "return_token_ids": True},
    }.get(engine, {})


NEUTRAL = {  # engine -> sampling parameters that change nothing, in place of defaults of the engine or of the model
    "vLLM": {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
    "SGLang": {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    "llama.cpp": {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0},
}
