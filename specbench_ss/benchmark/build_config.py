"""From options, given on a command line, in a file or in Python, to a `RunConfig`. Imports nothing heavy.

Whoever gives them, one form comes out and the same mistakes are found; messages name an option as the command line has
it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

from specbench_ss.benchmark.asked import check_plugins, method_specs
from specbench_ss.benchmark.asked_endpoints import MODEL as SERVED_MODEL
from specbench_ss.benchmark.asked_endpoints import endpoints_of, in_flight
from specbench_ss.decoding.sampling import COLDEST
from specbench_ss.errors import UserError, did_you_mean, known_words
from specbench_ss.models.chat_templates import template_text
from specbench_ss.models.devices import device_names
from specbench_ss.models.quantising import QUANTIZE
from specbench_ss.number_formats import DTYPES
from specbench_ss.options import MOST_SEED, encodable, plain_number, positive, value_text, whole_number
from specbench_ss.runs.config import MOST_REPEATS, Engine, Goal, Recording, RunConfig
from specbench_ss.runs.preset import read_preset

LEAST = {"limit": 0, "repeats": 1, "warmup": 0, "max_new_tokens": 1, "top_k": 0, "seed": 0}  # of whole numbers
OPTIONAL = ("limit", "max_new_tokens", "chat_template")  # options that may be None
FLOOR = 0.01  # half the width below which no interval is: `intervals.TIMING_FLOOR`, which is not imported here
CHOICES = {
    "dtype": DTYPES,
    "history": ("reference", "own"),
    "order": ("suite", "tasks"),
    "engine": get_args(Engine),
    "quantize": QUANTIZE,
}
TEXTS = ("suite", "model", "device", "chat_template")


def as_options(content: Mapping[Any, Any], known: set[str], place: str | Path) -> dict[str, Any]:
    """Values as YAML or Python has them, in the form that the command line has them in; None is as if not given.

    known: names of the options. place: a file, or 'run()', for messages. Raises UserError for an unknown name, or for
    a `set`, `stop` or `plugin` that is none.
    """
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise UserError(f"{place}: no option {str(key)!r}{did_you_mean(name, known)}")
        if value is None:
            continue
        if name == "set":
            values[name] = _set_items(value, place)
        elif name in ("stop", "plugin", "endpoint", "label", "endpoint_model", "api_key_env"):
            values[name] = [os.fspath(value)] if isinstance(value, (str, Path)) else _texts(value, place, name)
        else:
            listed = isinstance(value, (list, tuple)) and name not in TEXTS
            values[name] = ",".join(map(str, value)) if listed else _plain_path(value)
    return values


def _plain_path(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _set_items(value: Any, place: str | Path) -> list[str]:
    """{ss: {k: 1}}, {ss.k: 1} or ['ss.k=1'] -> ['ss.k=1']."""
    if not isinstance(value, Mapping):
        return _texts(value, place, "set")
    items: list[str] = []
    for name, options in value.items():
        if isinstance(options, Mapping):
            items += [f"{name}.{key}={value_text(v)}" for key, v in options.items()]
        elif "." in str(name) and not isinstance(options, (list, tuple)):
            items.append(f"{name}={value_text(options)}")
        else:
            raise UserError(f"{place}: 'set' has {name!r}; expected method.option: value, or method: {{option: value}}")
    return items


def _texts(value: Any, place: str | Path, name: str) -> list[str]:
    if isinstance(value, (list, tuple)) and all(isinstance(item, (str, Path)) for item in value):
        return [os.fspath(item) for item in value]
    form = "method.option=value, or method: {option: value}" if name == "set" else "texts"
    raise UserError(f"{place}: {name!r} must be a list of {form}")


def run_config(values: Mapping[str, Any]) -> RunConfig:
    """The run that the options describe, every one of them given; the reference method comes first, asked for or not.

    Raises UserError for a value that an option cannot have.
    """
    values = _checked(values)
    if values.get("endpoint"):
        values |= {"model": SERVED_MODEL, "concurrency": in_flight(values["concurrency"])}
    else:
        values |= {"concurrency": in_flight(values["batch_size"], "--batch-size")}
        _check_batches(values)
    suite, data = suite_and_data(values["suite"], values["data"])
    own = {f.name for f in fields(RunConfig)} - {
        "methods",
        "suite",
        "categories",
        "data",
        "stop",
        "presets",
        "endpoints",
    }
    if values["chat_template"] is not None:
        template_text(values["chat_template"])  # found wrong before anything is loaded
    served = bool(values.get("endpoint"))
    if values["methods"] is None and not served:
        raise UserError("give --methods NAME,NAME, or --endpoint URL, the address of a server")
    presets = tuple(read_preset(Path(part)) for part in _parts("preset", values["preset"]))
    check_plugins(presets)
    return RunConfig(
        methods=() if served else method_specs(values["methods"], values["set"] or (), presets),
        suite=suite,
        categories=_parts("categories", values["categories"]),
        data=data,
        stop=tuple(values["stop"] or ()),
        presets=presets,
        endpoints=endpoints_of(values) if served else (),
        **{name: values[name] for name in own},
    )


def _check_batches(values: Mapping[str, Any]) -> None:
    """Raises UserError for what requests in one pass do not go with."""
    if values["concurrency"] and values["engine"] == "graph":
        raise UserError("--batch-size makes passes operator by operator: leave out --engine graph")


def suite_and_data(suite: str, data: str | Path | None) -> tuple[str, str | None]:
    """'NAME:FILE' -> the suite's name, and the data that it reads. Raises UserError where --data names other data."""
    name, colon, carried = suite.partition(":")
    if colon and (not carried or data is not None):
        what = "names no file behind the colon" if not carried else "carries its data already: leave --data out"
        raise UserError(f"--suite {suite} {what}")
    given = carried or data
    return name, None if given is None else str(Path(given).expanduser())


