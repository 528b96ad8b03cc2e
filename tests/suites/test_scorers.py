"""Every metric against values known by hand or from its definition."""

from __future__ import annotations

import pytest

from specbench_ss.suite import Question
from specbench_ss.suites.scorers import METRICS, final_number, score, score_turn

TEXT = "SELECT name FROM singer WHERE age > 3"


@pytest.mark.parametrize("metric", sorted(METRICS))
def test_every_metric_rewards_the_reference_and_not_something_else(metric: str) -> None:
    reference = "The answer is 42 apples." if metric == "numeric" else TEXT
    other = "The answer is 7." if metric == "numeric" else "zzz qqq"
    assert score(metric, reference, [reference]) == pytest.approx(1.0)
    assert score(metric, reference, [other, reference]) == pytest.approx(1.0)
    assert score(metric, other, [reference]) < 0.05
    assert score(metric, "", [reference]) == 0.0
    assert score(metric, reference, []) == 0.0


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("SELECT COUNT(*) FROM t WHERE a = 'x';", "select count( * )\nfrom T where (A = 'x')"),
        ("SELECT a FROM t WHERE b != 1", "SELECT a FROM t WHERE b <> 1"),
        ("SELECT a FROM t INNER JOIN u ON t.i = u.i", "SELECT a FROM t JOIN u ON (t.i = u.i)"),
        ("SELECT a FROM t ORDER BY a", "SELECT a FROM t ORDER BY a ASC"),
        ('SELECT a FROM t WHERE (b = "O\'Neil") AND c = 1', "SELECT a FROM t WHERE b = 'O''Neil' AND c = 1"),
        ("SELECT T1.a FROM x AS T1", "select t1.a from x t1"),
        ("SELECT a FROM t", "Here:\n```sql\nSELECT a\nFROM t;\n```\nDone."),
        ("SELECT ((( A", "select  ((( a"),
    ],
)
def test_sql_written_differently_is_the_same(left: str, right: str) -> None:
    assert score("exact_sql", left, [right]) == 1.0
    assert score("exact_sql", right, [left]) == 1.0


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("SELECT a FROM t WHERE b = 'X'", "SELECT a FROM t WHERE b = 'x'"),
        ("SELECT a FROM t ORDER BY a DESC", "SELECT a FROM t ORDER BY a"),
        ("SELECT a FROM t LEFT JOIN u ON t.i = u.i", "SELECT a FROM t JOIN u ON t.i = u.i"),
        ("SELECT a FROM t WHERE (a = 1 OR b = 2) AND c = 3", "SELECT a FROM t WHERE a = 1 OR b = 2 AND c = 3"),
        ("SELECT a FROM t WHERE 2 = (a = 1)", "SELECT a FROM t WHERE 2 = a = 1"),
        ("SELECT a FROM t LIMIT 1", "SELECT a FROM t"),
        ('SELECT a FROM t WHERE t."b" = 1', "SELECT a FROM t WHERE 'b' = 1"),
        ("SELECT a FROM t; SELECT b FROM t", "SELECT a FROM t"),
    ],
)
def test_sql_that_means_something_else_differs(left: str, right: str) -> None:
    assert score("exact_sql", left, [right]) == 0.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("He has 3+4=<<3+4=7>>7.\n#### 1,007", "1007"),
        ("The answer is 18. That was question 5", "18"),
        ("The answer is: **-3**", "-3"),
        ("**Answer: $1,234.50**", "1234.5"),
        ("the answer is \\boxed{42}", "42"),
        ("First 3, then 4, so 7 apples.", "7"),
        ("from 10-5", "5"),
        ("it is \u22124", "-4"),
        ("only .5", "0.5"),
        ("-$5", "-5"),
    ],
)
def test_final_number(text: str, number: str) -> None:
    assert str(final_number(text)) == number or final_number(text) == final_number(number)
    assert score("numeric", text, [f"#### {number}"]) == 1.0
    assert score("numeric", text, ["#### 99"]) == 0.0


def test_squad_words() -> None:
    assert score("em", "The  Eiffel-Tower!", ["eiffeltower"]) == 1.0
    assert score("token_f1", "in the year 1999", ["1999"]) == pytest.approx(0.5)  # 3 words to 1, 1 in common
    assert score("token_f1", "a a b", ["b b"]) == pytest.approx(2 / 3)  # "a" is an article: 1 word to 2
    assert score("token_f1", "Paris", ["London", "Paris, France"]) == pytest.approx(2 / 3)


def test_contains_wants_whole_words() -> None:
    assert score("contains", "It is Paris, of course.", ["London", "paris"]) == 1.0
    assert score("contains", "Parisians", ["Paris"]) == 0.0
    assert score("contains", "no sign", ["++"]) == 0.0
    assert score("contains", "x ++ y", ["++"]) == 1.0


def test_rouge_by_hand() -> None:
    assert score("rouge_1", "the cat sat", ["the cat ran away"]) == pytest.approx(2 * 2 / (3 + 4))
    assert score("rouge_2", "the cat sat", ["the cat ran away"]) == pytest.approx(2 * 1 / (2 + 3))
    assert score("rouge_l", "sat the cat", ["the cat sat"]) == pytest.approx(2 / 3)
    assert score("rouge_1", "cats running", ["cat runs"]) == pytest.approx(1.0)  # stemmed
    swapped, reference = "Blue is cold. Red is warm.", "Red is warm. Blue is cold."
    assert score("rouge_lsum", swapped, [reference]) == pytest.approx(1.0)
    assert score("rouge_l", swapped, [reference]) == pytest.approx(0.5)


def test_translation_metrics_are_fractions_and_ordered() -> None:
    reference = "The cat is sitting on the old mat."
    for metric in ("bleu", "chrf"):
        near, far = (score(metric, text, [reference]) for text in ("The cat is sitting on a mat.", "A dog runs."))
        assert 0.0 <= far < near < 1.0
    assert score("bleu", "the cat is here", ["the cat", "cat is here"]) > score("bleu", "the cat is here", ["the cat"])


def test_turns_are_scored_against_their_own_references() -> None:
    question = Question("1", "qa", ("a", "b", "c"), (("x",), ("y",), ()), "em")
    assert [score_turn(question, turn, "y") for turn in range(4)] == [0.0, 1.0, None, None]
    assert score_turn(Question("1", "qa", ("a",), (("x",),)), 0, "x") is None
