"""Quality metrics by name: each takes an answer and its acceptable references, and returns a score in [0, 1].

The library behind a metric is imported when the metric is first used.
"""

from __future__ import annotations

import logging
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from specbench_ss.errors import UserError, did_you_mean
from specbench_ss.suite import Question

if TYPE_CHECKING:
    from sqlglot import exp

# Metrics of short answers: numbers, and the normalised word comparisons of SQuAD. They need no library.

# A minus belongs to the number unless it follows a word or a bracket, as in 10-5.
_NUMBER = r"(?:(?<![\w)\]])-)?[$€£]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_FINAL = re.compile(rf"####\s*[$€£]?\s*({_NUMBER})")
_STATED_NUMBER = re.compile(rf"answer(?:\s+is|\s*[:=])[^\w\n.-]*({_NUMBER})", re.IGNORECASE)
_ANY = re.compile(rf"({_NUMBER})")
_ARTICLE = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def final_number(text: str) -> Decimal | None:
    """Return the number that a text ends on: after `####`, else in "the answer is N", else its last number."""
    text = text.replace("\u2212", "-")
    for pattern in (_FINAL, _STATED_NUMBER, _ANY):
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


# Final answers in LaTeX, compared in a normal form. No algebra is done: x+1 and 1+x are two answers.
#
# These count as the same: spaces, dollar signs, `\left`, `\right`, `\text{}` around a word, the kinds of `\frac`,
# thousands separators of an answer that is one number, a degree or percent sign, a full stop at the end, and equal
# numbers: 0.5, 1/2 and \frac{1}{2}.

_BOXED = re.compile(r"\\f?boxed\s*\{")
_STATED_ANSWER = re.compile(r"answer(?:\s+is|\s*[:=])\s*(.+?)\s*(?:\.\s|\.?$)", re.IGNORECASE | re.MULTILINE)
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}\s*\{([^{}]*)\}|(\d)\s*(\d))")
_DROPPED = re.compile(r"\\(?:left|right|,|;|!|:|quad|displaystyle)(?![A-Za-z])|\\\$|\$|\\%|%|\^\{?\\circ\}?|\s")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")  # whole answers only: (1,234) is a pair
_LATEX_NUMBER = re.compile(  # limits digits and exponents, so that comparisons are fast
    r"[-+]?(?:(?:\d{1,99}(?:\.\d{0,99})?|\.\d{1,99})(?:e[-+]?\d{1,2})?|\d{1,99}/\d{1,99})", re.IGNORECASE | re.ASCII
)


def boxed(answer: str, references: Sequence[str]) -> float:
    """Return 1 if the final answer equals that of a reference in normal form."""
    given = normal(final_answer(answer))
    return float(bool(given) and given in {normal(final_answer(reference)) for reference in references})


def final_answer(text: str) -> str:
    """Return the final answer: the last `\\boxed{}`, else "the answer is X", else the last line."""
    found = last_boxed(text)
    if found is not None:
        return found
    stated = _STATED_ANSWER.findall(text)
    lines = [line for line in text.splitlines() if line.strip()]
    return str(stated[-1]) if stated else lines[-1] if lines else ""


