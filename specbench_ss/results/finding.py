"""The sentence that ends a run's tables: what was found, and how sure that is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from specbench_ss.method_spec import REFERENCE
from specbench_ss.results.intervals import FEWEST
from specbench_ss.results.noise_floor import floor
from specbench_ss.results.number_text import interval, times
from specbench_ss.results.run_health import Check
from specbench_ss.results.standings import Standing
from specbench_ss.results.summary import OVERALL, SummaryRow, failing

DISBELIEVE = (
    "impossible",
    "void",
    "biased",
    "mismatch",
    "failed",
    "incomplete",
    "tokens",
)  # checks after which no speed is a finding


def finding(summaries: Sequence[SummaryRow], made: Sequence[Check], placed: Mapping[str, Standing]) -> str:
    """Return the finding over all tasks.

    made: the checks of the run; what is wrong is named before the numbers. placed: as `standings` has it.
    """
    measured = [row for row in summaries if row.category == OVERALL and row.comparison != "reference"]
    baseline = next((row.baseline for row in summaries), REFERENCE)
    rows = [row for row in measured if not row.reference_of] or measured  # plain decodings of changed models are none
    wrong = [check.name for check in made if check.state == "wrong" and check.name in DISBELIEVE]
    rows, wrong, left_out = _without_failing(summaries, rows, wrong)
    said = _fastest(rows, placed) if rows else f"Only {baseline} was measured: there is nothing to compare it with."
    said += _noise([row for row in summaries if row.category == OVERALL], rows) + left_out
    if not wrong:
        return said
    made_so_far = next((check.made for check in made if check.name == "incomplete"), None)
    if wrong == ["incomplete"] and made_so_far is not None:
        return f"Not finished: {math.floor(100 * made_so_far)} % of the samples. So far {_within(said, rows)}"
    return f"Something is wrong ({', '.join(wrong)}); until it is explained, do not rely on this: {said}"


def _without_failing(
    summaries: Sequence[SummaryRow], rows: list[SummaryRow], wrong: list[str]
) -> tuple[list[SummaryRow], list[str], str]:
    """Return the methods of which no sample failed, what is wrong beside the failures, and a sentence on the others.

    Where samples of the reference failed, failures concern every method; so they do where every method failed.
    """
    ill = failing(summaries)
    well = [row for row in rows if row.method not in ill]
    reference = next((row for row in summaries if row.category == OVERALL and row.comparison == "reference"), None)
    if not ill or not well:
        return rows, wrong, ""
    if not (reference and reference.n_failed):
        wrong = [name for name in wrong if name != "failed"]
    names = [row.method for row in rows if row.method in ill]
    said = f" Without {_some(names)}, of which samples failed." if names else ""
    return well, wrong, said


def _within(said: str, rows: Sequence[SummaryRow]) -> str:
    """Return a sentence as it stands behind other words; names of methods stay as they are."""
    named = any(said.startswith(row.method) for row in rows)
    return said if named else said[:1].lower() + said[1:]


def _fastest(rows: Sequence[SummaryRow], placed: Mapping[str, Standing]) -> str:
    over = rows[0].baseline
    known = sorted((row for row in rows if row.speedup_interval), key=lambda row: -(row.speedup or 0))
    if not known and any(row.comparison == "void" for row in rows):
        return f"The numbers of {_some([row.method for row in rows if row.comparison == 'void'])} are void."
    if not known and not any(row.n_prompts for row in rows):
        return f"No method has an answer that can be compared with {over}'s."
    if not known:
        return f"Too few questions to tell a method from {over}: an interval takes {FEWEST}."
    faster = [row for row in known if row.comparison == "faster"]
    if faster:
        return (
            f"{faster[0].method} is {times(faster[0].speedup)} as fast as {over} "
            f"(95% interval {interval(faster[0].speedup_interval)}){_of(known, placed)}."
        )
    counts = Counter(row.comparison for row in known)
    if counts["not distinguishable"] == len(known):
        which = f"{known[0].method} is not" if len(known) == 1 else "No method is"
        return f"{which} distinguishable from {over}{_nearest(known)}."
    if counts["slower"] == len(known):
        which = f"{known[0].method} is" if len(known) == 1 else f"All {len(known)} methods are"
        return f"{which} slower than {over}{_nearest(known)}."
    slower, same = counts["slower"], counts["not distinguishable"]
    return f"No method is faster than {over}: {slower} slower, {same} not distinguishable{_nearest(known)}."


def _noise(overall: Sequence[SummaryRow], rows: Sequence[SummaryRow]) -> str:
    """Say that the fastest method's lead may be noise, where plain decoding seems as fast; '' elsewhere."""
    seems = floor(overall)
    best = max((row for row in rows if row.speedup_interval), key=lambda row: row.speedup or 0.0, default=None)
    if seems is None or best is None or not seems.holds(best):
        return ""
    return f" That may be noise: {seems.method}, which keeps one token a step, reaches {times(seems.speedup)}."


def _of(known: Sequence[SummaryRow], placed: Mapping[str, Standing]) -> str:
    """Say where the fastest stands among the others, and which of these cannot be told from it."""
    if len(known) == 1:
        return ""
    level = placed[known[0].method].level if known[0].method in placed else ()
    near = f"; question by question, {_some(level)} cannot be told from it" if level else ""
    return f", the fastest of {len(known)} methods{near}"


def _some(names: Sequence[str], shown: int = 3) -> str:
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")


def _nearest(known: Sequence[SummaryRow]) -> str:
    best = known[0]
    name = "" if len(known) == 1 else f"the fastest of {len(known)} is {best.method}: "
    return f" ({name}{times(best.speedup)}, 95% interval {interval(best.speedup_interval)})"