def recording_of(values: Mapping[str, Any]) -> Recording:
    """What is recorded besides the samples, from the options of its name. Raises UserError as `run_config` does."""
    often = values["remake_disturbed"]
    recording = Recording(
        telemetry=plain_number("--telemetry", values["telemetry"]),
        remake_disturbed=None if often is None else whole_number("--remake-disturbed", often, 0),
        record_drafts=_share_of_drafts(values["record_drafts"]),
        trace=bool(values["trace"]),
    )
    if not (math.isfinite(recording.telemetry) and recording.telemetry >= 0):
        raise UserError(f"--telemetry must be a number of at least 0, not {recording.telemetry:g}")
    if often and not recording.telemetry:
        raise UserError("--remake-disturbed needs --telemetry: without readings nothing is known to be disturbed")
    return recording


def _share_of_drafts(value: Any) -> str:
    """'first', or a share from 0 to 1. Raises UserError for anything else."""
    try:
        if value == "first" or 0 <= float(value) <= 1:
            return str(value)
    except (TypeError, ValueError):
        pass
    raise UserError(f"--record-drafts is first, or a share of the questions from 0 to 1, not {value!r}")


def _parts(name: str, text: Any) -> tuple[str, ...]:
    """'a, b' -> ('a', 'b'). Raises UserError for what is no text."""
    if not isinstance(text, str | None):
        raise UserError(f"{_flag(name)} must be text, or a list of texts, not {text!r}")
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def _checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values, numbers as plain `int` and `float`. Raises UserError for one that its option cannot have."""
    done = dict(values)
    device_names(done["device"])
    for name in (*LEAST, *TEXTS):
        if done[name] is None and name in OPTIONAL:
            continue
        if name in LEAST:
            done[name] = whole_number(_flag(name), done[name], LEAST[name])
        elif not isinstance(done[name], str):
            raise UserError(f"{_flag(name)} must be text, not {done[name]!r}")
    if done["seed"] > MOST_SEED:
        raise UserError(f"--seed must be at most {MOST_SEED}, not {done['seed']}")
    for name in ("temperature", "top_p"):
        done[name] = plain_number(_flag(name), done[name])
    for name, choices in CHOICES.items():
        if done[name] not in choices:
            raise UserError(f"{_flag(name)}: there is no {done[name]!r}{known_words(str(done[name]), choices)}")
    if not (math.isfinite(done["temperature"]) and done["temperature"] >= 0):
        raise UserError(f"--temperature must be a number of at least 0, not {done['temperature']:g}")
    if 0 < done["temperature"] < COLDEST:
        raise UserError(
            f"--temperature must be 0, which is greedy, or at least {COLDEST:g}, not {done['temperature']:g}"
        )
    if not 0 < done["top_p"] <= 1:
        raise UserError(f"--top-p must be above 0 and at most 1, not {done['top_p']:g}")
    if "" in (done["stop"] or ()):
        raise UserError("--stop must not be empty")
    for text in done["stop"] or ():
        if not encodable(text):
            raise UserError(f"--stop is not UTF-8 text: {ascii(text)}")
    return done


def _flag(name: str) -> str:
    """An option's name as on the command line."""
    return f"--{name.replace('_', '-')}"


def goal_of(values: Mapping[str, Any]) -> Goal | None:
    """When to stop repeating, as the options say. Raises UserError for a value that an option cannot have."""
    asked, most, budget = (values[name] for name in ("until_ci", "max_repeats", "budget"))
    if asked is None:
        given = [name for name, value in (("--max-repeats", most), ("--budget", budget)) if value is not None]
        if given:
            raise UserError(f"{given[0]} needs --until-ci: without it, --repeats says how often prompts are answered")
        return None
    until = positive("--until-ci", asked)
    if not FLOOR < until < 1:
        raise UserError(f"--until-ci must be above {FLOOR:g}, which no interval goes below, and below 1, not {until:g}")
    repeats = whole_number("--max-repeats", MOST_REPEATS if most is None else most, 1)
    if repeats < values["repeats"]:
        raise UserError(f"--max-repeats {repeats} is less than --repeats {values['repeats']}")
    return Goal(until, repeats, None if budget is None else positive("--budget", budget))


def default_out(config: RunConfig, now: datetime) -> Path:
    """runs/<timestamp>-<model>-<suite>, with only plain characters."""
    model = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(config.model).name or config.model).strip("-.") or "model"
    return Path("runs") / f"{now:%Y%m%d-%H%M%S}-{model}-{config.suite}"
