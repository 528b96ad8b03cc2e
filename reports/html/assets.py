"""The fixed parts of the page: templates, style, scripts, and the policy that allows only those scripts to run."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

FOLDER = Path(__file__).parent / "templates"


@cache
def plotly_js() -> str:
    """Return Plotly's whole library, which is embedded once."""
    from plotly.offline import get_plotlyjs

    return _newlines(str(get_plotlyjs()))


@cache
def asset(name: str) -> str:
    """Return the text of report.css or report.js."""
    return _newlines((FOLDER / name).read_text(encoding="utf-8"))


def policy() -> str:
    """Return the Content-Security-Policy: no network requests, and no scripts but the page's two, by their hashes.

    Plotly sets style attributes and offers its image as a blob to download, so these are allowed.
    """
    scripts = " ".join(f"'sha256-{_digest(script)}'" for script in (plotly_js(), asset("report.js")))
    return (
        f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def render(name: str, **values: Any) -> str:
    """Fill a template. Every value is escaped unless the template says otherwise."""
    return (
        _templates()
        .get_template(name)
        .render(policy=policy(), css=asset("report.css"), js=asset("report.js"), plotly=plotly_js(), **values)
    )


@cache
def _templates() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=False
    )


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _newlines(text: str) -> str:
    """Return the text with line ends as a browser reads it, since the hash is taken over that."""
    return text.replace("\r\n", "\n").replace("\r", "\n")
