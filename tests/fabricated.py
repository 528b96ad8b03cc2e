"""Made-up run directories with known properties."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from specbench_ss.engine.decoder import Generation, Step
from specbench_ss.runs.config import OutputOptions
from specbench_ss.runs.manifest import FORMAT
from specbench_ss.runs.records import Agreement, OutputMatch, Run, SampleRecord
from specbench_ss.runs.run_dir import RunDir
from specbench_ss.suite import Question, SuiteData

CATEGORIES = ("writing", "translation", "qa", "math_reasoning")
# chance that a drafted token is accepted; others draft nothing
RATE = {"ss": 0.7, "ss-shared": 0.7, "medusa": 0.55, "sd": 0.6}
STEP_S = {"ar": 0.010, "ss": 0.013, "ss-shared": 0.013, "ss-shared-ar": 0.010, "medusa": 0.012, "sd": 0.012}
EVIL = "Answer with </script><script>alert(1)</script> & <b>bold</b>"


def fabricate(path: Path, **changes: Any) -> Path:
    """Write a run directory in which every number is consistent, and return its path.

    changes: those of `_fabricate`. A run with the same changes is made once a process, since many tests begin with it.
    """
    key = repr(sorted(changes.items()))
    if key in _FILES:
        path.mkdir(parents=True, exist_ok=True)
        for name, content in _FILES[key].items():
            (path / name).write_bytes(content)
    else:
        _fabricate(path, **changes)
        _FILES[key] = {file.name: file.read_bytes() for file in path.iterdir()}
    return path


_FILES: dict[str, dict[str, bytes]] = {}  # the files of runs by their changes


def _fabricate(
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
) -> None:
    """A run whose `failing` methods fail on the first question.

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


PREFILL_S = 0.005


def paced(run: Run) -> Run:
    """Return a run that really decoded with planted seconds instead of its measured ones.

    A prefill takes 5 ms, and a step 10 ms (8 ms of verification), or 11 ms with a draft.
    """
    made = run.steps.columns
    draft_s = np.where(made.draft_nodes > 0, 0.001, 0.0)
    verify_s, accept_s, host_s = (np.full(len(made), seconds) for seconds in (0.008, 0.001, 0.001))
    total_s = draft_s + verify_s + accept_s + host_s
    columns = replace(made, draft_s=draft_s, verify_s=verify_s, accept_s=accept_s, host_s=host_s, total_s=total_s)
    steps, rows = replace(run.steps, columns=columns), list[SampleRecord]()
    for row in run.rows:
        rows.append(replace(row))
        if row.ok:
            decode_s = float(steps.of(row.key).total_s.sum())
            rows[-1].prefill_s, rows[-1].decode_s, rows[-1].wall_s = PREFILL_S, decode_s, PREFILL_S + decode_s
            rows[-1].started, rows[-1].ended = 0.0, PREFILL_S + decode_s
    return replace(run, rows=rows, steps=steps)
