"""Exchange formats: answer files of Spec-Bench, EAGLE and Medusa, CSV, Parquet; rescoring of answers.

A line has question_id, category, model_id, tstamp and choices, one for each repeat. A choice has a list with an entry
for each turn of `turns` (texts), `new_tokens`, `wall_time` and, of Spec-Bench, `decoding_steps`, and `accept_lengths`,
the tokens of every step of all its turns, the bonus included. EAGLE and Medusa have `idxs` instead: the index of the
last step of a turn. Other scripts count no steps.

Speedup: seconds per token of the baseline's file over that of the method's, a ratio of sums with an interval, as in
our own runs. Tokens are `new_tokens` on both sides; Spec-Bench counts those of the baseline by tokenising its text
again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import pandas as pd

from specbench_ss.errors import UserError, known_words
from specbench_ss.options import REFERENCE
from specbench_ss.results.analysis import Results
from specbench_ss.results.frames import write_frames
from specbench_ss.results.summary import OVERALL, safe_div
from specbench_ss.runs.records import Run, SampleRecord
from specbench_ss.stats.intervals import Comparison, Interval, compare
from specbench_ss.stats.pairs import Pairs, mean_acceptance_length
from specbench_ss.storage import write_text
from specbench_ss.user_files import read_bytes

FAILED = "ERROR"  # what Spec-Bench writes as the text of a turn that failed, with numbers of the turn before


class Choice(msgspec.Struct):
    """All turns of one question, answered once."""

    turns: list[str] = []
    new_tokens: list[int] = []
    wall_time: list[float] = []
    decoding_steps: list[int] = []
    idxs: list[int] = []
    accept_lengths: list[int] = []
    index: int = 0


class Answer(msgspec.Struct):
    """A line of an answer file."""

    question_id: int | str
    choices: list[Choice]
    category: str = ""
    model_id: str = ""
    tstamp: float | None = None


def read_answers(file: Path) -> list[Answer]:
    """Return the lines of an answer file; of several lines with the same question, the last one, as Spec-Bench does.

    Raises UserError for a line that is none.
    """
    lines = read_bytes(file).splitlines()
    answers = [_answer(f"{file}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not answers:
        raise UserError(f"{file} holds no answers")
    return list({str(answer.question_id): answer for answer in answers}.values())


def _answer(place: str, line: bytes) -> Answer:
    try:
        answer = msgspec.json.decode(line, type=Answer)
    except (msgspec.DecodeError, RecursionError) as e:
        at = re.search(r"`\$?\.?([^`]*)`$", str(e).replace("[...]", ""))
        what = f"an unexpected value or no value at {at[1]}" if at else "not JSON"
        raise UserError(f"{place}: not a line of an answer file of Spec-Bench, EAGLE or Medusa: {what}") from None
    for choice in answer.choices:
        for name in ("turns", "new_tokens", "wall_time"):
            if not getattr(choice, name):
                raise UserError(f"{place}: no `{name}`: it was made by a script that measures no speed")
        choice.decoding_steps = choice.decoding_steps or [last + 1 for last in choice.idxs]
        steps = choice.decoding_steps or choice.new_tokens
        lengths = {len(part) for part in (choice.turns, steps, choice.new_tokens, choice.wall_time)}
        if len(lengths) > 1 or min([*choice.new_tokens, *steps, *choice.accept_lengths], default=0) < 0:
            raise UserError(f"{place}: lists of different lengths, or a negative count")
    return answer


def write_answers(results: Results, folder: Path) -> list[str]:
    """Write an answer file for each method of a run into a folder; return what was left out, a sentence each.

    Only whole repeats of a question are written: a turn that failed has no numbers. Raises UserError for a run of
    served engines.
    """
    run = results.run
    if run.served:
        raise UserError("Spec-Bench's answer files hold the steps of an answer, which servers do not report")
    notes, names = [], file_names(run.labels)
    turns = {question.id: len(question.turns) for question in run.questions}
    for label in run.labels:
        repeats: dict[str, dict[int, list[SampleRecord]]] = {}
        for row in sorted(run.of(label), key=lambda row: (row.repeat, row.turn)):
            repeats.setdefault(row.question_id, {}).setdefault(row.repeat, []).append(row)
        whole = [
            [rows for rows in answers.values() if _whole(rows, turns.get(id, len(rows)))]
            for id, answers in repeats.items()
        ]
        text = "".join(json.dumps(_line(run, label, own), ensure_ascii=False) + "\n" for own in whole if own)
        write_text(folder / names[label], text)
        if lacking := sum(map(len, repeats.values())) - sum(map(len, whole)):
            notes.append(f"{label}: {lacking} answers with failed or missing turns are left out")
    return notes


def file_names(labels: Sequence[str]) -> dict[str, str]:
    """Return a file name for each label, none twice: what a file system may not take is replaced."""
    names: dict[str, str] = {}
    for label in labels:
        stem = plain = re.sub(r"[^\w.,=\[\]#-]+", "_", label)[:100]
        while f"{stem}.jsonl" in names.values():
            stem = f"{plain}-{len(names)}"
        names[label] = f"{stem}.jsonl"
    return names


def _whole(rows: Sequence[SampleRecord], turns: int) -> bool:
    return all(row.ok for row in rows) and [row.turn for row in rows] == list(range(turns))


def _line(run: Run, label: str, answers: Sequence[Sequence[SampleRecord]]) -> dict[str, Any]:
    first, model = answers[0][0], run.manifest["model"]
    return {
        "question_id": int(first.question_id) if first.question_id.isdecimal() else first.question_id,
        "category": first.category,
        "model_id": f"{model['name']}-{label}-{model['dtype']}",
        "choices": [
            {
                "index": rows[0].repeat,
                "turns": [row.text for row in rows],
                "decoding_steps": [row.steps for row in rows],
                "new_tokens": [row.tokens for row in rows],
                "wall_time": [row.wall_s for row in rows],
                "accept_lengths": run.steps.together(row.key for row in rows).tokens.tolist(),
            }
            for rows in answers
        ],
        "tstamp": max(row.ended or 0.0 for rows in answers for row in rows),
    }


def write_csv(results: Results, folder: Path) -> list[str]:
    """Write the frames of a run as CSV files; lists are JSON texts."""
    made = {"samples": results.samples, "steps": results.steps, "output_match": results.output_match}
    for name, frame in (made | {"summary": results.summary(all=True)}).items():
        write_text(folder / f"{name}.csv", plain(frame).to_csv(index=False))
    return []


def plain(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a frame for CSV: lists as JSON texts."""
    lists = [name for name in frame if str(frame[name].dtype) == "object"]
    return frame.assign(
        **{name: frame[name].map(lambda one: one if one is pd.NA else json.dumps(list(one))) for name in lists}
    )


