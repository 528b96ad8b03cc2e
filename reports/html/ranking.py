"""The rows of the first screen: every method by its speedup, why, and how far to believe it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from markupsafe import Markup

from specbench_ss.reports.html import forest
from specbench_ss.reports.html.axis import Axis
from specbench_ss.reports.html.palette import Style
from specbench_ss.results import ranking as verdict_text
from specbench_ss.results.checks import floor
from specbench_ss.results.ranking import Standing
from specbench_ss.results.summary import SummaryRow
from specbench_ss.results.text import MISSING, interval, number, times

Badge = tuple[str, str]  # text, kind of pill
GRID = "ranking"
QUALITY: dict[str, Badge] = {
    "non-inferior": ("quality no worse", "good"),
    "inferior": ("quality worse", "bad"),
    "not shown": ("quality not settled", "flat"),
}
DISTURBED: Badge = ("disturbed", "note")
ORIGINS = {
    "learnt from": "text that its drafter read in training, repeats counted",
    "searches": "text that its drafts are looked up in",
}
UNKNOWN: Badge = ("training not recorded", "note")
LEGEND = {  # tags that need a word more, in the order in which they are explained
    "not distinguishable": "the interval covers 1",
    "unstable timing": "times of its repeats, or its step times over prompts, differ by a tenth or more",
    "may be noise": "it begins below what plain decoding itself seems to gain in this run",
    "identical": "the same tokens as the reference for every prompt",
    DISTURBED[0]: "something else on the machine disturbed a tenth or more of its samples or of the reference's",
    "quality not settled": "too few answers to say whether quality is worse",
}
BIAS = {"biased": "bad", "no bias found": "good", "too few tokens": "note", "not testable": "note"}  # kinds of pill
PILLS: dict[str, Badge] = {
    "faster": ("faster", "good"),
    "slower": ("slower", "bad"),
    "not distinguishable": ("not distinguishable", "flat"),
    "too few": ("too few questions", "flat"),
    "void": ("void", "bad"),
    "reference": ("reference", "flat"),
}


@dataclass(frozen=True, slots=True)
class Ranked:
    """One method of the ranking. place: 1 for the fastest; None for the reference and where there is no speedup.

    may_be: the places that it may have, where that is more than one, as in '2–4'. cost: its step over the reference's.
    other: what tau and cost leave unexplained. controls: plain decodings of its own model, folded below it.
    """

    label: str
    style: Style
    place: int | None
    may_be: str
    strip: Markup
    speedup: str
    interval: str
    tau: str
    cost: str
    other: str
    rate: str
    badges: Sequence[Badge]
    own_model: str = ""
    controls: Sequence[Ranked] = field(default=())


def order(overall: Mapping[str, SummaryRow]) -> list[str]:
    """Return the methods from the fastest on; those without a speedup come last, in the order of the run."""
    return sorted(overall, key=lambda label: -(overall[label].speedup or 0.0))


def controls(overall: Mapping[str, SummaryRow]) -> set[str]:
    """Return the methods that are measured only because others are compared with them."""
    return {label for label, row in overall.items() if row.reference_of}


def axis_of(rows: Sequence[SummaryRow], styles: Mapping[str, Style]) -> Axis:
    """Return the axis of speedups that holds all of them."""
    return forest.axis_of([mark(row, styles[row.method]) for row in rows])


def mark(row: SummaryRow, style: Style) -> forest.Mark:
    """Return how a method's speedup is drawn."""
    return forest.Mark(row.speedup, row.speedup_interval, f"var(--{style.css})", style.symbol)


