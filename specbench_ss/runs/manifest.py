"""Manifest of a run directory: methods, model, questions and settings, and its comparison with a wanted run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from specbench_ss import storage, user_files
from specbench_ss.engine.decoder import Decoder, reference_spec
from specbench_ss.engine.target import Target
from specbench_ss.engine.timing import cuda_settings
from specbench_ss.errors import UserError
from specbench_ss.models.checkpoint import TrainingInfo
from specbench_ss.models.load import template_hash
from specbench_ss.options import MethodSpec, option_values, value_text
from specbench_ss.redaction import redacted_words
from specbench_ss.runs.config import GOODPUT, Endpoint, RunConfig
from specbench_ss.runs.environment import environment
from specbench_ss.runs.environment import now as now
from specbench_ss.runs.records import baseline_of
from specbench_ss.suite import SuiteData
from specbench_ss.version import __version__

Amount = Annotated[float, Meta(ge=0)]


def _struct_type(required: dict[str, Any], optional_fields: dict[str, Any] | None = None) -> Any:
    """Return the type of a JSON object of the manifest, for its check. optional_fields: entries that may be missing."""
    optional = [(name, kind, None) for name, kind in (optional_fields or {}).items()]
    return msgspec.defstruct("Form", [*required.items(), *optional])


def _list_of(kind: Any) -> Any:
    return GenericAlias(list, (kind,))


JsonObject = dict[str, Any]
REVISION = _struct_type({"commit": str, "dirty": bool})
ENVIRONMENT = _struct_type(
    {"python": str, "platform": str, "packages": JsonObject, "gpus": _list_of(_struct_type({"name": str}))},
    {
        "cpu": JsonObject | None,
        "threads": JsonObject | None,
        "memory_bytes": float | None,
        "driver": str | None,
        "cuda": str | None,
        "revision": REVISION | None,
    },
)
CONFIG = _struct_type(
    {"temperature": float, "top_p": float, "top_k": int, "repeats": int},
    {
        "verification": str,
        "stop": list[str],
        "methods": _list_of(_struct_type({"name": str, "options": JsonObject}, {"copy": int})),
        "presets": _list_of(_struct_type({"method": str})),
        "plugin": _list_of(_struct_type({"file": str, "sha256": str})),
        "endpoints": list[Endpoint],
        "concurrency": list[int],
        "rate": list[float],
        "data": str | None,
        "engine": str | None,
    },
)
SUITE = _struct_type(
    {"name": str, "edition": str, "content_hash": str, "size": int, "prompts": int, "notes": list[str]},
    {"max_new_tokens": int | None},
)
SERVED_MODEL = _struct_type({"name": str, "dtype": str, "device": str})  # of a server
MODEL = _struct_type(
    {"name": str, "hash": str, "parameters": int, "dtype": str, "device": str, "context_length": int},
    {
        "chat_template": str | None,
        "generation_config": dict[str, JsonObject],
        "engine": str,
        "dtype_choice": str,
        "origin": _struct_type({}, {"gguf": _struct_type({}, {"types": JsonObject | None}) | None}) | None,
        "attention": str | None,
        "computed": str | None,
        "quantised": str,
        "layer_devices": dict[str, list[Any]],
    },
)
METHOD = _struct_type(
    {"label": str, "name": str, "summary": str, "paper": str, "lossless": bool, "options": JsonObject},
    {
        "resolved": JsonObject,
        "training_info": TrainingInfo | None,
        "advised": JsonObject,
        "measured": JsonObject,
        "stateful": bool,
        "reference": str,
        "error": str,  # why the method is not part of the run
        "served": _struct_type({}, {"software": str | None, "tokens": str | None, "acceptance": str | None}),
    },
)
SESSION = _struct_type(
    {"started": str, "environment": ENVIRONMENT},
    {"workers": _list_of(_struct_type({"machine": str, "environment": ENVIRONMENT})), "measures": bool, "session": int},
)
LIMITS = _struct_type(
    {},
    {
        "read_bytes_per_s": Amount | None,
        "flops_per_s": dict[str, Amount] | None,
        "launch_s": Amount | None,
        "busy": str,
    },
)
SHAPE = _struct_type(  # cost of a forward pass
    dict.fromkeys(("weight_bytes", "matrix_parameters", "kv_bytes", "attention_flops"), Amount)
    | {"windows": list[Amount | None]},
    {
        "drafter": _struct_type({"weight_bytes": Amount, "matrix_parameters": Amount}) | None,
        "extra_work": _struct_type({}, dict.fromkeys(("step", "node", "dropped"), Amount)) | None,
    },
)
TRACE = _struct_type(  # profile of one request
    dict.fromkeys(("tokens", "wall_s", "busy_share", "span_s"), Amount)
    | {
        "what": str,
        "gaps": _struct_type(dict.fromkeys(("number", "mean_s", "longest_s"), Amount)),
        "timeline": list[Amount],
        "launches_per_token": Amount | None,
    }
)
REQUIRED = {
    "format": int,
    "version": str,
    "command": list[str],
    "config": CONFIG,
    "fingerprint": str,
    "suite": SUITE,
    "model": MODEL,
    "methods": _list_of(METHOD),
    "environment": ENVIRONMENT,
    "created": str,
    "finished": str | None,
    "status": str,
}
OPTIONAL = {  # added during the run
    "warnings": list[str],
    "sessions": _list_of(SESSION),
    "repeats_made": int | None,
    "n_sessions": int | None,
    "blocks": int | None,
    "baseline": str | None,
    # shapes: SHAPE if it has a number of bytes; traces: TRACE if it has a timeline
    "machine": _struct_type({}, {"limits": LIMITS | None, "shapes": dict[str, JsonObject | None] | None}) | None,
    "traces": dict[str, JsonObject | None] | None,
    "target_ci": _struct_type({"why": str}) | None,
    "goodput": _struct_type({}, dict.fromkeys(GOODPUT, Amount)) | None,
}
MANIFEST_TYPE, SERVED_MANIFEST_TYPE = (
    _struct_type(REQUIRED, OPTIONAL),
    _struct_type(REQUIRED | {"model": SERVED_MODEL}, OPTIONAL),
)

FORMAT = 1
MANIFEST = "manifest.json"

IDENTITY = {  # must be equal, with configuration and methods, for two sessions to share a directory
    ("suite", "content_hash"): "suite content",
    ("model", "hash"): "model hash",
    ("model", "dtype"): "dtype",
    ("model", "device"): "device",
    ("model", "chat_template"): "chat template",
    ("model", "generation_config"): "generation configuration",
}
HASH_SHOWN = 16  # characters
NOT_COMPARED = ("plugin", "engine")  # plugins are compared by content, engines as resolved


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of the run directory `path`. Raises UserError if it is missing or incomplete."""
    file = path / MANIFEST
    try:
        manifest = user_files.parse(storage.read_bytes(file))
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            version = manifest.get("format") if isinstance(manifest, dict) else None
            if isinstance(version, int) and version > FORMAT:
                message = f"its format is {version}, and this version reads {FORMAT}"
                raise UserError(f"{file} is of a newer version of ssbench: {message}")
            raise UserError(f"{file} is not the manifest of a run that this version can read")
        _check_manifest(manifest)
    except OSError as e:
        if not path.exists():
            raise UserError(f"run directory '{path}' does not exist") from e
        raise UserError(f"'{path}' is not a run directory: cannot read {MANIFEST}: {e.strerror}") from e
    except ValueError as e:
        raise UserError(f"{file} is damaged: {e}") from e
    return manifest


