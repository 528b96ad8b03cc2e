"""What differs between two runs before any result is looked at: configuration, methods, versions, machine, in words.

Some differences make results incomparable: another model, other questions, another way of decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specbench_ss.number_formats import HALF_WEIGHTS
from specbench_ss.options import value_text
from specbench_ss.results.number_text import MISSING
from specbench_ss.runs.config import decoding
from specbench_ss.runs.environment import machine_changes
from specbench_ss.runs.manifest_reading import engine_of
from specbench_ss.runs.rows import Run

SHOWN = 12  # characters of a hash
HASH = 40  # characters from which a text of hexadecimal digits is taken for a hash
MACHINE = {  # what must be the same for times of two runs to compare directly, and its name in words
    "cpu": "processor",
    "gpus": "GPUs",
    "threads": "threads",
    "driver": "driver",
}
Manifest = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs, with its value in both runs as text. hinders: results then do not compare."""

    what: str
    a: str
    b: str
    hinders: bool = False


def differences(a: Run, b: Run) -> list[Difference]:
    """Return everything that differs between two runs, what makes them incomparable first."""
    old, new = _facts(a), _facts(b)
    pairs = [(what, old.get(what, MISSING), new.get(what, MISSING)) for what in {**old, **new}]
    found = [Difference(what, x, y, what in HINDERING or _rounded(what, x, y)) for what, x, y in pairs if x != y]
    made = [*_question_differences(a, b), *found, *_method_differences(a.manifest, b.manifest)]
    return sorted(made, key=lambda difference: not difference.hinders)


def _rounded(what: str, x: str, y: str) -> bool:
    """Say whether weights were rounded for one run alone: their hash is of the weights as loaded."""
    return what == "number format" and HALF_WEIGHTS in (x, y)


def conditions_apart(a: Run, b: Run) -> dict[str, str]:
    """Return the conditions that make times of the two runs incomparable, each with both values: '1 → 2'.

    They are the processor, GPUs, threads, driver and device. Two machines of the same kind cannot be distinguished.
    """
    old, new = a.manifest["environment"], b.manifest["environment"]
    changed = [name for name in machine_changes(old, new) if name in MACHINE]
    apart = {MACHINE[name]: _both(old.get(name), new.get(name)) for name in changed}
    devices = [run.manifest["model"]["device"] for run in (a, b)]
    return apart if devices[0] == devices[1] else {**apart, "device": _both(*devices)}


def _both(old: Any, new: Any) -> str:
    """Return two values as text; of two mappings the entries that differ."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        return ", ".join(f"{name} {_both(old.get(name), new.get(name))}" for name in names)
    return f"{_text(old)} → {_text(new)}"


HINDERING = (
    "model hash",
    "quantised weights",
    "chat template",
    "suite",
    "decoding",
    "longest answer",
    "history of later turns",
    "method that speedups are over",
)


def _facts(run: Run) -> dict[str, str]:
    """Return what is compared of a run, by its name in words."""
    manifest = run.manifest
    config, model, suite, here = (manifest[part] for part in ("config", "model", "suite", "environment"))
    facts = {
        "model": model["name"],
        "model hash": model["hash"],
        "number format": model["dtype"],
        "device": model["device"],
        **{f"CUDA setting, {name}": state for name, state in (model.get("cuda_settings") or {}).items()},
        "chat template": model.get("chat_template"),
        "suite": suite["name"],
        "edition of the suite": suite["edition"],
        "hash of the questions": suite["content_hash"],
        "questions": suite["size"],
        "tasks": ", ".join(run.categories),
        "decoding": decoding(config),
        "longest answer": f"{suite['max_new_tokens']} tokens" if suite.get("max_new_tokens") else None,
        "history of later turns": config.get("history", "reference"),
        "order of questions": config.get("order", "suite"),
        "engine": engine_of(manifest),
        "quantised weights": model.get("quantised", "none").partition(":")[0],
        "how weights were quantised": model.get("quantised"),
        "seed": config.get("seed"),
        "repeats": run.repeats,
        "warm-up prompts": config.get("warmup"),
        "methods": ", ".join(run.labels),
        "method that speedups are over": run.baseline,
        "version of ssbench": manifest["version"],
        "code revision": _revision(here.get("revision")),
        "Python": here["python"],
        **{f"version of {name}": version for name, version in here["packages"].items()},
        "platform": here["platform"],
        "processor": here.get("cpu"),
        "threads": here.get("threads"),
        "memory": here.get("memory_bytes"),
        "GPUs": ", ".join(gpu["name"] for gpu in here["gpus"]),
        "driver": here.get("driver"),
        "CUDA": here.get("cuda"),
    }
    return {what: _text(value) for what, value in facts.items()}


def _question_differences(a: Run, b: Run) -> Iterator[Difference]:
    """Yield where questions of the same id have other texts, or where no question is in both runs.

    Where a run has no texts, as those of old versions, the hashes of all questions must be the same.
    """
    same = a.manifest["suite"]["content_hash"] == b.manifest["suite"]["content_hash"]
    if same:
        return
    old, new = ({question.id: (question.history, question.turns) for question in run.questions} for run in (a, b))
    if not old or not new:
        known = ["known" if texts else "not known" for texts in (old, new)]
        yield Difference("texts of the questions", known[0], known[1], hinders=True)
        return
    common = [id for id in old if id in new]
    others = [id for id in common if old[id] != new[id]]
    if not common:
        yield Difference("questions in both", "none", "none", True)
    if others:
        said = f"{len(others)} of {len(common)} with another text, first {others[0]}"
        yield Difference("questions of the same id", said, said, True)
    elif common:
        yield Difference("questions in both", f"{len(common)} of {len(old)}", f"{len(common)} of {len(new)}")


def _method_differences(a: Manifest, b: Manifest) -> Iterator[Difference]:
    """Yield options, weights and settings of methods that both runs have under the same label."""
    old, new = ({method["label"]: method for method in manifest["methods"]} for manifest in (a, b))
    for label in (label for label in old if label in new):
        for part in ("options", "resolved"):
            mine, theirs = old[label].get(part, {}), new[label].get(part, {})
            for key in mine | theirs:
                texts = [_text(of[key]) if key in of else MISSING for of in (mine, theirs)]
                if texts[0] != texts[1]:
                    yield Difference(f"{label}: {key}", texts[0], texts[1])


def _revision(revision: Mapping[str, Any] | None) -> str | None:
    if not revision:
        return None
    return f"{revision['commit'][:SHOWN]}{' with changes' if revision['dirty'] else ''}"


def _text(value: Any) -> str:
    """Return a value as people read it; a hash is cut."""
    if value is None or value == "":
        return MISSING
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(inner)}" for key, inner in value.items()) or MISSING
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or MISSING
    text = value if isinstance(value, str) else value_text(value)
    is_hash = len(text) >= HASH and not set(text) - set("0123456789abcdef")
    return text[:SHOWN] if is_hash else text
