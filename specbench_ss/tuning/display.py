"""Show tuning on the console: one line while it goes on, and tables at the end. Draws only between samples."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from specbench_ss.method_spec import REFERENCE
from specbench_ss.results.number_text import interval, number, times
from specbench_ss.results.terminal_table import result_table, widen
from specbench_ss.tuning.measurements import Comparison
from specbench_ss.tuning.session import Tuned

REDRAW_S = 0.5


class TuneProgress:
    """The `Watch` of a session, shown on a console, as a context manager. Without a terminal, each race gets a line."""

    def __init__(self, budget: float, console: Console) -> None:
        self.budget, self.console = budget, console
        self.live = Live(console=console, auto_refresh=False, transient=True)
        self.what, self.labels, self.samples = "warming up", 0, 0
        self._started, self._drawn = time.monotonic(), 0.0

    def __enter__(self) -> TuneProgress:
        self._started = time.monotonic()
        self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.live.stop()

    def on_race(self, what: str, labels: Sequence[str]) -> None:
        """Show that these configurations run against each other from now on."""
        if not self.console.is_terminal and what != self.what:
            self.console.print(f"{what}: {', '.join(labels)}", highlight=False, markup=False, soft_wrap=True)
        self.what, self.labels = what, len(labels)
        self._draw()

    def on_sample(self, label: str) -> None:
        """Count an answer, and redraw the line if it is time."""
        self.samples += 1
        self._draw()

    def on_warning(self, text: str) -> None:
        """Print something that the user should know; it stays on the screen."""
        self.console.print(f"[yellow]warning:[/] {escape(text)}", highlight=False, soft_wrap=True)

    def _draw(self) -> None:
        now = time.monotonic()
        if self.console.is_terminal and now - self._drawn >= REDRAW_S:
            spent = f"{now - self._started:.0f} of {self.budget:.0f} s"
            line = f"{self.what}: {self.labels} configurations left, {self.samples} answers, {spent}"
            self.live.update(Text(line), refresh=True)
            self._drawn = time.monotonic()


def print_tuned(tuned: Tuned, console: Console) -> None:
    """Print what was tried, then how the finalist did on the other prompts."""
    widen(console)
    if tuned.search.labels() or tuned.failed:
        console.print(_search_table(tuned))
    if tuned.confirmation.labels():
        console.print(_confirmation_table(tuned))


def _search_table(tuned: Tuned) -> Table:
    """List the configurations, the fastest first, each compared with the default on the prompts that it answered."""
    book, default = tuned.search, tuned.default.label
    over = {label: book.compare(label, default) for label in book.labels() if label not in tuned.failed}
    table = result_table("Tried", ("configuration", "over default", "95% interval", "prompts"))
    for label in sorted(over, key=lambda x: -(over[x].speedup or 0.0)):
        table.add_row(_name(label, default), *_speedup(over[label]), f"{over[label].prompts}")
    for label, why in tuned.failed.items():
        table.add_row(escape(label), "failed", escape(why), "")
    return table


def _confirmation_table(tuned: Tuned) -> Table:
    book, default = tuned.confirmation, tuned.default.label
    columns = ("configuration", "tokens/s", "over ar", "95% interval", "over default", "95% interval", "prompts")
    table = result_table("On prompts that it was not chosen on", columns)
    for label in tuned.entrants:
        of_ar, of_default = book.compare(label, REFERENCE), book.compare(label, default)
        cells = (number(of_ar.tokens_per_s, 1), *_speedup(of_ar), *_speedup(of_default), f"{of_ar.prompts}")
        table.add_row(_name(label, default), *cells)
    return table


def _name(label: str, default: str) -> str:
    return escape(f"{label} (default)" if label == default else label)


def _speedup(found: Comparison) -> tuple[str, str]:
    return times(found.speedup), interval(found.interval) or found.verdict
