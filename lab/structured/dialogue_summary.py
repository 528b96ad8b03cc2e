"""Short dialogues on everyday matters, to be summed up in a sentence or two."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

from lab.example import Example, load
from lab.structured.dialogue_scenes_life import LIFE
from lab.structured.dialogue_scenes_service import SERVICE
from lab.structured.wording import key_of, pick, say, say_all
from lab.structured.words import KINDS, draw_slots, more_kinds, people, person_forms

_MORE = load("dialogue_summary.more", str)
_KINDS = {**KINDS, **more_kinds(_MORE)}
_FRAMES = load("dialogue_summary.frames", tuple[str, ...])


@dataclass(frozen=True, slots=True)
class Scene:
    """A kind of dialogue: its slots, its lines and the ways to sum it up."""

    name: str
    spec: str
    lines: tuple[str, ...]
    summaries: tuple[str, ...]


def _scene(block: str) -> Scene:
    head, *rest = block.strip().split("\n")
    name, spec = head.split(" | ")
    lines = tuple(line for line in rest if not line.startswith("= "))
    return Scene(name, spec, lines, tuple(line[2:] for line in rest if line.startswith("= ")))


@cache
def scenes() -> tuple[Scene, ...]:
    """All scenes."""
    return tuple(_scene(block) for text in (SERVICE, LIFE) for block in text.strip().removeprefix("# ").split("\n# "))


def _names(rng: random.Random) -> dict[str, object]:
    """Two speakers with their pronouns; speakers without names are `they`."""
    if rng.random() < 0.25:
        return {"A": "#Person1#", "B": "#Person2#", "hisA": "their", "himA": "them", "hisB": "their", "himB": "them"}
    first, second = people(rng, 2)
    slots: dict[str, object] = {"A": first, "B": second}
    for letter, name in (("A", first), ("B", second)):
        _, slots[f"his{letter}"], slots[f"him{letter}"] = person_forms(name)
    return slots


def _dialogue(rng: random.Random, scene: Scene, slots: dict[str, object]) -> str:
    """The lines as spoken. Optional lines come and go together, so that no question loses its answer."""
    full = rng.random() < 0.5
    spoken = [line.removeprefix("?") for line in scene.lines if full or not line.startswith("?")]
    text, last = "", ""
    for line in spoken:
        # two lines of one speaker are one turn
        text += " " if line[0] == last else f"\n{slots[line[0]]}: "
        text, last = text + say(rng, line[3:], slots), line[0]
    return text[1:]


def generate(rng: random.Random) -> Example:
    """A dialogue of four to eight lines; the answer sums it up."""
    scene = pick(rng, scenes())
    facts = draw_slots(rng, scene.spec, _KINDS)
    slots = {**facts, **_names(rng)}
    prompt = say(rng, pick(rng, _FRAMES), {"dialogue": _dialogue(rng, scene, slots)})
    key = key_of(scene.name, slots["A"], slots["B"], *facts.values())
    return Example("dialogue_summary", (prompt,), (say_all(rng, scene.summaries, slots),), key, "rouge_l")
