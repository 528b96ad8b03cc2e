"""Fixtures that several tests share: a made-up run directory with known properties."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from specbench_ss.conformance import Check, kit
from specbench_ss.engine.decoder import Generation, Step
from specbench_ss.engine.target import Target
from specbench_ss.models.cpu_dtype import Choice
from specbench_ss.models.load import load_target
from specbench_ss.runs.config import OutputOptions
from specbench_ss.runs.manifest import FORMAT
from specbench_ss.runs.records import Agreement, OutputMatch, SampleRecord
from specbench_ss.runs.run_dir import RunDir
from specbench_ss.suite import Question, SuiteData

collect_ignore = ["plugin_pkg"]  # its test needs the package to be installed: tests/methods/test_plugin.py
CATEGORIES = ("writing", "translation", "qa", "math_reasoning")
# chance that a drafted token is accepted; others draft nothing
RATE = {"ss": 0.7, "ss-shared": 0.7, "medusa": 0.55, "sd": 0.6}
STEP_S = {"ar": 0.010, "ss": 0.013, "ss-shared": 0.013, "ss-shared-ar": 0.010, "medusa": 0.012, "sd": 0.012}
EVIL = "Answer with </script><script>alert(1)</script> & <b>bold</b>"
MakeRun = Callable[..., Path]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that take long come first, so that none of them is left to one process when the others are done."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """Freeze imported objects, so that later garbage collections need not scan a million of them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ends gives all objects back to the collector, which takes the next one a third of a second."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


@pytest.fixture(scope="session")
def lab() -> Target:
    """The lab's base. A test that changes the target loads its own."""
    return load_target("lab", dtype="float32", device="cpu")


@pytest.fixture
def few_checks(monkeypatch: pytest.MonkeyPatch) -> tuple[Check, ...]:
    """`ssbench check` tries these alone, for tests of what it states and not of the checks."""
    few = tuple(check for check in kit.CHECKS if check.name in ("draft", "rows", "greedy", "description"))
    monkeypatch.setattr(kit.CheckRunner.results, "__defaults__", (few,))
    return few


