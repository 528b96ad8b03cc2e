"""The law of what a method says of itself: its options, what it measures and, if it is lossy, that it is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specbench_ss.decoding.decoder import Decoder, State
from specbench_ss.decoding.generation import Step
from specbench_ss.decoding.tree import DraftTree
from specbench_ss.method_spec import REFERENCE, MethodSpec
from specbench_ss.options import describe_options
from specbench_ss.results.summary import summarise
from specbench_ss.results.verdict_text import notes, output
from specbench_ss.runs.config import RunConfig
from specbench_ss.runs.manifest import manifest_for, plain
from specbench_ss.runs.rows import Key, Row, Run, Sameness
from specbench_ss.runs.steps import Steps
from specbench_ss.runs.suite import Question, SuiteData
from specbench_ss.testing.law import Case, Law, Subject
from specbench_ss.testing.laws_greedy import asked
from specbench_ss.testing.watched_decoder import Trace

SUITE = SuiteData("kit", "tiny", (Question("q", "qa", ("?",)),))


class Undrafted(Decoder):
    """Plain decoding, as a stand-in for the method that others are compared with."""

    name, summary = REFERENCE, "autoregressive decoding"
    autoregressive = True

    def propose(self, state: State) -> DraftTree:
        """Return a draft of nothing but the root."""
        return DraftTree.root_only(state.root)


def described(subject: Subject, case: Case) -> str:
    """Test name and options, the description that goes into the manifest, and what reports make of it."""
    decoder, again = subject.decoder(), subject.decoder()
    if problem := unlisted(decoder):
        return problem
    said, second = plain(decoder.described()), plain(again.described())
    if said != second:
        return f"described() of two that are made alike: {said} and {second}"
    subject.watch(case, decoder=decoder)
    if plain(decoder.described()) != said:
        return f"described() was {said}, and after an answer {plain(decoder.described())}"
    return "" if decoder.lossless else unsaid(decoder, subject.watch(case, decoder=again))


def unlisted(decoder: Decoder) -> str:
    """Say what `ssbench methods` cannot show of the method; '' where it can show everything."""
    kind = type(decoder)
    for name in ("name", "summary"):
        text = getattr(kind, name, None)
        if not isinstance(text, str) or not text or "\n" in text:
            return f"{name} is {text!r}, not one line of text"
    if not dataclasses.is_dataclass(decoder.options):
        return f"its options are {type(decoder.options).__name__}, not a dataclass"
    if decoder.reference_for(decoder.options).name == kind.name != REFERENCE:
        return f"reference_for names {kind.name} itself; name {REFERENCE!r}, or an autoregressive method of its model"
    silent = [option.name for option in describe_options(kind.Options) if not option.help]
    if silent:
        return f'option {silent[0]} has no metadata={{"help": ...}}'
    helps = [option.help for option in describe_options(kind.Options)]
    if kind.lossless and not decoder.lossless and not any("loss" in text for text in helps):
        return "an option made it lossy, and no option's help says 'lossy': `ssbench methods` calls the method lossless"
    return ""


def unsaid(decoder: Decoder, trace: Trace) -> str:
    """Say what a run's results leave unsaid of a lossy method; '' where all of them say that it is lossy."""
    run = made_up_run(decoder, trace)
    entry = next(m for m in run.manifest["methods"] if m["label"] == decoder.name)
    if entry["lossless"]:
        return "the manifest calls it lossless"
    row = next(row for row in summarise(run) if row.method == decoder.name)
    config = run.manifest["config"]
    promised = output(row, config) != "not compared" and not row.reference_of
    if row.lossless or promised:
        return f"the table's row is lossless={row.lossless}, output {output(row, config)!r}"
    if not any("does not promise" in note for note in notes([row], config)):
        return "no note under the table says that it does not promise the output of its reference"
    return ""


def made_up_run(decoder: Decoder, trace: Trace) -> Run:
    """Return a run of one question, as it would be read from its directory."""
    reference = decoder.reference_for(decoder.options).label
    others = {label: Undrafted(decoder.target) for label in (REFERENCE, reference)}
    config = RunConfig(methods=(MethodSpec(REFERENCE), MethodSpec(decoder.name)))
    manifest = manifest_for(config, decoder.target, SUITE, {**others, decoder.name: decoder}, [])
    rows, steps = list[Row](), dict[Key, list[Step]]()
    for i, label in enumerate((REFERENCE, decoder.name)):
        row = Row("q", 0, label, 0, "qa", i, i, 0, SUITE.edition, SUITE.content_hash, "ok")
        row.fill(trace.generation)
        rows.append(row)
        steps[row.key] = trace.generation.steps
    verdicts = [] if decoder.lossless else [Sameness(*rows[1].key, verdict="not compared")]
    return Run(Path(), manifest, rows, Steps.from_samples(steps), verdicts)


SAYS = "every report says what the method is and measures, and that it is lossy if it is"
LAWS = (Law("description", SAYS, asked, described, on=("small",)),)