def write_parquet(results: Results, folder: Path) -> list[str]:
    """Write the frames of a run as Parquet files."""
    write_frames(results.run, results.rows, folder)
    return []


FOLDERS: dict[str, Callable[[Results, Path], list[str]]] = {  # formats of several files
    "specbench": write_answers,
    "csv": write_csv,
    "parquet": write_parquet,
}


BASELINES = (REFERENCE, "vanilla", "baseline")  # what a baseline's file is called
Place = tuple[str, int]  # question id, repeat


@dataclass(frozen=True, slots=True)
class RescoredRow:
    """One file on one task (or `overall`). n_left_out: answers of this file that count on neither side.

    mean_acceptance_length: tokens per step, bonus token included, first token counted apart where the file does
    so. mean_accept_lengths: the mean
    of accept_lengths, which Spec-Bench prints. speedup_specbench: its formula, on the same questions and tokens.
    n_turns: answered turns, repeats included; n_same_text: of these, turns whose text is the baseline's; n_other_count:
    of these, turns with another number of tokens. longest: most tokens of a turn. beyond: tokens in accept_lengths that
    are no part of an answer.
    """

    task: str
    method: str
    n_prompts: int
    n_questions: int
    n_left_out: int
    speedup: float | None
    speedup_interval: Interval | None
    comparison: Comparison
    speedup_geomean: float | None
    speedup_specbench: float | None
    mean_acceptance_length: float | None
    mean_accept_lengths: float | None
    tokens_per_s: float | None
    n_turns: int
    n_same_text: int
    n_other_count: int
    longest: int
    first_apart: bool
    bonus_left_out: bool
    beyond: int


