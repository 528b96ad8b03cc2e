"""Spec-Bench's answer files scored again by rules that are the same for all of them. docs/design/compare.md has these.

Speedup: seconds per token of the baseline's file over that of the method's, a ratio of sums with an interval, as in our
own runs. Tokens are `new_tokens` on both sides; Spec-Bench counts those of the baseline by tokenising its text again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from specbench_ss.errors import UserError, known_words
from specbench_ss.method_spec import REFERENCE
from specbench_ss.results.intervals import Comparison, Interval, compare
from specbench_ss.results.paired_times import PairedTimes, paired
from specbench_ss.results.specbench_files import FAILED, Answer, Choice, read_answers
from specbench_ss.results.summary import OVERALL
from specbench_ss.runs.rows import Row

BASELINES = (REFERENCE, "vanilla", "baseline")  # what a baseline's file is called
Place = tuple[str, int]  # question id, repeat


@dataclass(frozen=True, slots=True)
class RescoredRow:
    """One file on one category (or `overall`). n_left_out: answers of this file that count on neither side.

    tau: tokens per step, bonus token included, first token counted apart where the file does so. tau_written: the mean
    of accept_lengths, which Spec-Bench prints. speedup_specbench: its formula, on the same questions and tokens.
    n_turns: answered turns, repeats included; n_same_text: of these, turns whose text is the baseline's; n_other_count:
    of these, turns with another number of tokens. longest: most tokens of a turn. beyond: tokens in accept_lengths that
    are no part of an answer.
    """

    category: str
    method: str
    n_prompts: int
    n_questions: int
    n_left_out: int
    speedup: float | None
    speedup_interval: Interval | None
    comparison: Comparison
    speedup_geomean: float | None
    speedup_specbench: float | None
    tau: float | None
    tau_written: float | None
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
        self.rows: list[Row] = []
        for answer in answers:
            for repeat, choice in enumerate(answer.choices):
                self.choices[str(answer.question_id), repeat] = choice
                self.rows += _rows(label, answer, repeat, choice)
        good = [self.choices[place] for place in dict.fromkeys((r.question_id, r.repeat) for r in self.rows if r.ok)]
        counted = [(sum(c.new_tokens), sum(c.accept_lengths), _steps(c), len(c.turns)) for c in good]
        missing = [(tokens - listed) / steps for tokens, listed, steps, _ in counted if steps]
        self.bonus_left_out = bool(missing) and median(missing) > 0.5
        rests = [n - listed - steps * self.bonus_left_out >= turns for n, listed, steps, turns in counted]
        self.first_apart = sum(rests) * 2 > len(rests)


def _steps(choice: Choice) -> int:
    return len(choice.accept_lengths) or sum(choice.decoding_steps)


def _rows(label: str, answer: Answer, repeat: int, choice: Choice) -> Iterator[Row]:
    """Yield a sample for each turn. Where one failed all count as failed: later ones follow the text of the failure."""
    good = choice.turns and not any(text.strip() == FAILED for text in choice.turns)
    good = good and all(
        n > 0 and math.isfinite(s) and s > 0 for n, s in zip(choice.new_tokens, choice.wall_time, strict=True)
    )
    for turn, text in enumerate(choice.turns):
        row = Row(
            str(answer.question_id), turn, label, repeat, answer.category, 0, 0, 0, "", "", "ok" if good else "failed"
        )
        if good:
            row.tokens, row.wall_s, row.text = choice.new_tokens[turn], choice.wall_time[turn], text
        yield row


def rescored(files: Sequence[Path], baseline: str | None = None) -> list[RescoredRow]:
    """Return a row for each file, the baseline's first, on `overall` and then on each category.

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
    categories = [OVERALL, *dict.fromkeys(row.category for row in ref.rows)]
    ordered = [ref, *(one for label, one in made.items() if label != chosen)]
    return [_row(one, ref, category) for category in categories for one in ordered]


def _baseline(labels: Sequence[str], asked: str | None) -> str:
    if asked is not None:
        if asked.removesuffix(".jsonl") not in labels:
            raise UserError(f"--baseline: there is no file {asked!r}{known_words(asked, labels)}")
        return asked.removesuffix(".jsonl")
    found = [x for x in labels if x.lower() == REFERENCE or any(name in x.lower() for name in BASELINES[1:])]
    if len(found) != 1:
        raise UserError(f"say which file is the baseline, --baseline NAME; there are {', '.join(labels)}")
    return found[0]


