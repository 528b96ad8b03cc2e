"""Checks of a run: failures, output mismatches, impossible and unstable times.

`sample_checks` finds what is wrong with the numbers of one method; this module collects its findings, and names the
checks that could not be made. A check is ok only if there was something to check.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from specbench_ss.results.concurrency import concurrency_rows, missing
from specbench_ss.results.findings import FINDINGS, Check
from specbench_ss.results.sample_checks import comparable, unfinished
from specbench_ss.results.summary import OVERALL, SummaryRow
from specbench_ss.results.text import format_number, format_speedup, interval, pluralize
from specbench_ss.runs.environment import between_sessions, is_of_times
from specbench_ss.runs.records import Run, SampleRecord
from specbench_ss.stats.intervals import FEWEST, Comparison, compare
from specbench_ss.stats.pairs import Pairs
from specbench_ss.stats.precision import advice, widest_ci

OF_METHOD = 0.1  # share of noisy samples from which a method is marked


def often_noisy(run: Run) -> set[str]:
    """Return the methods of whose good samples, or of the baseline's, a tenth or more is noisy."""
    every, bad = Counter[str](), Counter[str]()
    for row in run.rows:
        every[row.method] += row.ok
        bad[row.method] += bool(row.ok and row.noise_reason)
    found = {label for label, n in every.items() if n and bad[label] >= OF_METHOD * n}
    return set(run.labels) if run.baseline in found else found


@dataclass(frozen=True, slots=True)
class BaselineNoise:
    """The upper end, above 1, of the interval of a method that drafts nothing, and the method's name.

    A lead whose interval begins below that end may be noise.
    """

    method: str
    speedup: float

    def holds(self, row: SummaryRow) -> bool:
        """Return whether a method counts as faster although its interval begins within the noise."""
        low = row.speedup_interval[0] if row.speedup_interval else 0.0
        return row.comparison == "faster" and not plain(row) and low <= self.speedup


def plain(row: SummaryRow) -> bool:
    """Return whether a method decodes as the baseline does: it drafted nothing at all."""
    drafted = row.acceptance_rate is not None or any(row.acceptance_rate_per_pos_n)
    alone = row.mean_acceptance_length is not None and row.mean_acceptance_length <= 1  # servers may count steps alone
    return row.comparison != "baseline" and alone and not drafted


def baseline_noise(overall: Iterable[SummaryRow]) -> BaselineNoise | None:
    """Return the noise of methods that draft nothing; None if there are none, or none reaches above 1.

    overall: the summaries over all tasks.
    """
    high = {row.method: row.speedup_interval[1] for row in overall if plain(row) and row.speedup_interval}
    most = max(high, key=lambda method: high[method], default=None)
    return BaselineNoise(most, high[most]) if most is not None and high[most] > 1 else None


TAIL = 32  # tokens at the end of an output that are examined
LONGEST = 8  # tokens of a repeated n-gram, at most
MANY = 0.1  # share of repetitive outputs from which the check has a line


def repeats_itself(ids: Sequence[int]) -> bool:
    """Return whether the last TAIL tokens repeat one n-gram of at most LONGEST tokens, four times or more."""
    tail = list(ids[-TAIL:])
    return len(tail) == TAIL and any(tail[n:] == tail[:-n] for n in range(1, LONGEST + 1))


LOW_QUALITY = 0.1  # quality by the task's measure below which outputs are of low quality
WEAK = {"drafter_hash": 1.2, "heads_hash": 1.1}  # hash in a manifest, which only trained drafters have -> least τ
REMEMBERED = 0.02  # share of steps that later repeats may save, by ties
DRIFTED = 0.1  # change of the baseline's time from which a run is not steady
UNCOVERED = 0.05  # the same where no interval covers it
OTHERS = "it served other requests meanwhile, or did not always report its counts"
MEMORY = "that needs --repeats 2 and greedy decoding."
USELESS = "speedups on low-quality outputs (e.g. from copying) may not carry over"
KINDS = 3  # kinds of warnings in one sentence
NUMBERS = re.compile(r"[\d.,]*\d")


