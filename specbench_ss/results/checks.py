"""Checks of a run: failures, output mismatches, impossible and unstable times.

What is found wrong with a single method's numbers is in `sample_checks`; here this is gathered, and what could not be
checked is said. A check is ok only where something was looked at.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specbench_ss.results.concurrency import concurrency_rows, missing
from specbench_ss.results.sample_checks import comparable, unfinished
from specbench_ss.results.summary import OVERALL, SummaryRow
from specbench_ss.results.text import format_number, format_speedup, interval, title
from specbench_ss.runs.environment import between_sessions, is_of_times
from specbench_ss.runs.records import Run, SampleRecord
from specbench_ss.stats import FEWEST

OF_METHOD = 0.1  # of a method's samples: a share of disturbed ones with which its speed is marked


def often_noisy(run: Run) -> set[str]:
    """Return the methods of whose good samples, or of the reference's, a tenth or more was disturbed."""
    every, bad = Counter[str](), Counter[str]()
    for row in run.rows:
        every[row.method] += row.ok
        bad[row.method] += bool(row.ok and row.noise_reason)
    found = {label for label, n in every.items() if n and bad[label] >= OF_METHOD * n}
    return set(run.labels) if run.baseline in found else found


@dataclass(frozen=True, slots=True)
class BaselineNoise:
    """The highest speedup, above 1, that the interval of a method that drafts nothing holds, and its name.

    What such intervals have above 1 is noise, and a method's lead that begins within it may be noise as well.
    """

    method: str
    speedup: float

    def holds(self, row: SummaryRow) -> bool:
        """Say whether a method is called faster though its interval begins within the noise."""
        low = row.speedup_interval[0] if row.speedup_interval else 0.0
        return row.comparison == "faster" and not plain(row) and low <= self.speedup


def plain(row: SummaryRow) -> bool:
    """Say whether a method decodes as the reference does: it drafted nothing at all."""
    drafted = row.acceptance_rate is not None or any(row.acceptance_rate_per_pos_n)
    return row.comparison != "reference" and row.mean_acceptance_length is not None and not drafted


def baseline_noise(overall: Iterable[SummaryRow]) -> BaselineNoise | None:
    """Return the noise that such methods show; None where there are none, or none reaches above 1.

    overall: the summaries over all tasks.
    """
    high = {row.method: row.speedup_interval[1] for row in overall if plain(row) and row.speedup_interval}
    most = max(high, key=lambda method: high[method], default=None)
    return BaselineNoise(most, high[most]) if most is not None and high[most] > 1 else None


TAIL = 32  # tokens at the end of an answer that are looked at
LONGEST = 8  # tokens that repeat themselves, at most
MANY = 0.1  # of the answers: from here on it is said


def repeats_itself(ids: Sequence[int]) -> bool:
    """Say whether the last TAIL tokens are one n-gram of at most LONGEST tokens again and again: four times or more."""
    tail = list(ids[-TAIL:])
    return len(tail) == TAIL and any(tail[n:] == tail[:-n] for n in range(1, LONGEST + 1))


POOR = 0.1  # of 1, by the task's own measure: below that, answers are called poor
OTHERS = "it answered somebody else meanwhile, or did not tell its counts every time"
CheckState = Literal["ok", "warning", "wrong", "not checked"]
STATES: tuple[CheckState, ...] = ("wrong", "warning", "not checked", "ok")  # the worst first

MEMORY = "only where prompts are answered greedily, twice or more, does it show."
USELESS = "what a method gains on such answers, by copying for instance, may be of no use"
KINDS = 3  # of warnings, that are named in one sentence
NUMBERS = re.compile(r"[\d.,]*\d")

