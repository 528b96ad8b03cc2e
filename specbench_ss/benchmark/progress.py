"""The live display of a run. Draws only between timed parts: no thread of its own ever competes with a measurement."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from specbench_ss.runs.rows import Row

REDRAW_S = 0.5  # while a sample is being answered, redraw at most this often
PLAIN_LINES = 10  # without a terminal, so many progress lines a run


@dataclass(slots=True)
class RunningTotals:
    """What one method has done so far."""

    samples: int = 0
    failed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    step_tokens: int = 0
    steps: int = 0

    def add(self, row: Row) -> None:
        """Count a committed sample."""
        self.samples += 1
        self.failed += not row.ok
        if row.ok:
            self.tokens += row.tokens or 0
            self.seconds += row.wall_s or 0.0
            self.step_tokens += (row.tokens or 0) - (row.prefill_tokens or 0)
            self.steps += row.steps or 0

    def cells(self) -> list[str]:
        """samples, tokens/s, tokens per step."""
        rate = f"{self.tokens / self.seconds:.1f}" if self.seconds else "–"
        tau = f"{self.step_tokens / self.steps:.2f}" if self.steps else "–"
        return [f"{self.samples}" + (f" ({self.failed} failed)" if self.failed else ""), rate, tau]


class Progress:
    """The runner's `Events`, shown on a console; a context manager."""

    def __init__(self, labels: list[str], console: Console) -> None:
        self.console = console
        self.totals = {label: RunningTotals() for label in labels}
        self.bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
        )
        self.task = self.bar.add_task("warming up", total=None)
        self.live = Live(console=console, auto_refresh=False, transient=True)
        self.total = self.done = self.tokens = 0
        self._warmed = set[str]()
        self._drawn = 0.0

    def __enter__(self) -> Progress:
        self.live.start()
        self._draw()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.live.stop()

    def on_start(self, total: int) -> None:
        """Samples still to be made."""
        self.total = total
        self.bar.update(self.task, total=total)
        self._draw()

    def on_warm_up(self, label: str) -> None:
        """A method warms up: shown at once, for it may take minutes; without a terminal, a line for each method."""
        self.bar.update(self.task, description=f"warming up: {escape(label)}")
        if self.console.is_terminal:
            self._draw()
        elif label not in self._warmed:
            self.console.print(f"warming up: {label}", highlight=False, markup=False)
        self._warmed.add(label)

    def on_sample_start(self, label: str, question_id: str) -> None:
        """A method begins to answer."""
        self.tokens = 0
        self.bar.update(self.task, description=f"{escape(label)} on {escape(question_id)}")
        self._draw_soon()

    def on_tokens(self, n: int) -> None:
        """Called between steps, which are timed one by one."""
        self.tokens += n
        self._draw_soon()

    def on_sample(self, row: Row) -> None:
        """A sample is committed."""
        self.done += 1
        self.totals[row.method].add(row)
        self.bar.update(self.task, completed=self.done)
        if self.console.is_terminal:
            self._draw_soon()
        elif self.done == self.total or self.done % max(1, self.total // PLAIN_LINES) == 0:
            self.console.print(f"{self.done} of {self.total} samples", highlight=False)

    def on_warning(self, text: str) -> None:
        """Something that the user should know; it stays on the screen."""
        self.console.print(f"[yellow]warning:[/] {escape(text)}", highlight=False, soft_wrap=True)

    def _draw_soon(self) -> None:
        if time.monotonic() - self._drawn >= REDRAW_S:
            self._draw()

    def _draw(self) -> None:
        if self.console.is_terminal:
            self.live.update(self._view(), refresh=True)
        self._drawn = time.monotonic()

    def _view(self) -> RenderableType:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in ("method", "samples", "tokens/s", "tokens/step"):
            table.add_column(column, justify="left" if column == "method" else "right")
        for label, totals in self.totals.items():
            table.add_row(escape(label), *totals.cells())
        return Group(table, self.bar)