def ranking(
    overall: Mapping[str, SummaryRow],
    styles: Mapping[str, Style],
    config: Mapping[str, Any],
    axis: Axis,
    placed: Mapping[str, Standing],
    disturbed: Collection[str] = (),
    origins: Mapping[str, str] | None = None,
) -> list[Ranked]:
    """Return the methods in order, controls under the first method that is compared with them.

    disturbed: methods whose speed is marked, since too many samples of theirs or of the reference were disturbed.
    origins: what drafts come from, in words.
    """
    noise = floor(overall.values())
    near = {label for label, row in overall.items() if noise is not None and noise.holds(row)}
    rows = {label: _ranked(overall[label], styles[label], config, axis, label in near) for label in order(overall)}
    for label in disturbed:
        rows[label] = replace(rows[label], badges=[*rows[label].badges, DISTURBED])
    for label, text in (origins or {}).items():
        if label in rows:
            origin = (text, "flat origin") if text else UNKNOWN
            rows[label] = replace(rows[label], badges=[*rows[label].badges, origin])
    places, folded, made = 0, controls(overall), []
    left = set(folded)
    for label in (label for label in rows if label not in folded):
        row, own = overall[label], overall[label].reference
        counts = row.speedup is not None and row.comparison != "reference"
        places += counts
        mine, control = rows[label], overall.get(own or "")
        if mine.own_model and control and control.speedup is not None:
            mine = replace(mine, own_model=f"{mine.own_model}, itself {times(control.speedup)}")
        mine = replace(mine, place=places if counts else None, may_be=_may_be(placed.get(label)))
        made.append(replace(mine, controls=[rows[own]] if own in left else []))
        left.discard(own)
    return [*made, *(rows[label] for label in rows if label in left)]


def legend(rows: Sequence[Ranked]) -> list[tuple[str, str]]:
    """Return the tags of these rows that need an explanation, each with it."""
    shown = {text for row in rows for one in (row, *row.controls) for text, _ in one.badges}
    found = [(text, said) for text, said in LEGEND.items() if text in shown]
    for word, said in ORIGINS.items():
        if any(text.startswith(word) for text in shown):
            found.append((f"{word} … tokens", said))
    return found


def _may_be(standing: Standing | None) -> str:
    return "" if standing is None or standing.best == standing.worst else f"{standing.best}–{standing.worst}"


def _ranked(row: SummaryRow, style: Style, config: Mapping[str, Any], axis: Axis, near: bool) -> Ranked:
    return Ranked(
        label=row.method,
        style=style,
        place=None,
        may_be="",
        strip=forest.strip(GRID, forest.drawn(mark(row, style), axis)),
        speedup="void" if row.comparison == "void" else times(row.speedup),
        interval=interval(row.speedup_interval),
        tau=number(row.tau),
        cost=number(row.step_cost),
        other=number(None if row.comparison == "void" else row.residual),
        rate=number(row.tokens_per_s, 1),
        badges=badges(row, config, near),
        own_model=f"{verdict_text.own_model(row)} over {row.reference}" if row.reference_speedup is not None else "",
    )


def badges(row: SummaryRow, config: Mapping[str, Any], near: bool = False) -> list[Badge]:
    """Return how far to believe a method, the worst first: void, differing, failed, or sure and identical.

    near: its lead begins within what plain decoding seems to gain.
    """
    found = [PILLS[row.comparison]]
    found += [("may be noise", "note")] if near else []
    found += [(f"{row.n_failed:,} failed", "bad")] if row.n_failed else []
    found += [_output(row, config)] if row.comparison != "reference" else []
    found += [("unstable timing", "note")] if row.unstable else []
    found += [QUALITY[row.quality_verdict]] if row.quality_verdict is not None else []
    found = [badge for badge in found if badge[0] != MISSING]  # no answer was compared
    return sorted(found, key=lambda badge: badge[0] != "void" and badge[1] != "bad")


def _output(row: SummaryRow, config: Mapping[str, Any]) -> Badge:
    """Say how the answers compare with those that they must equal."""
    said = verdict_text.short_output(row, config)
    if row.bias:
        return said, BIAS[row.bias] if row.lossless else "flat"
    if row.sameness.get("mismatch"):
        return f"differs: {said}", "bad"
    if row.sameness.get("near-tie") or row.sameness.get("length"):
        return said, "note"
    return said, "good" if row.sameness.get("identical") else "flat"
