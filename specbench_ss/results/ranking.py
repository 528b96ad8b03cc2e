"""Ranking of methods: rank ranges, verdicts as text and the headline.

Overlapping intervals of two speedups do not imply a tie, and separate ones do not imply a difference. Each pair of
methods therefore has its own interval, on the prompts that all methods answered. All these intervals hold together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specbench_ss.options import REFERENCE
from specbench_ss.results.checks import baseline_noise
from specbench_ss.results.findings import Check
from specbench_ss.results.quality import measures
from specbench_ss.results.summary import OVERALL, SummaryRow, failing
from specbench_ss.results.text import MISSING, cut, format_speedup, interval, output_match, pluralize, title
from specbench_ss.runs.records import Run
from specbench_ss.stats.betting import BIASED
from specbench_ss.stats.intervals import FEWEST, Comparison, Interval, compare, pairwise
from specbench_ss.stats.pairs import Pairs, answered_blocks, together
from specbench_ss.suite import MT_BENCH

RANKED = ("faster", "slower", "not significant")


@dataclass(frozen=True, slots=True)
class RankRange:
    """Ranks of a method that are consistent with the significant pairwise differences.

    best, worst: ranks from 1. tied_with: the methods that do not differ significantly from it, the fastest first.
    faster: it is significantly faster than the baseline, among all these comparisons.
    """

    best: int
    worst: int
    tied_with: tuple[str, ...]
    faster: bool


def contends(row: SummaryRow) -> bool:
    """Return whether a method is ranked by its speed: it is lossless, and decodes the model of the baseline."""
    return row.lossless and row.reference == row.baseline and row.comparison not in ("baseline", "invalid")


def contenders(summaries: Sequence[SummaryRow]) -> list[SummaryRow]:
    """Return the methods with an interval over all tasks that contend, without controls and failing methods."""
    rows = [row for row in summaries if row.task == OVERALL and row.comparison in RANKED and not row.reference_of]
    return [row for row in rows if contends(row) and row.method not in failing(summaries)]


def by_speed(rows: Sequence[SummaryRow]) -> list[SummaryRow]:
    """Return the rows of a task by speedup; those without one come last."""
    return sorted(rows, key=lambda row: (row.speedup is None, -(row.speedup or 0)))


def rank_ranges(run: Run, summaries: Sequence[SummaryRow]) -> Mapping[str, RankRange]:
    """Return the rank range of every method that `contenders` gives; nothing below FEWEST questions.

    The intervals of all pairs, the baseline's among them, hold together in 95 % of runs. A server that answered
    nothing in one of the blocks has no rank.
    """
    blocks = answered_blocks(run.of(run.baseline))
    rows = [row for row in contenders(summaries) if answered_blocks(run.of(row.method)) >= blocks]
    labels = [row.method for row in by_speed(rows)]
    all_of = together([run.of(label) for label in (*labels, run.baseline)])
    if all_of.seconds.shape[1] < FEWEST:
        return {}
    found = {}
    several = all_of.sessions.shape[1] > 1
    *ratios_of, _ = pairwise(  # how many times as fast as each other
        *all_of[:3], 0 if several else run.processes, sessions=all_of.sessions, blocks=all_of.blocks
    )
    for label, (*ratios, over_baseline) in zip(labels, ratios_of, strict=True):
        faster, slower = sum(high < 1 for _, high in ratios), sum(low > 1 for low, _ in ratios)
        level = [other for other, (low, high) in zip(labels, ratios, strict=True) if low <= 1 <= high]
        ties = tuple(other for other in level if other != label)
        found[label] = RankRange(1 + faster, len(labels) - slower, ties, over_baseline[0] > 1)
    return found


NOT_COMPARED, SAMPLED = "not compared", "sampled"
PROMISED = f"{SAMPLED}: a lossless method has the same distribution, not the same text; quality may differ by chance"
NO_MEAN = "quality over all tasks is left out: the tasks are scored by different measures"
BIAS = {
    "no bias found": "no bias found: the sampled tokens (how many were tested) fit the target's distribution; texts, "
    "and quality, differ by chance",
    "biased": f"biased: sampled tokens (how many were tested) do not follow the target's distribution, p < {BIASED:g}",
    "too few tokens": "too few tokens: not enough to find a clear bias; use more prompts or longer outputs",
    "not testable": "not testable: rounding at this temperature, or a baseline that fails the test; see below",
}
MARKS = {"not significant": "≈", "insufficient data": "?"}
WITHOUT_INTERVAL = f"for fewer than {FEWEST} questions, or a load that was measured once, or one block of several"
MARKED = {  # meaning of a mark
    "not significant": "not significant: the interval covers 1",
    "insufficient data": f"no confidence interval ({WITHOUT_INTERVAL})",
}


def config_of(run: Run) -> dict[str, Any]:
    """Return the configuration in the manifest, with the number of repeats and the measures of the tasks."""
    return {**run.manifest["config"], "repeats": run.repeats, "measures": measures(run.questions)}


def speedup(row: SummaryRow) -> str:
    """Return a speedup as in '≈ 1.13×' where the interval covers 1, or '? 1.61×' where there is none."""
    return marked_speedup(row.speedup, row.comparison)


def marked_speedup(value: float | None, comparison: Comparison | None) -> str:
    """Return a ratio of speeds as in '≈ 1.13×', with the mark of its comparison, if it has one."""
    if comparison == "invalid":
        return "invalid"
    mark = "" if value is None else MARKS.get(comparison or "", "")
    return f"{mark} {format_speedup(value)}".strip()


def output(row: SummaryRow, config: Mapping[str, Any]) -> str:
    """Return the output match with its baseline: 'identical', 'sampled', 'identical to ss-shared-ar'.

    config: that of the manifest.
    """
    if row.comparison == "baseline":
        return "baseline"
    if row.reference_of:
        return f"baseline of {', '.join(row.reference_of)}"
    text = _sampled(row) if row.bias else output_match(row.output_match)
    if text == NOT_COMPARED:
        return SAMPLED if row.lossless and config["temperature"] else text
    if row.reference == row.baseline or text == MISSING:
        return text
    return f"{text} {'to' if text == 'identical' else 'against'} {row.reference}"


def _sampled(row: SummaryRow) -> str:
    """Describe the test of sampled tokens: 'no bias found (1,480 tokens)'."""
    if not row.lossless:
        return f"not promised, {row.bias}"
    return f"{row.bias} ({row.bias_tokens:,})" if row.bias != "not testable" else row.bias


def short_output(row: SummaryRow, config: Mapping[str, Any]) -> str:
    """Return `output` for narrow columns: 'identical †' if the baseline is of the method's own model."""
    text = output(row, config)
    if row.reference_of:
        return "baseline †"
    if row.reference == row.baseline or not text.endswith(row.reference):
        return text
    return f"{text.removesuffix(row.reference).rsplit(maxsplit=1)[0]} †"


