"""Manifest of a run directory: methods, model, questions and settings, and its comparison with a wanted run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from specbench_ss import user_files
from specbench_ss.engine.decoder import Decoder, references
from specbench_ss.engine.target import Target
from specbench_ss.engine.timing import cuda_settings
from specbench_ss.errors import UserError
from specbench_ss.models.checkpoint import TrainingInfo
from specbench_ss.models.load import template_hash
from specbench_ss.options import MethodSpec, option_values, value_text
from specbench_ss.runs.config import RunConfig
from specbench_ss.runs.environment import environment
from specbench_ss.runs.environment import now as now
from specbench_ss.runs.records import baseline_of
from specbench_ss.suite import SuiteData
from specbench_ss.version import __version__

Amount = Annotated[float, Meta(ge=0)]


def _form(needed: dict[str, Any], more: dict[str, Any] | None = None) -> Any:
    """Return the type of an object of the manifest, to check it by. more: the entries that may be missing."""
    optional = [(name, kind, None) for name, kind in (more or {}).items()]
    return msgspec.defstruct("Form", [*needed.items(), *optional])


def _each(kind: Any) -> Any:
    return GenericAlias(list, (kind,))


Facts = dict[str, Any]
REVISION = _form({"commit": str, "dirty": bool})
ENVIRONMENT = _form(
    {"python": str, "platform": str, "packages": Facts, "gpus": _each(_form({"name": str}))},
    {
        "cpu": Facts | None,
        "threads": Facts | None,
        "memory_bytes": float | None,
        "driver": str | None,
        "cuda": str | None,
        "revision": REVISION | None,
    },
)
CONFIG = _form(
    {"temperature": float, "top_p": float, "top_k": int, "repeats": int},
    {
        "stop": list[str],
        "methods": _each(_form({"name": str, "options": Facts}, {"copy": int})),
        "presets": _each(_form({"method": str})),
        "plugin": _each(_form({"file": str, "sha256": str})),
        "endpoints": _each(_form({"label": str, "url": str}, {"model": str | None})),
        "concurrency": list[int],
        "data": str | None,
        "engine": str | None,
    },
)
SUITE = _form(
    {"name": str, "edition": str, "content_hash": str, "size": int, "prompts": int, "notes": list[str]},
    {"max_new_tokens": int | None},
)
SERVED_MODEL = _form({"name": str, "dtype": str, "device": str})  # of served engines: little is known
MODEL = _form(
    {"name": str, "hash": str, "parameters": int, "dtype": str, "device": str, "context_length": int},
    {
        "chat_template": str | None,
        "engine": str,
        "dtype_choice": str,
        "origin": _form({}, {"gguf": _form({}, {"types": Facts | None}) | None}) | None,
        "attention": str | None,
        "computed": str | None,
        "quantised": str,
        "layer_devices": dict[str, list[Any]],
    },
)
METHOD = _form(
    {"label": str, "name": str, "summary": str, "paper": str, "lossless": bool, "options": Facts},
    {
        "resolved": Facts,
        "training_info": TrainingInfo | None,
        "advised": Facts,
        "reference": str,
        "served": _form({}, {"software": str | None, "tokens": str | None, "acceptance": str | None}),
    },
)
SESSION = _form(
    {"started": str, "environment": ENVIRONMENT},
    {"workers": _each(_form({"machine": str, "environment": ENVIRONMENT})), "measures": bool},
)
LIMITS = _form(
    {},
    {
        "read_bytes_per_s": Amount | None,
        "flops_per_s": dict[str, Amount] | None,
        "launch_s": Amount | None,
        "busy": str,
    },
)
SHAPE = _form(  # cost of a forward pass
    dict.fromkeys(("weight_bytes", "matrix_parameters", "kv_bytes", "attention_flops"), Amount)
    | {"windows": list[Amount | None]},
    {
        "drafter": _form({"weight_bytes": Amount, "matrix_parameters": Amount}) | None,
        "own": _form({}, dict.fromkeys(("step", "node", "dropped"), Amount)) | None,
    },
)
TRACE = _form(  # profile of one request
    dict.fromkeys(("tokens", "wall_s", "busy_share", "span_s"), Amount)
    | {
        "what": str,
        "gaps": _form(dict.fromkeys(("number", "mean_s", "longest_s"), Amount)),
        "timeline": list[Amount],
        "launches_per_token": Amount | None,
    }
)
WHOLE = {
    "format": int,
    "version": str,
    "command": list[str],
    "config": CONFIG,
    "fingerprint": str,
    "suite": SUITE,
    "model": MODEL,
    "methods": _each(METHOD),
    "environment": ENVIRONMENT,
    "created": str,
    "finished": str | None,
    "status": str,
}
LATER = {  # what a run adds
    "warnings": list[str],
    "sessions": _each(SESSION),
    "repeats_made": int | None,
    "baseline": str | None,
    # shapes: of those with a number of bytes, SHAPE; traces: of those with a timeline, TRACE
    "machine": _form({}, {"limits": LIMITS | None, "shapes": dict[str, Facts | None] | None}) | None,
    "traces": dict[str, Facts | None] | None,
    "target_ci": _form({"why": str}) | None,
}
FORM, SERVED_FORM = _form(WHOLE, LATER), _form(WHOLE | {"model": SERVED_MODEL}, LATER)

FORMAT = 1
MANIFEST = "manifest.json"

IDENTITY = {  # besides configuration and methods, what must be the same for two sessions to share a directory
    ("suite", "content_hash"): "suite content",
    ("model", "hash"): "model hash",
    ("model", "dtype"): "dtype",
    ("model", "device"): "device",
    ("model", "chat_template"): "chat template",
}
HASH_SHOWN = 16  # characters
NOT_COMPARED = ("plugin", "engine")  # plugins by their content; of engines what counts is the one that was found


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of the run directory `path`. Raises UserError where it cannot be read or is not whole."""
    file = path / MANIFEST
    try:
        manifest = user_files.parse(file.read_bytes())
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            form = manifest.get("format") if isinstance(manifest, dict) else None
            if isinstance(form, int) and form > FORMAT:
                newer = f"its format is {form}, and this version reads {FORMAT}"
                raise UserError(f"{file} is of a newer version of ssbench: {newer}")
            raise UserError(f"{file} is not the manifest of a run that this version can read")
        _check_whole(manifest)
    except OSError as e:
        raise UserError(f"{path} is not a run directory: cannot read {MANIFEST}: {e.strerror}") from e
    except ValueError as e:
        raise UserError(f"{file} is damaged: {e}") from e
    return manifest