def checks(run: Run, summaries: Sequence[SummaryRow]) -> list[Check]:
    """Return every check of a run, passed or not. summaries: as `summarise` gives them; those of all tasks count."""
    rows = [row for row in summaries if row.task == OVERALL]
    found: dict[str, list[str]] = {}
    for row in rows:
        for finding in row.health:
            found.setdefault(finding.kind, []).append(f"{row.method}: {finding.text}")
    unstable = found.pop("unstable", [])
    answering = {row.method for row in run.rows if row.ok} or set(run.labels)  # others can only have failed
    answered = [row for row in rows if row.method in answering or row.comparison == "baseline"]
    bad = {kind: Check(kind, *FINDINGS[kind], tuple(lines)) for kind, lines in found.items()}
    return [
        _finished(run),
        *_warned(run),
        *{**{check.name: check for check in _not_found(run, answered)}, **bad}.values(),
        _timing(run, answered, unstable),
        *served_checks(run, {row.method for row in rows if row.comparison == "invalid"}),
        *_eager(run),
        *_bound(answered),
        *_noise(rows),
        *_repetition(run),
        *_low_quality(run, summaries),
        *_weak_drafters(run, rows),
    ]


def _finished(run: Run) -> Check:
    lacking, made = unfinished(run), len(run.rows)
    if not lacking:
        return Check("incomplete", "ok", f"The run is complete: {made:,} samples.")
    going = run.manifest["status"] != "complete" and run.samples > made
    return Check("incomplete", "wrong", f"The run is {lacking}.", made=made / run.samples if going else None)


def _warned(run: Run) -> Iterator[Check]:
    """Yield the warnings of the run that do not concern its times, and differences between sessions."""
    if found := tuple(text for text in run.manifest.get("warnings", []) if not is_of_times(text)):
        kinds = list(dict.fromkeys(text.partition(":")[0] for text in found))
        more = [f"{len(kinds) - KINDS} more"] if len(kinds) > KINDS else []
        many = f"{len(found)} warnings of the run: {'; '.join([*kinds[:KINDS], *more])}"
        yield Check("warnings", "warning", f"{many if len(found) > 1 else found[0]}.", found)
    if changed := between_sessions(run.manifest):
        what = ", ".join(changed)
        yield Check("sessions", "warning", f"Not all sessions had the same {what}: their times do not compare.")


def _timing(run: Run, rows: Sequence[SummaryRow], unstable: Sequence[str]) -> Check:
    """Return the check of all times: noisy samples, unstable step times, and the run's warnings about times."""
    warned = [text for text in run.manifest.get("warnings", []) if is_of_times(text)]
    noisy = [row.noise_reason for row in run.rows if row.noise_reason]
    good = [row for row in run.rows if row.ok]
    unseen = [row for row in good if not row.noise_reason and not _seen(row, run.manifest)]
    n_reruns = sum(row.n_reruns or 0 for row in run.rows)
    kinds = "; ".join(text.partition(": ")[0] for text in warned)
    problems = [
        (("noisy", "unstable"), _noisy_text(run, rows, noisy)),
        (("unstable",), f"Unstable timing: {'; '.join([*unstable, *_narrower(run, rows)])}" if unstable else ""),
        (("unstable", "warnings"), f"Timing: {kinds}" if warned else ""),
    ]
    lines = (
        *(_alike(noisy)),
        *([f"{pluralize(n_reruns, 're-run')} of noisy samples"] if n_reruns else []),
        *([f"noise is unknown for {len(unseen):,} samples: telemetry is incomplete"] if unseen and noisy else []),
        *unstable,
        *warned,
    )
    if found := [(names, text) for names, text in problems if text]:
        findings = tuple(dict.fromkeys(name for names, _ in found for name in names))
        return Check("timing", "warning", f"{found[0][1]}.", lines, findings=findings)
    lacking = []
    if unseen or not good:
        many = f" of {len(unseen):,} samples" if 0 < len(unseen) < len(good) else ""
        lacking.append(f"noise{many} (telemetry is incomplete)")
    if not any(row.unstable is False for row in rows):
        or_prompts = "" if run.served else f" or {FEWEST} prompts"
        lacking.append(f"stability (needs repeats{or_prompts})")
    if lacking:
        return Check("timing", "not checked", f"Timing was not checked for {' and '.join(lacking)}.")
    work = "repeats of an output" if run.repeats > 1 else f"steps of {run.baseline}"
    return Check("timing", "ok", f"Timing is stable: times of {work} differ by less than 10%, and no sample is noisy.")


