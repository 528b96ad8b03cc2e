"""Why a method is as fast as it is: from the reference's milliseconds per token to the method's, part by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbench_ss.method_spec import REFERENCE
from specbench_ss.results.number_text import number, percent
from specbench_ss.results.paired_times import PairedTimes, over, paired
from specbench_ss.results.step_tally import Tally
from specbench_ss.results.work import Pair, pairs
from specbench_ss.runs.rows import Run


@dataclass(frozen=True, slots=True)
class Waterfall:
    """Milliseconds per kept token on the prompts that both answered: reference_ms + the five parts = method_ms.

    passes_saved: the reference's pass, made less often. verifying: what the method's passes take beyond that.
    drafting: making drafts. reading: the prompt. other: accepting, the host. tau: kept tokens a step. pass_ratio: the
    method's pass over the reference's.
    """

    method: str
    reference_ms: float
    passes_saved: float
    verifying: float
    drafting: float
    reading: float
    other: float
    method_ms: float
    tau: float
    pass_ratio: float | None

    @property
    def parts(self) -> dict[str, float]:
        """Return the five parts by what they are called, in order."""
        return {
            "passes saved": self.passes_saved,
            "verifying widened": self.verifying,
            "drafting added": self.drafting,
            "reading prompts": self.reading,
            "other": self.other,
        }

    def sentence(self) -> str:
        """Say the same in words."""
        end = f"{number(self.reference_ms)} ms a token become {number(self.method_ms)}."
        if self.passes_saved >= 0:
            return f"{self.method} keeps {number(self.tau)} tokens a pass and saves no passes. {self._costs()} {end}"
        share = percent(-self.passes_saved / self.reference_ms)
        saved = f"saves {number(-self.passes_saved)} ms a token in passes ({share} of all, reading the prompt included)"
        return f"{self.method} keeps {number(self.tau)} tokens a pass, which {saved}. {self._costs()} {end}"

    def _costs(self) -> str:
        wide = f" (its passes take {number(self.pass_ratio)} times as long as plain ones)" if self.pass_ratio else ""
        rest = self.reading + self.other
        others = f"drafting {_adds(self.drafting)}, reading the prompt and other work {_adds(rest)}:"
        return f"Verifying {_adds(self.verifying)}{wide}, {others}"


def _adds(ms: float) -> str:
    if abs(ms) < 0.005:
        return "adds nothing"
    return f"{'adds' if ms > 0 else 'saves'} {number(abs(ms))} ms"


def waterfalls(run: Run, worked: Sequence[Pair] | None = None) -> dict[str, Waterfall]:
    """Return the waterfall of each method that has samples and steps beside the reference's; of the reference none.

    worked: what `work.pairs` gives, where that is known.
    """
    of = {pair.own.method: pair for pair in (pairs(run) if worked is None else worked)}
    made = {label: _waterfall(pair) for label, pair in of.items() if label != REFERENCE}
    return {label: found for label, found in made.items() if found}


def _waterfall(pair: Pair) -> Waterfall | None:
    mine, theirs = pair.own.tally, pair.plain.tally
    times = PairedTimes(*paired(pair.own.rows, pair.plain.rows))
    start = over(float(times.ref_s.sum()), float(times.ref_tokens.sum()))
    end = over(float(times.own_s.sum()), float(times.own_tokens.sum()))
    tokens, tokens_ref = (float(sum(row.tokens or 0 for row in work.rows)) for work in (pair.own, pair.plain))
    if not start or not end or not mine.steps or not theirs.steps or mine.tau is None:
        return None
    verify, verify_ref = _mean(mine, "verify_s"), _mean(theirs, "verify_s")
    passes, passes_ref = mine.steps / tokens, theirs.steps / tokens_ref
    saved = verify_ref * (passes - passes_ref)
    wider = (verify - verify_ref) * passes
    drafting = mine.sums["draft_s"] / tokens - theirs.sums["draft_s"] / tokens_ref
    prefill, prefill_ref = (sum(row.prefill_s or 0.0 for row in work.rows) for work in (pair.own, pair.plain))
    reading = prefill / tokens - prefill_ref / tokens_ref
    return Waterfall(
        pair.own.method,
        reference_ms=1000 * start,
        passes_saved=1000 * saved,
        verifying=1000 * wider,
        drafting=1000 * drafting,
        reading=1000 * reading,
        other=1000 * (end - start - saved - wider - drafting - reading),
        method_ms=1000 * end,
        tau=mine.tau,
        pass_ratio=over(verify, verify_ref),
    )


def _mean(of: Tally, name: str) -> float:
    return float(of.sums[name]) / of.steps
