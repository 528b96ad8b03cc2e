"""Generators of the lab's language tasks."""

from __future__ import annotations

from specbench_ss.suites.lab_text.example import Generator
from specbench_ss.suites.lab_text.language import (
    humanities,
    qa,
    rag,
    roleplay,
    stem,
    summarization,
    translation,
    writing,
)

GENERATORS: dict[str, Generator] = {
    "translation": translation.generate,
    "summarization": summarization.generate,
    "qa": qa.generate,
    "rag": rag.generate,
    "writing": writing.generate,
    "roleplay": roleplay.generate,
    "stem": stem.generate,
    "humanities": humanities.generate,
}
