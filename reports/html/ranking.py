"""Ranking: every method by its speedup, its causes and status; settings and training budgets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specbench_ss.reports.charts import ratio_axis
from specbench_ss.reports.html.page_parts import Cell, Column, Table, View, plain
from specbench_ss.reports.palette import Style
from specbench_ss.results import ranking as verdict_text
from specbench_ss.results.analysis import Budget, sources
from specbench_ss.results.checks import baseline_noise, often_noisy
from specbench_ss.results.ranking import RankRange
from specbench_ss.results.summary import SummaryRow
from specbench_ss.results.text import MISSING, format_number, format_speedup, interval

Badge = tuple[str, str]  # text, kind of pill
QUALITY: dict[str, Badge] = {
    "non-inferior": ("quality no worse", "good"),
    "inferior": ("quality worse", "bad"),
    "not shown": ("quality not settled", "flat"),
}
DISTURBED: Badge = ("noisy", "note")
ORIGINS = {
    "learnt from": "text that its drafter read in training, repeats counted",
    "searches": "text that its drafts are looked up in",
}
UNKNOWN: Badge = ("training not recorded", "note")
LEGEND = {  # tags that need a word more, in the order in which they are explained
    "not significant": "the interval covers 1",
    "unstable timing": "times of its repeats, or its step times over prompts, differ by a tenth or more",
    "may be noise": "it begins below what autoregressive decoding itself seems to gain in this run",
    "identical": "the same tokens as the reference for every prompt",
    DISTURBED[0]: "something else on the machine disturbed a tenth or more of its samples or of the reference's",
    "quality not settled": "too few answers to say whether quality is worse",
}
BIAS = {"biased": "bad", "no bias found": "good", "too few tokens": "note", "not testable": "note"}  # kinds of pill
PILLS: dict[str, Badge] = {
    "faster": ("faster", "good"),
    "slower": ("slower", "bad"),
    "not significant": ("not significant", "flat"),
    "insufficient data": ("too few questions", "flat"),
    "invalid": ("invalid", "bad"),
    "reference": ("reference", "flat"),
}


@dataclass(frozen=True, slots=True)
class Ranked:
    """One method of the ranking. place: 1 for the fastest; None for the reference and where there is no speedup.

    may_be: the places that it may have, where that is more than one, as in '2–4'. at, ends: percent
    along the axis of its speedup and interval. cost: its step over the reference's.
    other: what tau and cost leave unexplained. controls: autoregressive decodings of its own model, folded below it.
    """

    label: str
    style: Style
    place: int | None
    may_be: str
    at: float | None
    ends: tuple[float, float] | None
    speedup: str
    interval: str
    tau: str
    cost: str
    other: str
    rate: str
    badges: Sequence[Badge]
    own_model: str = ""
    controls: Sequence[Ranked] = field(default=())


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


def ranking(view: View, axis: Axis) -> list[Ranked]:
    """Return the methods in order, controls under the first method that is compared with them."""
    overall, rank_ranges, places, made = view.overall, view.results.rank_ranges, 0, list[Ranked]()
    tags, left = _all_badges(view), controls(overall)
    rows = {label: _ranked(row, view.look[label], axis, tags[label]) for label, row in overall.items()}
    for label in [label for label in rows if label not in left]:
        mine, row = rows[label], overall[label]
        counts = row.speedup is not None and row.comparison != "reference"
        places += counts
        control = overall.get(row.reference)
        if mine.own_model and control and control.speedup is not None:
            mine = replace(mine, own_model=f"{mine.own_model}, itself {format_speedup(control.speedup)}")
        mine = replace(mine, place=places if counts else None, may_be=_may_be(rank_ranges.get(label)))
        made.append(replace(mine, controls=[rows[row.reference]] if row.reference in left else []))
        left.discard(row.reference)
    return [*made, *(rows[label] for label in rows if label in left)]


def legend(rows: Sequence[Ranked]) -> list[tuple[str, str]]:
    """Return the tags of these rows that need an explanation, each with it."""
    shown = {text for row in rows for one in (row, *row.controls) for text, _ in one.badges}
    origins = {
        f"{word} … tokens": said for word, said in ORIGINS.items() if any(text.startswith(word) for text in shown)
    }
    return [*((text, said) for text, said in LEGEND.items() if text in shown), *origins.items()]


def _may_be(standing: RankRange | None) -> str:
    return "" if standing is None or standing.best == standing.worst else f"{standing.best}–{standing.worst}"


def _ranked(row: SummaryRow, style: Style, axis: Axis, badges: Sequence[Badge]) -> Ranked:
    ends = row.speedup_interval
    return Ranked(
        label=row.method,
        style=style,
        place=None,
        may_be="",
        at=None if row.speedup is None else axis.at(row.speedup),
        ends=None if ends is None else (axis.at(ends[0]), axis.at(ends[1])),
        speedup="invalid" if row.comparison == "invalid" else format_speedup(row.speedup),
        interval=interval(row.speedup_interval),
        tau=format_number(row.mean_acceptance_length),
        cost=format_number(row.step_cost),
        other=format_number(None if row.comparison == "invalid" else row.other_factor),
        rate=format_number(row.tokens_per_s, 1),
        badges=badges,
        own_model=f"{verdict_text.own_model(row)} over {row.reference}" if row.reference_speedup is not None else "",
    )


def _all_badges(view: View) -> dict[str, list[Badge]]:
    """Return how far to believe each method, whether its samples were disturbed, and what its drafts come from."""
    noise, disturbed, origins = baseline_noise(view.overall.values()), often_noisy(view.run), sources(view.run)
    found = {}
    for label, row in view.overall.items():
        found[label] = _badges(row, view.results.config, noise is not None and noise.holds(row))
        found[label] += [DISTURBED] if label in disturbed else []
        if label in origins:
            found[label].append((origins[label], "flat origin") if origins[label] else UNKNOWN)
    return found


def _badges(row: SummaryRow, config: Mapping[str, Any], near: bool) -> list[Badge]:
    """Return how far to believe a method, the worst first: invalid, differing, failed, or sure and identical.

    near: its lead begins within what autoregressive decoding seems to gain.
    """
    found = [PILLS[row.comparison]]
    found += [("may be noise", "note")] if near else []
    found += [(f"{row.n_failed:,} failed", "bad")] if row.n_failed else []
    found += [_output(row, config)] if row.comparison != "reference" else []
    found += [("unstable timing", "note")] if row.unstable else []
    found += [QUALITY[row.quality_verdict]] if row.quality_verdict is not None else []
    found = [badge for badge in found if badge[0] != MISSING]  # no answer was compared
    return sorted(found, key=lambda badge: badge[0] != "invalid" and badge[1] != "bad")


def _output(row: SummaryRow, config: Mapping[str, Any]) -> Badge:
    """Say how the answers compare with those that they must equal."""
    said = verdict_text.short_output(row, config)
    if row.bias:
        return said, BIAS[row.bias] if row.lossless else "flat"
    if row.output_match.get("mismatch"):
        return f"differs: {said}", "bad"
    if row.output_match.get("numerical tie") or row.output_match.get("length differs"):
        return said, "note"
    return said, "good" if row.output_match.get("identical") else "flat"


def budgets_table(view: View, found: Sequence[Budget]) -> Table:
    """Return a row for each method."""
    columns = [
        view.method(),
        Column("drafted a step", "drafted", "Nodes of the draft tree, the root left out, a mean over all steps", 1),
        Column("verified a step", "verified", "Of these, nodes that reached the model's last layer", 1),
        Column("parameters that learnt", _of("parameters"), "Of the drafter, in its training", 0),
        Column("tokens read", _of("tokens"), "Of text in its training, prompts included and repeats counted", 0),
        Column("steps of training", _of("steps"), digits=0),
        Column("peak learning rate", _rate),
        Column("text", lambda one: _text(one.training_info), "What it learnt from, or what is searched", numeric=False),
        Column(
            "settings of this run",
            _settings,
            "Options that the command gave, or the weights' folder advises",
            numeric=False,
        ),
    ]
    return Table.of("budgets", columns, found, "What each method had")


def _of(name: str) -> Callable[[Budget], Any]:
    return lambda budget: (budget.training_info or {}).get(name)


def _rate(budget: Budget) -> Cell:
    lr = (budget.training_info or {}).get("lr")
    return plain(MISSING) if lr is None else Cell(f"{lr:g}", lr)


def _settings(budget: Budget) -> str:
    given = budget.given + (" (a preset)" if budget.preset else "")
    return "; ".join(filter(None, (given, f"advised: {budget.advised}" if budget.advised else "")))


def _text(training_info: Mapping[str, Any] | None) -> str:
    if training_info is None:
        return "not recorded"
    if searched := training_info.get("searched"):
        return f"{searched.get('tokens') or 0:,} tokens are searched: {searched.get('made_of') or 'of unknown origin'}"
    if "regenerate_responses" not in training_info:
        return "not recorded" if training_info else ""
    return "the model's own answers" if training_info["regenerate_responses"] else "the answers of the data"