def _narrower(run: Run, rows: Sequence[SummaryRow]) -> Iterator[str]:
    """Yield what would narrow the widest interval of a method, since the intervals include what makes times differ."""
    methods = [row.method for row in rows if row.speedup_interval is not None and not row.reference_of]
    width = widest_ci(run.rows, [run.baseline, *methods], run.repeats)
    if text := advice(width, len({row.category for row in run.rows})):
        yield f"the intervals include that, and {text}"


def _noisy_text(run: Run, rows: Sequence[SummaryRow], noisy: Sequence[str]) -> str:
    """Return the most frequent reason with its range, its frequency and the result without the noisy samples."""
    if not noisy:
        return ""
    reason = next(_alike(noisy)).partition(": ")[2]
    text = f"Noisy timing: {reason} in {len(noisy):,} of {len(run.rows):,} samples"
    if all(row.noise_reason for row in run.rows if row.ok):
        return f"{text}; compare τ, or re-run on an idle machine"
    ranked = [row for row in rows if row.speedup_interval and row.comparison != "baseline" and not row.reference_of]
    if not ranked:
        return text
    without = {row.method: _without_noise(run, row) for row in ranked}
    if "insufficient data" in without.values():
        return f"{text}; too few samples are left without them"
    changes = {"also": list[str](), "not": list[str]()}
    for row in ranked:
        if (row.comparison == "faster") != (without[row.method] == "faster"):
            changes["not" if row.comparison == "faster" else "also"].append(row.method)
    if not any(changes.values()):
        faster = any(row.comparison == "faster" for row in ranked)
        same = (
            "the same methods are still significantly faster" if faster else "still no method is significantly faster"
        )
        return f"{text}; without these samples {same} than {run.baseline}"
    parts = [
        f"{', '.join(labels)} would {how} be significantly faster than {run.baseline}"
        for how, labels in changes.items()
        if labels
    ]
    return f"{text}; without these samples {' and '.join(parts)}"


def _without_noise(run: Run, row: SummaryRow) -> Comparison:
    """Return the comparison of a method without noisy samples; that of its row if none of its pairs is noisy."""
    pairs = Pairs(run.of(row.method), run.of(run.baseline), processes=run.processes)
    quiet = [[sample for sample in side if not sample.noise_reason] for side in (pairs.own, pairs.other)]
    if [len(pairs.own)] * 2 == [len(side) for side in quiet]:
        return row.comparison
    return compare(Pairs(*quiet, processes=run.processes).interval())


def _seen(row: SampleRecord, manifest: Mapping[str, Any]) -> bool:
    """Return whether a sample has telemetry of the host and, if the model is on one, of the GPU."""
    on_gpu = str(manifest["model"].get("device", "")).startswith("cuda")
    host = row.noise_reason is not None and row.host_foreign_share is not None
    return host and (not on_gpu or row.nvml_sm_mhz is not None)


def _alike(reasons: Sequence[str]) -> Iterator[str]:
    """Yield '19 samples: other processes took 47–72% ...' for each kind of reason, the most frequent first."""
    kinds: dict[str, list[str]] = {}
    for reason in reasons:
        kinds.setdefault(NUMBERS.sub("#", reason), []).append(reason)
    for alike in sorted(kinds.values(), key=len, reverse=True):
        alike.sort(key=lambda text: [float(number.replace(",", "")) for number in NUMBERS.findall(text)])
        highest = iter(NUMBERS.findall(alike[-1]))
        merged = NUMBERS.sub(lambda found, to=highest: _range(found[0], next(to)), alike[0])  # type: ignore[misc]
        yield f"{pluralize(len(alike), 'sample')}: {merged}"


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low}–{high}"


