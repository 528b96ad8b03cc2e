"""Figure 16 as it is drawn: who sees whom in segment attention, from the masks that training uses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import torch

from specbench_ss.methods.ss.layout import segment_visibility
from specbench_ss.reports.paper.figures import COLOURS, axes
from specbench_ss.results.report import Column, Grid, Plot

PROMPT, COMPLETION, SEGMENT, GAMMA = 4, 8, 6, 2  # of the drawn example
Kind = Literal["absent", "masked", "main", "stream"]
KINDS: tuple[Kind, ...] = ("absent", "masked", "main", "stream")
SIGNS: dict[Kind, str] = {"absent": " ", "masked": "·", "main": "■", "stream": "●"}
TINTS = ("#ffffff", "#e3e6ea", COLOURS[0], COLOURS[1])
TOLD = "■ main row that is seen, ● stream that is seen, · masked, blank: not in memory in that segment"


@dataclass(frozen=True, slots=True)
class Place:
    """A row or a key: a main row at a position, or the stream-th of its streams. part: number of the segment."""

    position: int
    stream: int
    part: int

    @property
    def name(self) -> str:
        """Return 'main 3' or 'stream 3.1'."""
        return f"stream {self.position}.{self.stream}" if self.stream else f"main {self.position}"


@dataclass(frozen=True, slots=True)
class Pattern:
    """Who sees whom: kinds[row][key], both in the order of `places`: main rows, then streams by segment."""

    places: list[Place]
    kinds: list[list[Kind]]


def pattern(attends: bool = True) -> Pattern:
    """Return the pattern of a row of PROMPT and COMPLETION tokens. attends: main rows see their streams (eq. 3)."""
    seen = {pair: kind for start in range(0, PROMPT + COMPLETION, SEGMENT) for pair, kind in _segment(start, attends)}
    places = sorted({row for row, _ in seen}, key=lambda p: (p.stream > 0, p.position, p.stream))
    return Pattern(places, [[seen.get((row, key), "absent") for key in places] for row in places])


def _segment(start: int, attends: bool) -> Iterator[tuple[tuple[Place, Place], Kind]]:
    """Yield ((row, key), kind) of everything that is in memory while one segment is computed."""
    length = min(SEGMENT, PROMPT + COMPLETION - start)
    predicting = range(PROMPT - 1, PROMPT + COMPLETION - 1)  # positions before a token of the completion
    carry = [i for i in range(length) if start + i in predicting]
    carriers = torch.tensor([carry])
    mask = segment_visibility(length, start, carriers, torch.ones_like(carriers, dtype=torch.bool), GAMMA, attends)[0]
    mains = [Place(i, 0, i // SEGMENT) for i in range(start + length)]
    streams = [Place(start + i, j, start // SEGMENT) for i in carry for j in range(1, GAMMA + 1)]
    for row, sees in zip([*mains[start:], *streams], mask.tolist(), strict=True):
        for key, seen in zip([*mains, *streams], sees, strict=True):
            yield (row, key), ("stream" if key.stream else "main") if seen else "masked"


def pattern_plot(found: Pattern) -> Plot:
    """Draw it: a row a line, a key a column."""
    names = [place.name for place in found.places]
    heights = [[KINDS.index(kind) for kind in row] for row in found.kinds]
    steps = [(edge, tint) for i, tint in enumerate(TINTS) for edge in (i / len(TINTS), (i + 1) / len(TINTS))]
    data: list[dict[str, Any]] = [
        {"type": "heatmap", "x": names, "y": names, "z": heights, "zmin": -0.5, "zmax": len(KINDS) - 0.5,
         "colorscale": [list(step) for step in steps], "showscale": False, "xgap": 1, "ygap": 1}
    ]  # fmt: skip
    title = f"who sees whom: a prompt of {PROMPT}, a completion of {COMPLETION}, segments of {SEGMENT}, {GAMMA} streams"
    label = "Heat map: main rows see main rows before them, and streams see what their main row sees and each other."
    note = "Blue: a main row that is seen; orange: a stream that is seen; grey: masked; white: not in memory then."
    return Plot("pattern", title, label, data, axes("", "", autorange="reversed"), pattern_grid(found), note)


def pattern_grid(found: Pattern) -> Grid:
    """Return the same in signs: a column for the main rows and one for the streams of each segment."""
    groups = [list(group) for _, group in groupby(range(len(found.places)), key=lambda i: _group(found.places[i]))]
    columns = (Column("row", "text"), *(Column(_group(found.places[group[0]]), "text") for group in groups))
    rows = tuple(
        (place.name, *("".join(SIGNS[kinds[i]] for i in group) for group in groups))
        for place, kinds in zip(found.places, found.kinds, strict=True)
    )
    return Grid("pattern", columns, rows, f"Who sees whom: {TOLD}")


def _group(place: Place) -> str:
    return f"streams of segment {place.part + 1}" if place.stream else "main rows"