class AnswerFile:
    """An answer file as samples. choices: what it holds, by question and repeat."""

    def __init__(self, label: str, answers: Sequence[Answer]) -> None:
        self.label = label
        self.choices: dict[Place, Choice] = {}
        self.rows: list[SampleRecord] = []
        for answer in answers:
            for repeat, choice in enumerate(answer.choices):
                self.choices[str(answer.question_id), repeat] = choice
                self.rows += _rows(label, answer, repeat, choice)
        good = [self.choices[place] for place in dict.fromkeys((r.question_id, r.repeat) for r in self.rows if r.ok)]
        listed = [c for c in good if c.accept_lengths]
        counted = [(sum(c.new_tokens), sum(c.accept_lengths), _steps(c), len(c.turns)) for c in listed]
        missing = [(tokens - listed) / steps for tokens, listed, steps, _ in counted if steps]
        self.bonus_left_out = bool(missing) and median(missing) > 0.5
        rests = [n - listed - steps * self.bonus_left_out >= turns for n, listed, steps, turns in counted]
        self.first_apart = sum(rests) * 2 > len(rests)


def _steps(choice: Choice) -> int:
    return len(choice.accept_lengths) or sum(choice.decoding_steps)


def _rows(label: str, answer: Answer, repeat: int, choice: Choice) -> Iterator[SampleRecord]:
    """Yield a sample for each turn. Where one failed all count as failed: later ones follow the text of the failure."""
    numbers = zip(choice.turns, choice.new_tokens, choice.wall_time, strict=True)
    good = all(text.strip() != FAILED and n > 0 and math.isfinite(s) and s > 0 for text, n, s in numbers)
    for turn, text in enumerate(choice.turns):
        place = (str(answer.question_id), turn, label, repeat)
        row = SampleRecord(*place, answer.category, 0, 0, 0, "", "", "ok" if good else "failed")
        if good:
            row.tokens, row.wall_s, row.text = choice.new_tokens[turn], choice.wall_time[turn], text
        yield row


def rescored(files: Sequence[Path], baseline: str | None = None) -> list[RescoredRow]:
    """Return a row for each file, the baseline's first, on `overall` and then on each task.

    baseline: name of the baseline's file without its ending. Raises UserError where it is not known which that is.
    """
    labels = [file.name.removesuffix(".jsonl") for file in files]
    if len(set(labels)) < len(labels):
        raise UserError("two of the files have the same name: a method is called by the name of its file")
    chosen = _baseline(labels, baseline)
    made = {label: AnswerFile(label, read_answers(file)) for label, file in zip(labels, files, strict=True)}
    ref = made[chosen]
    if not any(row.ok for row in ref.rows):
        raise UserError(f"the baseline {chosen} has no answer that did not fail")
    tasks = [OVERALL, *dict.fromkeys(row.category for row in ref.rows)]
    ordered = [ref, *(one for label, one in made.items() if label != chosen)]
    return [_row(one, ref, task) for task in tasks for one in ordered]


def _baseline(labels: Sequence[str], asked: str | None) -> str:
    if asked is not None:
        if asked.removesuffix(".jsonl") not in labels:
            raise UserError(f"--baseline: there is no file {asked!r}{known_words(asked, labels)}")
        return asked.removesuffix(".jsonl")
    found = [x for x in labels if x.lower() == REFERENCE or any(name in x.lower() for name in BASELINES[1:])]
    if len(found) != 1:
        raise UserError(f"name the file of the baseline with --baseline NAME; there are {', '.join(labels)}")
    return found[0]


