"""The fixed parts of the page: templates, style, scripts, and the policy that allows only those scripts to run."""

from __future__ import annotations

import base64
import hashlib
import lzma
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from specbench_ss.reports import charts, palette
from specbench_ss.reports.html.page_parts import finalize
from specbench_ss.results.text import first_lines, visible

PLOTLY = "plotly-cartesian-4.1.1.min.js.xz"  # of npm's plotly.js-cartesian-dist-min
FOLDER = Path(__file__).parent / "templates"
STYLES = ("report.css", "replay.css", "narrow.css")
SHOWN = 12  # lines of a list of findings; the rest is counted


@cache
def plotly_js() -> str:
    """Return the partial bundle of Plotly with bars, scatters and heat maps, which pages with charts embed once."""
    return lzma.decompress((FOLDER / PLOTLY).read_bytes()).decode()


CHART_STYLE = {"layout": charts.STYLE, "dark": palette.DARK}  # of all charts; what colours become on a dark page


def joined(names: Sequence[str]) -> str:
    """Return several styles or scripts of templates/ as one."""
    return "".join((FOLDER / name).read_text(encoding="utf-8") for name in names)


def policy(scripts: Sequence[str]) -> str:
    """Return the Content-Security-Policy: no network requests, and no scripts but the page's own, by their hashes.

    Rows and charts set style attributes, and Plotly offers its image as a blob to download, so these are allowed.
    """
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def render(name: str, scripts: Sequence[str], **values: Any) -> str:
    """Fill a template. Every text is made visible and escaped unless it is Markup."""
    template, css = _templates().get_template(name), Markup(joined(STYLES))
    return template.render(
        policy=policy(scripts), css=css, scripts=[Markup(s) for s in scripts], chart_style=CHART_STYLE, **values
    )


@cache
def _templates() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=finalize,
    )
    made.filters |= {"exact": _exact, "brief": _brief, "ticks": _ticks, "first_lines": partial(first_lines, most=SHOWN)}
    return made


def _ticks(text: str) -> Markup:
    """Return a text with its backticks as code elements."""
    parts = str(escape(visible(text))).split("`")
    return Markup("".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts)))


def _brief(value: float | str) -> float | str:
    """Return a number with the digits that sorting needs."""
    return value if isinstance(value, str) else f"{value:.7g}"


def _exact(text: str) -> Markup:
    """Return text for a file to download: escaped, its hidden characters as they are."""
    return escape(text.encode("utf-8", "replace").decode())
