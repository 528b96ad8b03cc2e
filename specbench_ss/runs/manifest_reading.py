"""Read the manifest of a run directory, check that it is whole, and compare it with the run that is wanted.

This module knows the file, but not how a manifest is made.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specbench_ss.errors import UserError
from specbench_ss.files import records
from specbench_ss.method_spec import MethodSpec
from specbench_ss.options import value_text
from specbench_ss.runs.baseline import baseline_of
from specbench_ss.runs.manifest_form import AskedMethod, ManifestForm, ServedForm, Shape, Trace

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
        manifest = records.parse(file.read_bytes())
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise UserError(_unreadable(file, manifest))
        _check_whole(manifest)
    except OSError as e:
        raise UserError(f"{path} is not a run directory: cannot read {MANIFEST}: {e.strerror}") from e
    except ValueError as e:
        raise UserError(f"{file} is damaged: {e}") from e
    return manifest


def _unreadable(file: Path, manifest: Any) -> str:
    """Say why what was read is no manifest of this version."""
    form = manifest.get("format") if isinstance(manifest, dict) else None
    if isinstance(form, int) and form > FORMAT:
        return f"{file} is of a newer version of ssbench: its format is {form}, and this version reads {FORMAT}"
    return f"{file} is not the manifest of a run that this version can read"


def _check_whole(manifest: dict[str, Any]) -> None:
    """Raise ValueError where a field is missing or of another type, or where the methods do not fit together."""
    served = isinstance(manifest.get("config"), dict) and manifest["config"].get("endpoints")
    records.convert(manifest, ServedForm if served else ManifestForm)
    _check_parts("machine.shapes", (manifest.get("machine") or {}).get("shapes"), "weight_bytes", Shape, required=True)
    _check_parts("traces", manifest.get("traces"), "timeline", Trace)
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
                records.convert(part, kind)
            except ValueError as error:
                raise ValueError(f"in {place}.{name}, {error}") from None
        elif part and required and mark not in part:
            raise ValueError(f"in {place}.{name}, it lacks {mark}")


def check_same_config(path: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Compare two `RunConfig`s as manifests hold them. Raises UserError with each differing field and both values."""
    check_same_plugins(path, stored, wanted)
    new = _plain(wanted)
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
    differing = [(name, _at(stored, keys), _at(wanted, keys)) for keys, name in IDENTITY.items()]
    _refuse(path, [(name, str(old)[:HASH_SHOWN], str(new)[:HASH_SHOWN]) for name, old, new in differing if old != new])
    _check_same_engine(path, engine_of(stored), engine_of(wanted))
    _refuse(path, list(_differing_methods(stored, wanted)))
    return {**stored, "sessions": [*stored.get("sessions", []), *wanted.get("sessions", [])]}


def engine_of(manifest: Mapping[str, Any]) -> str:
    """Return the engine that made a run's steps, eager or graph: what `auto` came to. A served model has none: ''."""
    return str(manifest["model"].get("engine", ""))


def _check_same_engine(path: Path, begun: str, here: str) -> None:
    """Raise UserError where a run would go on by another engine, so that its times would be those of two."""
    if begun != here:
        raise UserError(
            f"--resume: the run in {path} was begun with engine {begun}, and this session has engine {here}: give "
            f"--engine {begun}"
        )


def _refuse(path: Path, differing: list[tuple[str, str, str]]) -> None:
    """Raise UserError if anything differs. differing: a name, its stored value and its wanted value, for each."""
    if differing:
        what = "; ".join(f"{name} {old}, not {new}" for name, old, new in differing)
        raise UserError(f"--resume: the run in {path} has {what}")


def _differing_methods(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the weights and settings of methods that are not those that the run was begun with."""
    old, new = _resolved(stored), _resolved(wanted)
    if list(old) != list(new):
        yield "methods", ", ".join(old), ", ".join(new)
        return
    for label in old:
        for key in old[label] | new[label]:
            a, b = old[label].get(key, "nothing"), new[label].get(key, "nothing")
            if a != b:
                yield f"method {label} with {key}", _text(a), _text(b)


def _resolved(manifest: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {method["label"]: method.get("resolved", {}) for method in manifest["methods"]}


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration as it is read back from a file, where tuples are lists."""
    plain: dict[str, Any] = json.loads(json.dumps(config))
    return plain


def _text(value: Any) -> str:
    """Return a value as text for people: methods by their labels, and texts with spaces in quotes."""
    if isinstance(value, list):
        return ",".join(_label(entry) for entry in value) or "none"
    return (value if value.split() == [value] else repr(value)) if isinstance(value, str) else value_text(value)


def _label(entry: Any) -> str:
    try:
        asked = records.convert(entry, AskedMethod)
    except ValueError:
        return _text(entry)
    return MethodSpec(asked.name, asked.options, asked.copy).label


def _at(data: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data
