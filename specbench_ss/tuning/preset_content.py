"""What a tuning session leaves behind: the preset's content, and a sentence that says what to do.

This module knows no files.
"""

from __future__ import annotations

from typing import Any

from specbench_ss import __version__
from specbench_ss.method_spec import REFERENCE
from specbench_ss.results.intervals import FEWEST, Interval
from specbench_ss.results.number_text import interval, times
from specbench_ss.runs.manifest import now, plain
from specbench_ss.runs.suite import SuiteData
from specbench_ss.tuning.measurements import Comparison
from specbench_ss.tuning.session import Tuned


def sentence(tuned: Tuned) -> str:
    """Say whether anything is better than the default, by how much, and what there was no time to try."""
    return f"{_found(tuned)}{_untried(tuned)}"


def _untried(tuned: Tuned) -> str:
    if not tuned.untried:
        return ""
    options = ", ".join(
        f"{name} ({n} {'value' if n == 1 else 'values'})" if n else name for name, n in tuned.untried.items()
    )
    return f"; not tried, or not on enough prompts, for lack of time: {options}: give a longer --budget"


def _found(tuned: Tuned) -> str:
    """Compare with the default on prompts that were not used for choosing."""
    over, finalist = tuned.over_default, tuned.finalist.label
    measured = f"{times(over.speedup)}, interval {interval(over.interval)}, {over.prompts} prompts"
    if tuned.outcome == "faster":
        return f"{finalist} is faster than the default ({measured})"
    if tuned.outcome == "not confirmed":
        had = f"{over.prompts} of at least {FEWEST}"
        needs = f"tune again with a --budget that leaves {tuned.to_confirm:.0f} s more for that"
        return (
            f"the default is kept: {finalist} led the search, but was not confirmed on other prompts ({had}): {needs}"
        )
    if tuned.outcome in ("slower", "not distinguishable"):
        return f"the default is best within noise ({finalist}, which looked best, over it: {measured})"
    if not tuned.search.labels():
        return "the default is kept: nothing else was tried"
    return "the default is best within noise: nothing that was tried looked better on enough prompts"


def content(tuned: Tuned, resolved: dict[str, Any], made_for: dict[str, Any], asked: SuiteData, **how: Any) -> Any:
    """Return the preset of the chosen configuration, for `preset.write_preset`.

    resolved: the settings that its options lead to. made_for: the conditions from
    `preset_conditions.conditions`. asked: the calibration questions. how: further facts about the measurement.
    """
    found = {
        "method": tuned.chosen.name,
        "options": {name: _value(text) for name, text in tuned.chosen.options.items()},
        "verdict": sentence(tuned),
        **({"candidate": tuned.finalist.label} if tuned.outcome == "not confirmed" else {}),
        "made_for": {**made_for, "specbench_ss": __version__, "date": now()},
        "resolved": resolved,
        "measured": {
            "seconds": round(tuned.seconds, 1),
            "interrupted": tuned.interrupted,
            "untried": tuned.untried,
            **how,
            "confirmation": _confirmation(tuned),
            "search": _search(tuned),
        },
        "calibration": {
            "suite": asked.name,
            "edition": asked.edition,
            "content_hash": asked.content_hash,
            "notes": list(asked.notes),
            "prompts": [question.mark for question in asked.questions],
        },
    }
    return plain(found)


def _confirmation(tuned: Tuned) -> list[dict[str, Any]]:
    """Return the reference, the default and the finalist as measured on the second half of the prompts."""
    book, rows = tuned.confirmation, []
    for label in tuned.entrants:
        of_ar = book.compare(label, REFERENCE)
        counts = {"prompts": of_ar.prompts, "tokens_per_s": _short(of_ar.tokens_per_s)}
        of_default = _speedup(book.compare(label, tuned.default.label), "over_default")
        rows.append({"configuration": label, **counts, **_speedup(of_ar, "over_ar"), **of_default})
    return rows


def _search(tuned: Tuned) -> list[dict[str, Any]]:
    """Return everything that was tried on the first half, compared with the default on the same prompts."""
    book, rows = tuned.search, list[dict[str, Any]]()
    for label in book.labels():
        found = book.compare(label, tuned.default.label)
        rows.append({"configuration": label, "prompts": found.prompts, **_speedup(found, "over_default")})
    return rows + [{"configuration": label, "failed": why} for label, why in tuned.failed.items()]


def _speedup(found: Comparison, name: str) -> dict[str, Any]:
    return {name: _short(found.speedup), f"{name}_interval": _pair(found.interval)}


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _pair(bounds: Interval | None) -> list[float] | None:
    return None if bounds is None else [round(bound, 4) for bound in bounds]


def _value(text: str) -> int | str:
    """Return whole numbers as such, so that the file shows them without quotes."""
    return int(text) if text.lstrip("-").isdecimal() else text
