"""What a server counts of its own speculative decoding, as Prometheus text of `/metrics`.

vLLM counts drafts, drafted and accepted tokens. SGLang has only gauges of its last moments, which belong to no request,
and llama.cpp tells a request's own counts in its answer: `protocol.Timings`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec

NAMES = {
    "drafts": "vllm:spec_decode_num_drafts",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}
GENERATED = "vllm:generation_tokens"
GAUGE = "sglang:spec_accept_length"
NEEDS = "reading /metrics needs prometheus-client: pip install -e '.[endpoint]'"


@dataclass(frozen=True, slots=True)
class Counters:
    """Counts since the server began, or between two readings. generated: tokens of all its answers, where it tells."""

    drafts: int
    drafted: int
    accepted: int
    generated: int | None = None

    def since(self, before: Counters) -> Counters | None:
        """Return what was counted since an earlier reading; None where a count fell, as after a restart."""
        known = self.generated is not None and before.generated is not None
        grown = Counters(
            self.drafts - before.drafts,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            (self.generated or 0) - (before.generated or 0) if known else None,
        )
        return grown if min(grown.drafts, grown.drafted, grown.accepted, grown.generated or 0) >= 0 else None


def readable() -> bool:
    """Say whether the library that reads such text is installed."""
    return find_spec("prometheus_client") is not None


def read(text: str, model: str) -> Counters | str:
    """Return the counters of a model; in words, why there are none.

    Samples of several engines are added up; those of another model, which a label names, are left out.
    """
    from prometheus_client.parser import text_string_to_metric_families

    sums: dict[str, float] = {}
    wanted = (*NAMES.values(), GENERATED, GAUGE)
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.removesuffix("_total")
                if name in wanted and sample.labels.get("model_name", model) == model:
                    sums[name] = sums.get(name, 0.0) + sample.value
    except (ValueError, KeyError, IndexError, TypeError):
        return "its /metrics is no text that Prometheus reads"
    if not all(value >= 0 and value.is_integer() for name, value in sums.items() if name != GAUGE):
        return "its /metrics has counts that are no whole numbers"
    if missing := [name for name in NAMES.values() if name not in sums]:
        return _why(missing, GAUGE in sums)
    generated = sums.get(GENERATED)
    drafts, drafted, accepted = (int(sums[name]) for name in NAMES.values())
    if accepted > drafted:
        return f"its /metrics counts {accepted} of {drafted} drafted tokens as accepted"
    return Counters(drafts, drafted, accepted, None if generated is None else int(generated))


def _why(missing: Iterable[str], gauge: bool) -> str:
    if gauge:
        return f"its /metrics has {GAUGE} alone, a mean over its last moments that belongs to no request"
    return f"its /metrics has no {next(iter(missing))}"
