"""Overlap with reference texts, computed by the libraries that papers use: rouge_score and sacrebleu."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@cache
def _rouge(kind: str) -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer([kind], use_stemmer=True)


def _best_rouge(kind: str, answer: str, references: Sequence[str]) -> float:
    scorer = _rouge(kind)
    return max(float(scorer.score(reference, answer)[kind].fmeasure) for reference in references)


def rouge_1(answer: str, references: Sequence[str]) -> float:
    """Return the F-measure of stemmed words."""
    return _best_rouge("rouge1", answer, references)


def rouge_2(answer: str, references: Sequence[str]) -> float:
    """Return the F-measure of stemmed word pairs."""
    return _best_rouge("rouge2", answer, references)


def rouge_l(answer: str, references: Sequence[str]) -> float:
    """Return the F-measure of the longest common subsequence of the whole texts."""
    return _best_rouge("rougeL", answer, references)


def rouge_lsum(answer: str, references: Sequence[str]) -> float:
    """Return the F-measure of the union of the sentences' longest common subsequences."""
    return _best_rouge("rougeLsum", _lines(answer), [_lines(reference) for reference in references])


def _lines(text: str) -> str:
    """Put each sentence on a line of its own, as rougeLsum expects."""
    return _SENTENCE_END.sub("\n", text.strip())


def bleu(answer: str, references: Sequence[str]) -> float:
    """Return sentence BLEU with effective order, over all references at once."""
    from sacrebleu import sentence_bleu

    return float(sentence_bleu(answer, references).score) / 100


def chrf(answer: str, references: Sequence[str]) -> float:
    """Return the character n-gram F-score, the best over the references."""
    from sacrebleu import sentence_chrf

    return float(sentence_chrf(answer, references).score) / 100
