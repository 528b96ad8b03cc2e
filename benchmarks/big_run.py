"""How long it takes to load and report a large run, and how much memory: `python benchmarks/big_run.py [FOLDER]`.

The run is made up: 480 questions, 12 methods, 3 repeats, 104 steps a sample on average. Its steps are those of a
short run on the lab, copied with variation, so its numbers say nothing of any method. It is written to a temporary
folder, or to FOLDER, where it is kept and used again.
Each line is a process of its own: CPU seconds (user and system), seconds, and
the most memory that it had.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from specbench_ss.cli import main as main_command
from specbench_ss.runs.rows import Row, Sameness

SOURCE = ["run", "--methods", "pld,ss", "--suite", "specbench", "--limit", "1", "--max-new-tokens", "12"]
QUESTIONS, CATEGORIES, METHODS, REPEATS, STEPS = 480, 12, 12, 3, 104
ACTS = {
    "load": "from specbench_ss import load_run; run = load_run({path!r}); assert not run.unfinished, run.unfinished",
    "load, frame of steps": "from specbench_ss import load_run; print(len(load_run({path!r}).steps))",
    "report": "from specbench_ss.cli import main; assert main(['report', {path!r}]) == 0",
    "write Parquet": "from specbench_ss.results.parquet_files import write_parquet; from pathlib import Path; "
    "assert not write_parquet(Path({path!r}))",
}


def make(path: Path) -> None:
    """Write the run directory of a made-up, synthetic run."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        assert main_command([*SOURCE, "--out", str(source)]) == 0
        _make(path, source)


def _make(path: Path, folder: Path) -> None:
    """Write the made-up run. folder: the run directory that its steps are taken from."""
    path.mkdir(parents=True)
    rng = np.random.default_rng(0)
    source = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    of_method = {row["method"]: [s for s in steps if s["method"] == row["method"]] for row in source}
    labels = ["ar", *(f"{('pld', 'ss')[i % 2]}-synthetic-{i}" for i in range(1, METHODS))]
    _write_manifest(path, folder, labels)
    names = ("rows", "steps", "sameness")
    with ExitStack() as stack:
        rows, lines, verdicts = (stack.enter_context(open(path / f"{name}.jsonl", "w")) for name in names)
        for i, (q, repeat, label) in enumerate(product(range(QUESTIONS), range(REPEATS), labels)):
            key = {"question_id": f"synthetic-{q:04}", "turn": 0, "method": label, "repeat": repeat}
            made = _steps(rng, of_method[label.partition("-")[0]])
            lines.writelines(json.dumps({**key, "index": n, **step}) + "\n" for n, step in enumerate(made))
            rows.write(json.dumps(_row(key, i, made)) + "\n")
            if label != "ar" or repeat:
                verdicts.write(json.dumps(asdict(Sameness(**key, verdict="identical"))) + "\n")


def _write_manifest(path: Path, source: Path, labels: list[str]) -> None:
    manifest = json.loads((source / "manifest.json").read_text())
    known = {method["name"]: method for method in manifest["methods"]}
    manifest["methods"] = [{**known[label.partition("-")[0]], "label": label} for label in labels]
    manifest["suite"] |= {"name": "synthetic", "size": QUESTIONS, "prompts": QUESTIONS}
    manifest["config"]["repeats"] = REPEATS
    (path / "manifest.json").write_text(json.dumps(manifest))
    asked = [("synthetic", f"category-{q % CATEGORIES}", ["What is this?"], [], None) for q in range(QUESTIONS)]
    names = ("id", "category", "turns", "references", "metric")
    entries = [dict(zip(names, (f"{e[0]}-{q:04}", *e[1:]), strict=True)) for q, e in enumerate(asked)]
    (path / "questions.json").write_text(json.dumps(entries))


def _steps(rng: np.random.Generator, source: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Steps of the source in another order, with times that vary by a fifth."""
    n = int(rng.integers(STEPS // 2, 3 * STEPS // 2))
    return [_step(source[i], f) for i, f in zip(rng.integers(0, len(source), n), rng.uniform(0.8, 1.2, n), strict=True)]


def _step(step: dict[str, Any], factor: float) -> dict[str, Any]:
    counts = {name: step[name] for name in ("nodes", "verified", "depth", "accepted")}
    parts = {name: step[name] * float(factor) for name in ("draft_s", "verify_s", "accept_s", "host_s")}
    return {**counts, "tokens": step["accepted"] + 1, **parts, "total_s": sum(parts.values())}


def _row(key: dict[str, Any], index: int, made: list[dict[str, Any]]) -> dict[str, Any]:
    tokens, decode_s = 1 + sum(s["tokens"] for s in made), sum(s["total_s"] for s in made)
    sums = {name: sum(s[name] for s in made) for name in ("verified", "depth", "accepted")}
    number = int(key["question_id"].rpartition("-")[2])
    row = Row(
        **key, category=f"category-{number % CATEGORIES}", index=index, position=index % METHODS, seed=number,
        suite_edition="synthetic", suite_hash="synthetic", status="ok", started=0.0,
        ended=0.02 + decode_s, prompt_tokens=100, tokens=tokens, prefill_tokens=1, steps=len(made),
        drafted=sum(s["nodes"] for s in made), **sums, overshoot=0,
        draft_calls=0, finish="length", prefill_s=0.02, decode_s=decode_s, wall_s=0.02 + decode_s,
        text="synthetic words " * (tokens // 4), token_ids=[(number * 31 + j) % 32000 for j in range(tokens)],
    )  # fmt: skip
    return asdict(row)


def measure(name: str, path: Path) -> None:
    """Do it in a process of its own, and print what that took."""
    code = ACTS[name].format(path=str(path))
    report = "import resource, sys; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True)
    took, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{name:24} {cpu:7.1f} s of CPU {took:7.1f} s {int(done.stderr.split()[-1]) / 1024:8.0f} MiB", flush=True)


def main() -> None:
    """Make the run, unless it is there, and print a table: by lines alone, then with Parquet beside them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(sys.argv[1] if len(sys.argv) > 1 else f"{folder}/synthetic-run")
        if not path.exists():
            make(path)
        for file in path.glob("*.parquet"):
            file.unlink()
        print(f"steps.jsonl: {(path / 'steps.jsonl').stat().st_size / 1e6:.0f} MB; synthetic, no measurement")
        for name in [*ACTS, "load", "load, frame of steps", "report"]:
            measure(name, path)


if __name__ == "__main__":
    main()
