"""Analysis of a run: one Results object with frames, summary, checks and ranking; the budget of each method.

A comparison of methods is fair if budgets are equal; unequal ones are shown.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from specbench_ss import registry
from specbench_ss.errors import UserError, did_you_mean, expanded
from specbench_ss.options import MethodSpec
from specbench_ss.results import frames
from specbench_ss.results.checks import checks
from specbench_ss.results.concurrency import ConcurrencyRow, concurrency_rows
from specbench_ss.results.cost_model import MachineRow, PairedCost, machine_rows, pairs
from specbench_ss.results.draft_schedule import DraftSchedule, draft_schedule
from specbench_ss.results.findings import Check
from specbench_ss.results.places import Along, place_rows
from specbench_ss.results.quality import MARGIN, checked_margin
from specbench_ss.results.ranking import RankRange, config_of, headline, lossy_checks, more_questions, rank_ranges
from specbench_ss.results.sample_checks import unfinished
from specbench_ss.results.summary import OVERALL, SummaryRow, safe_div, summarise
from specbench_ss.results.text import pluralize, short
from specbench_ss.runs.records import Run
from specbench_ss.runs.run_dir import Drafts, add_warning, read_drafts, read_run, read_telemetry


@dataclass(frozen=True, slots=True)
class Budget:
    """Settings and training budget of one method.

    drafted, verified: nodes per step, root not counted; None without a step. given: options of the command, as text; ''
    without any. preset: whether they come from a preset of `ssbench tune`. training_info: `Decoder.training_info`.
    advised: options that the drafter folder advises, as text.
    """

    method: str
    drafted: float | None
    verified: float | None
    given: str
    preset: bool
    training_info: Mapping[str, Any] | None
    advised: str = ""


def budgets(run: Run, labels: Sequence[str]) -> list[Budget]:
    """Return settings and training budget of each method."""
    config = run.manifest["config"]
    asked = [MethodSpec(one["name"], one["options"], one.get("copy", 1)) for one in config.get("methods", [])]
    given = {spec.label: _settings(spec.options) for spec in asked}
    tuned = {preset["method"] for preset in config.get("presets", [])}
    found = []
    for label in labels:
        entry, rows = run.entry(label), [row for row in run.of(label) if row.ok]
        steps, *nodes = (
            sum(getattr(row, name) or 0 for row in rows) for name in ("steps", "draft_nodes", "verified_nodes")
        )
        from_preset = MethodSpec.parse(label.partition("#")[0]).name in tuned
        advised = _settings(entry.get("advised", {}))
        drafted, verified = (safe_div(count, steps) for count in nodes)
        facts = (given.get(label, ""), from_preset, entry.get("training_info"), advised)
        found.append(Budget(label, drafted, verified, *facts))
    return found


def _settings(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def sources(run: Run) -> dict[str, str]:
    """Return the source of each method's drafts as text: the text of a training, repeats counted, or of a datastore.

    A method that has neither is left out; '' where it was not recorded how much text there was.
    """
    found = {}
    for label in run.labels:
        if own := run.entry(label).get("training_info"):
            searched = own.get("searched")
            tokens, bound = trained_tokens(searched or own)
            how = "searches" if searched else "trained on"
            found[label] = "" if tokens is None else f"{how} {bound}{short(tokens)} tokens"
    return found


def scope_note(run: Run, found: Sequence[Budget]) -> str:
    """Return one sentence on the scope of a run's ranking, and on unequal budgets."""
    prompts, questions = len({(row.question_id, row.turn) for row in run.rows}), len(run.questions)
    question = "generated question" if run.manifest["suite"].get("edition") == "generated" else "question"
    often = "once" if run.repeats == 1 else f"{run.repeats} times"
    asked = f"{pluralize(prompts, 'prompt')} of {pluralize(questions, question)}"
    many = len({w["machine"] for session in run.manifest.get("sessions", []) for w in session.get("workers", [])}) > 1
    scope = f"Scope: this model, {'these machines' if many else 'this machine'}, {asked}, measured {often}"
    nodes = sorted(one.drafted for one in found if one.drafted)
    of_each = [trained_tokens(one.training_info) for one in found if one.training_info]
    read = sorted(tokens for tokens, _ in of_each if tokens)
    unequal = []
    if nodes and nodes[-1] > 1.05 * nodes[0]:
        unequal.append(f"methods draft {nodes[0]:.1f} to {nodes[-1]:.1f} nodes a step")
    if read:
        span = short(read[0]) if read[-1] <= 1.05 * read[0] else f"{short(read[0])} to {short(read[-1])}"
        unequal.append(f"trained drafters were trained on {max(bound for _, bound in of_each)}{span} tokens")
    return "; ".join([scope, " and ".join(unequal)] if unequal else [scope]) + "."