def own_model(row: SummaryRow) -> str:
    """Return the speedup of a method that changes the model over AR of that model: '1.52× (1.41–1.66)'."""
    around = interval(row.reference_interval)
    return marked_speedup(row.reference_speedup, compare(row.reference_interval)) + (f" ({around})" if around else "")


def quality(row: SummaryRow, config: Mapping[str, Any]) -> float | None:
    """Return the mean quality; None over all tasks if these have different measures.

    config: that of the manifest, with `measures` of the tasks.
    """
    return None if row.task == OVERALL and len(config.get("measures", ())) > 1 else row.quality


def quality_difference(row: SummaryRow) -> str:
    """Return the paired difference of quality to the baseline, as in '+0.01 (−0.02 to 0.04)'; '' without one."""
    return _difference(row, row.quality_difference, row.quality_interval)


def judged_difference(row: SummaryRow) -> str:
    """Return the paired difference of the judge score; '' without one."""
    return _difference(row, row.judge_score_difference, row.judge_score_interval)


def _difference(row: SummaryRow, difference: float | None, around: Interval | None) -> str:
    if difference is None or row.comparison == "baseline":
        return ""
    bounds = f" ({interval(around, line=0)})" if around else ""
    return f"{difference:+.2f}{bounds}".replace("-", "−")


def non_inferiority(row: SummaryRow) -> str:
    """Return the verdict on quality of a method that changes the model: 'non-inferior to ar (margin 0.02)', or ''."""
    if row.quality_verdict is None:
        return ""
    verdict = "not shown to be no worse than" if row.quality_verdict == "not shown" else f"{row.quality_verdict} to"
    return f"{verdict} {row.baseline} (margin {row.quality_margin:g})"


