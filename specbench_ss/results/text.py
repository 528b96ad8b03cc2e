"""Numbers and Markdown tables as text, for terminal and report."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence


def table(head: Sequence[str], lines: Sequence[Sequence[str]], left: Sequence[str]) -> str:
    """Return a Markdown table, with characters escaped that end a cell or begin HTML."""
    rule = ["---" if column in left else "---:" for column in head]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, rule, *([safe(c) for c in line] for line in lines)))


def safe(cell: str) -> str:
    """Return text that is neither HTML nor the end of a cell in Markdown."""
    return cell.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


MISSING = "–"
MOST_DIGITS = 17  # of a float


def format_number(value: float | None, digits: int = 2, unit: str = "", scale: float = 1) -> str:
    """Return a number, times `scale`, as in '1,234.50 ms'; a dash for what is unknown."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{scale * value:,.{digits}f}{unit}"


def pluralize(count: int, what: str) -> str:
    """Return a count with its noun, as in '1 question' or '1,280 questions'. what: the noun in the singular."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def format_speedup(value: float | None) -> str:
    """Return a speedup as in '1.84×'."""
    return format_number(value, 2, "×")


def percent(value: float | None, digits: int = 0) -> str:
    """Return a share of 1 as in '43%'."""
    return format_number(value, digits, "%", 100)


def scientific(value: float | None, digits: int = 3) -> str:
    """Return a number as in '4.096E4', as the papers print parameter counts; a dash for what is unknown."""
    if value is None or not math.isfinite(value):
        return MISSING
    mantissa, _, exponent = f"{value:.{digits}e}".partition("e")
    return f"{mantissa}E{int(exponent)}"


def interval(bounds: tuple[float, float] | None, digits: int = 2, line: float = 1) -> str:
    """Return bounds as in '1.71–1.97', with a longer separator where one is negative.

    Both have the digits that show on which side of `line` they lie. An interval wider than 1 has a digit less: the
    last one would suggest a precision that the interval does not have.
    """
    if bounds is None:
        return ""
    digits -= bounds[1] - bounds[0] > 1
    digits = max(len(end(bound, digits, line).partition(".")[2]) for bound in bounds)
    return (" to " if bounds[0] < 0 else "–").join(end(bound, digits, line) for bound in bounds)


def interval_of(text: object) -> tuple[float, float] | None:
    """Return the bounds that `interval` wrote, as far as its digits go; None for what is no interval."""
    if not isinstance(text, str) or not text:
        return None
    low, _, high = text.partition(" to " if " to " in text else "–")
    try:
        return float(low.replace("−", "-")), float(high.replace("−", "-"))
    except ValueError:
        return None


def end(bound: float, digits: int = 2, line: float = 1) -> str:
    """Return an end of an interval, with enough digits to show on which side of `line` it lies: '1.004'."""
    while math.isfinite(bound) and bound != line and float(f"{bound:.{digits}f}") == line and digits < MOST_DIGITS:
        digits += 1
    return format_number(bound, digits).replace("-", "−")


def parameters(count: int) -> str:
    """Return a count as in '12.3 M parameters'."""
    for unit, scale in (("B", 1e9), ("M", 1e6)):
        if count >= scale:
            return f"{count / scale:.1f} {unit} parameters"
    return f"{count:,} parameters"


def short(count: int) -> str:
    """Return a count in few digits, as in '0.43 M', '24 M', '12 k'."""
    for least, size, unit in ((1e9, 1e9, "B"), (1e5, 1e6, "M"), (1e3, 1e3, "k")):
        if count >= least:
            scaled = count / size
            return f"{scaled:.0f} {unit}" if scaled >= 10 else f"{scaled:.2g} {unit}"
    return str(count)


LONG = 44  # characters of a label in a sentence


def cut(label: str, width: int = LONG) -> str:
    """Return a label of at most so many characters, with its middle left out if it is longer."""
    half = (width - 1) // 2
    return label if len(label) <= width else f"{label[: width - half - 1]}…{label[-half:]}"


def first_lines(lines: Sequence[str], most: int) -> list[str]:
    """Return the first lines of a list, and how many more there are."""
    rest = len(lines) - most
    return [*lines[:most], *([f"and {rest:,} more"] if rest > 0 else [])]


def title(name: str) -> str:
    """Return a name as a title: 'math_reasoning' becomes 'math reasoning'."""
    return name.replace("_", " ")


def output_match(verdicts: Mapping[str, int]) -> str:
    """Return the verdicts on many outputs as text, the worst first: 'identical', or '2 numerical ties of 80'.

    Outputs that were not compared are counted last: 'identical, 1 not compared'.
    """
    if verdicts.get("sampled"):
        return "sampled"
    left = verdicts.get("not compared", 0)
    total = sum(verdicts.values()) - left
    if not total:
        return "not compared" if left else MISSING
    plural = {
        "mismatch": "mismatches",
        "numerical tie": "numerical ties",
        "length differs": "lengths differ",
        "text differs": "differing texts",
    }
    found = [
        f"{n} {many if n > 1 or kind == 'length' else kind}"
        for kind, many in plural.items()
        if (n := verdicts.get(kind, 0))
    ]
    text = f"{', '.join(found)} of {total}" if found else "identical"
    return f"{text}, {left} not compared" if left else text


C0 = [
    "NUL", "SOH", "STX", "ETX", "EOT", "ENQ", "ACK", "BEL", "BS", "HT", "LF", "VT", "FF", "CR", "SO", "SI",
    "DLE", "DC1", "DC2", "DC3", "DC4", "NAK", "SYN", "ETB", "CAN", "EM", "SUB", "ESC", "FS", "GS", "RS", "US",
]  # fmt: skip
CONTROL_NAMES = {**{chr(i): name for i, name in enumerate(C0)}, "\x7f": "DEL"}
# Control characters but tab and line feed; marks, embeddings and isolates of direction; spaces without width (those
# that join emoji and letters stay); halves of surrogate pairs; tags and interlinear marks.
HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def visible(text: str) -> str:
    """Return the text with every hidden character by its name: '⟨RIGHT-TO-LEFT OVERRIDE⟩', '⟨ESC⟩', '⟨U+D800⟩'."""
    return HIDDEN.sub(_name, text.replace("\r\n", "\n"))


def _name(found: re.Match[str]) -> str:
    character = found[0]
    return f"⟨{CONTROL_NAMES.get(character) or unicodedata.name(character, f'U+{ord(character):04X}')}⟩"