def _not_found(run: Run, rows: Sequence[SummaryRow]) -> Iterator[Check]:
    """Yield the check of each kind as it is without a finding."""
    if any(row.ok for row in run.rows):
        yield Check("impossible", "ok", "No impossible result: no count or time contradicts another.")
    else:
        yield Check("impossible", "not checked", "Counts and times were not checked: there is no good sample.")
    if run.rows:
        yield Check("failed", "ok", "No sample failed.")
    else:
        yield Check("failed", "not checked", "Failures were not checked: there is no sample.")
    if max(Counter(row.method for row in run.rows if row.ok).values(), default=0) >= FEWEST:
        yield Check("outlier", "ok", "No sample took far longer than others of its method.")
    yield _sampled(rows) if any(row.bias for row in rows) else _same(rows)
    silent = [row.method for row in rows if row.comparison != "baseline" and not run.entry(row.method).get("stateful")]
    rest = [label for label in silent if not comparable(run, label)]
    if len(rest) < len(silent):
        others = f" Not checked: {', '.join(rest)}." if rest else ""
        yield Check("invalid", "ok", f"No method answers repeats from memory.{others}")
    elif silent:
        yield Check("invalid", "not checked", f"Whether methods answer repeats from memory was not checked: {MEMORY}")


def _same(rows: Sequence[SummaryRow]) -> Check:
    verdicts = {row.method: row.output_match for row in rows if row.comparison != "baseline"}
    compared = {m for m, of in verdicts.items() if any(n for verdict, n in of.items() if verdict != "not compared")}
    rest = [method for method in verdicts if method not in compared]
    if not compared:
        return Check("mismatch", "not checked", "No output was compared with the baseline's.")
    others = f" Not compared: {', '.join(rest)}." if rest else ""
    return Check("mismatch", "ok", f"No compared output differs from the baseline's, numerical ties aside.{others}")


def _sampled(rows: Sequence[SummaryRow]) -> Check:
    rest: dict[str, list[str]] = {}
    promised = [row for row in rows if row.lossless and row.comparison != "baseline"]
    for row in (row for row in promised if row.bias not in ("biased", "no bias found")):
        rest.setdefault(row.bias or "no tokens", []).append(row.method)
    if not promised:
        return Check(
            "biased", "not checked", "No method preserves a distribution that its sampled tokens could follow."
        )
    if not rest:
        return Check("biased", "ok", "No bias was found in sampled tokens.")
    which = "; ".join(f"of {', '.join(methods)}: {why}" for why, methods in rest.items())
    return Check("biased", "not checked", f"Bias of sampled tokens was not checked {which}.")


def _bound(rows: Sequence[SummaryRow]) -> Iterator[Check]:
    """Yield the check of times against their lower bound."""
    rows = [row for row in rows if row.comparison != "baseline"]
    unknown = [row.method for row in rows if row.speedup_within_bound is None]
    if unknown:
        why = f"fewer than {FEWEST} common questions, or no steps"
        what = "The lower bound of time was not checked"
        yield Check("lower-bound", "not checked", f"{what} for {', '.join(unknown)}: {why}.")
    elif rows and all(row.speedup_within_bound for row in rows):
        yield Check("lower-bound", "ok", "Over all prompts no method is faster than its steps allow.")