def quality_text(row: SummaryRow) -> str:
    """Return the difference of quality with its verdict, as far as it was measured."""
    difference = quality_difference(row)
    return ", ".join(filter(None, (f"quality {difference or 'not measured'}", non_inferiority(row))))


def lossy_checks(summaries: Sequence[SummaryRow]) -> Iterator[Check]:
    """Yield what methods that may change outputs cost in quality."""
    rows = [row for row in summaries if row.task == OVERALL and row.comparison not in ("baseline", "invalid")]
    lossy = [row for row in rows if not (row.lossless or row.reference_of)]
    if lines := tuple(f"{row.method}: {format_speedup(row.speedup)}, {quality_text(row)}" for row in lossy):
        yield Check("lossy", "warning", "Methods may change outputs: compare their quality too.", lines)
    if worse := tuple(f"{row.method}: {quality_text(row)}" for row in rows if row.quality_verdict == "inferior"):
        yield Check("inferior", "warning", "Methods have a lower quality than the baseline.", worse)


def counts(row: SummaryRow) -> list[str]:
    """Return the details of n: '52 questions' if prompts are turns of fewer questions, and '4 failed'."""
    questions = [f"{row.n_questions:,} questions"] if row.n_questions != row.n_prompts else []
    return questions + ([f"{row.n_failed:,} failed"] if row.n_failed else [])


def n(row: SummaryRow) -> str:
    """Return the number of prompts with its details, as in '84 (52 questions, 4 failed)'."""
    more = counts(row)
    return f"{row.n_prompts:,} ({', '.join(more)})" if more else f"{row.n_prompts:,}"


def short_n(row: SummaryRow) -> str:
    """Return `n` for narrow columns, as in '84 (52 q, 4 failed)'. A note explains it."""
    return n(row).replace(" questions", " q")


def notes(rows: Sequence[SummaryRow], config: Mapping[str, Any], short: bool = False) -> list[str]:
    """Return the explanations of the marks and numbers in these rows.

    config: that of the manifest, with `measures` as in `quality`. short: the rows use `short_output` and `short_n`.
    """
    measured_by = ", ".join(config.get("measures", ()))
    q, dagger = (" (q)", "† ") if short else ("", "")
    marks = {text[0] for row in rows for text in (speedup(row), own_model(row))}
    shown = {(output(row, config), row.lossless) for row in rows}
    own_baselines = dict.fromkeys(row.reference for row in rows if row.reference != row.baseline)
    repeats, baseline = int(config["repeats"]), next((row.baseline for row in rows), "")
    explained = {
        "invalid: numbers contradict each other, sampled tokens are biased, outputs come from memory, or work "
        "happens outside the clock; see below": any(row.comparison == "invalid" for row in rows),
        **{f"{mark} {MARKED[comparison]}": mark in marks for comparison, mark in MARKS.items()},
        f"n is the number of prompts, then that of questions{q}: a question with several turns has several prompts; "
        "intervals are over questions, and quality is a mean over questions": any(
            row.n_questions != row.n_prompts for row in rows
        ),
        f"every prompt has {repeats} repeats; it counts once in n, with its mean": repeats > 1,
        f"{NO_MEAN} ({measured_by})": any(row.quality is not None and quality(row, config) is None for row in rows),
        PROMISED: (SAMPLED, True) in shown,
        **{text: any(bias in shown_text for shown_text, _ in shown) for bias, text in BIAS.items()},
        f"{NOT_COMPARED}: the method does not preserve the output of the baseline": (NOT_COMPARED, False) in shown,
        f"{dagger}a method that changes the model must match the AR output of that model "
        f"({', '.join(own_baselines)}); in every row speedup and quality are relative to {baseline}": bool(
            own_baselines
        ),
    }
    return [text for text, here in explained.items() if here]


UNRELIABLE = (  # checks that make every speedup unreliable
    "impossible", "invalid", "biased", "mismatch", "failed", "outlier", "incomplete",
)  # fmt: skip


