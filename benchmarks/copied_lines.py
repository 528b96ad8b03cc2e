"""Compare methods on the lines of an answer that the prompt contains, and on new lines.

    python benchmarks/copied_lines.py RUN --model FOLDER [--csv FILE]

A model that completes a function repeats its head and its docstring first, and lookup copies these. A line of an
answer is a copy if the prompt has the same line, surrounding whitespace aside; an empty line belongs to the line before
it. Each token has its share of its step and of the step's time; the first token, which prefill makes, is left out. The
intervals are those of a run, over questions. --csv writes the tokens, steps and seconds of each part of each sample,
and the seconds of drafting, verification and acceptance.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from transformers import AutoTokenizer

from specbench_ss.results.text import interval
from specbench_ss.runs.records import Run, SampleRecord, StepColumns
from specbench_ss.runs.run_dir import read_run
from specbench_ss.stats.pairs import Pairs

Parts = Callable[[SampleRecord], list[str]]  # part of each token of an answer


@dataclass(frozen=True)
class PartOfSample:
    """Tokens and seconds of a part of a sample (`record`), and its steps, of which a token is a share."""

    record: SampleRecord
    steps: float


def main() -> None:
    """Print a row for each part and method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="folder of the tokenizer")
    parser.add_argument("--csv", type=Path)
    a = parser.parse_args()
    run = read_run(a.run)
    parts_of = copied_lines(run, a.model)
    parts: dict[tuple[str, str], list[PartOfSample]] = {}
    lines = []
    for row in _answered_by_all(run):
        steps, found = run.steps.of(row.key), _split(row, run.steps.of(row.key), parts_of(row)[1:])
        for name, one in found.items():
            parts.setdefault((name, row.method), []).append(one)
        lines.append(_line(row, steps, found))
    if a.csv:
        pd.DataFrame(lines).to_csv(a.csv, index=False)
    print("part | method | questions | tokens | speedup | tau | step / step of the baseline")
    for name in dict.fromkeys(name for name, _ in parts):
        ref = parts[name, run.baseline]
        for method in run.labels:
            print(" | ".join((name, method, *_cells(parts[name, method], ref))))


def copied_lines(run: Run, model: Path) -> Parts:
    """Return a function of a sample: for each token, whether it begins in a line that the prompt has."""
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    prompts = {question.id: question.turns for question in run.questions}

    def parts(row: SampleRecord) -> list[str]:
        pieces = [tokenizer.decode([token]) for token in row.token_ids or ()]
        copied = copied_tokens(pieces, prompts[row.question_id][row.turn])
        return ["copied" if one else "new" for one in copied]

    return parts


def copied_tokens(pieces: Sequence[str], prompt: str) -> NDArray[np.bool_]:
    """Return whether each token of an answer begins in a line that the prompt has [tokens]. pieces: text of each."""
    lines = {line.strip() for line in prompt.splitlines()} - {""}
    copied = list[bool]()
    for line in "".join(pieces).splitlines(keepends=True):
        same = line.strip() in lines if line.strip() else bool(copied and copied[-1])
        copied += [same] * len(line)
    begins = np.cumsum([0, *map(len, pieces[:-1])])
    return np.array([*copied, False])[np.minimum(begins, len(copied))]


def _split(row: SampleRecord, steps: StepColumns, parts: Sequence[str]) -> dict[str, PartOfSample]:
    """Return the parts of a sample. parts: of each token after the first."""
    of_token = pd.DataFrame(
        {
            "part": parts,
            "steps": np.repeat(1 / steps.tokens, steps.tokens)[: len(parts)],
            "seconds": np.repeat(steps.total_s / steps.tokens, steps.tokens)[: len(parts)],
        }
    )
    return {
        str(name): PartOfSample(replace(row, tokens=len(own), wall_s=float(own["seconds"].sum())), own["steps"].sum())
        for name, own in of_token.groupby("part")
    }


def _line(row: SampleRecord, steps: StepColumns, parts: dict[str, PartOfSample]) -> dict[str, object]:
    line: dict[str, object] = {"method": row.method, "question_id": row.question_id, "turn": row.turn}
    for name, part in parts.items():
        seconds = part.record.wall_s or 0.0
        line |= {f"tokens {name}": part.record.tokens, f"steps {name}": round(part.steps, 1)}
        line[f"seconds {name}"] = round(seconds, 2)
    return line | {name: round(float(getattr(steps, name).sum()), 2) for name in ("draft_s", "verify_s", "accept_s")}


def _cells(own: Sequence[PartOfSample], ref: Sequence[PartOfSample]) -> list[str]:
    pairs = Pairs([part.record for part in own], [part.record for part in ref])
    (tokens, steps, pace), (_, _, of_ref) = _sums(own), _sums(ref)
    around = pairs.interval()
    speedup = f"{pairs.speedup():.2f}" + (f" ({interval(around)})" if around and own is not ref else "")
    return [str(len(pairs.questions)), str(tokens), speedup, f"{tokens / steps:.2f}", f"{pace / of_ref:.2f}"]


def _sums(parts: Sequence[PartOfSample]) -> tuple[int, float, float]:
    """Return tokens, steps, and seconds of a step."""
    steps = sum(part.steps for part in parts)
    seconds = sum(part.record.wall_s or 0.0 for part in parts)
    return sum(part.record.tokens or 0 for part in parts), steps, seconds / steps


def _answered_by_all(run: Run) -> list[SampleRecord]:
    """Return the samples of the prompts that every method answered."""
    good = [row for row in run.rows if row.ok]
    answered = [{row.prompt for row in good if row.method == label} for label in run.labels]
    return [row for row in good if all(row.prompt in prompts for prompts in answered)]


if __name__ == "__main__":
    main()
