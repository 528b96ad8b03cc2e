"""Health and record of a run: checks, output match, settings and versions, published numbers."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import comb
from typing import Any

from specbench_ss.options import value_text
from specbench_ss.reports.html.page_parts import Cell, Column, Fact, Table, View, figure
from specbench_ss.results import frames
from specbench_ss.results.concurrency import at_a_time, rates
from specbench_ss.results.published import Mark, PublishedComparison, comparable, compare_with_published
from specbench_ss.results.sample_checks import NOT_LOCKED
from specbench_ss.results.summary import SummaryRow
from specbench_ss.results.text import format_number, parameters, pluralize, scientific
from specbench_ss.runs.config import decoding
from specbench_ss.runs.records import KILLED, Run

LOW = 1e-3  # smaller p are shown by their exponent


def differences(view: View) -> Sequence[str]:
    """Describe the outputs that differ, with the first token that differs."""
    return [
        f"{_compared(view.overall[s.method])} on {s.question_id}, turn {s.turn + 1}: "
        + f"{s.verdict} at token {s.first_difference}"
        + (f", {s.drop:.3g} below the best logit" if s.drop is not None else f" ({s.reason})" if s.reason else "")
        for s in view.run.output_match
        if s.verdict in ("mismatch", "numerical tie", "length differs")
    ]


def _compared(row: SummaryRow) -> str:
    """Name the method, and its baseline if that is not the run's."""
    return row.method if row.reference == row.baseline else f"{row.method} against {row.reference}"


def output_match_note(view: View) -> str:
    """Return how to read the table of verdicts."""
    if view.run.manifest["config"]["temperature"]:
        return (
            "Outputs were sampled: lossless methods have the distribution of the target, not its tokens. The tokens of "
            "all outputs of a method are tested together."
        )
    if view.served:
        return "Greedy outputs, compared as text. Servers do not guarantee identical text: a difference is no error."
    return (
        "Greedy outputs, compared token by token. At a numerical tie two tokens have the same logit within the "
        "rounding of the dtype; only a mismatch is an error."
    )


def output_match(view: View) -> Table:
    """Return the table of verdicts by method."""
    columns = [
        view.method(),
        Column("against", _against, numeric=False),
        *(Column(name, of.cell, digits=0) for name, of in zip(frames.VERDICTS, frames.COUNTED, strict=True)),
        Column("failed", "n_failed", digits=0),
    ]
    if any(row.bias for row in view.overall.values()):
        columns += [
            Column("tokens", "bias_tokens", digits=0),
            Column("p at most", _p),
            Column("nats a token", "bias_surplus", digits=3),
            Column("accepted draft tokens", "bias_accepted", digits=0),
            Column("expected", "bias_expected", digits=0),
        ]
    rows = [row for row in view.overall.values() if row.comparison != "baseline" or row.output_match]
    return Table.of("output-match", columns, rows)


def _p(row: SummaryRow) -> Cell:
    p = row.bias_p
    return Cell(scientific(p, 1) if p is not None and p < LOW else format_number(p, 3), p)


def _against(row: SummaryRow) -> str:
    if row.bias:
        itself = row.comparison == "baseline" or row.reference_of
        return f"the distribution of {'its own model' if itself else row.reference}"
    if row.comparison == "baseline":
        return "its first repeat"
    if row.reference_of:
        return f"nothing: it is the baseline of {', '.join(row.reference_of)}"
    compared = row.lossless or row.output_match.get("identical") or row.output_match.get("text differs")
    return row.reference if compared else "nothing: its output may differ"


