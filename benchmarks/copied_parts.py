"""Compare methods on the lines of an answer that the prompt contains and on new lines apart.

    python benchmarks/copied_parts.py RUN --model FOLDER

A model that completes a function repeats its head and its docstring first, and lookup copies these. A line of an
answer is a copy if the prompt has the same line, surrounding whitespace aside; an empty line belongs to the line before
it. Each token gets its share of the time of its step; the first token, which prefill makes, is left out. The intervals
are those of a run, over questions.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

from specbench_ss.results.text import interval
from specbench_ss.runs.records import Run, SampleRecord
from specbench_ss.runs.run_dir import read_questions, read_run
from specbench_ss.stats.pairs import Pairs

PARTS = ("copied", "new")


def main() -> None:
    """Print a row for each part and method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="folder of the tokenizer")
    a = parser.parse_args()
    run, tokenizer = read_run(a.run), AutoTokenizer.from_pretrained(a.model, local_files_only=True)
    prompts = {question.id: question.turns for question in read_questions(a.run)}
    parts: dict[tuple[str, str], list[tuple[SampleRecord, float]]] = {}
    for row in _answered_by_all(run):
        pieces = [tokenizer.decode([token]) for token in row.token_ids or ()]
        copied = copied_tokens(pieces, prompts[row.question_id][row.turn])[1:]
        columns = run.steps.of(row.key)
        steps = np.repeat(1 / columns.tokens, columns.tokens)[: len(copied)]
        seconds = np.repeat(columns.total_s / columns.tokens, columns.tokens)[: len(copied)]
        for part, of_part in zip(PARTS, (copied, ~copied), strict=True):
            if of_part.any():
                one = replace(row, tokens=int(of_part.sum()), wall_s=float(seconds[of_part].sum()))
                parts.setdefault((part, row.method), []).append((one, float(steps[of_part].sum())))
    print("part | method | questions | tokens | speedup | tau | step / step of the baseline")
    for part in PARTS:
        ref = parts[part, run.baseline]
        for method in run.labels:
            print(" | ".join((part, method, *_cells(parts[part, method], ref))))


def _cells(own: Sequence[tuple[SampleRecord, float]], ref: Sequence[tuple[SampleRecord, float]]) -> list[str]:
    pairs = Pairs([row for row, _ in own], [row for row, _ in ref])
    (tokens, steps, pace), (_, _, of_ref) = _sums(own), _sums(ref)
    around = pairs.interval()
    speedup = f"{pairs.speedup():.2f}" + (f" ({interval(around)})" if around and own is not ref else "")
    return [str(len(pairs.questions)), str(tokens), speedup, f"{tokens / steps:.2f}", f"{pace / of_ref:.2f}"]


def _sums(parts: Sequence[tuple[SampleRecord, float]]) -> tuple[int, float, float]:
    """Return tokens, steps, and seconds of a step."""
    steps = sum(n for _, n in parts)
    return sum(row.tokens or 0 for row, _ in parts), steps, sum(row.wall_s or 0.0 for row, _ in parts) / steps


def copied_tokens(pieces: Sequence[str], prompt: str) -> NDArray[np.bool_]:
    """Return whether each token of an answer begins in a line that the prompt has [tokens]. pieces: text of each."""
    lines = {line.strip() for line in prompt.splitlines()} - {""}
    copied = list[bool]()
    for line in "".join(pieces).splitlines(keepends=True):
        same = line.strip() in lines if line.strip() else bool(copied and copied[-1])
        copied += [same] * len(line)
    begins = np.cumsum([0, *map(len, pieces[:-1])])
    return np.array([*copied, False])[np.minimum(begins, len(copied))]


def _answered_by_all(run: Run) -> list[SampleRecord]:
    """Return the samples of the prompts that every method answered."""
    good = [row for row in run.rows if row.ok]
    answered = [{row.prompt for row in good if row.method == label} for label in run.labels]
    return [row for row in good if all(row.prompt in prompts for prompts in answered)]


if __name__ == "__main__":
    main()