def _check_whole(manifest: dict[str, Any]) -> None:
    """Raise ValueError where a field is missing or of another type, or where the methods do not fit together."""
    served = isinstance(manifest.get("config"), dict) and manifest["config"].get("endpoints")
    user_files.convert(manifest, SERVED_FORM if served else FORM)
    _check_parts("machine.shapes", (manifest.get("machine") or {}).get("shapes"), "weight_bytes", SHAPE, required=True)
    _check_parts("traces", manifest.get("traces"), "timeline", TRACE)
    labels = [method["label"] for method in manifest["methods"]]
    if not labels or len(set(labels)) < len(labels):
        raise ValueError("it names no method, or one method twice")
    if baseline_of(manifest) not in labels and manifest.get("baseline"):
        raise ValueError(f"method {manifest['baseline']}, its baseline, is missing")
    strangers = {method.get("reference", labels[0]) for method in manifest["methods"]} - set(labels)
    if strangers:
        raise ValueError(f"method {min(strangers)} is named as a reference, but is missing")


def _check_parts(
    place: str, parts: Mapping[str, Any] | None, mark: str, kind: type[Any], required: bool = False
) -> None:
    """Raise ValueError where a part that has a value of `mark` is not of the type.

    parts: by name. required: every part must have an entry `mark`, which may be None.
    """
    for name, part in (parts or {}).items():
        if part and part.get(mark) is not None:
            try:
                user_files.convert(part, kind)
            except ValueError as error:
                raise ValueError(f"in {place}.{name}, {error}") from None
        elif part and required and mark not in part:
            raise ValueError(f"in {place}.{name}, it lacks {mark}")