FOUND: dict[str, tuple[CheckState, str]] = {  # kind of a finding (`sample_checks`) -> how bad it is, and what is said
    "impossible": ("wrong", "Impossible results: a bug, or a measurement that must not be believed."),
    "invalid": ("wrong", "Results that must not be used."),
    "biased": ("wrong", "Sampled tokens do not follow the target's distribution; these methods have no speedup."),
    "untestable": (
        "warning",
        "Sampled tokens cannot be tested: rounding, or the baseline fails the test.",
    ),
    "failed": ("wrong", "Samples failed; no number includes them."),
    "mismatch": ("wrong", "Answers differ from their reference's in a way that no numerical tie explains."),
    "length-differs": ("warning", "Answers end earlier or later than their reference's."),
    "numerical-tie": ("warning", "Numerical ties in float32, where they should be rare."),
    "uncompared": ("warning", "Answers were not compared with their reference's: the verdicts are lost."),
    "unstable": ("warning", "Unstable timing: other work on the machine, clocks that change, or prompts that differ."),
}


@dataclass(frozen=True, slots=True)
class Check:
    """What became of one check. name: the kind of finding, or `incomplete`, `warnings`, `sessions`, `noisy`,
    `tau`, `noise`, `loops`, `poor`, `engine`, `levels`, `levels of requests`, `tokens`, `acceptance`.

    sentence: what was found, or why nothing could be. lines: its details, one for each method or warning. made: of a
    run that has not ended, and of which nothing is lost, the share of its samples that there are.
    """

    name: str
    state: CheckState
    sentence: str
    lines: tuple[str, ...] = ()
    made: float | None = None


def checks(run: Run, summaries: Sequence[SummaryRow]) -> list[Check]:
    """Return every check of a run, passed or not. summaries: as `summarise` gives them; those of all tasks count."""
    rows = [row for row in summaries if row.category == OVERALL]
    found: dict[str, list[str]] = {}
    for row in rows:
        for sentence in row.health:
            kind, _, text = sentence.partition(": ")
            found.setdefault(kind, []).append(f"{row.method}: {text}")
    answering = {row.method for row in run.rows if row.ok} or set(run.labels)  # others can only have failed
    answered = [row for row in rows if row.method in answering or row.comparison == "reference"]
    bad = {kind: Check(kind, *FOUND[kind], tuple(lines)) for kind, lines in found.items()}
    return [
        _finished(run),
        *_warned(run),
        *_disturbed(run),
        *{**{check.name: check for check in _not_found(run, answered)}, **bad}.values(),
        *served_checks(run),
        *_unreplayed(run),
        *_bound(answered),
        *_noise(rows),
        *_loops(run),
        *_poor(run, summaries),
    ]


def worst_first(made: Sequence[Check]) -> list[Check]:
    """Return the checks in which something was found or nothing could be, the worst first."""
    return [check for state in STATES[:-1] for check in made if check.state == state]


def _finished(run: Run) -> Check:
    lacking, made = unfinished(run), len(run.rows)
    if not lacking:
        return Check("incomplete", "ok", f"The run is complete: {made:,} samples.")
    going = run.manifest["status"] != "complete" and run.samples > made
    return Check("incomplete", "wrong", f"The run is {lacking}.", made=made / run.samples if going else None)


def _warned(run: Run) -> Iterator[Check]:
    """Tell the run's own warnings, by how many there are and of what: the words before their first colon."""
    if said := tuple(run.manifest.get("warnings", [])):
        kinds = list(dict.fromkeys(text.partition(":")[0] for text in said))
        more = [f"{len(kinds) - KINDS} more"] if len(kinds) > KINDS else []
        many = f"{len(said)} warning{'s' * (len(said) > 1)} of the run"
        yield Check("warnings", "warning", f"{many}: {'; '.join([*kinds[:KINDS], *more])}.", said)
    if changed := between_sessions(run.manifest):
        what = ", ".join(changed)
        yield Check("sessions", "warning", f"Not all sessions had the same {what}: their times do not compare.")


