"""Speedups as a picture for the README: a row per method, fastest first, with 95 % intervals.

    python benchmarks/forest.py docs/results/all-methods.csv docs/images/all-methods.svg "84 prompts, lab model, ..."
    python benchmarks/forest.py runs/MY-RUN picture.svg "what was measured on what"

The first argument is a run directory, or a CSV file with the columns of `load_run(...).summary()` that are drawn. Plain
decodings of changed models (`medusa2-ar` and the like) are left out: they are references, not contestants.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment

from specbench_ss import load_run

ROW, LEFT, RIGHT, TOP, BOTTOM, WIDTH = 26, 110, 150, 34, 40, 760  # pixels
PICTURE = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {{ width }} {{ height }}" font-size="13"
 font-family="system-ui, sans-serif" role="img">
<title>{{ title }}</title>
<rect width="{{ width }}" height="{{ height }}" fill="#fff"/>
<g fill="#333">
<text x="{{ end + 16 }}" y="20" font-weight="600">speedup</text>
<text x="{{ width - 12 }}" y="20" font-weight="600" text-anchor="end">τ</text>
{%- for x, label in ticks %}
<line x1="{{ x }}" x2="{{ x }}" y1="{{ top }}" y2="{{ foot }}" stroke="{{ '#333' if label == '1' else '#ddd' }}"/>
<text x="{{ x }}" y="{{ foot + 16 }}" text-anchor="middle" fill="#555">{{ label }}×</text>
{%- endfor %}
<text x="12" y="{{ foot + 34 }}" fill="#555">{{ title }}</text>
{%- for row in rows %}
<text x="{{ start - 10 }}" y="{{ row.y + 4 }}" text-anchor="end">{{ row.method }}</text>
<line x1="{{ row.low }}" x2="{{ row.high }}" y1="{{ row.y }}" y2="{{ row.y }}" stroke="{{ row.colour }}"
 stroke-width="3"/>
<circle cx="{{ row.at }}" cy="{{ row.y }}" r="5" fill="{{ row.colour }}"/>
<text x="{{ end + 16 }}" y="{{ row.y + 4 }}">{{ row.speedup }}</text>
<text x="{{ width - 12 }}" y="{{ row.y + 4 }}" text-anchor="end">{{ row.tau }}</text>
{%- endfor %}
</g>
</svg>
"""
COLOURS = {"faster": "#0072B2", "slower": "#D55E00"}  # the others: not distinguishable from plain decoding


def read(path: Path) -> pd.DataFrame:
    """One row a method, over all tasks, the fastest first."""
    if path.is_dir():
        summary = load_run(path).summary()
        methods = summary[(summary.category == "overall") & (summary.method != "ar")]
    else:
        methods = pd.read_csv(path)
    return methods[~methods.method.str.endswith("-ar")].sort_values("speedup", ascending=False)


def picture(methods: pd.DataFrame, what: str) -> str:
    """The SVG of these rows. what: the sentence below them."""
    most, step = float(methods.speedup_high.max()), 0.25
    least = min(0.75, float(methods.speedup_low.min()))
    end = WIDTH - RIGHT

    def x(value: float) -> float:
        return round(LEFT + (value - least) / (most - least) * (end - LEFT), 1)

    def rows() -> Iterator[dict[str, Any]]:
        for i, row in enumerate(methods.itertuples()):
            yield {
                "method": row.method, "y": TOP + ROW * (i + 0.5), "at": x(row.speedup), "low": x(row.speedup_low),
                "high": x(row.speedup_high), "colour": COLOURS.get(row.comparison, "#7A8089"),
                "speedup": f"{row.speedup:.2f}", "tau": f"{row.tau:.2f}",
            }  # fmt: skip

    ticks = [(x(n * step), f"{n * step:g}") for n in range(int(-(-least // step)), int(most / step) + 1)]
    foot = TOP + ROW * len(methods)
    environment = Environment(autoescape=True)
    return environment.from_string(PICTURE).render(
        width=WIDTH,
        height=foot + BOTTOM,
        start=LEFT,
        end=end,
        top=TOP,
        foot=foot,
        ticks=ticks,
        rows=list(rows()),
        title=f"Speedup over autoregressive decoding: {what}",
    )


def main() -> None:
    """Read the run, write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("what", help="what was measured on what, for the line below the picture")
    arguments = parser.parse_args()
    arguments.out.write_text(picture(read(arguments.run), arguments.what), encoding="utf-8")


if __name__ == "__main__":
    main()
