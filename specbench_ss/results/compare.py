"""Two runs compared: differences of configuration, and changes with intervals.

Only prompts count that the method and the reference answered in both runs. Intervals are over questions, as
everywhere. docs/design/compare.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated as Col
from typing import Any

import numpy as np
import pandas as pd

from specbench_ss.engine.numerics import HALF_WEIGHTS
from specbench_ss.errors import UserError
from specbench_ss.options import value_text
from specbench_ss.results.analysis import Results, load_run
from specbench_ss.results.frames import frame
from specbench_ss.results.quality import measures
from specbench_ss.results.ranking import quality_text
from specbench_ss.results.summary import OVERALL, SummaryRow, failing
from specbench_ss.results.text import MISSING
from specbench_ss.runs.columns import OF_INTERVAL, Column, columns_of
from specbench_ss.runs.config import decoding
from specbench_ss.runs.environment import between_sessions, machine_changes
from specbench_ss.runs.manifest import engine_of
from specbench_ss.runs.records import Run, SampleRecord
from specbench_ss.stats.intervals import Floats, Interval, Strata, mean_interval, ratio_interval, strata_of
from specbench_ss.stats.pairs import Pairs

SHOWN = 12  # characters of a hash
HASH = 40  # characters from which a text of hexadecimal digits is taken for a hash
MACHINE = {  # part that must be equal for times of two runs to compare directly -> its name
    "cpu": "processor",
    "gpus": "GPUs",
    "threads": "threads",
    "driver": "driver",
}
USABLE = "usable cores"
Manifest = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between two runs."""

    what: Col[str, "name of the difference"]
    a: Col[str, "its value in run A"]
    b: Col[str, "its value in run B"]
    blocking: Col[bool, "it makes the results incomparable"] = False


def differences(a: Run, b: Run) -> list[Difference]:
    """Return all differences between two runs, blocking ones first."""
    old, new = _facts(a), _facts(b)
    pairs = [(what, old.get(what, MISSING), new.get(what, MISSING)) for what in {**old, **new}]
    found = [Difference(what, x, y, _hinders(what, x, y)) for what, x, y in pairs if x != y]
    made = [*_question_differences(a, b), *found, *_method_differences(a.manifest, b.manifest)]
    return sorted(made, key=lambda difference: not difference.blocking)


def _hinders(what: str, x: str, y: str) -> bool:
    # weights that were rounded for one run alone: their hash is of the weights as loaded
    return what in BLOCKING or (what == "dtype" and HALF_WEIGHTS in (x, y))


def conditions_apart(a: Run, b: Run) -> dict[str, str]:
    """Return the conditions that make times of the two runs incomparable, each with both values: '1 → 2'.

    They are the processor, GPUs, threads, driver and device. Two machines of the same kind cannot be distinguished.
    Usable cores are a setting, as threads are.
    """
    old, new = a.manifest["environment"], b.manifest["environment"]
    changed = [name for name in machine_changes(old, new) if name in MACHINE]
    apart = {MACHINE[name]: _both(old.get(name), new.get(name)) for name in changed}
    if "cpu" in changed and _processor(old) == _processor(new):
        apart[USABLE] = apart.pop(MACHINE["cpu"])
    devices = [run.manifest["model"]["device"] for run in (a, b)]
    return apart if devices[0] == devices[1] else {**apart, "device": _both(*devices)}


def _processor(environment: Mapping[str, Any]) -> Any:
    cpu = environment.get("cpu")
    return {**cpu, "available": None} if isinstance(cpu, Mapping) else cpu


