"""Questions of a suite as token ids of the request's model."""

from __future__ import annotations

from pathlib import Path

from specbench_ss import registry
from specbench_ss.engine.target import Target
from specbench_ss.models.resolve import is_lab
from specbench_ss.results.report import Request
from specbench_ss.suite import Question, SuiteRequest


def questions(request: Request, suite: str, category: str, limit: int) -> tuple[Question, ...]:
    """Return the first questions of a category. Raises UserError where the suite has none for this model."""
    data = None if request.data is None else Path(request.data)
    asked = SuiteRequest((category,), limit, data, is_lab(request.model))
    return registry.load_suite(suite).load(asked).questions


def first_turn(target: Target, question: Question) -> list[int]:
    """Return the token ids of the conversation that asks the first turn."""
    return target.encode_chat(question.messages())
