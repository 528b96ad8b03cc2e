"""Methods whose samples were often disturbed by something else on the machine."""

from __future__ import annotations

from collections import Counter

from specbench_ss.runs.rows import Run

OF_METHOD = 0.1  # of a method's samples: a share of disturbed ones with which its speed is marked


def often_disturbed(run: Run) -> set[str]:
    """Return the methods of whose good samples, or of the reference's, a tenth or more was disturbed."""
    every, bad = Counter[str](), Counter[str]()
    for row in run.rows:
        every[row.method] += row.ok
        bad[row.method] += bool(row.ok and row.disturbed)
    found = {label for label, n in every.items() if n and bad[label] >= OF_METHOD * n}
    return set(run.labels) if run.baseline in found else found
