"""Whether a preset holds for the run at hand: what it was made for, and what is here. Knows no method by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from specbench_ss.decoding.decoder import Decoder
from specbench_ss.decoding.target import Target
from specbench_ss.runs.config import RunConfig, decoding
from specbench_ss.runs.environment import environment
from specbench_ss.runs.manifest import plain
from specbench_ss.runs.preset import Preset
from specbench_ss.runs.suite import SuiteData

GREEDY = decoding({"temperature": 0})  # how presets are measured


def conditions(target: Target, decoded: str = GREEDY) -> dict[str, Any]:
    """What a measured choice depends on, JSON-ready. decoded: how tokens are chosen, as `words.decoding` says it."""
    here = environment()
    return {
        "model": target.name,
        "weights_hash": target.weights_hash,
        "device": target.device.type,
        "device_name": _device_name(target, here),
        "dtype": target.number_format,
        "engine": target.engine,
        "threads": (here["threads"] or {}).get("intra_op"),
        "torch": here["packages"]["torch"],
        "decoding": decoded,
    }


def _device_name(target: Target, here: Mapping[str, Any]) -> str:
    if target.device.type == "cuda":
        return ", ".join(map(torch.cuda.get_device_name, target.layers_on))
    return str(here["cpu"]["model"])


def preset_notes(config: RunConfig, target: Target, data: SuiteData, decoders: Mapping[str, Decoder]) -> Iterator[str]:
    """What the user should know of the run's presets: at most one sentence each on conditions, weights, questions."""
    here = conditions(target, decoding(config.as_dict() | {"stop": ()})) if config.presets else {}
    marks = {question.mark for question in data.questions}
    for preset in config.presets:
        name = f"preset {preset.file}"
        given = [file.sha256 for file in config.plugin if preset.method in file.methods]
        if preset.plugin and given and given != [preset.plugin["sha256"]]:
            yield f"{name} was made with another content of {preset.plugin['file']}"
        found = changed(preset.made_for, here)
        if found:
            yield f"{name} was made for other conditions: {found}"
        settings = "" if found else _settings(preset, config, decoders)
        if settings:
            yield f"{name} was made for other weights or settings of {preset.method}: {settings} differ"
        shared = len(marks.intersection(preset.prompts))
        if shared:
            yield f"{name} was chosen on {shared} of these {len(marks)} questions, which flatters it"


def changed(then: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Return what differs between two `conditions`, as 'device cuda, here cpu; dtype ...'; '' for nothing."""
    names = ["device", "device_name", "dtype", "engine"]
    # the hash depends on the dtype, and one model may lie in two folders
    names.append("weights_hash" if then.get("dtype") == here["dtype"] else "model")
    names += ["threads"] if here["device"] == "cpu" else []
    names += ["torch", "decoding"]
    found = [(name, then[name], here[name]) for name in names if name in then and then[name] != here[name]]
    return "; ".join(f"{name.replace('_', ' ')} {old}, here {new}" for name, old, new in found)


def _settings(preset: Preset, config: RunConfig, decoders: Mapping[str, Decoder]) -> str:
    """Names of what the preset's own options come down to here, and came to something else there."""
    for spec in config.methods:
        if spec.name == preset.method and spec.options == preset.options and preset.resolved:
            now = plain(decoders[spec.label].described())
            return ", ".join(name for name in now if now[name] != preset.resolved.get(name))
    return ""
