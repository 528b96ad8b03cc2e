"""RunConfig from options on a command line, in a file or in Python.

Whoever gives them, one form comes out and the same mistakes are found; messages name an option as the command line
has it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from specbench_ss import registry
from specbench_ss.engine.sampling import COLDEST
from specbench_ss.errors import UserError, did_you_mean, known_words
from specbench_ss.models.devices import check_one_device, device_names
from specbench_ss.models.load import template_text
from specbench_ss.options import (
    REFERENCE,
    MethodSpec,
    encodable,
    plain_number,
    positive,
    seconds,
    split_methods,
    value_text,
    whole_number,
)
from specbench_ss.runs.config import MOST_REPEATS, OPTIONS, Endpoint, Goal, Option, Recording, RunConfig, Workers
from specbench_ss.runs.preset import Preset, read_preset


def check_plugins(presets: Sequence[Preset]) -> None:
    """Raises UserError where a preset is of a method in a file that was not given."""
    for preset in presets:
        if preset.plugin and preset.method not in registry.names(registry.METHODS):
            file = preset.plugin["file"]
            raise UserError(f"--preset {preset.file} is for method {preset.method!r} of {file}: give --plugin {file}")


def method_specs(methods: str, settings: Sequence[str], presets: Sequence[Preset] = ()) -> tuple[MethodSpec, ...]:
    """Methods with their options; `settings` hold for every variant of a method that does not say otherwise.

    Presets hold where neither says otherwise.
    """
    shared = read_settings(settings)
    specs = [MethodSpec.parse(text) for text in with_all(split_methods(methods))]
    if not specs:
        raise UserError("no method given: --methods NAME,NAME[option=value],...")
    chosen = _by_method(presets, [s.name for s in specs])
    specs = [MethodSpec(s.name, chosen.get(s.name, {}) | shared.get(s.name, {}) | s.options) for s in specs]
    if not any(s.label == REFERENCE for s in specs):
        specs.append(MethodSpec(REFERENCE))
    specs = _numbered(specs)
    _check(specs, shared)
    return tuple(sorted(specs, key=lambda s: s.label != REFERENCE))  # stable: the others keep their order


def _numbered(specs: Sequence[MethodSpec]) -> list[MethodSpec]:
    """Give every further copy of the reference a number: 'ar,ar' compares it with itself, as `ar` and `ar#2`."""
    made: list[MethodSpec] = []
    for spec in specs:
        copies = sum(s.name == REFERENCE for s in made) if spec.label == REFERENCE else 0
        made.append(MethodSpec(spec.name, spec.options, copies + 1) if copies else spec)
    return made


def with_all(methods: Sequence[str]) -> list[str]:
    """'all' is every registered method that is not named beside it."""
    if registry.ALL not in methods:
        return list(methods)
    named = [MethodSpec.parse(text).name for text in methods]
    others = [name for name in registry.names(registry.METHODS) if name not in named]
    return [name for text in methods for name in (others if text == registry.ALL else [text])]


def optional_methods(methods: str, specs: Sequence[MethodSpec]) -> frozenset[str]:
    """Labels of the methods that only 'all' asks for."""
    listed = split_methods(methods)
    named = {MethodSpec.parse(text).name for text in listed if text != registry.ALL} | {REFERENCE}
    return frozenset(s.label for s in specs if s.name not in named) if registry.ALL in listed else frozenset()


def read_settings(settings: Sequence[str]) -> dict[str, dict[str, str]]:
    """METHOD.OPTION=VALUE -> the options of each method, as text."""
    found: dict[str, dict[str, str]] = {}
    for text in settings:
        match = re.fullmatch(r"([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)=(.*)", text.strip())
        if match is None:
            raise UserError(f"cannot read --set {text!r}: expected method.option=value")
        found.setdefault(match[1], {})[match[2]] = match[3].strip()
    return found


def _by_method(presets: Sequence[Preset], names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Method -> the options of its preset."""
    chosen: dict[str, dict[str, str]] = {}
    for preset in presets:
        if preset.method not in names:
            raise UserError(f"--preset {preset.file} is for method {preset.method!r}, which is not part of this run")
        if preset.method in chosen:
            raise UserError(f"--preset: two presets for method {preset.method!r}")
        chosen[preset.method] = preset.options
    return chosen


def _check(specs: list[MethodSpec], settings: Mapping[str, Any]) -> None:
    labels = [s.label for s in specs]
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(f"method {label!r} is asked for twice")
    names = [s.name for s in specs]
    for name in settings:
        if name not in names:
            raise UserError(f"--set names method {name!r}, which is not part of this run{did_you_mean(name, names)}")


EXECUTORS = ("local", "ray")


