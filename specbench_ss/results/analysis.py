"""A finished run's frames and manifest, and the drafting budget of each method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from specbench_ss.errors import UserError
from specbench_ss.options import MethodSpec
from specbench_ss.results import frames
from specbench_ss.results import frames as machine_frames
from specbench_ss.results.columns import LEVELS
from specbench_ss.results.concurrency import level_rows, value
from specbench_ss.results.quality import MARGIN, checked_margin
from specbench_ss.results.sample_checks import unfinished
from specbench_ss.results.summary import over
from specbench_ss.results.text import short
from specbench_ss.runs.records import Run
from specbench_ss.runs.run_dir import Drafts, read_drafts, read_run, read_telemetry


@dataclass(frozen=True, slots=True)
class Budget:
    """One method of a run. drafted, verified: nodes a step, the root left out; None where it took no step.

    given: options that the command gave, as text; '' where all are the method's or its weights' own. preset: whether
    they come from a preset, as `ssbench tune` makes them. learnt: what is known of the training of its weights, as
    `Decoder.learnt` has it; None in a run of a version that did not record it. advised: options that are as the folder
    of its weights advises, as text.
    """

    method: str
    drafted: float | None
    verified: float | None
    given: str
    preset: bool
    learnt: Mapping[str, Any] | None
    advised: str = ""


def budgets(run: Run, labels: Sequence[str]) -> list[Budget]:
    """Return what each of these methods had."""
    learnt = {method["label"]: method.get("learnt") for method in run.manifest["methods"]}
    config = run.manifest["config"]
    asked = config.get("methods", [])
    specs = [MethodSpec(method["name"], method["options"], method.get("copy", 1)) for method in asked]
    given = {spec.label: _settings(spec.options) for spec in specs}
    advised = {method["label"]: _settings(method.get("advised", {})) for method in run.manifest["methods"]}
    tuned = {preset["method"] for preset in config.get("presets", [])}
    found = []
    for label in labels:
        rows = [row for row in run.rows if row.method == label and row.ok]
        steps = sum(row.steps or 0 for row in rows)
        drafted, verified = (sum(getattr(row, name) or 0 for row in rows) for name in ("drafted", "verified"))
        name = MethodSpec.parse(label.partition("#")[0]).name
        chosen = given.get(label, ""), name in tuned
        known = learnt.get(label), advised.get(label, "")
        found.append(Budget(label, over(drafted, steps), over(verified, steps), *chosen, *known))
    return found


def _settings(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def sources(run: Run) -> dict[str, str]:
    """Return what each method's drafts come from, in words: the text of a training, repeats counted, or of a datastore.

    A method that has neither is left out; '' where it was not recorded how much text there was.
    """
    learnt = {method["label"]: method.get("learnt") or {} for method in run.manifest["methods"]}
    return {label: _source(own) for label, own in learnt.items() if own}


def _source(own: Mapping[str, Any]) -> str:
    searched = own.get("searched")
    tokens = (searched or own).get("tokens")
    return "" if tokens is None else f"{'searches' if searched else 'learnt from'} {short(tokens)} tokens"


def told_scope(run: Run, found: Sequence[Budget]) -> str:
    """Say in one sentence what a run's ranking holds for, and where its sides were not equal."""
    prompts, questions = len({(row.question_id, row.turn) for row in run.rows}), len(run.questions)
    made = " made up by a generator" if run.manifest["suite"].get("edition") == "generated" else ""
    often = "once" if run.repeats == 1 else f"{run.repeats} times"
    asked = f"{prompts:,} prompts ({questions:,} questions{made})"
    many = len({w["machine"] for session in run.manifest.get("sessions", []) for w in session.get("workers", [])}) > 1
    said = f"It holds for this model, {'these machines' if many else 'this machine'} and {asked}, measured {often}"
    nodes = sorted(one.drafted for one in found if one.drafted)
    read = sorted(one.learnt["tokens"] for one in found if one.learnt and one.learnt.get("tokens"))
    unequal = []
    if nodes and nodes[-1] > 1.05 * nodes[0]:
        unequal.append(f"methods draft {nodes[0]:.1f} to {nodes[-1]:.1f} nodes a step")
    if read:
        span = short(read[0]) if read[-1] <= 1.05 * read[0] else f"{short(read[0])} to {short(read[-1])}"
        unequal.append(f"trained drafters learnt from {span} tokens")
    return "; ".join([said, " and ".join(unequal)] if unequal else [said]) + "."