def newest_runs(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return the run directories in a folder, and those of runs of methods and servers, with their manifests.

    The newest comes first; what cannot be read is left out.
    """
    found = []
    for file in (*folder.glob(f"*/{MANIFEST}"), *folder.glob(f"*/*/{MANIFEST}")):
        with contextlib.suppress(UserError):
            found.append((file.parent, read_manifest(file.parent)))
    return sorted(found, key=lambda one: (str(one[1]["created"]), str(one[0])), reverse=True)


def _check_manifest(manifest: dict[str, Any]) -> None:
    """Raise ValueError for a missing or mistyped field, and for inconsistent methods."""
    served = isinstance(manifest.get("config"), dict) and manifest["config"].get("endpoints")
    user_files.convert(manifest, SERVED_MANIFEST_TYPE if served else MANIFEST_TYPE)
    _check_parts("machine.shapes", (manifest.get("machine") or {}).get("shapes"), "weight_bytes", SHAPE, required=True)
    _check_parts("traces", manifest.get("traces"), "timeline", TRACE)
    labels = [method["label"] for method in manifest["methods"]]
    if not labels or len(set(labels)) < len(labels):
        raise ValueError("it has no method, or one method twice")
    if baseline_of(manifest) not in labels and manifest.get("baseline"):
        raise ValueError(f"method {manifest['baseline']}, its baseline, is missing")
    unknown = {method.get("reference", labels[0]) for method in manifest["methods"]} - set(labels)
    if unknown:
        raise ValueError(f"method {min(unknown)} is a reference, but is missing")


def _check_parts(
    place: str, parts: Mapping[str, Any] | None, mark: str, kind: type[Any], required: bool = False
) -> None:
    """Raise ValueError if a part with a value of `mark` is not of the type.

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
    """Compare the `RunConfig`s of two manifests. Raises UserError with each differing field and both values."""
    check_same_plugins(path, stored, wanted)
    new = json.loads(json.dumps(wanted))  # tuples become lists, as in the stored one
    fields = [name for name in new if name not in NOT_COMPARED and stored.get(name) != new[name]]
    named = {name: "tasks" if name == "categories" else name.replace("_", "-") for name in fields}
    _raise_differences(path, [(named[name], _text(stored.get(name)), _text(new[name])) for name in fields])


def check_same_plugins(path: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Compare plugin files by content, as `check_same_config` does."""
    old, new = ({file["sha256"]: file["file"] for file in config.get("plugin", ())} for config in (stored, wanted))
    if set(old) != set(new):
        plugins = [
            " ".join(f"--plugin {file} ({sha256[:12]})" for sha256, file in files.items()) for files in (old, new)
        ]
        raise UserError(
            f"--resume: the run in {path} has {plugins[0] or 'no plugin file'}, not {plugins[1] or 'none'}"
            f"{'; give the same again' if old else ''}"
        )


def same_run(path: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored manifest with the new session added.

    Raises UserError if the stored manifest describes another run.
    """
    stored = read_manifest(path)
    check_same_config(path, stored["config"], wanted["config"])
    differing = [(name, stored[part].get(key), wanted[part].get(key)) for (part, key), name in IDENTITY.items()]
    _raise_differences(
        path, [(name, str(old)[:HASH_SHOWN], str(new)[:HASH_SHOWN]) for name, old, new in differing if old != new]
    )
    stored_engine, engine = engine_of(stored), engine_of(wanted)
    if stored_engine != engine:  # their times are not comparable
        raise UserError(
            f"--resume: the run in {path} has engine {stored_engine}, this session {engine}; "
            f"use --engine {stored_engine}"
        )
    _raise_differences(path, list(_differing_methods(stored, wanted)))
    stored["methods"] = [  # one that did not load may load now, or the reverse
        old | {"error": new["error"]} if "error" in new else new if "error" in old else old
        for old, new in zip(stored["methods"], wanted["methods"], strict=True)
    ]
    return {**stored, "sessions": [*stored.get("sessions", []), *wanted.get("sessions", [])]}


def engine_of(manifest: Mapping[str, Any]) -> str:
    """Return the resolved engine of a run, eager or graph; '' for a server."""
    return str(manifest["model"].get("engine", ""))


def _raise_differences(path: Path, differing: list[tuple[str, str, str]]) -> None:
    """Raise UserError if anything differs. differing: (name, stored value, wanted value) of each difference."""
    if differing:
        differences = "; ".join(f"{name} {old}, not {new}" for name, old, new in differing)
        raise UserError(f"--resume: the run in {path} has {differences}")


def _differing_methods(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the differences in weights and settings of methods between two manifests."""
    old, new = (
        {method["label"]: method.get("resolved", {}) for method in manifest["methods"]} for manifest in (stored, wanted)
    )
    if list(old) != list(new):
        yield "methods", ", ".join(old), ", ".join(new)
        return
    for label in (label for label in old if old[label] and new[label]):  # one that did not load has none
        for key in old[label] | new[label]:
            a, b = old[label].get(key, "nothing"), new[label].get(key, "nothing")
            if a != b:
                yield f"method {label} with {key}", _text(a), _text(b)


def _text(value: Any) -> str:
    """Return a value as text: methods by their labels, and texts with spaces in quotes."""
    if isinstance(value, list):
        return ",".join(map(_text, value)) or "none"
    if isinstance(value, dict) and value.keys() >= {"name", "options"}:
        return MethodSpec(**value).label
    return (value if value.split() == [value] else repr(value)) if isinstance(value, str) else value_text(value)


def manifest_for(
    config: RunConfig, target: Target, data: SuiteData, methods: Sequence[Mapping[str, Any]], command: Sequence[str]
) -> dict[str, Any]:
    """Return the manifest of a run that is about to start, JSON-ready. methods: entries."""
    model = {
        "name": target.name,
        "hash": target.weights_hash,
        "parameters": target.parameter_count,
        "dtype": target.number_format,
        "device": target.device_names,
        **({"cuda_settings": cuda_settings()} if target.device.type == "cuda" else {}),
        **(
            {"layer_devices": {str(device): layers for device, layers in target.layer_devices.items()}}
            if target.is_multi_device
            else {}
        ),
        "context_length": target.context_length,
        "attention": getattr(target, "attention", None),
        "computed": getattr(target, "kernel_summary", None),
        "engine": getattr(target, "engine", "eager"),
        **({"quantised": quantization} if (quantization := getattr(target, "quantised", "")) else {}),
        "vocab_size": target.vocab_size,
        "is_lab": target.is_lab,
        "chat_template": template_hash(getattr(target, "tokenizer", None)),
        "generation_config": plain(
            {
                "applied": target.processors.applied() if target.processors else {},
                "not_applied": target.settings_not_applied,
            }
        ),
        "origin": getattr(target, "origin", {}),
    }
    return manifest_of(config, data, command, model, methods)


def manifest_of(
    config: RunConfig,
    data: SuiteData,
    command: Sequence[str],
    model: Mapping[str, Any],
    methods: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the manifest of a run of methods or servers. model, methods: their entries."""
    here, started = environment(), now()
    return {
        "format": FORMAT,
        "version": __version__,
        "command": redacted_words(command),
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


MOST_DECLARED = 1_000_000  # characters that a method may declare, as JSON


def method_entry(label: str, decoder: Decoder) -> dict[str, Any]:
    """Return what a method declares, read once. Raises ValueError or TypeError for what a manifest cannot contain."""
    options = decoder.options
    entry = {
        "label": label,
        "options": option_values(options),
        "resolved": decoder.metadata(),
        "reference": reference_spec(decoder, options).label,
        **{name: getattr(decoder, name) for name in ("name", "lossless", "stateful", "summary", "paper")},
        **{name: dict(getattr(decoder, name)) for name in ("training_info", "advised", "measured")},
    }
    stored = plain(entry)
    user_files.convert(stored, METHOD)
    if len(str(stored)) > MOST_DECLARED:
        raise ValueError(f"more than {MOST_DECLARED:,} characters")
    return dict(stored)


def plain(values: dict[str, Any]) -> Any:
    """Return the values as they will be read back from the file. Raises ValueError for NaN or infinity."""
    return json.loads(json.dumps(values, default=str, allow_nan=False))
