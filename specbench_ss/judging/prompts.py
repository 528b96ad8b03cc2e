"""What a judge is sent of one answer, and how its rating is read.

The prompts are MT-Bench's, from its own file, where there is one; else the project's own short ones. Both ask for a
rating from 1 to 10 in double brackets.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench_ss.errors import UserError
from specbench_ss.files.user_files import read_bytes, read_rows

WITH_REFERENCE = ("math", "reasoning", "coding")  # MT-Bench's categories whose answers are held against a reference
KINDS = ("single-v1", "single-math-v1", "single-v1-multi-turn", "single-math-v1-multi-turn")  # names in its file
Message = dict[str, str]

_RATING = re.compile(r"\[\[\s*(\d+(?:\.\d+)?)\s*\]\]")
_OWN_TASK = (
    "You rate the last answer of an assistant. Say first, in a few sentences, whether it is correct, complete, clear "
    "and to the point; its length and its place count for nothing. Then give a whole number from 1 (useless) to 10 "
    "(excellent) in double brackets, as in [[7]]."
)


@dataclass(frozen=True, slots=True)
class Asked:
    """One answer with all that was said before it. references: of each turn up to this one, or none at all.

    history: messages before the first turn, each with its role and content.
    """

    category: str
    turns: tuple[str, ...]
    answers: tuple[str, ...]
    references: tuple[str, ...] = ()
    history: tuple[tuple[str, str], ...] = ()


class Prompts:
    """The project's own prompts. label: what they are called in verdicts."""

    label = "own-1"

    def messages(self, asked: Asked) -> list[Message] | None:
        """Return what the judge is sent; None for an answer that these prompts are not made for."""
        parts = [f"<{role}>\n{content}\n</{role}>" for role, content in asked.history]
        for i, (turn, answer) in enumerate(zip(asked.turns, asked.answers, strict=True)):
            parts.append(f"<user>\n{turn}\n</user>")
            parts += [f"<reference>\n{asked.references[i]}\n</reference>"] if asked.references else []
            parts.append(f"<assistant>\n{answer}\n</assistant>")
        return [{"role": "system", "content": _OWN_TASK}, {"role": "user", "content": "\n\n".join(parts)}]


class FilePrompts(Prompts):
    """Prompts of a file in the form of MT-Bench's judge_prompts.jsonl, for one or two turns without history."""

    def __init__(self, path: Path) -> None:
        self.label = f"{path.stem}-{hashlib.sha256(read_bytes(path)).hexdigest()[:12]}"
        self._templates = {str(row.get("name")): (place, row) for place, row in read_rows(path)}
        missing = [kind for kind in KINDS if kind not in self._templates]
        if missing:
            raise UserError(f"{path} has no prompt {missing[0]!r}")

    def messages(self, asked: Asked) -> list[Message] | None:
        """Return what the judge is sent; None for a third turn, and where messages stand before the first one."""
        if len(asked.turns) > 2 or asked.history:
            return None
        place, row = self._templates[KINDS[bool(asked.references) + 2 * (len(asked.turns) - 1)]]
        values: dict[str, Any] = {"question": asked.turns[0], "answer": asked.answers[0]}
        for number, (turn, answer) in enumerate(zip(asked.turns, asked.answers, strict=True), start=1):
            values |= {f"question_{number}": turn, f"answer_{number}": answer}
        values |= {f"ref_answer_{number}": text for number, text in enumerate(asked.references, start=1)}
        try:
            user = str(row["prompt_template"]).format(**values)
            return [{"role": "system", "content": str(row["system_prompt"])}, {"role": "user", "content": user}]
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise UserError(f"{place}: cannot fill this prompt: {error}") from None


def rating(text: str) -> float | None:
    """Return the last rating in double brackets, over ten; None where there is none from 1 to 10."""
    found: Sequence[str] = _RATING.findall(text)
    value = float(found[-1]) if found else 0.0
    return value / 10 if 1 <= value <= 10 else None
