"""The fixed parts of the page: templates, style, scripts, and the policy that allows only those scripts to run."""

from __future__ import annotations

import base64
import hashlib
import lzma
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from specbench_ss.reports import charts, palette
from specbench_ss.reports.html.page_parts import finalize, visible

PLOTLY = "plotly-cartesian-4.1.1.min.js.xz"  # of npm's plotly.js-cartesian-dist-min
FOLDER = Path(__file__).parent / "templates"
STYLES = ("report.css", "replay.css", "narrow.css")


@cache
def plotly_js() -> str:
    """Return the partial bundle of Plotly with bars, scatters and heat maps, which pages with charts embed once."""
    return lzma.decompress((FOLDER / PLOTLY).read_bytes()).decode()


@cache
def chart_style() -> dict[str, Any]:
    """Return the style that all charts of a page share, and what their colours become on a dark page."""
    return {"layout": charts.STYLE, "dark": palette.DARK}


@cache
def asset(name: str) -> str:
    """Return the text of a style or script in templates/."""
    return _newlines((FOLDER / name).read_text(encoding="utf-8"))


def joined(names: Sequence[str]) -> str:
    """Return several styles or scripts of templates/ as one."""
    return "".join(map(asset, names))


def policy(scripts: Sequence[str]) -> str:
    """Return the Content-Security-Policy: no network requests, and no scripts but the page's own, by their hashes.

    Rows and charts set style attributes, and Plotly offers its image as a blob to download, so these are allowed.
    """
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def render(name: str, scripts: Sequence[str], **values: Any) -> str:
    """Fill a template. Every text is made visible and escaped unless the template says otherwise."""
    template, css = _templates().get_template(name), Markup(joined(STYLES))
    return template.render(
        policy=policy(scripts), css=css, scripts=[Markup(s) for s in scripts], chart_style=chart_style(), **values
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
    made.filters |= {"exact": _exact, "brief": _brief, "breaking": _breaking}
    return made


def _breaking(label: str) -> Markup:
    """Return a method's label that may be broken before its options and between them."""
    shown = escape(visible(label))  # now, since nothing looks at Markup again
    return shown.replace("[", Markup("<wbr>[")).replace(",", Markup(",<wbr>"))


def _brief(value: float | str) -> float | str:
    """Return a number with the digits that sorting needs."""
    return value if isinstance(value, str) else f"{value:.7g}"


def _exact(text: str) -> Markup:
    """Return text for a file to download: escaped, its hidden characters as they are."""
    return escape(text.encode("utf-8", "replace").decode())


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _newlines(text: str) -> str:
    """Return the text with line ends as a browser reads it, since the hash is taken over that."""
    return text.replace("\r\n", "\n").replace("\r", "\n")
