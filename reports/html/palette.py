"""The colours of methods. Colour-blind eyes can tell them apart, and a pattern or symbol always stands beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbench_ss.method_spec import REFERENCE
from specbench_ss.reports.html.page_parts import Cell

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
REFERENCE_COLOUR = "#7A8089"
PATTERNS = ("", "/", "\\", "x", ".", "+")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x")
DASHES = ("solid", "dash", "dot", "dashdot")

# Where a step's time goes: not methods, so another scale: one hue, dark to light, with patterns.
PARTS = {
    "prefill": ("#3B4A63", "x"),
    "draft": ("#5B6F94", "/"),
    "verify": ("#8397BC", ""),
    "accept": ("#AFBEDA", "\\"),
    "host": ("#D3DCEC", "."),
}


@dataclass(frozen=True, slots=True)
class Style:
    """How one method is drawn. index: its CSS class is m<index>. again: how many methods before it have its colour."""

    label: str
    index: int
    colour: str
    pattern: str
    symbol: str
    dash: str
    again: int = 0

    @property
    def css(self) -> str:
        """Return the CSS class of its swatch."""
        return f"m{self.index}"

    @property
    def swatch(self) -> str:
        """Return the CSS stripes over its swatch; each method that shares a colour has its own slope."""
        if not self.again:
            return "none"
        stripes = "#fff 0 1.5px, transparent 1.5px 4px"
        return f"repeating-linear-gradient({45 * (2 * self.again - 1)}deg, {stripes})"

    def cell(self) -> Cell:
        """Return a table cell with the method's name."""
        return Cell(self.label, self.label, swatch=self.css)

    def marker(self) -> dict[str, object]:
        """Return the Plotly marker of a bar."""
        return {"color": self.colour, "pattern": hatch(self.pattern)}

    def hollow(self) -> dict[str, object]:
        """Return the Plotly marker of a bar that is not to be relied on: an outline, thinly hatched."""
        lines = {"shape": self.pattern or "/", "fgcolor": self.colour, "bgcolor": "rgba(0,0,0,0)"}
        return {
            "color": self.colour,
            "line": {"color": self.colour, "width": 1.5},
            "pattern": {**lines, "fillmode": "replace", "size": 8, "solidity": 0.15},
        }


def hatch(shape: str) -> dict[str, object]:
    """Return the Plotly pattern that is laid over a bar's own colour; '' is none."""
    return {"shape": shape, "fillmode": "overlay", "fgcolor": "#fff", "fgopacity": 0.6, "size": 7, "solidity": 0.25}


def styles(labels: Sequence[str]) -> dict[str, Style]:
    """Return a style for each method in order. The reference is grey; after six colours patterns and symbols change."""
    drawn = [label for label in labels if label != REFERENCE]
    made = {REFERENCE: Style(REFERENCE, 0, REFERENCE_COLOUR, "", "circle-open", "dot")}
    for i, label in enumerate(drawn):
        again, colour = divmod(i, len(COLOURS))
        pattern, dash = PATTERNS[again % len(PATTERNS)], DASHES[again % len(DASHES)]
        symbol = SYMBOLS[(i + again) % len(SYMBOLS)]
        made[label] = Style(label, i + 1, COLOURS[colour], pattern, symbol, dash, again)
    return {label: made[label] for label in labels}