def last_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{}`; None if there is none, or it is not closed."""
    begins = [match.end() for match in _BOXED.finditer(text)]
    for start in reversed(begins):
        depth = 1
        for at in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if not depth:
                return text[start:at]
    return None


def normal(text: str) -> Fraction | str:
    """Return a number as a fraction, and any other answer as normalized text."""
    plain = re.sub(r"\\(?:text|mathrm|textbf)\s*\{([^{}]*)\}", r"\1", text.strip()).replace("\u2212", "-")
    plain = _FRACTION.sub(lambda m: f"({m[1] or m[3]})/({m[2] or m[4]})", plain)
    plain = _DROPPED.sub("", plain).rstrip(".")
    if _THOUSANDS.fullmatch(plain):
        plain = plain.replace(",", "")
    number = re.sub(r"[()]", "", plain) if re.fullmatch(r"-?\(-?\d+\)/\(-?\d+\)", plain) else plain
    try:
        return Fraction(number) if _LATEX_NUMBER.fullmatch(number) else plain.lower()
    except ZeroDivisionError:
        return plain.lower()


# Overlap with reference texts, computed by the libraries that papers use: rouge_score and sacrebleu.

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


# Compare SQL queries, ignoring the way they are written. Nothing is executed and no schema is known.
#
# These count as the same: letter case of keywords and names, spaces, brackets around a single condition, `!=` and `<>`,
# `JOIN` and `INNER JOIN`, an explicit `ASC`, single and double quotes around a value, a closing semicolon, and a
# Markdown fence around the query.

_FENCE = re.compile(r"```(?:\w+[ \t]*\n)?(.*?)(?:```|$)", re.DOTALL)


def exact_sql(answer: str, references: Sequence[str]) -> float:
    """Return 1 if the query equals a reference in normal form. Text that is not SQL is compared as text."""
    return float(normal_sql(answer) in [normal_sql(reference) for reference in references])


@lru_cache(maxsize=4096)
def normal_sql(text: str) -> str:
    """Return the normal form of a query."""
    fenced = _FENCE.search(text)
    query = (fenced[1] if fenced else text).strip().rstrip("; \n")
    return _parsed(query) or " ".join(query.lower().split())


def _parsed(query: str) -> str:
    """Return the query in sqlglot's format; '' if it cannot be parsed."""
    import sqlglot
    from sqlglot.errors import SqlglotError
    from sqlglot.optimizer.normalize_identifiers import normalize_identifiers

    logging.getLogger("sqlglot").setLevel(logging.ERROR)
    try:
        tree = sqlglot.parse_one(query, read="sqlite")
        _make_plain(tree)
        return normalize_identifiers(tree, dialect="sqlite").sql("sqlite")
    except (SqlglotError, RecursionError):
        return ""


def _make_plain(tree: exp.Expr) -> None:
    """Normalize notation in the tree, in place."""
    from sqlglot import exp

    for column in list(tree.find_all(exp.Column)):
        if isinstance(column.this, exp.Identifier) and column.this.quoted and not column.table:
            # sqlite reads "x" as a value if there is no such column
            column.replace(exp.Literal.string(column.name))
    for ordered in tree.find_all(exp.Ordered):
        ordered.set("desc", bool(ordered.args.get("desc")))
    for join in tree.find_all(exp.Join):
        join.set("kind", None if join.kind == "INNER" else join.args.get("kind"))
    for bracket in reversed(list(tree.find_all(exp.Paren))):
        inside = isinstance(bracket.parent, exp.Paren | exp.Connector | exp.Where | exp.Having | exp.Join)
        if inside and isinstance(bracket.this, exp.Predicate):
            bracket.replace(bracket.this)


Metric = Callable[[str, Sequence[str]], float]

METRICS: dict[str, Metric] = {
    "exact_sql": exact_sql,
    "numeric": numeric,
    "boxed": boxed,
    "token_f1": token_f1,
    "em": exact_match,
    "contains": contains,
    "rouge_1": rouge_1,
    "rouge_2": rouge_2,
    "rouge_l": rouge_l,
    "rouge_lsum": rouge_lsum,
    "bleu": bleu,
    "chrf": chrf,
}


def score(metric: str, answer: str, references: Sequence[str]) -> float:
    """Return the best score of the answer over the references, or 0 if there are none."""
    if metric not in METRICS:
        raise UserError(f"unknown metric {metric!r}{did_you_mean(metric, METRICS)}")
    if not references:
        return 0.0
    return min(1.0, max(0.0, METRICS[metric](answer, references)))


def score_turn(question: Question, turn: int, answer: str) -> float | None:
    """Return the score of a turn's answer; None if the question has no metric or the turn no reference."""
    references = question.references[turn] if turn < len(question.references) else ()
    if question.metric is None or not references:
        return None
    return score(question.metric, answer, references)