def headline(
    summaries: Sequence[SummaryRow],
    made: Sequence[Check],
    placed: Mapping[str, RankRange],
    remedy: str = f"use --limit {FEWEST}",
) -> str:
    """Return the result over all tasks in one line, after the names of the checks that make it unreliable.

    made: the checks of the run. placed: as `rank_ranges` gives it. remedy: as `more_questions` gives it.
    """
    overall = [row for row in summaries if row.task == OVERALL]
    measured = [row for row in overall if row.comparison != "baseline"]
    over = baseline_name(next((row.baseline for row in overall), REFERENCE))
    methods = [row for row in measured if not row.reference_of] or measured  # without AR baselines of changed models
    failed = failing(summaries)
    rows = [row for row in methods if (contends(row) or row.reference_of) and row.method not in failed]
    made_so_far = next((check.made for check in made if check.name == "incomplete" and check.state == "wrong"), None)
    remedy = remedy if made_so_far is None else "finish the run with --resume"
    comparable = any(row.n_prompts for row in rows)
    sentence = _fastest(rows, placed, remedy) if comparable else _without_ranking(rows or methods, failed, over)
    sentence += _noise(overall, rows) + _set_apart(methods, failed) + (_left_out(methods, failed) if comparable else "")
    concerned = [row for row in overall if row.comparison == "baseline"] + (rows or methods)
    kinds = {finding.kind for row in concerned for finding in row.health} | {"incomplete"}
    wrong = [check.name for check in made if check.state == "wrong" and check.name in kinds.intersection(UNRELIABLE)]
    if not wrong:
        return sentence
    if wrong == ["incomplete"] and made_so_far is not None:
        return f"Unfinished ({math.floor(100 * made_so_far)}% of the samples): {sentence}"
    return f"Unreliable ({', '.join(wrong)}): {sentence}"


def baseline_name(label: str) -> str:
    """Return the name of the baseline in sentences: 'AR', or the label of a server."""
    return "AR" if label == REFERENCE else cut(label)


def _without_ranking(methods: Sequence[SummaryRow], failed: Collection[str], over: str) -> str:
    """Return why no method is ranked. failed: labels of the methods with failed samples."""
    if not methods:
        return f"Only {over} was measured: add {'--methods' if over == 'AR' else 'an --endpoint'} to compare it with."
    if invalid := [row.method for row in methods if row.comparison == "invalid"]:
        return f"The results of {_some(invalid)} are invalid."
    if not any(row.n_prompts for row in methods):
        return f"No method has an output that can be compared with {over}'s."
    if worse := [row.method for row in methods if row.method in failed]:
        return f"{_some(worse)} failed on more samples than {over}, so that the speedup has no meaning."
    return f"No lossless method of {over}'s model was measured."


def _set_apart(methods: Sequence[SummaryRow], failed: Collection[str]) -> str:
    """Return sentences on methods that are not ranked: of another model, with their quality, and lossy ones."""
    rows = [row for row in methods if row.comparison != "invalid" and row.method not in failed and not row.reference_of]
    others = [row for row in rows if row.lossless and row.reference != row.baseline]
    lossy = [row.method for row in rows if not row.lossless]
    gains = [(row, f"{own_model(row) or MISSING} vs {row.reference}; {quality_text(row)}") for row in others]
    shown = [f" {cut(row.method)} decodes another model: {text}." for row, text in gains]
    return "".join([*shown, f" {_some(lossy)} may change outputs (lossy)." if lossy else ""])


def _left_out(methods: Sequence[SummaryRow], failed: Collection[str]) -> str:
    """Return sentences on methods without a rank where others have one: invalid ones, and those that failed."""
    invalid = [row.method for row in methods if row.comparison == "invalid"]
    others = [row.method for row in methods if row.method in failed and row.method not in invalid]
    text = f" {_some(invalid)} {'is' if len(invalid) == 1 else 'are'} invalid." if invalid else ""
    return f"{text} {_some(others)} failed." if others else text


def more_questions(run: Run) -> str:
    """Return how a run gets enough questions for intervals: 'use --limit 4', or by more of them in the user's file."""
    suite, limit = run.manifest["suite"], run.manifest["config"].get("limit")
    fewest = min(Counter(question.category for question in run.questions).values(), default=0)
    if suite["edition"] != "custom" or (limit and fewest >= limit):
        return f"use --limit {FEWEST}"
    return f"the file has {pluralize(len(run.questions), 'question')}; add questions"


TOO_FEW_SHARED = f"fewer than {FEWEST} questions or not all blocks were answered by all methods: they cannot be ranked"


