"""Whether the numbers can be believed: failures, sameness of output, impossible and unstable results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specbench_ss.reports.html.page_parts import Cell, Column, Notice, Table, figure, plain
from specbench_ss.reports.html.palette import Style
from specbench_ss.reports.html.samples import VERDICTS
from specbench_ss.results.checks import Check, CheckState, worst_first
from specbench_ss.results.summary import SummaryRow
from specbench_ss.results.text import number, scientific
from specbench_ss.runs.records import Run

SHOWN = 12  # lines of a list; the rest is counted
SAMPLED = ("tokens", "p at most", "nats a token", "drafted tokens kept", "expected")  # columns at temperatures above 0
LOW = 1e-3  # smaller p are shown by their exponent
LEVELS: dict[CheckState, str] = {"wrong": "error", "warning": "warning", "not checked": "unknown", "ok": "ok"}


def notices(made: Sequence[Check]) -> list[Notice]:
    """Return every check, passed or not, over all tasks."""
    return [Notice(LEVELS[check.state], check.sentence, _some(check.lines)) for check in made]


def alerts(made: Sequence[Check]) -> list[Notice]:
    """Return what must stand above the results: all that is wrong, what to beware of, and what nobody checked.

    In a good run there is nothing.
    """
    return notices(worst_first(made))


def differences(run: Run, overall: Mapping[str, SummaryRow]) -> Sequence[str]:
    """Describe every answer that differs without a good reason, and where it differs."""
    return _some(
        [
            f"{_held(overall[s.method])} on {s.question_id}, turn {s.turn + 1}: "
            + f"{VERDICTS[s.verdict][0]} at token {s.first_difference}"
            + (f", {s.drop:.3g} below the best logit" if s.drop is not None else f" ({s.reason})" if s.reason else "")
            for s in run.sameness
            if s.verdict in ("mismatch", "near-tie", "length")
        ]
    )


def _held(row: SummaryRow) -> str:
    """Name the method, and what it is compared with where that is not the run's reference."""
    return row.method if row.reference == row.baseline else f"{row.method} against {row.reference}"


def sameness_note(run: Run) -> str:
    """Say how to read the table of verdicts."""
    if run.manifest["config"]["temperature"]:
        return (
            "Answers were sampled: the methods promise the same distribution, not the same tokens. So the tokens of "
            "all answers of a method are tested together."
        )
    if run.manifest["config"].get("endpoints"):
        return "Greedy answers, compared as texts. Servers do not promise the same text: a difference is no error."
    return (
        "Greedy answers, compared token by token. A near-tie is a place where two tokens are equally good to the model "
        "within the rounding of its data type; only a mismatch is an error."
    )


def sameness(overall: Mapping[str, SummaryRow], styles: Mapping[str, Style]) -> Table:
    """Return the table of verdicts by method."""
    sampled = any(row.bias for row in overall.values())
    columns = [
        Column("method", False),
        Column("against", False),
        *(Column(text) for text, _ in VERDICTS.values()),
        Column("failed"),
        *(Column(text) for text in SAMPLED if sampled),
    ]
    rows = [
        [
            style.cell(),
            plain(_against(overall[label])),
            *(figure(overall[label].sameness.get(v, 0), 0) for v in VERDICTS),
            figure(overall[label].n_failed, 0),
            *(_sampled(overall[label]) if sampled else ()),
        ]
        for label, style in styles.items()
        if overall[label].comparison != "reference" or overall[label].sameness
    ]
    return Table("sameness", columns, rows)


def _sampled(row: SummaryRow) -> tuple[Cell, ...]:
    """Return the cells of `SAMPLED`."""
    p = scientific(row.bias_p, 1) if row.bias_p is not None and row.bias_p < LOW else number(row.bias_p, 3)
    return (
        figure(row.bias_tokens, 0),
        Cell(p, row.bias_p),
        figure(row.bias_surplus, 3),
        figure(row.bias_accepted, 0),
        figure(row.bias_expected, 0),
    )


def _against(row: SummaryRow) -> str:
    if row.bias and (row.comparison == "reference" or row.reference_of):
        return "the distribution of its own model"
    if row.bias:
        return f"the distribution of {row.reference}"
    if row.comparison == "reference":
        return "its first repeat"
    if row.reference_of:
        return f"nothing: it is the reference of {', '.join(row.reference_of)}"
    compared = row.lossless or row.sameness.get("identical") or row.sameness.get("other text")
    return row.reference if compared else f"nothing: it does not promise the output of {row.reference}"


def _some(lines: Sequence[str]) -> list[str]:
    rest = len(lines) - SHOWN
    return [*lines[:SHOWN], *([f"and {rest:,} more"] if rest > 0 else [])]