def _row(file: AnswerFile, baseline: AnswerFile, task: str) -> RescoredRow:
    asked = [row for row in file.rows if task in (OVERALL, row.category)]
    times, itself = Pairs(*_equal_turns(Pairs(asked, baseline.rows), file, baseline), processes=2), file is baseline
    own, ref = times.own, times.other
    around = None if itself else times.interval()
    answered = list(dict.fromkeys((row.question_id, row.repeat) for row in own))
    choices = [file.choices[place] for place in answered]
    tokens, steps = sum(row.tokens or 0 for row in own), sum(map(_steps, choices))
    listed, lengths = sum(sum(c.accept_lengths) for c in choices), sum(len(c.accept_lengths) for c in choices)
    in_steps = tokens - len(own) * file.first_apart
    same = [(a, b) for a, b in zip(own, ref, strict=True) if a.text == b.text]
    return RescoredRow(
        task=task,
        method=file.label,
        n_prompts=times.n_prompts,
        n_questions=len(times.questions),
        n_left_out=len({(row.question_id, row.repeat) for row in asked} - {*answered}),
        speedup=times.speedup(),
        speedup_interval=around,
        comparison="baseline" if itself else compare(around),
        speedup_geomean=times.geomean(),
        speedup_specbench=times.specbench(),
        mean_acceptance_length=mean_acceptance_length(
            in_steps, steps if all(c.decoding_steps for c in choices) else None
        ),
        mean_accept_lengths=safe_div(listed, lengths),
        tokens_per_s=safe_div(tokens, sum(row.wall_s or 0.0 for row in own)),
        n_turns=len(own),
        n_same_text=len(same),
        n_other_count=sum(a.tokens != b.tokens for a, b in same),
        longest=max((row.tokens or 0 for row in own), default=0),
        first_apart=file.first_apart,
        bonus_left_out=file.bonus_left_out,
        beyond=max(0, listed + lengths * file.bonus_left_out - in_steps) if lengths else 0,
    )


def _equal_turns(pairs: Pairs[SampleRecord], *files: AnswerFile) -> tuple[list[SampleRecord], list[SampleRecord]]:
    """Return the pairs of those answers with as many turns in each of the files: steps belong to whole answers."""
    first, second = (file.choices for file in files)
    same = [len(first[r.question_id, r.repeat].turns) == len(second[r.question_id, r.repeat].turns) for r in pairs.own]
    kept = [both for both, equal in zip(zip(pairs.own, pairs.other, strict=True), same, strict=True) if equal]
    return [a for a, _ in kept], [b for _, b in kept]


def limitations(rows: Sequence[RescoredRow]) -> Iterator[str]:
    """Yield notes on these files and on what they do not contain."""
    rows = [row for row in rows if row.task == OVERALL]
    if len({row.first_apart for row in rows}) > 1:
        apart = ", ".join(row.method for row in rows if row.first_apart)
        yield f"The first token belongs to no step in {apart}, and to a step in the others: so it is in τ."
    if len({row.longest for row in rows}) > 1:
        longest = ", ".join(f"{row.method} {row.longest}" for row in rows)
        yield f"Longest answers, in tokens, which limits may have cut: {longest}."
    for name, text in COUNTED.items():
        for row in rows:
            if count := getattr(row, name):
                yield f"{row.method}: {count} {text}."
    for row in rows:
        if row.bonus_left_out:
            yield f"{row.method}: accept_lengths leave out the bonus token; τ counts it."
        if row.mean_acceptance_length is None:
            yield f"{row.method}: no τ: neither `decoding_steps` nor `idxs`, so the script had no counters."
    yield (
        "The files do not contain: the parts of a step, time to first token, rejected tokens, whether texts "
        "differ by a numerical tie, whether methods were interleaved, and the machine."
    )


COUNTED = {
    "n_left_out": "answers left out on both sides, since a turn failed or is in one of the files alone",
    "beyond": "tokens in accept_lengths lie beyond the end of an answer; τ leaves them out",
    "n_other_count": "texts are the baseline's, with another number of tokens: the files count otherwise",
}
