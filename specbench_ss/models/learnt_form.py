"""The form of what a drafter's config records of its training."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

Amount = Annotated[float, Meta(ge=0)]


class Searched(Struct):
    """A text that drafts are searched in."""

    tokens: Amount | None = None
    made_of: str | None = None


class Learnt(Struct):
    """The budget of a training; more may be recorded."""

    tokens: Amount | None = None
    steps: Amount | None = None
    parameters: Amount | None = None
    lr: float = 0.0
    own_answers: Any = None
    searched: Searched | None = None