def trained(found: Sequence[Budget]) -> str:
    """Return how long the weights of trained drafters were trained, each budget once; '' if none was trained."""
    of: dict[str, list[str]] = {}
    for one in found:
        if one.training_info and "searched" not in one.training_info:
            of.setdefault(_training(one.training_info), []).append(one.method)
    texts = []
    for how, labels in of.items():
        many = f"{pluralize(len(labels), 'method')} ({', '.join(labels)}) draft{'s' * (len(labels) == 1)}"
        texts += [f"{many} with weights that were trained {how}. "] if how else []
    unknown = of.get("", [])
    texts += [f"Of {', '.join(unknown)} it was not recorded how long the weights were trained."] if unknown else []
    return "".join(texts).strip()


def _training(training_info: Mapping[str, Any]) -> str:
    """Return 'for 420 steps on 430,080 tokens of text', as far as it is known."""
    steps, (tokens, bound) = training_info.get("steps"), trained_tokens(training_info)
    parts = [f"for {pluralize(steps, 'step')}"] if steps is not None else []
    parts += [f"on {bound}{tokens:,} tokens of text, repeats counted"] if tokens is not None else []
    return " ".join(parts)


def trained_tokens(training_info: Mapping[str, Any]) -> tuple[int | None, str]:
    """Return the number of training tokens, and 'at most ' where only their positions with padding are known."""
    if training_info.get("tokens") is not None:
        return training_info["tokens"], ""
    return training_info.get("token_positions"), "at most " if training_info.get("token_positions") else ""


