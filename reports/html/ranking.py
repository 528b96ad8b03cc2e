"""Ranking: every method by its speedup, its causes and status; settings and training budgets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specbench_ss.reports.charts import ratio_axis
from specbench_ss.reports.html.page_parts import VERDICTS, Cell, Column, Table, View, plain
from specbench_ss.reports.palette import Style
from specbench_ss.results import ranking as run_ranking
from specbench_ss.results.analysis import Budget, trained_tokens
from specbench_ss.results.checks import baseline_noise, often_noisy
from specbench_ss.results.ranking import RankRange
from specbench_ss.results.summary import SummaryRow, failing
from specbench_ss.results.table import ranking_columns
from specbench_ss.results.text import MISSING, format_number, format_speedup
from specbench_ss.runs.config import decoding_notes

Tag = tuple[str, str]  # text; 'good', 'flat', 'note' or 'bad'
QUALITY: dict[str, Tag] = {
    "non-inferior": ("quality not worse", "good"),
    "inferior": ("quality worse", "bad"),
    "not shown": ("quality not settled: too few outputs", "flat"),
}
BIAS = {"biased": "bad", "no bias found": "good", "too few tokens": "note", "not testable": "note"}
NOISY: Tag = ("noisy timing: a tenth or more of the samples, or of the baseline's", "note")
MAYBE: Tag = ("within baseline noise: a method that drafts nothing reaches this speedup", "note")
UNSTABLE: Tag = ("unstable timing: times of the same work differ by more than 10%", "note")
LOSSY: Tag = ("lossy: may change outputs, so its speed alone has little meaning", "note")
ANOTHER_MODEL: Tag = ("decodes another model than the baseline", "note")
FEW: Tag = (f"insufficient data: no interval {run_ranking.WITHOUT_INTERVAL}", "note")
ICONS = {"good": "✓", "note": "!", "bad": "✕"}
NO_RANK = "–"  # of methods slower than the baseline, without an interval, lossy or of another model


@dataclass(frozen=True, slots=True)
class Ranked:
    """One method of the ranking. rank: '1', '1–3' if the order is open, NO_RANK, or '' for the baseline.

    at, ends: percent along the axis of its speedup and interval. cells: texts by the keys of `ranking_columns`. tags:
    reasons of its status, the worst first. controls: autoregressive decodings of its own model, folded below it.
    """

    label: str
    style: Style
    rank: str
    at: float | None
    ends: tuple[float, float] | None
    cells: Mapping[str, str]
    nodes: str
    tags: Sequence[Tag]
    sure: bool = False
    own_model: str = ""
    controls: Sequence[Ranked] = field(default=())

    @property
    def status(self) -> str:
        """Return the level of the worst tag: 'good', 'note' or 'bad'."""
        return next((kind for _, kind in self.tags if kind in ("bad", "note")), "good")

    @property
    def icon(self) -> str:
        """Return the sign of the status."""
        return ICONS[self.status]

    @property
    def reasons(self) -> str:
        """Return the tooltip of the status."""
        return "; ".join(filter(None, (*(text for text, _ in self.tags), self.own_model)))


def controls(overall: Mapping[str, SummaryRow]) -> set[str]:
    """Return the methods that are measured only because others are compared with them."""
    return {label for label, row in overall.items() if row.reference_of}


@dataclass(frozen=True, slots=True)
class Axis:
    """A logarithmic axis of speedups, and its ticks."""

    low: float
    high: float
    ticks: Sequence[float]

    def at(self, value: float) -> float:
        """Return where a value lies, in percent."""
        return round(100 * math.log(value / self.low) / math.log(self.high / self.low), 2)


def axis_of(rows: Iterable[SummaryRow]) -> Axis:
    """Return the axis of speedups that holds all of them."""
    values = [value for row in rows for value in (row.speedup, *(row.speedup_interval or ())) if value is not None]
    return Axis(*ratio_axis(values))


def ranking(view: View, axis: Axis, found: Sequence[Budget]) -> list[Ranked]:
    """Return the methods in order, controls under the first method that is compared with them."""
    overall, rank_ranges, place, made = view.overall, view.results.rank_ranges, 0, list[Ranked]()
    left, failed = controls(overall), failing(view.results.rows)
    noise, noisy = baseline_noise(overall.values()), often_noisy(view.run)
    config, nodes = view.results.config, {budget.method: budget.drafted for budget in found}
    columns = [*ranking_columns(config).values()]
    rows = {
        label: Ranked(
            label=label,
            style=view.look[label],
            rank="",
            at=None if row.speedup is None else axis.at(row.speedup),
            ends=row.speedup_interval and (axis.at(row.speedup_interval[0]), axis.at(row.speedup_interval[1])),
            cells={one.key: one.cell(row) for one in columns} | {"output": run_ranking.short_output(row, config)},
            nodes=format_number(nodes.get(label) or None, 1),
            tags=_tags(row, config, noise is not None and noise.holds(row), label in noisy),
            sure=row.comparison in ("faster", "slower"),
            own_model=f"{run_ranking.own_model(row)} over {row.reference}" if row.reference_speedup is not None else "",
        )
        for label, row in overall.items()
    }
    for label in [label for label in rows if label not in left]:
        ranked, row = rows[label], overall[label]
        counts = row.speedup is not None and row.comparison != "baseline"
        contends = run_ranking.contends(row) and row.method not in failed
        place += counts and contends
        control = overall.get(row.reference)
        if ranked.own_model and control and control.speedup is not None:
            ranked = replace(ranked, own_model=f"{ranked.own_model}, itself {format_speedup(control.speedup)}")
        unranked = row.comparison == "slower" or row.speedup_interval is None or not contends
        rank = NO_RANK if unranked else _rank(place, rank_ranges.get(label))
        controls_below = [rows[row.reference]] if row.reference in left else []
        made.append(replace(ranked, rank=rank if counts else "", controls=controls_below))
        left.discard(row.reference)
    return [*made, *(rows[label] for label in rows if label in left)]


def _rank(place: int, found: RankRange | None) -> str:
    return f"{place}" if found is None or found.best == found.worst else f"{found.best}–{found.worst}"


def _tags(row: SummaryRow, config: Mapping[str, Any], near: bool, noisy: bool) -> list[Tag]:
    """Return the reasons of a method's status, the worst first.

    near: its interval begins within the baseline noise.
    """
    speed = (row.comparison, "flat" if row.comparison == "slower" else VERDICTS.get(row.comparison, "flat"))
    found = [FEW if row.comparison == "insufficient data" else speed]
    found += [MAYBE] if near else []
    found += [LOSSY] if not row.lossless and not row.reference_of else []
    found += [ANOTHER_MODEL] if row.reference != row.baseline else []
    found += [(f"{row.n_failed:,} failed", "bad")] if row.n_failed else []
    found += [_output(row, config)] if row.comparison != "baseline" else []
    found += [UNSTABLE] if row.unstable else []
    found += [QUALITY[row.quality_verdict]] if row.quality_verdict is not None else []
    found += [NOISY] if noisy else []
    found = [tag for tag in found if tag[0] != MISSING]  # no output was compared
    return sorted(found, key=lambda tag: (tag[0] != "invalid", tag[1] != "bad", tag[1] != "note"))


def _output(row: SummaryRow, config: Mapping[str, Any]) -> Tag:
    """Return the output match and its kind."""
    text = run_ranking.short_output(row, config)
    if row.comparison == "baseline":
        return "baseline", "flat"
    if row.bias:
        return text, BIAS[row.bias] if row.lossless else "flat"
    if row.output_match.get("mismatch"):
        return text, "bad"
    if any(finding.kind in ("numerical-tie", "length-differs") for finding in row.health):
        return text, "note"
    return text, "good" if row.output_match.get("identical") else "flat"


def budgets_table(view: View, found: Sequence[Budget]) -> Table:
    """Return a row for each method."""
    columns = [
        view.method(),
        Column("draft nodes per step", "drafted", "Nodes of the draft tree, root not counted, mean over all steps", 1),
        Column("verified per step", "verified", "Nodes that are left after pruning", 1),
        Column("trained parameters", _of("parameters"), "Of the drafter", 0),
        Column("training tokens", _tokens, "Prompts included, repeats counted; ≤: padding is counted too"),
        Column("training steps", _of("steps"), digits=0),
        Column("peak learning rate", _rate),
        Column("training text", lambda one: _text(one.training_info), "Training data, or the datastore", numeric=False),
        Column(
            "settings of this run",
            _settings,
            "Options of the command line; advised settings of the drafter folder",
            numeric=False,
        ),
    ]
    notes = tuple(decoding_notes(view.run.manifest["config"]))
    return Table.of("budgets", columns, found, "Settings and training budget", notes=notes)


def _of(name: str) -> Callable[[Budget], Any]:
    return lambda budget: (budget.training_info or {}).get(name)


def _tokens(budget: Budget) -> Cell:
    tokens, bound = trained_tokens(budget.training_info or {})
    return plain(MISSING) if tokens is None else Cell(f"{'≤ ' if bound else ''}{tokens:,}", tokens)


def _rate(budget: Budget) -> Cell:
    lr = (budget.training_info or {}).get("lr")
    return plain(MISSING) if lr is None else Cell(f"{lr:g}", lr)


def _settings(budget: Budget) -> str:
    options = budget.given + (" (a preset)" if budget.preset else "")
    return "; ".join(filter(None, (options, f"advised: {budget.advised}" if budget.advised else "")))


def _text(training_info: Mapping[str, Any] | None) -> str:
    if training_info is None:
        return "not recorded"
    if searched := training_info.get("searched"):
        return f"datastore of {searched.get('tokens') or 0:,} tokens: {searched.get('made_of') or 'of unknown origin'}"
    if "regenerate_responses" not in training_info:
        return "not recorded" if training_info else ""
    return "the model's outputs" if training_info["regenerate_responses"] else "responses of the data"
