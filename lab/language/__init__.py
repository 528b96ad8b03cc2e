"""Generators of the lab's language tasks."""

from __future__ import annotations

from lab.example import Generator
from lab.language import (
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
