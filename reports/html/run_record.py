"""What was run, and on what: the record that lets somebody else run it again."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from specbench_ss.options import value_text
from specbench_ss.reports.html.page_parts import Fact
from specbench_ss.results.concurrency import at_a_time
from specbench_ss.results.sample_checks import NOT_HELD
from specbench_ss.results.text import parameters
from specbench_ss.runs.config import decoding
from specbench_ss.runs.environment import machine_changes
from specbench_ss.runs.records import KILLED, Run

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
    on = machine(here, model["device"])
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


def machine(environment: Mapping[str, Any], device: str) -> str:
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
