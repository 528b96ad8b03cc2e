"""Published numbers of methods and how far a run compares with each.

tau depends on the model, the questions, how tokens are chosen and the drafter; hardly on the machine. A speedup
depends on the machine as well.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from specbench_ss.options import REFERENCE

FILE = Path(__file__).with_suffix(".csv")
NEAR = 0.05  # share by which the number of parameters may differ
Mark = Literal["same", "part", "other"]
PARTS = ("model", "questions", "decoding", "number format", "GPU")
OF_TAU = ("model", "questions", "decoding")  # what must be the same for tau to compare


@dataclass(frozen=True, slots=True)
class Published:
    """Numbers of one method on one model and GPU, with greedy decoding at batch 1.

    method: our name of it, '' where there is none. parameters: of the model. questions: how many of the suite.
    """

    method: str
    published_as: str
    family: str
    version: str
    size: str
    parameters: float
    gpu: str
    speedup: float
    tau: float
    suite: str
    questions: int
    dtype: str
    source: str

    @property
    def model(self) -> str:
        """Return the model's name for people: 'vicuna 7B v1.3'."""
        return f"{self.family} {self.size} {self.version}"


@cache
def published() -> tuple[Published, ...]:
    """Return every published number that is known here."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return tuple(msgspec.convert(list(csv.DictReader(file)), list[Published], strict=False))


def marks(manifest: Mapping[str, Any], entry: Published) -> dict[str, Mark]:
    """Return for each of PARTS whether a run has the same as a published number; `part` for some of the same.

    Of the model, `part` is the same family in another size or version; of the questions, a choice of the same.
    """
    suite, config, model = (manifest[name] for name in ("suite", "config", "model"))
    gpus = [gpu["name"] for gpu in manifest["environment"]["gpus"]] if model["device"].startswith("cuda") else []
    name, near = model["name"].lower(), abs(model["parameters"] / entry.parameters - 1) <= NEAR
    related = entry.family in name, (suite["name"], suite["edition"]) == (entry.suite, "official")
    whole = near and entry.version in name, suite["size"] == entry.questions
    model_mark, questions_mark = (_mark(*both) for both in zip(related, whole, strict=True))
    return {
        "model": model_mark,
        "questions": questions_mark,
        "decoding": _mark(not config["temperature"] and not config.get("stop")),
        "number format": _mark(model["dtype"] == entry.dtype),
        "GPU": _mark(any(entry.gpu in name for name in gpus)),
    }


def _mark(related: bool, whole: bool = True) -> Mark:
    return "other" if not related else "same" if whole else "part"


def comparable(found: Mapping[str, Mark]) -> str:
    """Return what of a published number compares with a run: 'τ and speedup', 'τ', or 'nothing'."""
    if any(found[part] != "same" for part in OF_TAU):
        return "nothing"
    return "τ and speedup" if all(mark == "same" for mark in found.values()) else "τ"


@dataclass(frozen=True, slots=True)
class PublishedComparison:
    """A method of a run with a published number; entry and marks are missing for an unpublished method."""

    method: str
    tau: float | None
    speedup: float | None
    entry: Published | None
    marks: Mapping[str, Mark]


def compare_with_published(
    manifest: Mapping[str, Any], figures: Mapping[str, tuple[float | None, float | None]]
) -> list[PublishedComparison]:
    """Pair each method of a run with every published number of it. figures: tau and speedup by label."""
    made = []
    for method in manifest["methods"]:
        if method["label"] in figures and method["name"] != REFERENCE:
            entries: list[Published | None] = [entry for entry in published() if entry.method == method["name"]]
            found = [(entry, marks(manifest, entry) if entry else {}) for entry in entries or [None]]
            made += [PublishedComparison(method["label"], *figures[method["label"]], *both) for both in found]
    return made