def chips(run: Run) -> list[tuple[str, str]]:
    """Return the five facts of the page's head: model and suite, prompts, hardware, dtype and decoding, date."""
    model, suite, config = run.manifest["model"], run.manifest["suite"], run.manifest["config"]
    facts = [parameters(model["parameters"])] if model.get("parameters") else []
    facts += ["dequantised"] if (model.get("origin") or {}).get("gguf") else []
    about = f" ({', '.join(facts)})" if facts else ""
    of_questions = f" of {pluralize(suite['size'], 'question')}" if suite["size"] != suite["prompts"] else ""
    repeats = f", {run.repeats} repeats" if run.repeats > 1 else ""
    dtype = [] if config.get("endpoints") else [model["dtype"]]
    requests = [f"{at_a_time(run.manifest)} concurrent requests"] if at_a_time(run.manifest) != "1" else []
    requests += [f"{rates(run.manifest)} arrivals"] if rates(run.manifest) else []
    limit = [_limit(run)] if suite.get("max_new_tokens") else []
    return [
        ("Model and suite", f"{model['name']}{about} on {suite['name']} ({suite['edition']})"),
        ("Number of prompts", f"{pluralize(suite['prompts'], 'prompt')}{of_questions}{repeats}"),
        ("Hardware", _on(run)),
        ("Dtype and decoding", ", ".join([*dtype, decoding(config), *limit, *requests])),
        ("Started", str(run.manifest["created"]).replace("T", " ")[:16]),
    ]


def _limit(run: Run) -> str:
    """Return the limit of outputs: 'outputs limited to 64 tokens (81% reached it)', a share of the baseline's."""
    limit = f"outputs limited to {pluralize(run.manifest['suite']['max_new_tokens'], 'token')}"
    ends = [row.finish for row in run.rows if row.ok and row.method == run.baseline]
    reached = 100 * ends.count("length") / len(ends) if ends else 0
    return f"{limit} ({reached:.0f}% reached it)" if reached else limit


def _on(run: Run) -> str:
    """Return the hardware of the model, or that of the client of servers."""
    on = _machine(run.manifest["environment"], run.manifest["model"]["device"])
    return f"servers, client on {on}" if run.manifest["config"].get("endpoints") else on


def _machine(environment: Mapping[str, Any], device: str) -> str:
    gpus = environment.get("gpus") or []
    if device.startswith("cuda") and gpus:
        numbers = [int(n) for n in re.findall(r"cuda:(\d+)", device)] or [0]
        used = [str(gpus[n]["name"]) for n in numbers if n < len(gpus)]
        names = " and ".join(dict.fromkeys(used)) or "a GPU that is not listed"
        return f"{len(numbers)} of {len(gpus)} GPUs: {names}" if len(numbers) > 1 else names
    cpu = environment.get("cpu") or {}
    return f"{cpu.get('model') or 'CPU'} ({cpu.get('available') or '?'} cores)"


def facts(run: Run) -> list[Fact]:
    """Return the facts of the manifest: settings, methods, versions and machine."""
    manifest = run.manifest
    command = manifest["command"]  # one text, where the run was started from Python
    status = NOT_LOCKED if manifest["status"] == KILLED else manifest["status"]
    started = [session["started"] for session in manifest.get("sessions", [])]
    workers = [worker for session in manifest.get("sessions", []) for worker in session.get("workers") or ()]
    known = [
        Fact("Command", command[0] if len(command) == 1 else shlex.join(command), code=True),
        Fact("Version", manifest["version"]),
        Fact("Started, ended", f"{manifest['created']}, {manifest['finished'] or 'not finished'} ({status})"),
        Fact("Sessions", "; ".join(started) if len(started) > 1 else ""),
        Fact("Workers", "; ".join(_machine(worker["environment"], "cuda") for worker in workers)),
        Fact("Concurrent requests", at_a_time(manifest)),
        Fact("Arrivals", rates(manifest)),
        Fact("Model", _words(manifest["model"])),
        Fact("Suite", _words(manifest["suite"])),
        *(fact for method in manifest["methods"] for fact in _method_facts(method, run.baseline)),
        Fact("Settings", _words({k: v for k, v in manifest["config"].items() if k != "methods"})),
        *(Fact(name.replace("_", " ").capitalize(), _words(of)) for name, of in manifest["environment"].items()),
        Fact("Fingerprint", manifest["fingerprint"], code=True),
    ]
    return [replace(fact, main=not fact.name.startswith("Method ")) for fact in known if fact.value]