def _eager(run: Run) -> Iterator[Check]:
    """Yield the check that decode passes ran as CUDA graphs, for runs that use them."""
    known = [row for row in run.rows if row.n_eager_fallbacks is not None]
    counts = Counter[tuple[str, str]]()
    for row in known:
        counts[row.method, row.eager_fallback_reason or ""] += row.n_eager_fallbacks or 0
    in_order = sorted(counts.items(), key=lambda item: (run.labels.index(item[0][0]), item[0][1]))
    found = [f"{n:,} of {label} ({why})" for (label, why), n in in_order if n]
    if found:
        yield Check(
            "cuda-graphs", "warning", f"Decode passes ran eagerly instead of as CUDA graphs: {', '.join(found)}."
        )
    elif known:
        yield Check("cuda-graphs", "ok", "All decode passes ran as CUDA graphs.")


def _noise(rows: Sequence[SummaryRow]) -> Iterator[Check]:
    """Yield the check of leads against the noise of methods that draft nothing."""
    found = baseline_noise(rows)
    if found is None:
        return
    near = [row for row in rows if found.holds(row)]
    seems = f"the interval of {found.method}, which drafts nothing, reaches {format_speedup(found.speedup)}"
    if near:
        lines = tuple(f"{row.method}: {format_speedup(row.speedup)} ({interval(row.speedup_interval)})" for row in near)
        yield Check(
            "baseline-noise", "warning", f"Speedups that may be noise: {seems}, above the lower ends here.", lines
        )
    else:
        yield Check("baseline-noise", "ok", f"No speedup is within the noise: {seems}.")


def _repetition(run: Run) -> Iterator[Check]:
    """Yield the count of the baseline's outputs that end in a repetition, from a tenth of them on."""
    outputs = [row.token_ids for row in run.of(run.baseline) if row.ok and row.token_ids]
    repetitive = sum(map(repeats_itself, outputs))
    if outputs and repetitive >= MANY * len(outputs):
        many = f"{repetitive:,} of {len(outputs):,} outputs of {run.baseline}"
        yield Check("repetition", "ok", f"{many} end in a repetition, which favors methods that copy.")


def _low_quality(run: Run, summaries: Sequence[SummaryRow]) -> Iterator[Check]:
    """Yield the tasks in which the baseline's outputs are of low quality, the worst first."""
    baseline = [row for row in summaries if row.comparison == "baseline" and row.task != OVERALL]
    tasks = sorted((row.quality, row.task) for row in baseline if row.quality is not None and row.quality < LOW_QUALITY)
    if tasks:
        named = ", ".join(f"{task} ({format_number(quality)})" for quality, task in tasks)
        why = "weak model or low --max-new-tokens"
        yield Check("low-quality", "warning", f"Low-quality outputs of {run.baseline} in {named}: {why}.", (USELESS,))


def _weak_drafters(run: Run, rows: Sequence[SummaryRow]) -> Iterator[Check]:
    """Yield the trained drafters whose mean acceptance length is far below that of their kind."""
    least = {row.method: WEAK[h] for row in rows for h in run.entry(row.method).get("resolved", {}) if h in WEAK}
    taus = {row.method: row.mean_acceptance_length for row in rows if row.method in least}
    weak = {label: tau for label, tau in taus.items() if tau is not None and tau < least[label]}
    if weak:
        named = ", ".join(f"{label} (τ {format_number(tau)})" for label, tau in weak.items())
        why = (
            "another model or other layers of it, a wrong embedding or draft vocabulary, prompts unlike its training's"
        )
        yield Check("weak-drafter", "warning", f"Drafts of {named} are hardly ever accepted; likely causes: {why}.")


GUESSES = {  # ways of counting tokens that a server did not count
    "tokenizer": "the tokenizer of the model counted them",
    "equal output": "the number of an equal output of another server is used",
    "length": "estimated from the length of the text, at the tokens per byte of another server",
    "chunks": "pieces of text were counted, which may have several tokens",
}


