"""Final answers in LaTeX, compared in a normal form. No algebra is done: x+1 and 1+x are two answers.

These count as the same: spaces, dollar signs, `\\left`, `\\right`, `\\text{}` around a word, the kinds of `\\frac`,
thousands separators of an answer that is one number, a degree or percent sign, a full stop at the end, and equal
numbers: 0.5, 1/2 and \\frac{1}{2}.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

_BOXED = re.compile(r"\\f?boxed\s*\{")
_STATED = re.compile(r"answer(?:\s+is|\s*[:=])\s*(.+?)\s*(?:\.\s|\.?$)", re.IGNORECASE | re.MULTILINE)
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}\s*\{([^{}]*)\}|(\d)\s*(\d))")
_DROPPED = re.compile(r"\\(?:left|right|,|;|!|:|quad|displaystyle)(?![A-Za-z])|\\\$|\$|\\%|%|\^\{?\\circ\}?|\s")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")  # of a whole answer: (1,234) is a pair
_NUMBER = re.compile(  # no number in it is so long, or has such an exponent, that it takes time to compare
    r"[-+]?(?:(?:\d{1,99}(?:\.\d{0,99})?|\.\d{1,99})(?:e[-+]?\d{1,2})?|\d{1,99}/\d{1,99})", re.IGNORECASE | re.ASCII
)


def boxed(answer: str, references: Sequence[str]) -> float:
    """Return 1 if the final answer equals that of a reference in normal form."""
    given = normal(final_answer(answer))
    return float(bool(given) and given in {normal(final_answer(reference)) for reference in references})


def final_answer(text: str) -> str:
    """Return what a text ends on: its last `\\boxed{}`, else "the answer is X", else its last line."""
    found = last_boxed(text)
    if found is not None:
        return found
    stated = _STATED.findall(text)
    lines = [line for line in text.splitlines() if line.strip()]
    return str(stated[-1]) if stated else lines[-1] if lines else ""


def last_boxed(text: str) -> str | None:
    """Return what stands between the braces of the last `\\boxed{}`; None where there is none, or it is not closed."""
    begins = [match.end() for match in _BOXED.finditer(text)]
    for start in reversed(begins):
        depth = 1
        for at in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if not depth:
                return text[start:at]
    return None


def normal(text: str) -> Fraction | str:
    """Return a number as a fraction, and any other answer as text without what depends only on how it is written."""
    plain = re.sub(r"\\(?:text|mathrm|textbf)\s*\{([^{}]*)\}", r"\1", text.strip()).replace("\u2212", "-")
    plain = _FRACTION.sub(lambda m: f"({m[1] or m[3]})/({m[2] or m[4]})", plain)
    plain = _DROPPED.sub("", plain).rstrip(".")
    if _THOUSANDS.fullmatch(plain):
        plain = plain.replace(",", "")
    number = re.sub(r"[()]", "", plain) if re.fullmatch(r"-?\(-?\d+\)/\(-?\d+\)", plain) else plain
    try:
        return Fraction(number) if _NUMBER.fullmatch(number) else plain.lower()
    except ZeroDivisionError:
        return plain.lower()
