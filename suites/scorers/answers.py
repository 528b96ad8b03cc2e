"""Metrics of short answers: numbers, and the normalised word comparisons of SQuAD. They need no library."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal

# A minus belongs to the number unless it stands behind a word or a bracket, as in 10-5.
_NUMBER = r"(?:(?<![\w)\]])-)?[$€£]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_FINAL = re.compile(rf"####\s*[$€£]?\s*({_NUMBER})")
_STATED = re.compile(rf"answer(?:\s+is|\s*[:=])[^\w\n.-]*({_NUMBER})", re.IGNORECASE)
_ANY = re.compile(rf"({_NUMBER})")
_ARTICLE = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def final_number(text: str) -> Decimal | None:
    """Return the number that a text ends on: after `####`, else in "the answer is N", else its last number."""
    text = text.replace("\u2212", "-")
    for pattern in (_FINAL, _STATED, _ANY):
        found = pattern.findall(text)
        if found:
            return Decimal(re.sub(r"[^\d.-]", "", found[-1]))
    return None


def numeric(answer: str, references: Sequence[str]) -> float:
    """Return 1 if the final number equals that of a reference: 18, 18.0 and $18 are the same."""
    number = final_number(answer)
    return float(number is not None and number in [final_number(reference) for reference in references])


def normalised(text: str) -> str:
    """Return SQuAD's normal form: lower case, without punctuation, articles and superfluous spaces."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, references: Sequence[str]) -> float:
    """Return 1 if the answer equals a reference in normal form."""
    return float(normalised(answer) in {normalised(reference) for reference in references})


def token_f1(answer: str, references: Sequence[str]) -> float:
    """Return the harmonic mean of word precision and recall, the best over the references."""
    return max(_f1(normalised(answer).split(), normalised(reference).split()) for reference in references)


def contains(answer: str, references: Sequence[str]) -> float:
    """Return 1 if a reference occurs in the answer as whole words. A reference without words must occur as it is."""
    return float(any(_occurs(reference, answer) for reference in references))


def _f1(answer: list[str], reference: list[str]) -> float:
    if not answer or not reference:
        return float(answer == reference)
    common = (Counter(answer) & Counter(reference)).total()
    return 2 * common / (len(answer) + len(reference))


def _occurs(reference: str, answer: str) -> bool:
    words = normalised(reference)
    return f" {words} " in f" {normalised(answer)} " if words else reference.strip() in answer
