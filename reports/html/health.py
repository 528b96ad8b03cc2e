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
from specbench_ss.reports.html.page_parts import Cell, Column, Fact, Notice, Table, figure, plain
from specbench_ss.reports.html.samples import VERDICTS
from specbench_ss.reports.palette import Style
from specbench_ss.results.checks import Check, CheckState, worst_first
from specbench_ss.results.concurrency import at_a_time
from specbench_ss.results.published import Beside, Mark, beside, comparable
from specbench_ss.results.sample_checks import NOT_HELD
from specbench_ss.results.summary import SummaryRow
from specbench_ss.results.text import number, parameters, scientific, times
from specbench_ss.runs.config import decoding
from specbench_ss.runs.environment import machine_changes
from specbench_ss.runs.records import KILLED, Run

SHOWN = 12  # lines of a list; the rest is counted
SAMPLED = ("tokens", "p at most", "nats a token", "drafted tokens kept", "expected")  # columns at temperatures above 0
LOW = 1e-3  # smaller p are shown by their exponent
LEVELS: dict[CheckState, str] = {"wrong": "error", "warning": "warning", "not checked": "unknown", "ok": "ok"}


def notices(made: Sequence[Check]) -> list[Notice]:
    """Return every check, passed or not, over all tasks."""
    return [Notice(LEVELS[check.state], check.sentence, _some(check.lines)) for check in made]


def alerts(made: Sequence[Check]) -> list[Notice]:
    """Return what must stand above the results: all that is wrong, what to beware of, and what nobody checked.

    In a good run there is nothing.
    """
    return notices(worst_first(made))


def differences(run: Run, overall: Mapping[str, SummaryRow]) -> Sequence[str]:
    """Describe every answer that differs without a good reason, and where it differs."""
    return _some(
        [
            f"{_held(overall[s.method])} on {s.question_id}, turn {s.turn + 1}: "
            + f"{VERDICTS[s.verdict][0]} at token {s.first_difference}"
            + (f", {s.drop:.3g} below the best logit" if s.drop is not None else f" ({s.reason})" if s.reason else "")
            for s in run.sameness
            if s.verdict in ("mismatch", "near-tie", "length")
        ]
    )


def _held(row: SummaryRow) -> str:
    """Name the method, and what it is compared with where that is not the run's reference."""
    return row.method if row.reference == row.baseline else f"{row.method} against {row.reference}"


def sameness_note(run: Run) -> str:
    """Say how to read the table of verdicts."""
    if run.manifest["config"]["temperature"]:
        return (
            "Answers were sampled: the methods promise the same distribution, not the same tokens. So the tokens of "
            "all answers of a method are tested together."
        )
    if run.manifest["config"].get("endpoints"):
        return "Greedy answers, compared as texts. Servers do not promise the same text: a difference is no error."
    return (
        "Greedy answers, compared token by token. A near-tie is a place where two tokens are equally good to the model "
        "within the rounding of its data type; only a mismatch is an error."
    )


def sameness(overall: Mapping[str, SummaryRow], styles: Mapping[str, Style]) -> Table:
    """Return the table of verdicts by method."""
    sampled = any(row.bias for row in overall.values())
    columns = [
        Column("method", False),
        Column("against", False),
        *(Column(text) for text, _ in VERDICTS.values()),
        Column("failed"),
        *(Column(text) for text in SAMPLED if sampled),
    ]
    rows = [
        [
            style.cell(),
            plain(_against(overall[label])),
            *(figure(overall[label].sameness.get(v, 0), 0) for v in VERDICTS),
            figure(overall[label].n_failed, 0),
            *(_sampled(overall[label]) if sampled else ()),
        ]
        for label, style in styles.items()
        if overall[label].comparison != "reference" or overall[label].sameness
    ]
    return Table("sameness", columns, rows)


def _sampled(row: SummaryRow) -> tuple[Cell, ...]:
    """Return the cells of `SAMPLED`."""
    p = scientific(row.bias_p, 1) if row.bias_p is not None and row.bias_p < LOW else number(row.bias_p, 3)
    return (
        figure(row.bias_tokens, 0),
        Cell(p, row.bias_p),
        figure(row.bias_surplus, 3),
        figure(row.bias_accepted, 0),
        figure(row.bias_expected, 0),
    )


def _against(row: SummaryRow) -> str:
    if row.bias and (row.comparison == "reference" or row.reference_of):
        return "the distribution of its own model"
    if row.bias:
        return f"the distribution of {row.reference}"
    if row.comparison == "reference":
        return "its first repeat"
    if row.reference_of:
        return f"nothing: it is the reference of {', '.join(row.reference_of)}"
    compared = row.lossless or row.sameness.get("identical") or row.sameness.get("other text")
    return row.reference if compared else f"nothing: it does not promise the output of {row.reference}"