class Results:
    """A run's numbers, computed once: frames, summary, checks, ranking. `analyse`, `load_run` and `run` return it.

    run: the records of the directory. path: the directory. manifest: methods, suite, settings and environment.
    unfinished: '' for a complete run, else a text on the missing part. quality_margin: largest loss of quality, on
    scores from 0 to 1, that `quality_verdict` calls non-inferior. docs/columns.md lists the columns of the frames.
    Terminal, reports, exports, comparisons and `--fail-on` take all numbers of a run from here.
    """

    def __init__(self, run: Run, quality_margin: float = MARGIN) -> None:
        self.run = run
        self.path: Path = run.path
        self.manifest: dict[str, Any] = run.manifest
        self.quality_margin = quality_margin
        self.unfinished: str = unfinished(run)

    def __repr__(self) -> str:
        made = f"{len(self.run.rows):,} samples of {', '.join(self.run.labels)}"
        return f"<run {self.path}: {made}{f'; {self.unfinished}' if self.unfinished else ''}>"

    @cached_property
    def rows(self) -> list[SummaryRow]:
        """Return the summary: a row for each task and method, `overall` first."""
        return summarise(self.run, self.quality_margin)

    @property
    def overall(self) -> list[SummaryRow]:
        """Return the summary rows over all tasks."""
        return [row for row in self.rows if row.task == OVERALL]

    @cached_property
    def checks(self) -> list[Check]:
        """Return every check of the run, passed or not."""
        return [*checks(self.run, self.rows), *lossy_checks(self.rows)]

    @cached_property
    def rank_ranges(self) -> Mapping[str, RankRange]:
        """Return the rank ranges of the methods, from their pairwise comparisons."""
        return rank_ranges(self.run, self.rows)

    @cached_property
    def pairs(self) -> list[PairedCost]:
        """Return each method paired with the baseline, over the samples of both."""
        return pairs(self.run, self._invalid)

    @cached_property
    def machine_rows(self) -> list[MachineRow]:
        """Return the cost of each method's steps, counted from shapes, and the share of the machine's limits."""
        return machine_rows(self.run, self.pairs)

    @cached_property
    def concurrency_rows(self) -> list[ConcurrencyRow]:
        """Return one row for each load and method; none if requests ran one at a time."""
        return concurrency_rows(self.run, self._invalid)

    @cached_property
    def draft_schedule(self) -> DraftSchedule | None:
        """Return the recommended server by requests in flight; None unless servers differ in k."""
        return draft_schedule(self.run, self.concurrency_rows, self._invalid)

    def concurrency_json(self) -> dict[str, Any]:
        """Return the concurrency rows and the draft schedule as JSON-ready data, as far as the run has them."""
        rows, schedule = [asdict(row) for row in self.concurrency_rows], self.draft_schedule
        return ({"concurrency": rows} if rows else {}) | ({"draft_schedule": schedule.as_dict()} if schedule else {})

    @property
    def _invalid(self) -> set[str]:
        return {row.method for row in self.overall if row.comparison == "invalid"}

    @cached_property
    def all_noisy(self) -> bool:
        """Return True if the timing of every good sample is noisy."""
        good = [row for row in self.run.rows if row.ok]
        return bool(good) and all(row.noise_reason for row in good)

    @cached_property
    def headline(self) -> str:
        """Return the result over all tasks, in a sentence, after a warning if all samples are noisy."""
        warning = "Timing unreliable, all samples are noisy. " if self.all_noisy else ""
        return warning + headline(self.rows, self.checks, self.rank_ranges, more_questions(self.run))

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return the manifest's configuration with the repeats that were made and the measures of the tasks."""
        return config_of(self.run)

    @cached_property
    def samples(self) -> pd.DataFrame:
        """Return one row for each sample: a method's output for one prompt, with counts and times."""
        return frames.samples(self.run)

    @cached_property
    def steps(self) -> pd.DataFrame:
        """Return one row for each decoding step, with its counts and the parts of its time."""
        return frames.steps(self.run)

    @cached_property
    def output_match(self) -> pd.DataFrame:
        """Return one row for each output that was compared with the baseline's, with the verdict."""
        return frames.output_match(self.run)

    @cached_property
    def telemetry(self) -> pd.DataFrame:
        """Return one row for each reading of the machine; empty without telemetry."""
        return frames.telemetry(read_telemetry(self.path))

    @cached_property
    def drafts(self) -> list[Drafts]:
        """Return the recorded drafts, one entry for each recorded output; docs/api.md lists the fields."""
        return read_drafts(self.path)

    def machine(self) -> pd.DataFrame:
        """Return one row for each method: cost of its steps, counted from shapes, and share of the machine's limits."""
        return frames.frame(frames.MACHINE, self.machine_rows)

    def places(self, along: Along = "answer", ends: Sequence[int] = ()) -> pd.DataFrame:
        """Return one row for each place and method: acceptance and speed along the answer, or along the context.

        along: `part` has the places thinking and answer, and a warning if outputs end before `</think>`. ends: last
        token of each place but the last one; empty: 64, 256 and 1,024, or 512, 2,048, 8,192 and 32,768 of a context.
        Raises UserError for ends that do not increase from 1 on, and as `place_rows` does for `part`.
        """
        return frames.frame(frames.PLACES, place_rows(self.run, self._invalid, along, ends))

    def concurrency(self) -> pd.DataFrame:
        """Return one row for each load and method; empty if requests ran one at a time."""
        return frames.frame(frames.LEVELS, self.concurrency_rows)

    @cached_property
    def plot(self) -> Any:
        """Return Plotly figures, such as `results.plot.ranking()`: docs/api.md lists them."""
        return registry.load(registry.FIGURES, "run")(self)

    def summary(self, *, all: bool = False, quality_margin: float | None = None) -> pd.DataFrame:
        """Return one row for each task and method. all: with all columns, not only those of a result table.

        quality_margin: in place of that of this object. Raises UserError for an invalid margin.
        """
        if quality_margin is not None and checked_margin(quality_margin) != self.quality_margin:
            return Results(self.run, quality_margin).summary(all=all)
        summary = frames.summary_of(self.rows, self.manifest["config"])
        return summary if all else summary[list(frames.SHORT_SUMMARY)]

    def by_task(self, column: str) -> pd.DataFrame:
        """Return one column of the summary with a row for each task and a column for each method.

        Raises UserError for a name that is no column of `summary(all=True)`.
        """
        summary = self.summary(all=True)
        if column not in summary or column in ("task", "method"):
            raise UserError(f"the summary has no column {column!r}{did_you_mean(column, summary)}")
        tasks = summary[summary["task"] != OVERALL].set_index(["task", "method"])[column]
        return tasks.unstack().reindex(index=self.run.categories, columns=self.run.labels)

    def _repr_html_(self) -> str:
        """Return the headline and the summary over all tasks, for notebooks."""
        overall = self.summary().query("task == @OVERALL").drop(columns="task")
        cells = overall.astype(object).where(overall.notna(), "")  # missing cells are empty
        table: str = cells.to_html(index=False, float_format="{:.3g}".format)
        notes = [self.headline, self.unfinished] if self.run.rows else [self.unfinished]
        return "".join(f"<p>{escape(note)}</p>" for note in notes if note) + table

    def write_parquet(self) -> str:
        """Write the Parquet files of a complete run; return why they could not be written, or ''.

        The run is complete without them: the reason becomes one of its warnings, if its manifest can be written.
        """
        if problem := frames.write_parquet(self.run, self.rows):
            with contextlib.suppress(UserError):
                self.manifest["warnings"] = add_warning(self.path, problem)
        return problem


def analyse(run: Run, quality_margin: float = MARGIN) -> Results:
    """Return the results of a run. Raises UserError for what is no margin of quality."""
    return Results(run, checked_margin(quality_margin))


def load_run(path: str | Path) -> Results:
    """Read what is committed in a run directory, whether the run is finished or not. Nothing in it is changed.

    Raises UserError where `path` is no run directory, or a damaged one.
    """
    if not isinstance(path, str | Path):
        raise UserError(f"load_run takes the path of a run directory, not {path!r}")
    return analyse(read_run(expanded(path)))
