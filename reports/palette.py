"""Colour and symbol of a method, fixed by its name: a colour for each family, a shade for each variant."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from specbench_ss.options import REFERENCE
from specbench_ss.results.text import visible

COLOURS = BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
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

METHODS = {
    "ss": (BLUE, "square"),
    "ss-shared": (BLUE, "diamond"),
    "medusa": (VERMILION, "diamond"),
    "medusa2": (VERMILION, "square"),
    "hydra": (VERMILION, "hourglass"),
    "eagle": (GREEN, "triangle-up"),
    "eagle2": (GREEN, "square"),
    "eagle3": (GREEN, "diamond"),
    "peagle": (GREEN, "cross"),
    "sd": (PURPLE, "circle"),
    "dflash": (PURPLE, "square"),
    "pld": (ORANGE, "cross"),
    "suffix": (ORANGE, "square"),
    "rest": (ORANGE, "diamond"),
    "recycling": (ORANGE, "triangle-up"),
    "lookahead": (SKY, "hourglass"),
    "space": (SKY, "circle"),
}
SHADES = 3  # of a colour: darker on a light page, lighter on a dark one
LONGEST = 24  # characters of a label that is not abbreviated

# Parts of a step's time have a scale of one hue, which no method has.
PARTS = {  # on a light and on a dark page
    "prefill": ("#3B4A63", "#E4EAF5"),
    "draft": ("#5B6F94", "#BCC9E2"),
    "verify": ("#8397BC", "#93A6CC"),
    "accept": ("#AFBEDA", "#7388B3"),
    "host": ("#D3DCEC", "#5D7199"),
}
LESS, MORE = "#4B3F9E", "#A3324A"  # time saved and added
INK, MUTED, GRID, PAPER = "#1A1E24", "#56606C", "#E6E9EE", "#FFFFFF"  # of charts


def _mixed(colour: str, other: str, share: float) -> str:
    pairs = zip(bytes.fromhex(colour[1:]), bytes.fromhex(other[1:]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02X}" for a, b in pairs)


def shade(colour: str, number: int, dark: bool = False) -> str:
    """Return a shade of a colour, 0 for the colour itself, on a light or a dark page."""
    return (
        _mixed(ON_DARK.get(colour, colour), "#FFFFFF", 0.3 * number)
        if dark
        else _mixed(colour, "#000000", 0.3 * number)
    )


DARK = {  # what a chart's colours become on a dark page
    **{shade(colour, i): shade(colour, i, dark=True) for colour in (*COLOURS, GREY) for i in range(SHADES)},
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
    """Look of one method. index: its CSS class is m<index>, which sets --c. symbol: a name of `SYMBOLS`.

    name: the label, abbreviated if it is long.
    """

    label: str
    index: int
    colour: str
    symbol: str
    name: str = ""

    @property
    def css(self) -> str:
        """Return the CSS class that sets its colour."""
        return f"m{self.index}"

    @property
    def shade(self) -> str:
        """Return its colour for style sheets, on a light and on a dark page."""
        return f"light-dark({self.colour}, {DARK[self.colour]})"

    @property
    def swatch(self) -> str:
        """Return the class and the symbol of a swatch, as 'm3 diamond'."""
        return f"{self.css} {self.symbol}"


Look = tuple[str, str, int]  # base colour, symbol, shade


def styles(labels: Sequence[str], plain: Collection[str] = (), baseline: str = REFERENCE) -> dict[str, Style]:
    """Return a style for each method, in order. plain: `ar` of changed models, grey as the baseline is."""
    made: dict[str, Look] = {baseline: (GREY, "circle", 0)}
    for label in sorted(set(labels) - {baseline}):
        made[label] = _look(label, label in plain, list(made.values()))
    names = short_labels(labels)
    return {
        label: Style(label, i, shade(made[label][0], made[label][2]), made[label][1], names[label])
        for i, label in enumerate(labels)
    }


def short_labels(labels: Sequence[str]) -> dict[str, str]:
    """Return each label, a long one as the name with the options in which variants differ, or numbered: `ss (2)`."""
    made: dict[str, str] = {}
    for label in labels:
        short, number = visible(label), 1
        if len(short) > LONGEST:
            short = _variant(label, [one for one in labels if _name(one) == _name(label)])
        while len(short) > 2 * LONGEST or short in made.values() or short in {*labels} - {label}:
            number += 1
            short = f"{visible(_name(label))[:LONGEST]} ({number})"
        made[label] = short
    return made


def _variant(label: str, variants: Sequence[str]) -> str:
    """Return 'medusa nodes=32': the options that not all variants share; a folder by its own name."""
    shared = set.intersection(*(set(_options(one)) for one in variants))
    texts = [option.rpartition("/" if "/" in option else "\0")[2] for option in _options(label) if option not in shared]
    return visible(" ".join([_name(label), *texts]))


def _options(label: str) -> list[str]:
    return [part for part in label.partition("[")[2].replace("]", ",").split(",") if part]


def _name(label: str) -> str:
    return label.partition("[")[0].partition("#")[0]


def _look(label: str, plain: bool, taken: Sequence[Look]) -> Look:
    """Return the look of the method's name, or of an unknown name; a variant gets the next shade, then symbol."""
    seed, used = zlib.crc32(_name(label).encode("utf-8", "surrogatepass")), Counter(colour for colour, _, _ in taken)
    both = Counter((colour, symbol) for colour, symbol, _ in taken)
    if plain or _name(label) not in METHODS:
        colour = GREY if plain else min(_turned(COLOURS, seed), key=lambda one: used[one])
        symbol = min(_turned(list(SYMBOLS), seed // 6), key=lambda one: both[colour, one])
    else:
        colour, symbol = METHODS[_name(label)]
    symbols = _turned(list(SYMBOLS), list(SYMBOLS).index(symbol))
    free = ((colour, one, i) for one in symbols for i in range(SHADES) if (colour, one, i) not in taken)
    return next(free, (colour, symbol, 0))


def _turned(values: Sequence[str], by: int) -> Iterator[str]:
    """Yield the values in their order, beginning with that of number `by`."""
    return (values[(by + i) % len(values)] for i in range(len(values)))


def symbols() -> Markup:
    """Return the shapes that swatches refer to, to be put once into a page."""
    paths = "".join(f'<path id="sy-{name}" d="{path}"/>' for name, path in SYMBOLS.items())
    return Markup(f"<defs>{paths}</defs>")