def _disturbed(run: Run) -> Iterator[Check]:
    """Say how many samples something else on the machine disturbed, and of how many nobody can know."""
    bad = [row.noise_reason for row in run.rows if row.noise_reason]
    good = [row for row in run.rows if row.ok]
    unseen = [row for row in good if not row.noise_reason and not _seen(row, run.manifest)]
    if bad:
        said = f"{len(bad):,} of {len(run.rows):,} samples were disturbed by something else on the machine"
        again = sum(row.n_reruns or 0 for row in run.rows)
        remade = f"{again} times one was made again" if again else ""
        rest = f"of {len(unseen):,} it is not known: not all of the machine was read" if unseen else ""
        yield Check("noisy", "warning", f"{said}.", (*filter(None, [remade, rest]), *_alike(bad)))
    elif unseen or not good:
        many = f" of {len(unseen):,} samples" if 0 < len(unseen) < len(good) else ""
        said = f"Disturbances{many} were not checked: not all of the machine was read."
        yield Check("noisy", "not checked", said)
    else:
        yield Check("noisy", "ok", "Nothing else on the machine was seen to disturb a sample.")


def _seen(row: SampleRecord, manifest: Mapping[str, Any]) -> bool:
    """Whether the machine was read while this sample was made: the host and, where it computes, the GPU."""
    on_gpu = str(manifest["model"].get("device", "")).startswith("cuda")
    host = row.noise_reason is not None and row.host_foreign_share is not None
    return host and (not on_gpu or row.nvml_sm_mhz is not None)


def _alike(reasons: Sequence[str]) -> Iterator[str]:
    """Yield a line for each kind of reason: how often it was given, and its range of numbers by two examples."""
    kinds: dict[str, list[str]] = {}
    for why in reasons:
        kinds.setdefault(NUMBERS.sub("#", why), []).append(why)
    for alike in sorted(kinds.values(), key=len, reverse=True):
        alike.sort(key=lambda text: [float(number.replace(",", "")) for number in NUMBERS.findall(text)])
        ends = alike[0] if alike[0] == alike[-1] else f"from “{alike[0]}” to “{alike[-1]}”"
        yield f"{'once' if len(alike) == 1 else f'{len(alike):,} times'}: {ends}"


def _not_found(run: Run, rows: Sequence[SummaryRow]) -> Iterator[Check]:
    """Yield what each check says where no method has a finding of its kind."""
    if any(row.ok for row in run.rows):
        yield Check("impossible", "ok", "No impossible result: no count or time contradicts another.")
    else:
        yield Check("impossible", "not checked", "Counts and times were not checked: there is no good sample.")
    if run.rows:
        yield Check("failed", "ok", "No sample failed.")
    else:
        yield Check("failed", "not checked", "Failures were not checked: there is no sample.")
    yield _sampled(rows) if any(row.bias for row in rows) else _same(rows)
    yield _timing(run, rows)
    silent = [row.method for row in rows if row.comparison != "reference" and not run.entry(row.method).get("stateful")]
    rest = [label for label in silent if not comparable(run, label)]
    if len(rest) < len(silent):
        others = f" Not checked: {', '.join(rest)}." if rest else ""
        yield Check("invalid", "ok", f"No method was seen to answer repeats from memory.{others}")
    elif silent:
        yield Check("invalid", "not checked", "Whether methods answer repeats from memory was not checked: " + MEMORY)


def _same(rows: Sequence[SummaryRow]) -> Check:
    verdicts = {row.method: row.output_match for row in rows if row.comparison != "reference"}
    compared = {m for m, of in verdicts.items() if any(n for verdict, n in of.items() if verdict != "not compared")}
    rest = [method for method in verdicts if method not in compared]
    if not compared:
        return Check("mismatch", "not checked", "No answer was compared with its reference's.")
    others = f" Not compared: {', '.join(rest)}." if rest else ""
    return Check("mismatch", "ok", f"No answer that was compared differs without a numerical tie.{others}")