def _both(old: Any, new: Any) -> str:
    """Return two values as text; of two mappings the entries that differ."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        return ", ".join(f"{name} {_both(old.get(name), new.get(name))}" for name in names)
    return f"{_text(old)} → {_text(new)}"


BLOCKING = (  # what makes results incomparable
    "model hash", "quantization", "chat template", "variables of the chat template", "logits processors", "suite",
    "decoding", "max new tokens",
    "history of later turns", "baseline",
)  # fmt: skip


def _server(entry: Mapping[str, Any]) -> str:
    """Return the engine of a server, and how it was started."""
    served, resolved = entry["served"], entry.get("resolved", {})
    version = served.get("version") or resolved.get("version")
    return " ".join(filter(None, (served.get("software"), version, resolved.get("command"))))


def _facts(run: Run) -> dict[str, str]:
    """Return the compared settings of a run by name."""
    manifest = run.manifest
    config, model, suite, here = (manifest[part] for part in ("config", "model", "suite", "environment"))
    revision = here.get("revision")
    facts = {
        "model": model["name"],
        "model hash": model["hash"],
        "dtype": model["dtype"],
        "device": model["device"],
        **{f"CUDA setting, {name}": state for name, state in (model.get("cuda_settings") or {}).items()},
        "chat template": model.get("chat_template"),
        "variables of the chat template": config.get("chat_template_kwargs"),
        "logits processors": model.get("generation_config", {}).get("applied"),
        "suite": suite["name"],
        "edition of the suite": suite["edition"],
        "hash of the questions": suite["content_hash"],
        "questions": suite["size"],
        "tasks": ", ".join(run.categories),
        "decoding": decoding(config),
        "max new tokens": suite.get("max_new_tokens"),
        "history of later turns": config.get("history", "reference"),
        "order of questions": config.get("order", "suite"),
        "engine": engine_of(manifest),
        "quantization": model.get("quantised", "none").partition(":")[0],
        "quantization method": model.get("quantised"),
        "seed": config.get("seed"),
        "repeats": run.repeats,
        "warm-up prompts": config.get("warmup"),
        "methods": ", ".join(run.labels),
        "plugin code": ", ".join(file["sha256"][:SHOWN] for file in config.get("plugin", ())),
        "baseline": run.baseline,
        "further fields of requests": config.get("extra_body"),
        **{f"server {entry['label']}": _server(entry) for entry in manifest["methods"] if entry.get("served")},
        "version of ssbench": manifest["version"],
        "code revision": f"{revision['commit'][:SHOWN]}{' with changes' * revision['dirty']}" if revision else None,
        "Python": here["python"],
        **{f"version of {name}": version for name, version in here["packages"].items()},
        "platform": here["platform"],
        "processor": here.get("cpu"),
        "threads": here.get("threads"),
        "memory": here.get("memory_bytes"),
        "GPUs": ", ".join(gpu["name"] for gpu in here["gpus"]),
        "driver": here.get("driver"),
        "CUDA": here.get("cuda"),
    }
    return {what: _text(value) for what, value in facts.items()}


def _question_differences(a: Run, b: Run) -> Iterator[Difference]:
    """Yield the difference of questions with the same id but other texts, or the lack of common questions."""
    if a.manifest["suite"]["content_hash"] == b.manifest["suite"]["content_hash"]:
        return
    old, new = ({question.id: (question.history, question.turns) for question in run.questions} for run in (a, b))
    common = [id for id in old if id in new]
    others = [id for id in common if old[id] != new[id]]
    if not common:
        yield Difference("common questions", f"0 of {len(old)}", f"0 of {len(new)}", True)
    elif others:
        text = f"{len(others)} of {len(common)} with another text, first {others[0]}"
        yield Difference("questions of the same id", text, text, True)
    else:
        yield Difference("questions in both", f"{len(common)} of {len(old)}", f"{len(common)} of {len(new)}")


def _method_differences(a: Manifest, b: Manifest) -> Iterator[Difference]:
    """Yield differing options, weights and settings of methods with the same label."""
    old, new = ({method["label"]: method for method in manifest["methods"]} for manifest in (a, b))
    for label in (label for label in old if label in new):
        for part in ("options", "resolved"):
            mine, theirs = old[label].get(part, {}), new[label].get(part, {})
            for key in mine | theirs:
                texts = [_text(of[key]) if key in of else MISSING for of in (mine, theirs)]
                if texts[0] != texts[1]:
                    yield Difference(f"{label}: {key}", texts[0], texts[1])


def _text(value: Any) -> str:
    """Return a value as text; a hash is cut."""
    if value is None or value == "":
        return MISSING
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(inner)}" for key, inner in value.items()) or MISSING
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or MISSING
    text = value if isinstance(value, str) else value_text(value)
    is_hash = len(text) >= HASH and not set(text) - set("0123456789abcdef")
    return text[:SHOWN] if is_hash else text


OTHER_MACHINE, OTHER_THREADS, FAILED = "other machine", "other threads", "failed"
TOO_FEW, SAME, INVALID = "insufficient data", "not significant", "invalid"
NO_VERDICT = (OTHER_MACHINE, OTHER_THREADS, FAILED, TOO_FEW, INVALID)
WORDS = {"speedup": ("slower", "faster"), "tokens_per_s": ("slower", "faster")}  # others are lower or higher
Rows = list[SampleRecord]


@dataclass(frozen=True, slots=True)
class Change:
    """One metric in both runs.

    change: B over A, less 1; of quality, B less A. None if there is nothing to compare.
    interval: the 95% interval of change, None below four questions.
    verdict: `faster`, `slower` (`higher`, `lower` if it is no speed), `not significant`, or one of NO_VERDICT.
    reason: the cause of `other machine`, `other threads`, `failed` and `invalid`.
    """

    a: float | None
    b: float | None
    change: float | None
    interval: Interval | None
    verdict: str
    reason: str = ""

    @property
    def why(self) -> str:
        """Return the verdict with its reason."""
        return f"{self.verdict} ({self.reason})" if self.reason else self.verdict


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """One method on one task (or `overall`). changes: by the names in METRICS. error: the first of a failed sample.

    baseline: the method that speedups are over.
    """

    task: Col[str, "task of the suite; `overall`: all tasks together"]
    method: Col[str, "label of the method"]
    n_prompts: Col[
        int,
        "prompts with an output of the method and of `ar` in both runs; all numbers are computed from them",
        "prompts",
    ]
    n_questions: Col[int, "questions of these prompts, the units of the intervals", "questions"]
    n_failed_a: Col[int, "failed samples of the method in run A", "samples"]
    n_failed_b: Col[int, "failed samples of the method in run B", "samples"]
    changes: Mapping[str, Change]
    n_outputs: Col[int, "outputs of the same prompt and repeat in both runs", "outputs"]
    n_other_outputs: Col[int, "outputs among them whose tokens differ", "outputs"]
    baseline: str
    error: str


OTHERS = "`not significant`, `insufficient data` or `failed`"
CHANGES = {  # metric -> unit and meaning in both runs, unit and meaning of the change, verdicts
    "speedup": (
        "×", "speedup over `ar` in run A, on these prompts", "speedup over `ar` in run B, on these prompts",
        "share", "speedup in B / speedup in A - 1",
        "`faster`, `slower`, `not significant`, `insufficient data`, `failed` (in a run) or `invalid`",
    ),
    "tokens_per_s": (
        "tokens/s", "all tokens / all seconds in run A", "all tokens / all seconds in run B",
        "share", "tokens/s in B / tokens/s in A - 1; missing if the machines differ",
        "as `speedup_verdict`, or `other machine`, `other threads`",
    ),
    "mean_acceptance_length": (
        "tokens", "τ in run A", "τ in run B",
        "share", "τ in B / τ in A - 1", f"`higher`, `lower`, {OTHERS}",
    ),
    "quality": (
        "0 to 1", "quality in run A, mean over questions with a score in both runs",
        "quality in run B, mean over the same questions",
        "", "mean paired difference, B - A", f"`higher`, `lower`, {OTHERS}",
    ),
}  # fmt: skip
METRICS = tuple(CHANGES)


def _columns_of_change(metric: str) -> Iterator[Column]:
    unit, in_a, in_b, unit_of_change, change, verdict = CHANGES[metric]

    def of(get: Callable[[Change], Any]) -> Callable[[ComparedRow], Any]:
        return lambda row: get(row.changes[metric])

    yield Column(f"{metric}_a", "Float64", unit, in_a, of(lambda one: one.a))
    yield Column(f"{metric}_b", "Float64", unit, in_b, of(lambda one: one.b))
    yield Column(f"{metric}_change", "Float64", unit_of_change, change, of(lambda one: one.change))
    for i, (name, word) in enumerate((("low", "lower"), ("high", "upper"))):
        end = of(lambda one, i=i: one.interval[i] if one.interval else None)  # type: ignore[misc]
        yield Column(f"{metric}_change_{name}", "Float64", unit_of_change, f"{word} {OF_INTERVAL}", end)
    yield Column(f"{metric}_verdict", "string", "", verdict, of(lambda one: one.verdict))


_OWN = columns_of(ComparedRow)
COMPARISON = (*_OWN[:-2], *(column for metric in METRICS for column in _columns_of_change(metric)), *_OWN[-2:])
DIFFERENCES = columns_of(Difference)


ANYWAY = "; use --force to compare them anyway"  # end of an error of `compared`, for `ssbench compare`


def why_incomparable(found: Sequence[Difference]) -> str:
    """Return the blocking differences as in 'the runs differ in suite (mtbench and specbench)'; '' without one."""
    hindering = [f"{one.what} ({one.a} and {one.b})" for one in found if one.blocking]
    return f"the runs differ in {', '.join(hindering)}" if hindering else ""


def compared(first: Results, second: Results, force: bool = False) -> tuple[list[Difference], list[ComparedRow]]:
    """Return the differences between two runs, and rows of the common methods: `overall` first, then by task.

    Raises UserError if they do not compare, unless `force`, and without a common method or question.
    """
    a, b = first.run, second.run
    found = differences(a, b)
    obstacle = why_incomparable(found)
    if obstacle and not force:
        raise UserError(f"{obstacle}{ANYWAY}")
    labels = [label for label in a.labels if label in b.labels]
    shared = {row.question_id for row in a.rows} & {row.question_id for row in b.rows}
    if not shared or labels in ([], [a.baseline]):
        if not shared:
            raise UserError("the runs have no question in common; run the same suite")
        there = next((label for label in b.labels if label != b.baseline), b.baseline)
        raise UserError(
            f"the runs have no method with the same name and options in common; B has {there}, for instance"
        )
    apart, voided = conditions_apart(a, b), {label: _voided(label, first, second) for label in labels}
    tasks = [OVERALL, *(task for task in a.categories if task in b.categories)]
    rows = [_compared(a, b, label, task, voided[label], apart) for task in tasks for label in labels]
    return found, rows


GATED = ("failed", "mismatch", "length-differs", "biased", "impossible", "invalid")  # findings that fail a gate


def _faults(row: SummaryRow) -> dict[str, str]:
    """Return the findings about a method that fail a gate if they are new, with their texts, each in one line."""
    found = {one.kind: " ".join(one.text.split()) for one in reversed(row.health) if one.kind in GATED}
    found |= {} if row.lossless or row.reference_of else {"lossy": quality_text(row)}
    return found | ({"inferior": quality_text(row)} if row.quality_verdict == "inferior" else {})


def _voided(label: str, first: Results, second: Results) -> Change | None:
    """Return why times of a method do not compare: it is invalid in a run, or fails more often than the baseline."""
    for name, results in (("A", first), ("B", second)):
        row = next(row for row in results.overall if row.method == label)
        verdict = FAILED if label in failing(results.rows) else row.comparison
        if verdict in (FAILED, INVALID):
            what = next((f" ({kind}: {text})" for kind, text in _faults(row).items()), "")
            return _nothing(verdict, f"{label} {'failed' if verdict == FAILED else 'is invalid'} in {name}{what}")
    return None


def regressions(first: Results, second: Results) -> list[str]:
    """Return the faults of run B that run A lacks; with one of them a gate fails whatever its limits."""
    old, new = ({row.method: row for row in results.overall} for results in (first, second))
    found = [f"B is {second.unfinished}"] if second.unfinished and not first.unfinished else []
    added = {label: _faults(row) for label, row in new.items() if label not in old}
    found += [f"{label}, in B alone: {kind}: {of[kind]}" for label, of in added.items() for kind in GATED if kind in of]
    for label, before in old.items():
        if label not in new:
            found.append(f"{label} is missing in B")
            continue
        faults, known = _faults(new[label]), _faults(before)
        shares = [row.n_failed / max(1, len(run.run.of(label))) for row, run in ((before, first), (new[label], second))]
        if shares[1] > shares[0]:
            known.pop("failed", None)
        found += [f"{label} in B: {kind}: {text}" for kind, text in faults.items() if kind not in known]
    return found


def _nothing(verdict: str, reason: str = "") -> Change:
    return Change(None, None, None, None, verdict, reason)


def _compared(a: Run, b: Run, label: str, task: str, voided: Change | None, apart: Mapping[str, str]) -> ComparedRow:
    """Compare a method's samples in two runs, with the baseline's, on the prompts with all four outputs."""
    asked, references = (
        [[row for row in run.of(one) if task in (OVERALL, row.category)] for run in (a, b)]
        for one in (label, a.baseline)
    )
    sides = [Pairs(*both) for both in zip(asked, references, strict=True)]
    both = {_prompt(row) for row in sides[0].own} & {_prompt(row) for row in sides[1].own}
    kept = [
        [sorted((r for r in rows if _prompt(r) in both), key=_prompt) for rows in (of.own, of.other)] for of in sides
    ]
    times = [Pairs(*side, processes=run.processes) for side, run in zip(kept, (a, b), strict=True)]
    own = [of.own for of in times]
    made = [{(*_prompt(row), row.repeat): _answer(row) for row in rows} for rows in own]
    twice = [key for key in made[0] if key in made[1]]
    if failed := _failures(label, asked) or _failures(a.baseline, references):
        changes = dict.fromkeys(METRICS, _nothing(FAILED, failed))
    else:
        tau = voided or _tau(own)
        changes = {"mean_acceptance_length": tau, "quality": _quality(own), **_of_times(times, voided, apart)}
    n_failed = [sum(not row.ok for row in rows) for rows in asked]
    return ComparedRow(
        task=task,
        method=label,
        n_prompts=times[0].n_prompts,
        n_questions=len(times[0].questions),
        n_failed_a=n_failed[0],
        n_failed_b=n_failed[1],
        changes=changes,
        n_outputs=len(twice),
        n_other_outputs=sum(made[0][key] != made[1][key] for key in twice),
        baseline=a.baseline,
        error=first_error([*asked[0], *asked[1]]),
    )


def _of_times(
    times: Sequence[Pairs[SampleRecord]], voided: Change | None, apart: Mapping[str, str]
) -> dict[str, Change]:
    if voided:
        return dict.fromkeys(("speedup", "tokens_per_s"), voided)
    sums = [of.by_question() for of in times]
    strata, processes = times[0].strata, sum(of.processes for of in times)
    blocks = list({one.tobytes(): one for of in times for one in of.blocks}.values())  # equal ones of both runs once
    speedups = _ratio(
        "speedup",
        [(ref_s, own_n, ref_n, own_s) for ref_s, ref_n, own_s, own_n in sums],
        strata,
        processes,
        [apart for of in times for apart in of.sessions()],
        blocks,
    )
    single = sum(of.n_sessions == 1 for of in times)
    rates = _ratio(
        "tokens_per_s",
        [(own_n, own_s) for _, _, own_s, own_n in sums],
        strata,
        single,
        [of.pace(of.own) for of in times if of.n_sessions > 1],
        blocks,
    )
    if apart:
        only_threads = set(apart) <= {"threads", USABLE}
        named = ", ".join(f"{name} {values}" for name, values in apart.items())
        reason = apart["threads"] if list(apart) == ["threads"] else named
        rates = Change(rates.a, rates.b, None, None, OTHER_THREADS if only_threads else OTHER_MACHINE, reason)
    return {"speedup": speedups, "tokens_per_s": rates}


def _tau(own: Sequence[Rows]) -> Change:
    """Compare tokens of steps over steps; questions without a step in one of the runs are left out."""
    a, b = (_by_question([(r, r.later, r.steps or 0) for r in rows]) for rows in own)
    stepped = (a != 0).all(axis=1) & (b != 0).all(axis=1)
    strata = strata_of(np.array(_tasks(own[0]))[stepped].tolist())
    return _ratio("mean_acceptance_length", [(of[stepped, 0], of[stepped, 1]) for of in (a, b)], strata, processes=0)


def _quality(own: Sequence[Rows]) -> Change:
    scored = [{r.question_id for r in rows if r.quality is not None} for rows in own]
    kept = [[r for r in rows if r.quality is not None and r.question_id in scored[0] & scored[1]] for rows in own]
    a, b = (_by_question([(r, r.quality or 0.0, 1) for r in rows]) for rows in kept)
    if not len(a):
        return _nothing(TOO_FEW)
    before, after = a[:, 0] / a[:, 1], b[:, 0] / b[:, 1]
    around = mean_interval(after - before, strata_of(_tasks(kept[0])))
    means = float(before.mean()), float(after.mean())
    return Change(*means, float((after - before).mean()), around, _verdict("quality", around))


def _by_question(values: Sequence[tuple[SampleRecord, float, float]]) -> Floats:
    """Return the sums of two values over the samples of each question: [questions, 2]."""
    sums = dict[str, Floats]()
    for row, *both in values:
        sums[row.question_id] = sums.get(row.question_id, 0.0) + np.array(both)
    return np.array([*sums.values()]).reshape(-1, 2)


def _tasks(rows: Rows) -> list[str]:
    """Return the task of each question, in the order of `_by_question`."""
    return list({row.question_id: row.category for row in rows}.values())


def _failures(label: str, asked: Sequence[Rows]) -> str:
    """Return the runs in which every sample of a method failed, with the first error, or ''."""
    failed = [(name, rows) for name, rows in zip("AB", asked, strict=True) if rows and not any(row.ok for row in rows)]
    return "; ".join(f"{label} failed in {name}: {first_error(rows)}" for name, rows in failed)


def first_error(rows: Sequence[SampleRecord]) -> str:
    """Return the first line of the first error of some samples, or ''."""
    return next((line for row in rows if not row.ok for line in (row.error or "").splitlines()), "")


def _prompt(row: SampleRecord) -> tuple[str, int]:
    return row.question_id, row.turn


def _answer(row: SampleRecord) -> object:
    """Return the tokens of an output; its text if it comes from a server, which sends no tokens."""
    return row.token_ids if row.token_ids is not None else row.text


def _ratio(
    metric: str,
    sides: Sequence[Sequence[Floats]],
    strata: Strata,
    processes: int,
    sessions: Sequence[Floats] = (),
    blocks: Sequence[Strata] = (),
) -> Change:
    """Compare a ratio of products of sums. sides: of each run the numerators, then the denominators: [questions]."""
    (a, b), half = sides, len(sides[0]) // 2
    before, after = (_over(side[:half], side[half:]) for side in sides)
    if before is None or after is None:
        return Change(before, after, None, None, TOO_FEW)
    around = ratio_interval((*b[:half], *a[half:]), (*b[half:], *a[:half]), processes, strata, sessions, blocks)
    changed = None if around is None else (around[0] - 1, around[1] - 1)
    return Change(before, after, after / before - 1, changed, _verdict(metric, changed))


def _over(above: Sequence[Floats], below: Sequence[Floats]) -> float | None:
    tops, bottoms = ([float(column.sum()) for column in columns] for columns in (above, below))
    return float(np.prod(tops) / np.prod(bottoms)) if all(tops) and all(bottoms) else None


def _verdict(metric: str, around: Interval | None) -> str:
    if around is None:
        return TOO_FEW
    if around[0] <= 0 <= around[1]:
        return SAME
    return WORDS.get(metric, ("lower", "higher"))[around[0] > 0]


def as_record(row: ComparedRow) -> dict[str, Any]:
    """Return a row with its changes as flat, JSON-ready columns: `speedup_a`, `speedup_change_low`, ..."""
    return {column.name: column.cell(row) for column in COMPARISON}


def judged(metric: str, row: ComparedRow) -> bool:
    """Return whether a metric of a method is compared: of the baseline, only tokens per second."""
    return row.method != row.baseline or metric == "tokens_per_s"


OF_TIMES = ("timing",)  # checks whose warnings concern the times of a run


class RunComparison:
    """Two runs and what changed from `a` to `b`; `compare` returns it.

    warnings: sentences on doubts about the numbers. uncompared: methods of one run alone. measures: the quality metrics
    of the questions. regressions: faults of B that A lacks.
    """

    def __init__(self, a: Results, b: Results, force: bool = False) -> None:
        self.a, self.b = a.path, b.path
        self.found, self.rows = compared(a, b, force)
        self.regressions = regressions(a, b)
        self.measures = measures([*a.run.questions, *b.run.questions])
        both = {row.method for row in self.rows}
        alone = [(name, label) for name, one in (("A", a), ("B", b)) for label in one.run.labels if label not in both]
        self.uncompared = tuple(f"{label} (only in run {name})" for name, label in alone)
        self.warnings = (
            *(f"not compared: {text}; methods are paired by name, options included" for text in self.uncompared),
            *(f"run {name}: {text}" for name, one in (("A", a), ("B", b)) for text in _doubts(one)),
        )

    def __repr__(self) -> str:
        return f"<comparison of {self.a} and {self.b}: {len(self.found)} differences in configuration>"

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row for each task and method, `overall` first, with every figure in both runs and its change."""
        return frame(COMPARISON, self.rows)

    @cached_property
    def differences(self) -> pd.DataFrame:
        """One row for each difference: what, a, b, blocking."""
        return frame(DIFFERENCES, self.found)


def _doubts(results: Results) -> list[str]:
    """Return the sentences of a run's wrong checks and timing warnings, and on differing sessions."""
    changed = ", ".join(between_sessions(results.manifest))
    wrong = [c.sentence for c in results.checks if c.state == "wrong" or (c.state == "warning" and c.name in OF_TIMES)]
    return wrong + ([f"Not all sessions had the same {changed}: their times do not compare."] if changed else [])


def compare(run_a: str | Path | Results, run_b: str | Path | Results, *, force: bool = False) -> RunComparison:
    """Compare two runs of the same questions by the same model: run directories, or results of `load_run`.

    force: compare runs of another model, other questions or another way of decoding too. Raises UserError if the runs
    do not compare, or have no method or question in common.
    """
    return RunComparison(_results(run_a), _results(run_b), force)


def _results(given: Any) -> Results:
    if not isinstance(given, str | Path | Results):
        raise UserError(f"compare takes run directories or results of load_run, not {given!r}")
    return given if isinstance(given, Results) else load_run(given)