def _some(lines: Sequence[str]) -> list[str]:
    rest = len(lines) - SHOWN
    return [*lines[:SHOWN], *([f"and {rest:,} more"] if rest > 0 else [])]


MAIN = (  # what a printed page has room for
    "Command", "Version", "Started, ended", "Sessions", "Model", "Model's origin", "Model hash", "Data type, device",
    "Layers", "Suite", "Suite hash", "Settings", "Processor", "GPU", "Driver, CUDA", "System", "Packages",
    "Fingerprint",
)  # fmt: skip


def chips(run: Run) -> list[tuple[str, str]]:
    """Return the handful of settings that stand under the title."""
    model, suite = run.manifest["model"], run.manifest["suite"]
    return [
        ("Model", ", ".join(_model(model))),
        ("Suite", f"{suite['name']}, {suite['edition']} edition, {_asked(suite)}"),
        ("Repeats", str(run.repeats)),
        ("Decoding", decoding(run.manifest["config"])),
        *([("Answers", _answers(run))] if suite.get("max_new_tokens") else []),
        ("Requests", f"{at_a_time(run.manifest)} at a time"),
        ("On", _on(run)),
        ("Started", str(run.manifest["created"]).replace("T", " ")[:16]),
    ]


def _model(model: Mapping[str, Any]) -> list[str]:
    """Return its name, its size, and whether its weights were held in fewer bits before."""
    size = [parameters(model["parameters"])] if model.get("parameters") else []
    return [model["name"], *size, *(["dequantised"] if (model.get("origin") or {}).get("gguf") else [])]


def _status(manifest: Mapping[str, Any]) -> str:
    return NOT_HELD if manifest["status"] == KILLED else str(manifest["status"])


def _answers(run: Run) -> str:
    """Say how long answers may be, and how many of the reference's end there: 'at most 64 tokens, 81 % cut there'."""
    most = f"at most {run.manifest['suite']['max_new_tokens']:,} tokens"
    ends = [row.finish for row in run.rows if row.ok and row.method == run.baseline]
    share = 100 * ends.count("length") / len(ends) if ends else 0
    return f"{most}, {share:.0f} % cut there" if ends else most


def facts(run: Run) -> list[Fact]:
    """Return everything that the manifest knows."""
    manifest = run.manifest
    model, suite, environment = manifest["model"], manifest["suite"], manifest["environment"]
    served = bool(manifest["config"].get("endpoints"))
    known = [
        Fact("Command", _command(manifest["command"]), code=True),
        Fact("Version", f"{manifest['version']}, {revision(environment.get('revision'))}"),
        Fact(
            "Started, ended", f"{manifest['created']}, {manifest['finished'] or 'not finished'} ({_status(manifest)})"
        ),
        Fact("Sessions", _sessions(manifest)),
        Fact("Workers", _workers(manifest)),
        Fact("Model", f"{model['name']}, {_size(model)}"),
        Fact("Model hash", model.get("hash") or "", code=True),
        Fact("Model's origin", _origin(model.get("origin") or {})),
        Fact(
            "Data type, device",
            "" if served else f"{model['dtype']}, {model['device']}, batch {at_a_time(run.manifest)}",
        ),
        Fact("Choice of the data type", model.get("dtype_choice", "")),
        Fact("Layers", _layers(model)),
        Fact(
            "Suite",
            f"{suite['name']}, {suite['edition']} edition: {suite['size']} questions, {suite['prompts']} prompts",
        ),
        Fact("Suite hash", suite["content_hash"], code=True),
        *(Fact("Suite note", note) for note in suite["notes"]),
        *(fact for m in manifest["methods"] for fact in _method_facts(m, run.baseline)),
        Fact("Settings", ", ".join(f"{k}={_setting(k, v)}" for k, v in manifest["config"].items() if k != "methods")),
        Fact("Processor", _processor(environment)),
        *(
            Fact("GPU", ", ".join(f"{k.replace('_', ' ')} {_short(v)}" for k, v in gpu.items()))
            for gpu in environment["gpus"]
        ),
        Fact("Driver, CUDA", f"{environment.get('driver') or 'none'}, {environment.get('cuda') or 'none'}"),
        Fact("System", f"{environment['platform']}, Python {environment['python']}"),
        Fact(
            "Packages", ", ".join(f"{name} {version}" for name, version in environment["packages"].items() if version)
        ),
        Fact("Fingerprint", manifest["fingerprint"], code=True),
    ]
    return [replace(fact, main=fact.name in MAIN) for fact in known if fact.value]