def _row(file: AnswerFile, baseline: AnswerFile, category: str) -> RescoredRow:
    asked = [row for row in file.rows if category in (OVERALL, row.category)]
    own, ref = _together(*paired(asked, baseline.rows), file, baseline)
    times = PairedTimes(own, ref)
    itself = file is baseline
    around = None if itself else times.interval()
    choices = [file.choices[place] for place in dict.fromkeys((row.question_id, row.repeat) for row in own)]
    tokens, steps = sum(row.tokens or 0 for row in own), sum(map(_steps, choices))
    listed, lengths = sum(sum(c.accept_lengths) for c in choices), sum(len(c.accept_lengths) for c in choices)
    in_steps = tokens - len(own) * file.first_apart
    same = [(a, b) for a, b in zip(own, ref, strict=True) if a.text == b.text]
    left = {(row.question_id, row.repeat) for row in asked} - {(row.question_id, row.repeat) for row in own}
    seconds = sum(row.wall_s or 0.0 for row in own)
    return RescoredRow(
        category=category,
        method=file.label,
        n_prompts=len(times.own_s),
        n_questions=len(times.questions),
        n_left_out=len(left),
        speedup=times.speedup(),
        speedup_interval=around,
        comparison="reference" if itself else compare(around),
        speedup_geomean=times.geomean(),
        speedup_specbench=times.specbench(),
        tau=in_steps / steps if steps else None,
        tau_written=listed / lengths if lengths else None,
        tokens_per_s=tokens / seconds if seconds else None,
        n_turns=len(own),
        n_same_text=len(same),
        n_other_count=sum(a.tokens != b.tokens for a, b in same),
        longest=max((row.tokens or 0 for row in own), default=0),
        first_apart=file.first_apart,
        bonus_left_out=file.bonus_left_out,
        beyond=max(0, listed + lengths * file.bonus_left_out - in_steps) if lengths else 0,
    )


def _together(own: Sequence[Row], ref: Sequence[Row], *files: AnswerFile) -> tuple[list[Row], list[Row]]:
    """Return the pairs of those answers with as many turns in each of the files: steps belong to whole answers."""
    first, second = (file.choices for file in files)
    same = [len(first[r.question_id, r.repeat].turns) == len(second[r.question_id, r.repeat].turns) for r in own]
    kept = [pair for pair, equal in zip(zip(own, ref, strict=True), same, strict=True) if equal]
    return [a for a, _ in kept], [b for _, b in kept]


def cannot_tell(rows: Sequence[RescoredRow]) -> Iterator[str]:
    """Yield what is to be known of these files, and what they cannot tell."""
    of_all = [row for row in rows if row.category == OVERALL]
    yield from _counting(of_all)
    yield (
        "The files cannot tell: the parts of a step, time to first token, what was drafted and refused, whether texts "
        "that differ do so by a near-tie, whether methods were interleaved, and which machine took the times."
    )


def _counting(rows: Sequence[RescoredRow]) -> Iterator[str]:
    if len({row.first_apart for row in rows}) > 1:
        apart = ", ".join(row.method for row in rows if row.first_apart)
        yield f"The first token belongs to no step in {apart}, and to a step in the others: so it is in τ."
    if len({row.longest for row in rows}) > 1:
        longest = ", ".join(f"{row.method} {row.longest}" for row in rows)
        yield f"Longest answers, in tokens, which limits may have cut: {longest}."
    sentences: Mapping[str, Sequence[tuple[RescoredRow, int]]] = {
        "answers left out on both sides, since a turn failed or is in one of the files alone": [
            (row, row.n_left_out) for row in rows
        ],
        "tokens in accept_lengths lie beyond the end of an answer; τ leaves them out": [
            (row, row.beyond) for row in rows
        ],
        "texts are the baseline's, with another number of tokens: the files count otherwise": [
            (row, row.n_other_count) for row in rows
        ],
    }
    for text, counts in sentences.items():
        for row, count in counts:
            if count:
                yield f"{row.method}: {count} {text}."
    for row in rows:
        if row.bonus_left_out:
            yield f"{row.method}: accept_lengths leave out the bonus token; τ counts it."