def check_same_config(path: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Compare two `RunConfig`s as manifests hold them. Raises UserError with each differing field and both values."""
    check_same_plugins(path, stored, wanted)
    new = json.loads(json.dumps(wanted))  # as it is read back from a file, where tuples are lists
    fields = [name for name in new if name not in NOT_COMPARED and stored.get(name) != new[name]]
    _refuse(path, [(name.replace("_", "-"), _text(stored.get(name)), _text(new[name])) for name in fields])


def check_same_plugins(path: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Compare the files that methods are defined in, as `check_same_config` does: by content, not by path."""
    old, new = ({file["sha256"]: file["file"] for file in config.get("plugin", ())} for config in (stored, wanted))
    if set(old) != set(new):
        told = [" ".join(f"--plugin {file} ({sha256[:12]})" for sha256, file in files.items()) for files in (old, new)]
        raise UserError(
            f"--resume: the run in {path} was begun with {told[0] or 'no plugin file'}, not with {told[1] or 'none'}"
            f"{': give the same again' if old else ''}"
        )


def same_run(path: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored manifest with the new session added to it.

    Raises UserError where the stored manifest does not describe the wanted run.
    """
    stored = read_manifest(path)
    check_same_config(path, stored["config"], wanted["config"])
    differing = [(name, stored[part].get(key), wanted[part].get(key)) for (part, key), name in IDENTITY.items()]
    _refuse(path, [(name, str(old)[:HASH_SHOWN], str(new)[:HASH_SHOWN]) for name, old, new in differing if old != new])
    begun, here = engine_of(stored), engine_of(wanted)
    if begun != here:  # its times would be those of two engines
        raise UserError(
            f"--resume: the run in {path} was begun with engine {begun}, and this session has engine {here}: give "
            f"--engine {begun}"
        )
    _refuse(path, list(_differing_methods(stored, wanted)))
    return {**stored, "sessions": [*stored.get("sessions", []), *wanted.get("sessions", [])]}


def engine_of(manifest: Mapping[str, Any]) -> str:
    """Return the engine that made a run's steps, eager or graph: what `auto` came to. A served model has none: ''."""
    return str(manifest["model"].get("engine", ""))


def _refuse(path: Path, differing: list[tuple[str, str, str]]) -> None:
    """Raise UserError if anything differs. differing: a name, its stored value and its wanted value, for each."""
    if differing:
        what = "; ".join(f"{name} {old}, not {new}" for name, old, new in differing)
        raise UserError(f"--resume: the run in {path} has {what}")


def _differing_methods(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the weights and settings of methods that are not those that the run was begun with."""
    old, new = ({method["label"]: method.get("resolved", {}) for method in of["methods"]} for of in (stored, wanted))
    if list(old) != list(new):
        yield "methods", ", ".join(old), ", ".join(new)
        return
    for label in old:
        for key in old[label] | new[label]:
            a, b = old[label].get(key, "nothing"), new[label].get(key, "nothing")
            if a != b:
                yield f"method {label} with {key}", _text(a), _text(b)


def _text(value: Any) -> str:
    """Return a value as text for people: methods by their labels, and texts with spaces in quotes."""
    if isinstance(value, list):
        return ",".join(map(_text, value)) or "none"
    if isinstance(value, dict) and value.keys() >= {"name", "options"}:
        return MethodSpec(**value).label
    return (value if value.split() == [value] else repr(value)) if isinstance(value, str) else value_text(value)


def manifest_for(
    config: RunConfig, target: Target, data: SuiteData, decoders: Mapping[str, Decoder], command: Sequence[str]
) -> dict[str, Any]:
    """Return the manifest of a run that is about to start, as JSON-ready data.

    Raises UserError for a reference that `references` refuses.
    """
    model = {
        "name": target.name,
        "hash": target.weights_hash,
        "parameters": target.parameter_count,
        "dtype": target.number_format,
        "device": target.device_names,
        **({"cuda_settings": cuda_settings()} if target.device.type == "cuda" else {}),
        **(
            {"layer_devices": {str(at): layers for at, layers in target.layer_devices.items()}}
            if target.is_multi_device
            else {}
        ),
        "context_length": target.context_length,
        "attention": getattr(target, "attention", None),
        "computed": getattr(target, "computed", None),
        "engine": getattr(target, "engine", "eager"),
        **({"quantised": held} if (held := getattr(target, "quantised", "")) else {}),
        "vocab_size": target.vocab_size,
        "is_lab": target.is_lab,
        "chat_template": template_hash(getattr(target, "tokenizer", None)),
        "origin": getattr(target, "origin", {}),
    }
    named = references(decoders)
    methods = [_method_entry(label, decoder, named[label]) for label, decoder in decoders.items()]
    return manifest_of(config, data, command, model, methods)


def manifest_of(
    config: RunConfig,
    data: SuiteData,
    command: Sequence[str],
    model: Mapping[str, Any],
    methods: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the manifest of a run, whatever answers in it. model, methods: what it says of these."""
    here, started = environment(), now()
    return {
        "format": FORMAT,
        "version": __version__,
        "command": list(command),
        "config": config.as_dict(),
        "fingerprint": config.fingerprint,
        "suite": {
            "name": data.name,
            "edition": data.edition,
            "content_hash": data.content_hash,
            "size": len(data.questions),
            "prompts": sum(len(q.turns) for q in data.questions),
            "max_new_tokens": config.max_new_tokens or data.max_new_tokens,
            "notes": list(data.notes),
        },
        "model": dict(model),
        "methods": list(methods),
        "environment": here,
        "sessions": [{"started": started, "environment": here}],  # one more for each --resume
        "created": started,
        "finished": None,
        "status": "running",
    }


def _method_entry(label: str, decoder: Decoder, reference: str) -> dict[str, Any]:
    options = decoder.options
    return {
        "label": label,
        "name": decoder.name,
        "options": plain(option_values(options)),
        "resolved": plain(decoder.metadata()),
        "training_info": plain(dict(decoder.training_info)),
        "advised": plain(dict(decoder.advised)),
        "lossless": decoder.lossless,
        "stateful": decoder.stateful,
        "reference": reference,
        "summary": decoder.summary,
        "paper": decoder.paper,
    }


def plain(values: dict[str, Any]) -> Any:
    """Return the values as they will be read back from the file."""
    return json.loads(json.dumps(values, default=str))