def _fastest(rows: Sequence[SummaryRow], placed: Mapping[str, RankRange], remedy: str) -> str:
    over = baseline_name(rows[0].baseline)
    known = by_speed([row for row in rows if row.speedup_interval])
    if not known:
        return f"Too few questions to compare with {over}: a confidence interval needs {FEWEST} ({remedy})."
    several = len(known) > 1
    if faster := [row for row in known if row.comparison == "faster"]:
        if several and not placed:
            return f"Highest speedup: {cut(known[0].method)}, {_measured(known[0], over)}; {TOO_FEW_SHARED}."
        faster = [row for row in faster if not several or (row.method in placed and placed[row.method].faster)]
        if not faster:
            alone = f"No method is significantly faster than {over} if all {len(known)} are compared at once"
            return f"{alone}; highest estimate: {cut(known[0].method)} {_measured(known[0])}."
        tied = placed[faster[0].method].tied_with if faster[0].method in placed else ()
        different = f"{'is' if len(tied) == 1 else 'are'} not significantly different from {cut(faster[0].method)}"
        ties = f"; {_some(tied)} {different}" if tied else ""
        if tied and faster[0] is known[0]:
            return f"Highest speedup: {cut(faster[0].method)}, {_measured(faster[0], over)}{ties}."
        first = "faster" if not several else "fastest" if faster[0] is known[0] else "significantly faster"
        return f"{cut(faster[0].method)} is {first}: {_measured(faster[0], over)}{ties}."
    best, slower = known[0], sum(row.comparison == "slower" for row in known)
    if not several:
        verdict = "is slower than" if slower else "is not significantly different from"
        return f"{cut(best.method)} {verdict} {over}: {_measured(best)}."
    if not slower:
        verdict = f"No method is significantly different from {over}"
    elif slower == len(known):
        every = "Both" if len(known) == 2 else f"All {len(known)}"
        verdict = f"{every} methods are slower than {over}"
    else:
        verdict = f"No method is faster than {over} ({slower} slower, {len(known) - slower} not significant)"
    return f"{verdict}; highest estimate: {cut(best.method)} {_measured(best)}."


def _measured(row: SummaryRow, over: str = "") -> str:
    versus = f" vs {over}" if over else ""
    return f"{format_speedup(row.speedup)}{versus} (95% CI {interval(row.speedup_interval)})"


def _noise(overall: Sequence[SummaryRow], rows: Sequence[SummaryRow]) -> str:
    """Return a sentence if the fastest method's lead is within the noise of methods that draft nothing, else ''."""
    seems = baseline_noise(overall)
    best = max((row for row in rows if row.speedup_interval), key=lambda row: row.speedup or 0.0, default=None)
    if seems is None or best is None or not seems.holds(best):
        return ""
    return f" That may be noise: {seems.method}, which drafts nothing, reaches {format_speedup(seems.speedup)}."


def _some(names: Sequence[str], shown: int = 3) -> str:
    """Return names as in 'a', 'a and b', 'a, b and c', 'a, b, c and 2 more'."""
    named = [cut(name) for name in names[:shown]]
    last = [f"{len(names) - shown} more"] if len(names) > shown else [named.pop()]
    return " and ".join([", ".join(named), *last] if named else last)


def chat_group(run: Run, short: bool = False) -> str:
    """Return the name of the group of MT-Bench's tasks, which a generated suite only imitates."""
    if run.manifest["suite"]["edition"] != "generated":
        return "MT-Bench"
    return "chat" if short else "chat (as MT-Bench)"


def task_groups(tasks: Sequence[str], chat: str = "MT-Bench") -> dict[str, tuple[str, ...]]:
    """Return the tasks by their names in Spec-Bench's tables, which group those of MT-Bench. chat: `chat_group`."""
    parts = tuple(name for name in tasks if name in MT_BENCH)
    if len(parts) < len(MT_BENCH):
        return {title(name): (name,) for name in tasks}
    return {chat: parts, **{title(name): (name,) for name in tasks if name not in parts}}


def speedup_of(run: Run, label: str, tasks: Sequence[str]) -> float | None:
    """Return the speedup of a method over the baseline on some tasks together."""
    samples, baseline = ([row for row in run.of(one) if row.category in tasks] for one in (label, run.baseline))
    return Pairs(samples, baseline).speedup()