def _words(value: Any) -> str:
    """Return a value of the manifest as text; entries that are empty or not known are left out."""
    if isinstance(value, Mapping):
        named = {name: _words(of) for name, of in value.items()}
        return ", ".join(
            f"{name} ({text})" if ", " in text else f"{name} {text}" for name, text in named.items() if text
        )
    if isinstance(value, list):
        return "; ".join(map(_words, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "" if value is None else value_text(value)


def _method_facts(method: Mapping[str, Any], baseline: str) -> list[Fact]:
    reference, name = method.get("reference", baseline), f"Method {method['label']}"
    match = f"its output is compared with that of {reference}" if reference != baseline else ""
    summary = (method["summary"], _options(method["options"]) or "no options", method["paper"], match)
    measured = Fact(f"{name}, as measured", _options(method.get("resolved", {})), code=True)
    return [Fact(name, "; ".join(filter(None, summary))), measured]


def _options(values: Mapping[str, Any]) -> str:
    texts = {k: json.dumps(v) if isinstance(v, list | dict) else value_text(v) for k, v in values.items()}
    return ", ".join(f"{k}={text}" for k, text in texts.items())


FORMULA_OF = "specbench"  # the suite whose published speedups have a formula of their own
FEWEST = 3  # methods from which their order is compared
SIGNS: dict[Mark, str] = {"same": "✓", "part": "~", "other": "✕"}
NOTE = (
    "✓ the same, ~ the same model family, ✕ another. Drafters and settings are not compared. Speedups next to those "
    "of Spec-Bench use its formula."
)


def published(view: View) -> Table | None:
    """Return a row for each published number of a method of the run; None without any."""
    figures = {
        label: (view.overall[label].mean_acceptance_length, view.overall[label].speedup) for label in view.contestants
    }
    found = [one for one in compare_with_published(view.run.manifest, figures) if one.entry is not None]
    if not found:
        return None
    rows = [_alike(one, view.overall[one.method]) for one in found]
    columns = [
        view.method(),
        Column("τ", "tau"),
        Column("published τ", lambda one: one.entry.tau),
        Column("speedup", "speedup", unit="×"),
        Column("published speedup", lambda one: figure(one.entry.speedup, unit="×")),
        Column("model", lambda one: f"{SIGNS[one.marks['model']]} {one.entry.model}", numeric=False),
        Column("GPU", lambda one: f"{SIGNS[one.marks['GPU']]} {one.entry.gpu}", numeric=False),
        Column("compares", lambda one: comparable(one.marks), numeric=False),
        Column("source", lambda one: one.entry.source.removeprefix("https://"), numeric=False),
    ]
    rows.sort(key=lambda one: view.contestants.index(one.method))
    notes = (*order_note(rows), NOTE)
    return Table.of("published", columns, rows, "Published numbers and those of this run", notes=notes)


def _alike(one: PublishedComparison, row: SummaryRow) -> PublishedComparison:
    """Return the run's speedup by the formula of the published one."""
    of_suite = one.entry is not None and one.entry.suite == FORMULA_OF
    return replace(one, speedup=row.speedup_specbench) if of_suite else one


def order_note(rows: Sequence[PublishedComparison]) -> list[str]:
    """Return the published order of methods and the order here, for the model and GPU with the most methods."""
    lists: dict[tuple[str, str], dict[str, PublishedComparison]] = {}
    for one in rows:
        if one.entry is not None and one.speedup is not None:
            lists.setdefault((one.entry.model, one.entry.gpu), {}).setdefault(one.entry.method, one)
    (model, gpu), most = max(lists.items(), key=lambda item: len(item[1]), default=(("", ""), {}))
    if len(most) < FEWEST:
        return []
    published_order = sorted(most, key=lambda name: -(most[name].entry.speedup))  # type: ignore[union-attr]
    order = sorted(published_order, key=lambda name: -(most[name].speedup or 0.0))
    same = sum(order.index(a) < order.index(b) for a, b in combinations(published_order, 2))
    apart = all(comparable(one.marks) == "nothing" for one in most.values())
    lead = "None of these numbers is comparable with this run; only the order may be. " if apart else ""
    return [
        f"{lead}Published order by speedup for {model} on {gpu}: {', '.join(published_order)}; order here: "
        f"{', '.join(most[name].method for name in order)}. {same} of {comb(len(order), 2)} pairs have the same order, "
        "including pairs that do not differ significantly here."
    ]
