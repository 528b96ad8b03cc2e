"""Colour and symbol of a method. They come from its name, so that two reports of the same methods draw them alike."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from specbench_ss.options import REFERENCE

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#7A8089"  # autoregressive decoding
ON_DARK = {"#0072B2": "#4A90E2", "#D55E00": "#F07A2B", GREY: "#98A0AB"}  # those that a dark page would swallow
SYMBOLS = {  # by Plotly's names; around 0, five pixels to each side
    "circle": "M-5 0A5 5 0 1 0 5 0A5 5 0 1 0 -5 0Z",
    "square": "M-4.4 -4.4H4.4V4.4H-4.4Z",
    "diamond": "M0 -6L6 0L0 6L-6 0Z",
    "triangle-up": "M0 -5.6L5.6 4.6H-5.6Z",
    "cross": "M-2 -5.5H2V-2H5.5V2H2V5.5H-2V2H-5.5V-2H-2Z",
    "hourglass": "M-5.2 -5.2H5.2L0 0L5.2 5.2H-5.2L0 0Z",
}

# Where a step's time goes: not methods, so another scale: one hue, from what stands out most on the page to the least.
PARTS = {  # on a light and on a dark page
    "prefill": ("#3B4A63", "#E4EAF5"),
    "draft": ("#5B6F94", "#BCC9E2"),
    "verify": ("#8397BC", "#93A6CC"),
    "accept": ("#AFBEDA", "#7388B3"),
    "host": ("#D3DCEC", "#5D7199"),
}
LESS, MORE = "#4B3F9E", "#A3324A"  # time saved and added
INK, MUTED, GRID, PAPER = "#1A1E24", "#56606C", "#E6E9EE", "#FFFFFF"  # of charts
DARK = {  # what a chart's colours become on a dark page
    **ON_DARK,
    **dict(PARTS.values()),
    LESS: "#A9A1F2",
    MORE: "#F08BA0",
    INK: "#E7EAEE",
    MUTED: "#A3AEBB",
    GRID: "#2C333D",
    PAPER: "#1D222A",
}


@dataclass(frozen=True, slots=True)
class Style:
    """How one method is drawn. index: its CSS class is m<index>, which sets --c. symbol: a name of `SYMBOLS`."""

    label: str
    index: int
    colour: str
    symbol: str

    @property
    def css(self) -> str:
        """Return the CSS class that sets its colour."""
        return f"m{self.index}"

    @property
    def shade(self) -> str:
        """Return its colour for style sheets, on a light and on a dark page."""
        return f"light-dark({self.colour}, {ON_DARK.get(self.colour, self.colour)})"

    @property
    def swatch(self) -> str:
        """Return what a swatch needs: its class and its symbol, as 'm3 diamond'."""
        return f"{self.css} {self.symbol}"


def styles(labels: Sequence[str], plain: Collection[str] = (), baseline: str = REFERENCE) -> dict[str, Style]:
    """Return a style for each method, in order. plain: `ar` of changed models, grey as the baseline is."""
    made: dict[str, tuple[str, str]] = {baseline: (GREY, "circle")}
    for label in sorted(set(labels) - {baseline}):
        made[label] = _free(label, (GREY,) if label in plain else COLOURS, list(made.values()))
    return {label: Style(label, i, *made[label]) for i, label in enumerate(labels)}


def _free(label: str, colours: Sequence[str], taken: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Return colour and symbol: those of its name, or the next that fewest have."""
    seed = zlib.crc32(label.encode("utf-8", "surrogatepass"))
    used, both = Counter(colour for colour, _ in taken), Counter(taken)
    colour = min(_turned(colours, seed), key=lambda one: used[one])
    return colour, min(_turned(list(SYMBOLS), seed // 6), key=lambda one: both[colour, one])


def _turned(values: Sequence[str], by: int) -> Iterator[str]:
    """Yield the values in their order, beginning with that of number `by`."""
    return (values[(by + i) % len(values)] for i in range(len(values)))


def symbols() -> Markup:
    """Return the shapes that swatches refer to, to be put once into a page."""
    paths = "".join(f'<path id="sy-{name}" d="{path}"/>' for name, path in SYMBOLS.items())
    return Markup(f"<defs>{paths}</defs>")