def workers_of(values: Mapping[str, Any]) -> Workers | None:
    """Return who makes the samples, None where this process does. Raises UserError for options that do not fit."""
    executor, count, address = (values[name] for name in ("executor", "workers", "ray_address"))
    if executor not in EXECUTORS:
        raise UserError(f"--executor: there is no {executor!r}{known_words(str(executor), EXECUTORS)}")
    if executor == "local":
        given = [name for name, value in (("--workers", count), ("--ray-address", address)) if value is not None]
        if given:
            raise UserError(f"{given[0]} needs --executor ray: without it, this process makes all samples")
        return None
    if values.get("endpoint"):
        raise UserError(
            "--executor is of methods in processes of ours, and --endpoint measures a server: leave one out"
        )
    if values.get("batch_size"):
        raise UserError("--batch-size is measured in one process: leave out --batch-size or --executor")
    if values.get("trace"):
        raise UserError("--trace profiles a method in one process: leave out --trace or --executor")
    check_one_device(values.get("device", "auto"), "--executor ray")
    if find_spec("ray") is None:
        raise UserError("--executor ray needs Ray: pip install -e '.[ray]'")
    if not isinstance(address, str | None):
        raise UserError(f"--ray-address must be text, not {address!r}")
    return Workers(None if count is None else whole_number("--workers", count, 1), address)


LOCAL = (  # options that say something of a model in this process
    "methods", "set", "preset", "plugin", *(name for name, option in OPTIONS.items() if option.local),
    "trust_remote_code", *(field.name for field in fields(Recording)), "batch_size",
)  # fmt: skip
SERVED = ("label", "endpoint_model", "api_key_env", "concurrency", "endpoint_timeout")
TIMEOUT_S = 120.0
MOST_IN_FLIGHT = 1024
MODEL = "served"  # in the configuration of a run, in place of a model's name


@dataclass(frozen=True, slots=True)
class Access:
    """How the servers are reached. This is no part of what a run measures, and is never written down.

    urls: with user and password, where they have some. keys: of each, or None. timeout_s: the longest wait for the next
    sign of an answer.
    """

    urls: tuple[str, ...]
    keys: tuple[str | None, ...]
    timeout_s: float = TIMEOUT_S

    def hidden(self, words: Sequence[str]) -> list[str]:
        """Return a command line without users, passwords and keys."""
        secrets = [key for key in self.keys if key]
        secrets += [urlsplit(url).netloc.rpartition("@")[0] + "@" for url in self.urls if "@" in urlsplit(url).netloc]
        found = list(words)
        for secret in secrets:
            found = [word.replace(secret, "***@" if secret.endswith("@") else "***") for word in found]
        return found


def check_fit(given: Collection[str], served: bool) -> None:
    """Raises UserError for an option that does not fit. given: names of options that were stated, not left alone."""
    if served and (idle := [name for name in LOCAL if name in given]):
        raise UserError(
            f"{flag(idle[0])} is of a model in this process, and --endpoint measures a server: give one of them"
        )
    if not served and (idle := [name for name in SERVED if name in given]):
        raise UserError(f"{flag(idle[0])} needs --endpoint, the address of a server")


def endpoints_of(values: Mapping[str, Any]) -> tuple[Endpoint, ...]:
    """Return the servers in their order. Raises UserError for what is none, and for labels that do not fit."""
    urls, labels = _endpoint_texts(values["endpoint"]), _endpoint_texts(values["label"])
    if not labels:
        labels = [f"endpoint-{i + 1}" for i in range(len(urls))]
    if len(labels) != len(urls):
        raise UserError(
            f"{len(urls)} --endpoint and {len(labels)} --label: each server has one label, in the same order"
        )
    for label in labels:
        _check_label(label, labels)
    models = _each("--endpoint-model", _endpoint_texts(values["endpoint_model"]), len(urls))
    return tuple(Endpoint(label, address(url), model) for label, url, model in zip(labels, urls, models, strict=True))


def access_of(values: Mapping[str, Any]) -> Access:
    """Return how the servers are reached. Raises UserError for a variable that is not set, and for a bad time."""
    urls = _endpoint_texts(values["endpoint"])
    names = _each("--api-key-env", _endpoint_texts(values["api_key_env"]), len(urls))
    for name in names:
        if name is not None and not os.environ.get(name):
            raise UserError(f"--api-key-env {name}: there is no such variable in the environment, or it is empty")
        if name is not None and not (os.environ[name].isascii() and os.environ[name].isprintable()):
            raise UserError(f"--api-key-env {name}: the key has characters that no header holds; use printable ASCII")
    for url, name in zip(urls, names, strict=True):
        if name and "@" in urlsplit(url).netloc:
            raise UserError(f"--endpoint {_shown(url)} has a user, and --api-key-env a key: a request has room for one")
    timeout = values["endpoint_timeout"]
    wait = TIMEOUT_S if timeout is None else seconds("--endpoint-timeout", timeout)
    return Access(tuple(url.strip() for url in urls), tuple(name and os.environ[name] for name in names), wait)


