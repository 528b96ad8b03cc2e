"""Elements of SVG as markup. Text and attributes are escaped; numbers are written short."""

from __future__ import annotations

from collections.abc import Iterable

from markupsafe import Markup, escape

from specbench_ss.reports.html.visible_text import visible

Value = str | float | None


def element(tag: str, *children: str, **attributes: Value) -> Markup:
    """Return <tag ...>children</tag>. class_ is `class`, a_b is `a-b`; an attribute that is None is left out."""
    given = "".join(f' {_name(name)}="{_value(value)}"' for name, value in attributes.items() if value is not None)
    inner = join(children)
    return Markup(f"<{tag}{given}>{inner}</{tag}>" if inner else f"<{tag}{given}/>")


def join(pieces: Iterable[str]) -> Markup:
    """Return pieces of markup one after the other; what is plain text is escaped."""
    return Markup("".join(escape(piece if isinstance(piece, Markup) else visible(piece)) for piece in pieces))


def percent(share: float) -> str:
    """Return a share of 1 as a coordinate: '43.2%'."""
    return f"{100 * share:.4g}%"


def _name(name: str) -> str:
    return name.rstrip("_").replace("_", "-") if name not in ("viewBox", "preserveAspectRatio") else name


def _value(value: str | float) -> str:
    return str(escape(visible(value))) if isinstance(value, str) else f"{value:.5g}"