def unequal(found: Sequence[Budget]) -> str:
    """Say whether the methods that learnt had equal budgets, and of which that is not known; '' where none learnt."""
    trained = {one.method: one.learnt for one in found if one.learnt and "searched" not in one.learnt}
    unknown = [label for label, learnt in trained.items() if learnt.get("tokens") is None]
    counts = {learnt["tokens"] for label, learnt in trained.items() if label not in unknown}
    known, said = len(trained) - len(unknown), []
    if len(counts) > 1:
        said.append(f"Trained methods read {min(counts):,} to {max(counts):,} tokens of text: their budgets differ.")
    elif known > 1:
        said.append(f"{known} trained methods read {counts.pop():,} tokens of text each, repeats counted.")
    if unknown:
        said.append(f"How many tokens {', '.join(unknown)} read was not recorded.")
    return " ".join(said)


def trained(found: Sequence[Budget]) -> str:
    """Say how long the weights of trained drafters were trained, each budget once; '' where none learnt."""
    of: dict[str, list[str]] = {}
    for one in found:
        if one.learnt and "searched" not in one.learnt:
            of.setdefault(_training(one.learnt), []).append(one.method)
    told = [f"{_drafts(labels)} with weights that were trained {how}" for how, labels in of.items() if how]
    unknown = of.get("", [])
    told += [f"Of {', '.join(unknown)} it was not recorded how long the weights were trained"] if unknown else []
    return "".join(f"{said}. " for said in told).strip()


def _training(learnt: Mapping[str, Any]) -> str:
    """Return 'for 420 steps on 430,080 tokens of text', as far as it is known."""
    steps, tokens = learnt.get("steps"), learnt.get("tokens")
    parts = [
        "" if steps is None else f"for {steps:,} step{'s' * (steps != 1)}",
        "" if tokens is None else f"on {tokens:,} tokens of text, repeats counted",
    ]
    return " ".join(filter(None, parts))


def _drafts(labels: Sequence[str]) -> str:
    many = f"{len(labels)} method{'s' * (len(labels) > 1)} ({', '.join(labels)})"
    return f"{many} draft{'s' * (len(labels) == 1)}"


class RunResults:
    """What a run directory holds, as `load_run` and `run` return it. Frames are made when they are first asked for.

    path: the directory. manifest: which methods were measured, on what, with which settings, in which environment.
    unfinished: '' for a complete run, else a text that says what is missing. docs/api.md lists the columns of the
    frames.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.path: Path = run.path
        self.manifest: dict[str, Any] = run.manifest
        self.unfinished: str = unfinished(run)

    def __repr__(self) -> str:
        made = f"{len(self._run.rows):,} samples of {', '.join(self._run.labels)}"
        return f"<run {self.path}: {made}{f'; {self.unfinished}' if self.unfinished else ''}>"

    @cached_property
    def samples(self) -> pd.DataFrame:
        """One row for each sample: a method's answer to one prompt, with its counts and times."""
        return frames.samples(self._run)

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One row for each decoding step, with its counts and the parts of its time."""
        return frames.steps(self._run)

    @cached_property
    def sameness(self) -> pd.DataFrame:
        """One row for each answer that was compared with its reference's, with the verdict."""
        return frames.sameness(self._run)

    @cached_property
    def telemetry(self) -> pd.DataFrame:
        """One row for each reading of the machine; empty where telemetry was switched off."""
        return machine_frames.telemetry(read_telemetry(self.path))

    @cached_property
    def drafts(self) -> list[Drafts]:
        """The recorded drafts, one entry for each recorded answer; docs/api.md lists the fields."""
        return read_drafts(self.path)

    def machine(self) -> pd.DataFrame:
        """One row for each method: what its steps cost by their shapes, and what of the limits they reached."""
        return machine_frames.machine(self._run)

    def concurrency(self) -> pd.DataFrame:
        """One row for each number of requests in flight and served engine; empty where only one was in flight."""
        return frames.frame(LEVELS, level_rows(self._run), value)

    def summary(self, quality_margin: float = MARGIN) -> pd.DataFrame:
        """One row for each task and method, `overall` first: the numbers of the terminal's table and of the report.

        quality_margin: how much lower than that of `ar` the quality of a method that changes the model may be, on
        scores from 0 to 1, for `quality_verdict` to call it non-inferior. Raises UserError for what is no such margin.
        """
        return frames.summary(self._run, checked_margin(quality_margin))


def load_run(path: str | Path) -> RunResults:
    """Read what is committed in a run directory, whether the run is finished or not. Nothing in it is changed.

    Raises UserError where `path` is no run directory, or a damaged one.
    """
    if not isinstance(path, str | Path):
        raise UserError(f"load_run takes the path of a run directory, not {path!r}")
    return RunResults(read_run(Path(path).expanduser()))
