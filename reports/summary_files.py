"""Reports that are the summary of a run as a file: Markdown, CSV, JSON, Parquet, or a picture of the ranking."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path

from specbench_ss.errors import UserError
from specbench_ss.results import exchange
from specbench_ss.results.analysis import Results
from specbench_ss.results.quality import measures
from specbench_ss.results.ranking import NO_MEAN
from specbench_ss.results.report import Report
from specbench_ss.results.table import levels_markdown, summary_markdown
from specbench_ss.results.text import safe
from specbench_ss.storage import replacing


class _File(Report):
    """A report whose whole file is made at once, of the run's summary."""

    def write(self, results: Results, path: Path) -> None:
        """Write the file, whole or not at all."""
        content = self.content(results)
        with replacing(path) as file:
            file.write(content)

    def content(self, results: Results) -> bytes:
        """Return the bytes of the file."""
        raise NotImplementedError


class MarkdownReport(_File):
    """The report `md`."""

    name = "md"
    summary = "headline, findings and summary as Markdown tables, load levels included"
    filename = "report.md"

    def content(self, results: Results) -> bytes:
        """Return the bytes of the file."""
        run = results.run
        model, suite = run.manifest["model"]["name"], run.manifest["suite"]["name"]
        found = [check for check in results.checks if check.is_alert]
        alerts = [line for check in found for line in (f"- {check.sentence}", *(f"  - {line}" for line in check.lines))]
        lines = [f"# {model} on {suite}", "", results.headline, "", *alerts]
        notes = [f"{NO_MEAN}.\n"] if len(measures(run.questions)) > 1 else []
        tables = filter(None, (summary_markdown(results), *notes, levels_markdown(results)))
        return "\n".join([*map(safe, lines), "", *tables]).encode("utf-8", "replace")


class CsvReport(_File):
    """The report `csv`."""

    name = "csv"
    summary = "summary, one row per task and method; all frames: ssbench export --form csv"
    filename = "summary.csv"

    def content(self, results: Results) -> bytes:
        """Return the bytes of the file."""
        text: str = exchange.plain(results.summary(all=True)).to_csv(index=False)
        return text.encode("utf-8", "replace")


class ParquetReport(_File):
    """The report `parquet`."""

    name = "parquet"
    summary = "summary, one row per task and method; all frames: ssbench export --form parquet"
    filename = "summary.parquet"

    def content(self, results: Results) -> bytes:
        """Return the bytes of the file."""
        file = io.BytesIO()
        results.summary(all=True).to_parquet(file, index=False)
        return file.getvalue()


class JsonReport(_File):
    """The report `json`."""

    name = "json"
    summary = "headline, checks, summary and manifest of the run, for other programs"
    filename = "report.json"

    def content(self, results: Results) -> bytes:
        """Return the bytes of the file."""
        run = results.run
        checks = [
            {"name": one.name, "state": one.state, "sentence": one.sentence, "lines": list(one.lines)}
            for one in results.checks
        ]
        content = {
            "headline": results.headline,
            "checks": checks,
            "rank_ranges": {label: asdict(ranks) for label, ranks in results.rank_ranges.items()},
            "summary": [row.as_dict() for row in results.rows],
            **results.concurrency_json(),
            "manifest": run.manifest,
        }
        return json.dumps(content, indent=1, ensure_ascii=False).encode("utf-8", "replace")


class PngReport(Report):
    """The report `png`."""

    name = "png"
    summary = "figure of the ranking; other figures: ssbench plot"
    filename = "ranking.png"

    def write(self, results: Results, path: Path) -> None:
        """Write the picture. Raises UserError without kaleido or a browser, and for a name not ending in .png."""
        from specbench_ss.reports.run_figures import write_plot

        if path.suffix != ".png":
            raise UserError(f"cannot draw {path}: the name must end in .png")
        write_plot(results, "ranking", path)
