"""Where disturbed samples gather: in a session, in a question, in a method."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from statistics import median

from specbench_ss.runs.rows import Row, Run

OF_QUESTION = 0.25  # of the disturbed samples: a share of one question that is named
OF_SESSION = 0.5  # the same of a session
OF_METHOD = 0.1  # of a method's samples: a share of disturbed ones with which its speed is marked


def gathered(run: Run) -> list[str]:
    """Name the session and the question that have many of the disturbed samples, a line each."""
    return [line for line in (_session(run), _question(run)) if line]


def often_disturbed(run: Run) -> set[str]:
    """Return the methods of whose good samples, or of the reference's, a tenth or more was disturbed."""
    every, bad = Counter[str](), Counter[str]()
    for row in run.rows:
        every[row.method] += row.ok
        bad[row.method] += bool(row.ok and row.disturbed)
    found = {label for label, n in every.items() if n and bad[label] >= OF_METHOD * n}
    return set(run.labels) if run.baseline in found else found


def began_at(started: str) -> str:
    """Return when a session began, as in '02:39 on 2026-11-23'. started: as the manifest has it."""
    return f"{datetime.fromisoformat(started):%H:%M on %Y-%m-%d}"


def _session(run: Run) -> str:
    """Name the session that has half of the disturbed samples or more, and more of them than of all samples."""
    begun = sorted(str(session["started"]) for session in run.manifest.get("sessions", ()))
    rows = {began: [row for row in run.rows if _began(row, begun) == began] for began in begun}
    bad = {began: sum(bool(row.disturbed) for row in made) for began, made in rows.items()}
    if len(begun) < 2 or not any(bad.values()):
        return ""
    worst = max(bad, key=lambda began: bad[began])
    of = sum(bool(row.disturbed) for row in run.rows)
    share = bad[worst] / of
    if share < OF_SESSION or share <= len(rows[worst]) / len(run.rows):
        return ""
    rest = [row for began in begun if began != worst for row in rows[began]]
    said = f"{bad[worst]:,} of the {of:,} are of the session that began at {began_at(worst)}"
    return said + _pace(run.baseline, rows[worst], rest)


def _began(row: Row, begun: Sequence[str]) -> str:
    """Return the beginning of the session in which a sample was made. Manifests have whole seconds."""
    return max((b for b in begun if _unix(b) < (row.started or 0.0) + 1), default=begun[0])


def _unix(text: str) -> float:
    when = datetime.fromisoformat(text)
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def _pace(label: str, there: Sequence[Row], elsewhere: Sequence[Row]) -> str:
    """Say how long the reference's steps took in the session and in the others, by their medians."""
    own, other = ([_step_ms(row) for row in rows if row.method == label and row.steps] for rows in (there, elsewhere))
    if not own or not other:
        return ""
    return f"; a step of {label} took {median(own):.3g} ms there and {median(other):.3g} ms in the others (medians)"


def _step_ms(row: Row) -> float:
    return 1000 * (row.decode_s or 0.0) / (row.steps or 1)


def _question(run: Run) -> str:
    """Name the question that has a quarter of the disturbed samples or more, where there are several."""
    of = Counter(row.question_id for row in run.rows if row.disturbed)
    question, n = of.most_common(1)[0]
    if len(of) == 1 or n == 1 or n < OF_QUESTION * of.total():
        return ""
    return f"{n:,} of these are of question {question}: what it says of single methods may be the disturbance"
