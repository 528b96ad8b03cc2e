"""Findings about the numbers of a run, as records that every output renders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

CheckState = Literal["ok", "warning", "wrong", "not checked"]
STATES: tuple[CheckState, ...] = ("wrong", "warning", "not checked", "ok")  # the worst first


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding about the numbers of one method. kind: `unstable`, or a key of `FINDINGS`."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


FINDINGS: dict[str, tuple[CheckState, str]] = {  # kind -> state and sentence of the check that collects these findings
    "impossible": ("wrong", "Impossible results: a bug or an invalid measurement."),
    "invalid": ("wrong", "Invalid results."),
    "biased": ("wrong", "Sampled tokens do not follow the target's distribution; these methods have no speedup."),
    "untestable": ("warning", "Sampled tokens cannot be tested: rounding, or the baseline fails the test."),
    "failed": ("wrong", "Samples failed; no number includes them."),
    "mismatch": ("wrong", "Outputs differ from the baseline's without a numerical tie: no speedup for the same model."),
    "text-differs": ("warning", "Outputs of servers differ from the baseline's, for an unknown reason."),
    "length-differs": ("warning", "Outputs end earlier or later than the baseline's."),
    "numerical-tie": ("warning", "Numerical ties in float32, where they should be rare."),
    "short-steps": ("warning", "Steps take less time than the baseline's: other kernels, or a wrong clock or model."),
    "outlier": (
        "wrong",
        "Samples took far longer than others of their method: run again, or use the speedups without them.",
    ),
    "uncompared": ("warning", "Outputs were not compared with the baseline's: their verdicts are missing."),
}


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check.

    name: a key of `FINDINGS`, or `incomplete`, `warnings`, `sessions`, `timing`, `lower-bound`, `baseline-noise`,
    `lossy`, `inferior`, `repetition`, `low-quality`, `weak-drafter`, `cuda-graphs`, `concurrency`,
    `concurrency-verdicts`, `tokens`, `acceptance`, `memory`, `drift`.
    sentence: the finding, or the reason why there is none.
    lines: its details, one for each method or warning.
    made: share of the samples that an unfinished run has.
    findings: further names for `--fail-on`.
    """

    name: str
    state: CheckState
    sentence: str
    lines: tuple[str, ...] = ()
    made: float | None = None
    findings: tuple[str, ...] = ()

    @property
    def is_alert(self) -> bool:
        """Return True if the check found something."""
        return self.state in ("wrong", "warning")


def worst_first(made: Sequence[Check]) -> list[Check]:
    """Return the checks that found something or could not be made, the worst first."""
    return [check for state in STATES[:-1] for check in made if check.state == state]
