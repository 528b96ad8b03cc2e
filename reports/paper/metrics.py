"""The columns of the papers' tables, each with what this project's summary has for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specbench_ss.results.report import Form
from specbench_ss.results.summary import SummaryRow


@dataclass(frozen=True, slots=True)
class Metric:
    """A column of the papers' tables: its name in the published data, and how this project's summary gives it."""

    column: str
    title: str
    ours: Callable[[SummaryRow], float | None]
    form: Form = "number"


def _latency(row: SummaryRow) -> float | None:
    return None if not row.tokens or not row.tokens_per_s else 1000 * row.tokens / row.tokens_per_s


def _percent(row: SummaryRow) -> float | None:
    return None if row.quality is None else 100 * row.quality


SPEEDUP = Metric("speedup", "speedup", lambda row: row.speedup, "times")
TAU = Metric("tau", "mean accepted tokens (tau)", lambda row: row.tau)
SCORE = Metric("score", "quality (published: GPT-4 score of 10; ours: the suite's metrics of 100)", _percent)
METRIC = Metric("metric", "quality (published: exact match or ROUGE-1; ours: the suite's)", _percent)
TARGET_CALLS = Metric("target_calls", "target calls per sample", lambda row: row.target_calls)
DRAFT_CALLS = Metric("draft_calls", "draft calls per sample", lambda row: row.draft_calls)
LATENCY = Metric("latency_ms", "wall time per sample, ms", _latency)