def _sampled(rows: Sequence[SummaryRow]) -> Check:
    rest: dict[str, list[str]] = {}
    promised = [row for row in rows if row.lossless and row.comparison != "reference"]
    for row in (row for row in promised if row.bias not in ("biased", "no bias found")):
        rest.setdefault(row.bias or "no tokens", []).append(row.method)
    if not promised:
        return Check("biased", "not checked", "No method promises a distribution that its sampled tokens could follow.")
    if not rest:
        return Check("biased", "ok", "No bias was found in sampled tokens.")
    which = "; ".join(f"of {', '.join(methods)}: {why}" for why, methods in rest.items())
    return Check("biased", "not checked", f"Whether sampled tokens are biased was not checked {which}.")


def _timing(run: Run, rows: Sequence[SummaryRow]) -> Check:
    if any(map(is_of_times, run.manifest.get("warnings", []))) or between_sessions(run.manifest):
        return Check("unstable", "warning", "Timing cannot be called stable: the run has warnings of its times.")
    if any(row.noise_reason for row in run.rows):
        return Check("unstable", "warning", "Timing cannot be called stable: samples were disturbed.")
    if not any(row.unstable is False for row in rows):
        or_prompts = "" if run.served else f", or {FEWEST} prompts that {run.baseline} answered"
        said = f"Whether timing is stable was not checked: that takes repeats{or_prompts}."
        return Check("unstable", "not checked", said)
    work = "repeats of an answer" if run.repeats > 1 else f"steps of {run.baseline}"
    return Check("unstable", "ok", f"Timing is stable: the times of {work} differ by less than a tenth.")


def _bound(rows: Sequence[SummaryRow]) -> Iterator[Check]:
    """Say of which methods nobody knows whether they are faster than their steps allow, and why some are."""
    plain_s = next((row.verify_s for row in rows if row.comparison == "reference"), None)
    rows = [row for row in rows if row.comparison != "reference"]
    unknown = [row.method for row in rows if row.speedup_within_bound is None]
    if unknown:
        why = f"there are fewer than {FEWEST} questions that both answered, or no steps"
        what = "Whether a method is faster than its steps allow was not checked"
        yield Check("tau", "not checked", f"{what} of {', '.join(unknown)}: {why}.")
    elif rows and all(row.speedup_within_bound for row in rows):
        cheaper = tuple(
            f"{row.method}: {format_speedup(row.speedup)} with {format_number(row.mean_acceptance_length)} "
            f"tokens per step; its verifying takes "
            f"{format_number(row.verify_s / plain_s)} of a plain pass"
            for row in rows
            if row.speedup
            and row.mean_acceptance_length
            and row.speedup > row.mean_acceptance_length
            and row.verify_s
            and plain_s
        )
        yield Check("tau", "ok", "Over all prompts no method is faster than its steps allow.", cheaper)


def _unreplayed(run: Run) -> Iterator[Check]:
    """Say, of a run that replays its steps, which passes were run eagerly all the same, and why."""
    known = [row for row in run.rows if row.n_eager_fallbacks is not None]
    counts = Counter[tuple[str, str]]()
    for row in known:
        counts[row.method, row.eager_fallback_reason or ""] += row.n_eager_fallbacks or 0
    in_order = sorted(counts.items(), key=lambda item: (run.labels.index(item[0][0]), item[0][1]))
    found = [f"{n:,} of {label} ({why})" for (label, why), n in in_order if n]
    if found:
        which = ", ".join(found)
        said = f"Not every pass was replayed; these were run eagerly, which takes longer: {which}."
        yield Check("engine", "warning", said)
    elif known:
        yield Check("engine", "ok", "Every pass that the engine was given after a prompt was replayed.")


def _noise(rows: Sequence[SummaryRow]) -> Iterator[Check]:
    """Say which methods are called faster by no more than methods that keep one token a step may seem to be."""
    found = baseline_noise(rows)
    if found is None:
        return
    near = [row for row in rows if found.holds(row)]
    seems = f"the interval of {found.method}, which keeps one token a step, reaches {format_speedup(found.speedup)}"
    if near:
        lines = tuple(f"{row.method}: {format_speedup(row.speedup)} ({interval(row.speedup_interval)})" for row in near)
        yield Check("noise", "warning", f"Leads that may be noise: {seems}, and these begin below that.", lines)
    else:
        yield Check("noise", "ok", f"No lead begins within the noise: {seems}.")


