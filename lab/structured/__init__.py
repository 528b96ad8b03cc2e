"""Generators of the lab's structured tasks."""

from __future__ import annotations

from lab.example import Generator
from lab.structured import (
    coding,
    dialogue_summary,
    extraction,
    math_reasoning,
    meaning_representation,
    reasoning,
    school_math,
    sql,
)

GENERATORS: dict[str, Generator] = {
    "sql": sql.generate,
    "meaning_representation": meaning_representation.generate,
    "dialogue_summary": dialogue_summary.generate,
    "math_reasoning": math_reasoning.generate,
    "math": school_math.generate,
    "coding": coding.generate,
    "reasoning": reasoning.generate,
    "extraction": extraction.generate,
}
