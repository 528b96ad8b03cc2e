"""Arithmetic drills: training text only, never asked in a suite. The word problems need sums that come out right."""

from __future__ import annotations

import random

from lab.example import Example

ASKS = ("Drill", "Sums", "Practice", "Work these out")
LIMIT = 400  # products go no further


def equation(rng: random.Random) -> tuple[str, str]:
    """A calculation and its result, in the notation of the word problems."""
    kind = rng.choice("++--***//")
    if kind == "+":
        a, b = rng.randint(1, 200), rng.randint(1, rng.choice((20, 100, 200)))
        return f"{a} + {b}", str(a + b)
    if kind == "-":
        a = rng.randint(2, 250)
        b = rng.randint(1, a - 1)
        return f"{a} - {b}", str(a - b)
    a = rng.randint(2, 12)
    b = rng.randint(2, max(2, min(100, LIMIT // a)))
    if rng.random() < 0.5:
        a, b = b, a
    return (f"{a} * {b}", str(a * b)) if kind == "*" else (f"{a * b} / {a}", str(b))


def generate(rng: random.Random) -> Example:
    """A row of calculations, asked together and answered one by one."""
    sums = [equation(rng) for _ in range(rng.randint(6, 12))]
    asked = ", ".join(left for left, _ in sums)
    answer = " ".join(f"{left} = {right}." for left, right in sums)
    return Example("arithmetic", (f"{rng.choice(ASKS)}: {asked}",), ((answer,),), asked, "none")