@pytest.fixture(autouse=True)
def no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are as wide as where nobody states how wide a terminal is: xdist shows its processes."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has no load, which a run would observe for half a second: the tests themselves are one."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Ctrl-C is received, as at a terminal: a shell that starts the tests in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def no_measured_format(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--dtype auto` is float32 on a CPU: what noise made faster once would answer otherwise where logits are close."""
    if request.node.get_closest_marker("measured_format") is None:
        choice = Choice("float32", {})
        monkeypatch.setattr("specbench_ss.models.cpu_dtype.faster_dtype", lambda *_: choice)


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """make_run(labels=..., questions=..., failing=...) writes a run directory and returns its path."""

    def make(**changes: Any) -> Path:
        return fabricate(tmp_path / f"run{len(list(tmp_path.iterdir()))}", **changes)

    return make


def fabricate(
    path: Path,
    labels: tuple[str, ...] = ("ar", "ss", "medusa"),
    categories: tuple[str, ...] = CATEGORIES,
    questions: int = 6,
    failing: tuple[str, ...] = (),
    verdict: Agreement = "identical",
    seed: int = 0,
    turns: int = 1,
    repeats: int = 1,
    temperature: float = 0.0,
    references: Mapping[str, str] | None = None,
) -> Path:
    """A run in which every number is consistent; `failing` methods fail on the first question.

    references: of methods that are compared with another one than ar; those that stand for others promise nothing.
    """
    rng = random.Random(seed)
    kept_here = {label: (references or {}).get(label, "ar") for label in labels}
    asked = tuple(
        Question(f"{name}-{i}", name, _turns(name, i, turns), (("reference",),) * turns, "rouge_l")
        for name in categories
        for i in range(questions)
    )
    data = SuiteData("specbench", "generated", asked, 64)
    about = manifest(labels, data)
    about["config"] |= {"repeats": repeats, "temperature": temperature}
    about["suite"]["prompts"] = turns * len(asked)
    for method in about["methods"]:
        method |= {
            "reference": kept_here[method["label"]],
            "lossless": method["label"] not in (references or {}).values(),
        }
    with RunDir.open(OutputOptions(path), about, asked) as run_dir:
        for question, turn, repeat in product(asked, range(turns), range(repeats)):
            length, pace = rng.randint(30, 60), rng.uniform(0.8, 1.2)
            for position, label in enumerate(labels):
                row = _row(question, label, data, len(run_dir.rows), position)
                row.turn, row.repeat = turn, repeat
                if label in failing and question.id.endswith("-0"):
                    row.status, row.error = "failed", "RuntimeError: out of luck"
                    run_dir.append(row, [])
                    continue
                generation = _generation(label.partition("[")[0], length, pace, rng)
                row.fill(generation)
                row.text, row.quality, row.started, row.ended = f"{EVIL} #{position}", rng.random(), 0.0, row.wall_s
                run_dir.append(row, generation.steps)
                promised = label not in (references or {}).values() and not temperature
                if label != "ar" or repeat:
                    run_dir.append_output_match(OutputMatch(*row.key, verdict=verdict if promised else "not compared"))
        run_dir.update(status="complete", finished="2026-01-02T03:05:06+00:00")
    return path


def _turns(category: str, number: int, turns: int) -> tuple[str, ...]:
    return tuple(f"Question {number} of {category}{f', turn {t}' if t else ''}: {EVIL}" for t in range(turns))


def manifest(labels: tuple[str, ...], data: SuiteData) -> dict[str, Any]:
    """Return the record that a runner would write."""
    return {
        "format": FORMAT,
        "version": "0.1.0",
        "command": ["ssbench", "run", "--methods", "ss,medusa"],
        "config": {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0, "repeats": 1, "warmup": 2},
        "fingerprint": "f" * 64,
        "suite": {
            "name": data.name,
            "edition": data.edition,
            "content_hash": data.content_hash,
            "size": len(data.questions),
            "prompts": len(data.questions),
            "max_new_tokens": data.max_new_tokens,
            "notes": ["questions generated by the lab"],
        },
        "model": {
            "name": "lab-s",
            "hash": "0123456789abcdef" * 4,
            "parameters": 12_345_678,
            "dtype": "float32",
            "device": "cpu",
            "context_length": 1024,
            "vocab_size": 4096,
            "is_lab": True,
        },
        "methods": [
            {
                "label": label,
                "name": label.partition("[")[0],
                "options": {} if label == "ar" else {"k": 4, "prune": True},
                "lossless": True,
                "summary": f"the method {label}",
                "paper": "",
            }
            for label in labels
        ],
        "environment": {
            "python": "3.11.9",
            "packages": {"torch": "2.13.0", "transformers": "5.23.0"},
            "platform": "Linux",
            "cpu": {"model": "A processor", "cores": 2, "available": 2},
            "threads": {"intra_op": 2, "inter_op": 2},
            "memory_bytes": 8 << 30,
            "gpus": [],
            "driver": None,
            "cuda": None,
            "revision": {"commit": "abcdef0123456789abcdef0123456789abcdef01", "dirty": False},
        },
        "created": "2026-01-02T03:04:05+00:00",
        "finished": None,
        "status": "running",
    }


def _row(question: Question, label: str, data: SuiteData, index: int, position: int) -> SampleRecord:
    return SampleRecord(
        question.id, 0, label, 0, question.category, index, position, 1, data.edition, data.content_hash, "ok"
    )  # fmt: skip


def _generation(name: str, length: int, pace: float, rng: random.Random) -> Generation:
    """An answer of `length` tokens: one from prefill, the rest from steps with drafts of depth 4."""
    steps: list[Step] = []
    left, tokens_past_stop = length - 1, 0
    while left:
        depth = 4 if name in RATE else 0
        accepted = next((i for i in range(depth) if rng.random() > RATE[name]), depth)
        kept = min(accepted + 1, left)
        tokens_past_stop += accepted + 1 - kept
        left -= kept
        verify, draft = STEP_S[name] * pace * rng.uniform(0.95, 1.05), 0.001 if name in RATE else 0.0
        parts = (draft, verify, 0.0005, 0.0003)
        steps.append(Step(depth * 3, depth * 3, depth, accepted, kept, *parts, sum(parts)))
    return Generation(list(range(length)), 50, "length", 0.02, 1, steps, tokens_past_stop)