def _loops(run: Run) -> Iterator[Check]:
    """Say how many of the reference's answers end in a repetition, from a tenth of them on."""
    answers = [row.token_ids for row in run.of(run.baseline) if row.ok and row.token_ids]
    looping = sum(map(repeats_itself, answers))
    if answers and looping >= MANY * len(answers):
        said = f"{looping:,} of {len(answers):,} answers of {run.baseline} end in a repetition: methods that copy gain"
        yield Check("loops", "ok", f"{said} there.")


def _poor(run: Run, summaries: Sequence[SummaryRow]) -> Iterator[Check]:
    """Say in which tasks the reference's own answers are poor, the worst first."""
    own = [row for row in summaries if row.comparison == "reference" and row.category != OVERALL]
    tasks = sorted((row.quality, row.category) for row in own if row.quality is not None and row.quality < POOR)
    if tasks:
        named = ", ".join(f"{title(task)} ({format_number(quality)} of 1)" for quality, task in tasks)
        why = "the model is weak there, or the limit cut them too early"
        yield Check("poor", "warning", f"Answers of {run.baseline} are poor in {named}: {why}.", (USELESS,))


def served_checks(run: Run) -> Iterator[Check]:
    """Yield the checks that only runs of servers, or of several requests at a time, have."""
    if run.served:
        yield from _tokens(run)
        yield from _acceptance(run)
    found = concurrency_rows(run)
    alone = {row.method: row.comparison for row in found if row.concurrency == 1}
    turned = tuple(
        f"{row.method} with {row.concurrency} at a time: {format_speedup(row.speedup)} "
        f"({interval(row.speedup_interval)}) by "
        f"single requests, {row.comparison}"
        for row in found
        if row.concurrency > 1 and row.comparison in ("faster", "slower") and row.comparison != alone[row.method]
    )
    if turned:
        said = "With several requests at a time some verdicts are others than those of one at a time."
        yield Check("levels of requests", "warning", said, turned)
    if lacking := tuple(missing(run)):
        said = "Not every number of requests at a time was measured; --resume goes on."
        yield Check("levels", "wrong", said, lacking)


def _tokens(run: Run) -> Iterator[Check]:
    """Say where pieces of text were counted in place of tokens, and whether servers were counted in one way."""
    ways = {label: {row.counted for row in run.of(label) if row.counted} for label in run.labels}
    known = {label: way for label, way in ways.items() if way}
    by_pieces = [label for label, way in known.items() if way != {"usage"}]
    names = ", ".join(by_pieces)
    if by_pieces and len(by_pieces) < len(known):
        said = f"{names} told no number of tokens, so that pieces of text were counted"
        rest = "Times per token do not compare with those of the others."
        yield Check("tokens", "wrong", f"Tokens were counted in two ways: {said}. {rest}")
    elif by_pieces:
        said = f"No server told its number of tokens: pieces of text were counted of {names}."
        rest = "A piece may hold several tokens, above all where drafts are accepted."
        yield Check("tokens", "warning", f"{said} {rest}")
    elif known:
        yield Check("tokens", "ok", "Every server told how many tokens its answers have.")


def _acceptance(run: Run) -> Iterator[Check]:
    """Say of which servers nobody knows how many drafted tokens they accepted."""
    lacking = []
    for label in run.labels:
        own = [row for row in run.of(label) if row.ok]
        known = sum(row.accepted_tokens is not None for row in own)
        if known < len(own):
            told = str(run.entry(label).get("served", {}).get("acceptance", ""))
            why = told.removeprefix("not measured: ") if told.startswith("not measured") else OTHERS
            lacking.append(f"{label}, {len(own) - known:,} of {len(own):,} answers: {why}")
    if lacking:
        said = f"Acceptance was not measured: {'; '.join(lacking)}."
        yield Check("acceptance", "not checked", said, tuple(lacking))