def served_checks(run: Run, invalid: Collection[str] = ()) -> Iterator[Check]:
    """Yield the checks of runs with servers or with load levels. invalid: labels of the methods without a speedup."""
    if run.served:
        yield from _tokens(run)
        yield from _acceptance(run)
        yield from _memory(run)
        yield from _drift(run)
    rows = concurrency_rows(run, invalid)
    single = {row.method: row.comparison for row in rows if row.concurrency == 1}
    changed = tuple(
        f"{row.method} {row.load.phrase}: {row.comparison}, "
        f"{format_speedup(row.speedup)} per request ({interval(row.speedup_interval)})"
        for row in rows
        if row.concurrency != 1 and row.comparison in ("faster", "slower") and row.comparison != single[row.method]
    )
    if changed:
        text = "Some methods are faster or slower under load than with single requests."
        yield Check("concurrency-verdicts", "warning", text, changed)
    if lacking := tuple(missing(run)):
        text = "Not every load level was measured; --resume continues."
        yield Check("concurrency", "wrong", text, lacking)


def _memory(run: Run) -> Iterator[Check]:
    """Yield the servers that take fewer steps when they repeat an output: suffix and n-gram caches remember it.

    Repeats are those of single requests, and load levels, which send the same prompts again.
    """
    remembering = []
    for label in run.labels:
        outputs: dict[tuple[str, int, str], list[int]] = defaultdict(list)
        requests = [row for row in run.requests if row.method == label]
        for row in [*sorted(run.of(label), key=lambda row: row.repeat), *requests]:
            if row.ok and row.steps:  # without the streamed chunks, of which a loaded server may join several
                steps = max(row.drafts or 0, row.later - (row.accepted_tokens or 0), 1)
                outputs[row.question_id, row.turn, row.text or ""].append(steps)
        repeated = [steps for steps in outputs.values() if len(steps) > 1]
        first, later = sum(steps[0] for steps in repeated), sum(fmean(steps[1:]) for steps in repeated)
        if later < (1 - REMEMBERED) * first:
            remembering.append(f"{label}: {later / first - 1:+.0%} steps in later repeats of the same outputs")
    if remembering:
        text = "Servers answer repeats from memory; use no --repeats, and --servers for load levels."
        yield Check("memory", "warning", text, tuple(remembering))


def _drift(run: Run) -> Iterator[Check]:
    """Yield how much longer the baseline took at the end of a run that starts its servers."""
    drift = run.manifest.get("drift")
    if drift:
        change = drift["ratio"] - 1
        prompts = pluralize(drift["prompts"], "prompt")
        uncovered = len(run.labels) > 1 and not any(row.block for row in run.rows)
        rest = "; intervals do not cover it, since the servers took turns once (blocks)" if uncovered else ""
        text = f"{run.baseline}'s time per token at the end of the run changed by {change:+.0%} ({prompts} repeated)"
        limit = UNCOVERED if uncovered else DRIFTED
        yield Check("drift", "warning" if abs(change) > limit else "ok", f"{text}{rest}.")


def _tokens(run: Run) -> Iterator[Check]:
    """Yield the check that tokens were counted by the servers, and how they were guessed where they were not."""
    ways = {(row.counted, row.method): None for row in run.rows if row.counted}
    labels = {way: ", ".join(label for other, label in ways if other == way) for way in GUESSES}
    if guessed := tuple(f"{GUESSES[way]} ({names})" for way, names in labels.items() if names):
        text = f"Servers reported no number of tokens, which is a guess then: {'; '.join(guessed)}."
        yield Check("tokens", "warning", text, guessed)
    elif ways:
        yield Check("tokens", "ok", "Every server reported the number of tokens.")


def _acceptance(run: Run) -> Iterator[Check]:
    """Yield the servers whose number of accepted draft tokens is unknown."""
    lacking = []
    for label in run.labels:
        good = [row for row in run.of(label) if row.ok]
        known = sum(row.accepted_tokens is not None for row in good)
        if known < len(good):
            stated = str(run.entry(label).get("served", {}).get("acceptance", ""))
            why = stated.removeprefix("not measured: ") if stated.startswith("not measured") else OTHERS
            lacking.append(f"{label}, {len(good) - known:,} of {len(good):,} outputs: {why}")
    if lacking:
        text = f"Acceptance was not measured: {'; '.join(lacking)}."
        yield Check("acceptance", "not checked", text, tuple(lacking))
