"""What the figures are drawn from: the summary of a run, the fastest method first."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from specbench_ss.errors import UserError, known_words
from specbench_ss.reports.html.palette import Style, styles
from specbench_ss.results.summary import OVERALL, SummaryRow, summarise
from specbench_ss.runs.records import Run


@dataclass(frozen=True, slots=True)
class Numbers:
    """A run, its rows over all tasks of the methods to draw, fastest first, and how each is drawn."""

    run: Run
    rows: list[SummaryRow]
    styles: dict[str, Style]

    @property
    def contestants(self) -> list[SummaryRow]:
        """Return the rows without the reference."""
        return [row for row in self.rows if row.comparison != "reference"]

    @property
    def title(self) -> str:
        """Return model, suite and device in a few words."""
        manifest = self.run.manifest
        model, suite = manifest["model"], manifest["suite"]
        prompts = f"{suite['prompts']:,} prompt{'s' * (suite['prompts'] != 1)}"
        return f"{model['name']}, {model['dtype']}, {model['device']}; {suite['name']}, {prompts}"


def numbers_of(run: Run, wanted: Collection[str] = ()) -> Numbers:
    """Return what to draw. wanted: labels of methods; none: all but plain decodings of changed models.

    Raises UserError for a label that the run does not have, and where the run has no sample.
    """
    if not run.rows:
        raise UserError(f"nothing to draw: {run.path} has none of the run's {run.samples:,} samples")
    for label in wanted:
        if label not in run.labels:
            raise UserError(f"the run has no method {label!r}{known_words(label, run.labels)}")
    rows = [row for row in summarise(run) if row.category == OVERALL]
    plain = {row.method for row in rows if row.reference_of}
    kept = [row for row in rows if (row.method in wanted if wanted else row.method not in plain)]
    return Numbers(run, sorted(kept, key=lambda row: -(row.speedup or 0.0)), styles(run.labels, plain, run.baseline))