def _size(model: Mapping[str, Any]) -> str:
    """Return the number of parameters and the context, as far as they are known: a server does not tell them."""
    if model.get("parameters") is None:
        return "as served: size, weights and number format not told"
    return f"{parameters(model['parameters'])}, context {model['context_length']:,}"


def _on(run: Run) -> str:
    """Say in a few words what the model ran on; of servers, from where they were asked."""
    model, here = run.manifest["model"], run.manifest["environment"]
    on = machine_text(here, model["device"])
    return f"servers, asked from {on}" if run.manifest["config"].get("endpoints") else f"{on}, {model['dtype']}"


def _origin(origin: Mapping[str, Any]) -> str:
    """Say where the weights come from and which ones were made float again; '' where nothing is known."""
    gguf, rest = origin.get("gguf"), {k: v for k, v in origin.items() if k != "gguf"}
    said = [f"{k.replace('_', ' ')} {_short(v)}" for k, v in rest.items()]
    if isinstance(gguf, Mapping):
        types = ", ".join(f"{count} {kind}" for kind, count in (gguf.get("types") or {}).items())
        said.insert(0, f"dequantised from {gguf.get('file')} (tensors: {types})")
    return "; ".join(said)


def _layers(model: Mapping[str, Any]) -> str:
    """Say what computed the layers, with which attention, and where they lay; '' in a run of an earlier version."""
    attention = model.get("attention")
    places = [f"{len(layers)} of the layers on {device}" for device, layers in model.get("layers_on", {}).items()]
    return "; ".join(filter(None, (model.get("computed"), attention and f"attention {attention}", *places)))


def _command(words: Sequence[str]) -> str:
    """Return a command line as text. A run that was started from Python is a single text already."""
    return words[0] if len(words) == 1 else shlex.join(words)


def _asked(suite: Mapping[str, Any]) -> str:
    """Return the size of the suite as in '84 prompts (52 questions)'."""
    few = suite["size"] != suite["prompts"]
    return f"{suite['prompts']:,} prompts" + (f" ({suite['size']:,} questions)" if few else "")


def machine_text(environment: Mapping[str, Any], device: str) -> str:
    """Say in a few words what the model ran on."""
    gpus = environment.get("gpus") or []
    if device.startswith("cuda") and gpus:
        numbers = [int(n) for n in re.findall(r"cuda:(\d+)", device)] or [0]
        used = [str(gpus[n]["name"]) for n in numbers if n < len(gpus)]
        names = " and ".join(dict.fromkeys(used)) or "a GPU that is not listed"
        return f"{len(numbers)} of {len(gpus)} GPUs: {names}" if len(numbers) > 1 else names
    cpu = environment.get("cpu") or {}
    return f"{cpu.get('model') or 'CPU'} ({cpu.get('available') or '?'} cores)"


def revision(known: Mapping[str, Any] | None) -> str:
    """Say which commit was run, and whether it had changes."""
    if not known:
        return "revision unknown"
    return f"revision {known['commit'][:12]}{' with changes' if known['dirty'] else ''}"


def _method_facts(method: Mapping[str, Any], baseline: str) -> list[Fact]:
    resolved = ", ".join(f"{k}={_text(v)}" for k, v in method.get("resolved", {}).items())
    name = f"Method {method['label']}"
    return [Fact(name, _method(method, baseline)), Fact(f"{name}, as measured", resolved, code=True)]


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (list, dict)) else value_text(value)


def _sessions(manifest: Mapping[str, Any]) -> str:
    """Say when each session began and what had changed; '' for a run made in one session."""
    sessions = manifest.get("sessions", [])
    told = []
    for session in sessions if len(sessions) > 1 else ():
        if not session.get("measures", True):
            told.append(f"{session['started']} (nothing was measured in it)")
            continue
        changed = machine_changes(manifest["environment"], session["environment"])
        told.append(session["started"] + (f" (other {', '.join(changed)}: times do not compare)" if changed else ""))
    return "; ".join(told)


def _workers(manifest: Mapping[str, Any]) -> str:
    """Say what made the samples where several workers did: '2 on one machine: AMD EPYC, 2 cores'; '' elsewhere."""
    told = []
    for session in manifest.get("sessions", []):
        if not (workers := session.get("workers")):
            continue
        machines = len({worker["machine"] for worker in workers})
        kinds = dict.fromkeys(_device(worker["environment"]) for worker in workers)
        told.append(f"{len(workers)} on {machines} {'machine' if machines == 1 else 'machines'}: {'; '.join(kinds)}")
    return "; then ".join(told)


