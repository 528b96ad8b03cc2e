"""Roles to play: what each is proud of, uses, likes and dislikes, and how each answers its visitors' troubles.

A problem is told by the visitor after "says that" or "My problem:"; its advice follows "you should".
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.example import table


@dataclass(frozen=True, slots=True)
class Role:
    """Someone to speak as."""

    name: str
    place: str
    tool: str
    joy: str
    worry: str
    problems: tuple[tuple[str, str], ...]


def _role(row: tuple[str, ...]) -> Role:
    pairs = tuple((problem, advice) for problem, _, advice in (pair.partition(" > ") for pair in row[5:]))
    return Role(row[0], row[1], row[2], row[3], row[4], tuple((a.strip(), b.strip()) for a, b in pairs))


ROLES = [_role(row) for row in table("roleplay_roles")]