def in_flight(given: Any, option: str = "--concurrency") -> tuple[int, ...]:
    """'1,2,4' -> (2, 4): numbers of requests at a time besides 1, which is measured in any case. Raises UserError."""
    parts = given.split(",") if isinstance(given, str) else [given] if isinstance(given, int) else list(given or ())
    try:
        numbers = [int(str(part)) for part in parts if str(part).strip()]
    except ValueError:
        raise UserError(f"{option} is a list of whole numbers, as in 1,2,4, not {given!r}") from None
    for number in numbers:
        if not 1 <= number <= MOST_IN_FLIGHT:
            raise UserError(f"{option} must be from 1 to {MOST_IN_FLIGHT}, not {number}")
    return tuple(sorted(set(numbers) - {1}))


def address(url: str) -> str:
    """Return an address as it may be written down. Raises UserError for what is no address of an API."""
    try:
        parts = urlsplit(url.strip())
        host, _ = parts.hostname, parts.port
    except ValueError as e:
        raise UserError(f"--endpoint {_shown(url)}: {e}") from None
    if any(c.isspace() or not c.isprintable() for c in url.strip()):
        raise UserError(f"--endpoint {_shown(url)}: an address has no spaces and no control characters")
    if parts.scheme not in ("http", "https") or not host:
        raise UserError(f"--endpoint {_shown(url)}: an address begins with http:// or https:// and names a host")
    if parts.query or parts.fragment:
        raise UserError(f"--endpoint {_shown(url)}: an address has no ? and no #; keys are given with --api-key-env")
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")


def _shown(url: str) -> str:
    """Return what was given, without what may be secret."""
    return ascii(url.partition("?")[0].rpartition("@")[2])


def _check_label(label: str, labels: Sequence[str]) -> None:
    if not label.strip() or not label.isprintable() or not encodable(label) or label != label.strip():
        raise UserError(f"--label {ascii(label)}: a label is printable text, without space at its ends")
    if "," in label:
        raise UserError(f"--label {label!r}: a label has no comma, which separates methods elsewhere")
    if labels.count(label) > 1:
        raise UserError(f"--label {label!r} is given twice: results could not be told apart")


def _endpoint_texts(given: Any) -> list[str]:
    """Return what was given once or several times as a list."""
    values = [] if given is None else [given] if isinstance(given, str) else list(given)
    if wrong := [value for value in values if not isinstance(value, str)]:
        raise UserError(f"endpoints, labels, models and variables are texts, not {wrong[0]!r}")
    return values


def _each(name: str, given: Sequence[str], servers: int) -> list[str | None]:
    """Return a value for each server: none, one for all, or one for each."""
    if len(given) not in (0, 1, servers):
        raise UserError(f"{name} is given {len(given)} times for {servers} servers: give it once, or once for each")
    values: list[str | None] = list(given) or [None]
    return values * servers if len(values) == 1 else values


def flag(name: str) -> str:
    """Return an option's name as on the command line."""
    return f"--{name.replace('_', '-')}"


FLOOR = 0.01  # half the width below which no interval is: `intervals.TIMING_FLOOR`, which is not imported here


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
            listed = isinstance(value, (list, tuple)) and not (name in OPTIONS and OPTIONS[name].kind == "text")
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
        values |= {"model": MODEL, "concurrency": in_flight(values["concurrency"])}
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
        raise UserError(f"{flag(name)} must be text, or a list of texts, not {text!r}")
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


DEFAULT = RunConfig(methods=())


def _valid(name: str, value: Any, option: Option) -> Any:
    """Return the value, a number as plain `int` or `float`. Raises UserError for one that its option cannot have."""
    if option.kind == "number":
        return plain_number(flag(name), value)
    if option.kind == "whole":
        number = whole_number(flag(name), value, option.least)
        if option.most is not None and number > option.most:
            raise UserError(f"{flag(name)} must be at most {option.most}, not {number}")
        return number
    if not isinstance(value, str):
        raise UserError(f"{flag(name)} must be text, not {value!r}")
    if option.choices and value not in option.choices:
        raise UserError(f"{flag(name)}: there is no {value!r}{known_words(value, option.choices)}")
    return value


def _checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values, numbers as plain `int` and `float`. Raises UserError for one that its option cannot have."""
    done = dict(values)
    device_names(done["device"])
    for name, option in OPTIONS.items():
        if done[name] is not None or getattr(DEFAULT, name) is not None:
            done[name] = _valid(name, done[name], option)
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