def _device(environment: Mapping[str, Any]) -> str:
    return ", ".join(gpu["name"] for gpu in environment["gpus"]) or _processor(environment)


def _method(method: Mapping[str, Any], baseline: str) -> str:
    options = ", ".join(f"{k}={value_text(v)}" for k, v in method["options"].items())
    reference = method.get("reference", baseline)
    held = f"its output is compared with that of {reference}" if reference != baseline else ""
    return "; ".join(filter(None, (method["summary"], options or "no options", method["paper"], held)))


def _processor(environment: Mapping[str, Any]) -> str:
    cpu, memory = environment.get("cpu") or {}, environment.get("memory_bytes")
    threads = (environment.get("threads") or {}).get("intra_op")
    text = f"{cpu.get('model')}, {cpu.get('cores')} cores, {cpu.get('available')} available"
    return text + (f", {threads} threads" if threads else "") + (f", {memory / 2**30:.1f} GiB" if memory else "")


def _setting(name: str, value: Any) -> str:
    return "the model's own" if name == "chat_template" and value is None else _short(value)


def _short(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else value_text(value)


FORMULA_OF = "specbench"  # the suite whose published speedups have a formula of their own
FEWEST = 3  # methods: of two there is no order to speak of
SIGNS: dict[Mark, str] = {"same": "✓", "part": "~", "other": "✕"}
NOTE = (
    "✓ the same, ~ the same family of models or some of the questions, ✕ another. Whether drafters and settings are "
    "those that were published is not known here. Speedups beside those of Spec-Bench are by its formula."
)


def published_beside(
    run: Run, overall: Mapping[str, SummaryRow], styles: Mapping[str, Style], ranked: Sequence[str]
) -> Table | None:
    """Return a row for each published number of a method of the run; None where there are none."""
    figures = {label: (overall[label].tau, overall[label].speedup) for label in ranked}
    rows = [_alike(one, overall[one.method]) for one in beside(run.manifest, figures) if one.entry is not None]
    if not rows:
        return None
    texts = ("model", "GPU", "compares", "source")
    numbers = ("τ", "published τ", "speedup", "published speedup")
    columns = [Column("method", False), *map(Column, numbers), *(Column(name, False) for name in texts)]
    cells = [_published_row(one, styles[one.method]) for label in ranked for one in rows if one.method == label]
    return Table(
        "published", columns, cells, "Published numbers beside this run's", notes=(*order_in_words(rows), NOTE)
    )


def _alike(one: Beside, row: SummaryRow) -> Beside:
    """Return the run's speedup by the formula of the published one."""
    of_suite = one.entry is not None and one.entry.suite == FORMULA_OF
    return replace(one, speedup=row.speedup_specbench) if of_suite else one


def order_in_words(rows: Sequence[Beside]) -> list[str]:
    """Say how the order of methods was published and how it is here, on the model and GPU with the most methods."""
    lists: dict[tuple[str, str], dict[str, Beside]] = {}
    for one in rows:
        if one.entry is not None and one.speedup is not None:
            lists.setdefault((one.entry.model, one.entry.gpu), {}).setdefault(one.entry.method, one)
    (model, gpu), most = max(lists.items(), key=lambda item: len(item[1]), default=(("", ""), {}))
    if len(most) < FEWEST:
        return []
    theirs = sorted(most, key=lambda name: -(most[name].entry.speedup))  # type: ignore[union-attr]
    ours = sorted(theirs, key=lambda name: -(most[name].speedup or 0.0))
    same = sum(ours.index(a) < ours.index(b) for a, b in combinations(theirs, 2))
    apart = all(comparable(one.marks) == "nothing" for one in most.values())
    lead = "No number of these compares with this run's; orders can be set side by side. " if apart else ""
    return [
        f"{lead}By speedup, the order published for {model} on {gpu} is {', '.join(theirs)}; here it is "
        f"{', '.join(most[name].method for name in ours)}. {same} of {comb(len(theirs), 2)} pairs stand in the same "
        "order, those counted too whose order is not sure here. Where model or machine are others, it may well differ."
    ]


def _published_row(one: Beside, style: Style) -> list[Cell]:
    entry = one.entry
    assert entry is not None
    return [
        style.cell(),
        figure(one.tau),
        figure(entry.tau),
        Cell(times(one.speedup), one.speedup),
        Cell(times(entry.speedup), entry.speedup),
        plain(f"{SIGNS[one.marks['model']]} {entry.model}", entry.model),
        plain(f"{SIGNS[one.marks['GPU']]} {entry.gpu}", entry.gpu),
        plain(comparable(one.marks)),
        plain(entry.source.removeprefix("https://")),
    ]
