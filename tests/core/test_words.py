"""Numbers and verdicts as text."""

from __future__ import annotations

import pytest

from specbench_ss.results.text import interval, pluralize


def test_one_is_no_plural() -> None:
    assert [pluralize(n, "question") for n in (0, 1, 1280)] == ["0 questions", "1 question", "1,280 questions"]


@pytest.mark.parametrize(
    ("bounds", "line", "text"),
    [
        ((1.714, 1.966), 1, "1.71–1.97"),
        ((1.0042, 1.32), 1, "1.004–1.320"),
        ((0.9996, 1.32), 1, "0.9996–1.3200"),
        ((0.9, 0.9951), 1, "0.900–0.995"),
        ((0.9, 1.00000003), 1, "0.90000000–1.00000003"),
        ((1.0, 1.32), 1, "1.00–1.32"),
        ((-0.02, 0.0004), 0, "−0.0200 to 0.0004"),
        ((-0.0031, 0.05), 0, "−0.003 to 0.050"),
        ((0.0, 0.0), 0, "0.00–0.00"),
        ((-0.004, 0.999), 0, "−0.004 to 0.999"),  # wider than 1: a digit less
        (None, 1, ""),
    ],
)
def test_an_end_shows_on_which_side_of_the_line_it_lies(
    bounds: tuple[float, float] | None, line: float, text: str
) -> None:
    assert interval(bounds, line=line) == text
