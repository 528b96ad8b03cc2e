"""Published numbers of methods, with the conditions that a run shares with each.

τ depends on the model, the questions, the sampling and the drafter, and hardly on the machine. A speedup depends on the
machine as well.
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
OF_TAU = ("model", "questions", "decoding")  # conditions that must be the same to compare τ


@dataclass(frozen=True, slots=True)
class Published:
    """Numbers of one method on one model and GPU, with greedy decoding at batch 1.

    method: its name in ssbench, '' if ssbench lacks it. parameters: of the model. questions: their number. tau: the
    mean acceptance length.
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
        """Return the model as text: 'vicuna 7B v1.3'."""
        return f"{self.family} {self.size} {self.version}"


@cache
def published() -> tuple[Published, ...]:
    """Return all published numbers."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return tuple(msgspec.convert(list(csv.DictReader(file)), list[Published], strict=False))


def marks(manifest: Mapping[str, Any], entry: Published) -> dict[str, Mark]:
    """Return `same`, `part` or `other` for each of PARTS of a run against a published number.

    `part` is the same model family in another size or version, or some of the questions.
    """
    suite, config, model = (manifest[name] for name in ("suite", "config", "model"))
    gpus = [gpu["name"] for gpu in manifest["environment"]["gpus"]] if model["device"].startswith("cuda") else []
    name, near = model["name"].lower(), abs(model["parameters"] / entry.parameters - 1) <= NEAR
    model_mark = _mark(entry.family in name, near and entry.version in name)
    same_suite = (suite["name"], suite["edition"]) == (entry.suite, "official")
    questions_mark = _mark(same_suite, suite["size"] == entry.questions)
    return {
        "model": model_mark,
        "questions": questions_mark,
        "decoding": _mark(not config["temperature"] and not config.get("stop")),
        "number format": _mark(model["dtype"] == entry.dtype),
        "GPU": _mark(any(entry.gpu in name for name in gpus)),
    }


def _mark(related: bool, same: bool = True) -> Mark:
    return "other" if not related else "same" if same else "part"


def comparable(found: Mapping[str, Mark]) -> str:
    """Return the comparable parts of a published number: 'τ and speedup', 'τ', or 'nothing'."""
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
