"""Tables in Markdown. Knows no run."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], lines: Sequence[Sequence[str]], left: Sequence[str]) -> str:
    """Return a Markdown table; what would end a cell or begin HTML is escaped."""
    rule = ["---" if column in left else "---:" for column in head]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, rule, *([safe(c) for c in line] for line in lines)))


def safe(cell: str) -> str:
    """Return text that is neither HTML nor the end of a cell in Markdown."""
    return cell.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
