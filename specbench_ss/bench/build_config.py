"""RunConfig and RunTarget from the options of a run; messages name an option as the command line has it."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from specbench_ss import registry
from specbench_ss.engine.sampling import MIN_TEMPERATURE
from specbench_ss.errors import UserError, did_you_mean, expanded
from specbench_ss.models.devices import check_one_device, device_names
from specbench_ss.models.load import template_text
from specbench_ss.options import REFERENCE, MethodSpec, encodable, registered_name, split_methods
from specbench_ss.runs.config import Endpoint, OutputOptions, Recording, RunConfig, StoppingRule, Workers
from specbench_ss.runs.preset import Preset, read_preset
from specbench_ss.runs.run_options import MOST_REPEATS, RAY, SERVER, TIMEOUT_S, RunOptions


def asked_run(options: RunOptions) -> tuple[RunConfig, OutputOptions, Access | None]:
    """Return what is measured, where results are written, and how servers are reached, if any are.

    The methods of --plugin files, and of no others, are known from now on. Raises UserError for options that do not go
    together.
    """
    options.check_modes()
    if options.resume and options.out is None:
        raise UserError("--resume needs --out, the directory of the unfinished run")
    config = run_config(options)
    where = OutputOptions(
        default_out(config, datetime.now()) if options.out is None else expanded(options.out),
        options.resume,
        optional_methods(options.methods or "", config.methods),
        recording_of(options),
        options.timeout,
        stopping_rule_of(options),
        workers_of(options),
    )
    return config, where, access_of(options) if options.mode == SERVER else None


MODEL = "served"  # in the configuration of a run, in place of a model's name
OWN = {f.name for f in fields(RunConfig)} & {f.name for f in fields(RunOptions)}


def run_config(options: RunOptions) -> RunConfig:
    """Return what is measured; the reference method comes first, asked for or not."""
    _check_values(options)
    values: dict[str, Any] = {name: getattr(options, name) for name in OWN}
    values["suite"], values["data"] = suite_and_data(options.suite, options.data)
    values["categories"] = listed(options.categories)
    values["stop"] = tuple(options.stop or ())
    values["plugin"] = registry.load_plugins(options.plugin or ())
    if options.mode == SERVER:
        values |= {"model": MODEL, "methods": (), "endpoints": endpoints_of(options)}
        values["concurrency"] = in_flight(options.concurrency, "--concurrency")
        return RunConfig(**values)

    if options.methods is None:
        raise UserError("give --methods NAME,NAME, or --endpoint URL, the address of a server")
    values["concurrency"] = in_flight(options.batch_size, "--batch-size")
    if values["concurrency"] and options.engine == "graph":
        raise UserError("--batch-size runs passes eagerly: leave out --engine graph")
    values["presets"] = tuple(read_preset(Path(part)) for part in listed(options.preset))
    _check_plugins(values["presets"])
    values["methods"] = method_specs(options.methods, options.set or (), values["presets"], options.nodes)
    return RunConfig(**values)


def _check_values(options: RunOptions) -> None:
    """Raise UserError for a value that the option's type does not tell to be wrong."""
    device_names(options.device)
    if options.chat_template is not None:
        template_text(options.chat_template)
    if 0 < options.temperature < MIN_TEMPERATURE:
        raise UserError(
            f"--temperature must be 0, which is greedy, or at least {MIN_TEMPERATURE:g}, not {options.temperature:g}"
        )
    for text in options.stop or ():
        if not text or not encodable(text):
            raise UserError(f"--stop must be UTF-8 text that is not empty, not {ascii(text)}")


def listed(text: str | None) -> tuple[str, ...]:
    """'a, b' -> ('a', 'b')."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def suite_and_data(suite: str, data: str | Path | None) -> tuple[str, str | None]:
    """'NAME:FILE' -> the suite's name, and the data that it reads. Raises UserError where --data names other data."""
    name, colon, carried = suite.partition(":")
    if colon and (not carried or data is not None):
        what = "names no file behind the colon" if not carried else "carries its data already: leave --data out"
        raise UserError(f"--suite {suite} {what}")
    given = carried or data
    return name, None if given is None else str(expanded(given))


def default_out(config: RunConfig, now: datetime) -> Path:
    """runs/<timestamp>-<model>-<suite>, with only plain characters."""
    model = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(config.model).name or config.model).strip("-.") or "model"
    return Path("runs") / f"{now:%Y%m%d-%H%M%S}-{model}-{config.suite}"


def _check_plugins(presets: Sequence[Preset]) -> None:
    """Raise UserError where a preset is of a method in a file that was not given."""
    for preset in presets:
        if preset.plugin and preset.method not in registry.names(registry.METHODS):
            file = preset.plugin["file"]
            raise UserError(f"--preset {preset.file} is for method {preset.method!r} of {file}: give --plugin {file}")


def method_specs(
    methods: str, settings: Sequence[str], presets: Sequence[Preset] = (), nodes: int | None = None
) -> tuple[MethodSpec, ...]:
    """Return the methods with their options, the reference first.

    Options in METHOD[...] have priority over `settings`, which apply to every variant of a method, then `nodes`, the
    node budget, then presets.
    """
    shared, texts = read_settings(settings), split_methods(methods)
    specs = [spec for text in texts for spec in _meant(text, texts)]
    if not specs:
        raise UserError("no method given: --methods NAME,NAME[option=value],...")
    names = [spec.name for spec in specs]
    chosen = _by_method(presets, names)
    for name in shared:
        if name not in names:
            raise UserError(f"--set names method {name!r}, which is not part of this run{did_you_mean(name, names)}")
    specs = [
        MethodSpec(s.name, _options(s.name, shared.get(s.name, {}) | s.options, chosen.get(s.name, {}), nodes))
        for s in specs
    ]
    if not any(spec.label == REFERENCE for spec in specs):
        specs.append(MethodSpec(REFERENCE))
    specs = _numbered(specs)
    labels = [spec.label for spec in specs]
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(f"method {label!r} is asked for twice")
    return tuple(sorted(specs, key=lambda s: s.label != REFERENCE))  # stable: the others keep their order


def _options(name: str, given: dict[str, str], preset: dict[str, str], nodes: int | None) -> dict[str, str]:
    """Return a method's options: those given, a node budget where they set none, and the preset's others."""
    if nodes is None and not preset:
        return given
    kind = registry.method_class(name)
    limits = {"nodes", *kind.node_options}
    if nodes is not None and not kind.node_options and not kind.autoregressive:
        warnings.warn(f"--nodes does not apply to {name}, which sets no node_options", stacklevel=2)
    elif nodes is not None and kind.node_options and not limits & given.keys():
        given = {"nodes": str(nodes)} | given
    kept = {option: value for option, value in preset.items() if option not in limits or "nodes" not in given}
    return kept | given


def _meant(text: str, texts: Sequence[str]) -> list[MethodSpec]:
    """Return the method of a text; of 'all' every registered one that is not named beside it."""
    if text != registry.ALL:
        return [MethodSpec.parse(text)]
    named = [MethodSpec.parse(other).name for other in texts]
    return [MethodSpec(name) for name in registry.names(registry.METHODS) if name not in named]


def _numbered(specs: Sequence[MethodSpec]) -> list[MethodSpec]:
    """Give every further copy of the reference a number: 'ar,ar' compares it with itself, as `ar` and `ar#2`."""
    made: list[MethodSpec] = []
    for spec in specs:
        copies = sum(s.name == REFERENCE for s in made) if spec.label == REFERENCE else 0
        made.append(MethodSpec(spec.name, spec.options, copies + 1) if copies else spec)
    return made


def optional_methods(methods: str, specs: Sequence[MethodSpec]) -> frozenset[str]:
    """Return the labels of the methods that only 'all' asks for."""
    texts = split_methods(methods)
    named = {MethodSpec.parse(text).name for text in texts} | {REFERENCE}
    return frozenset(s.label for s in specs if s.name not in named) if registry.ALL in texts else frozenset()


def read_settings(settings: Sequence[str]) -> dict[str, dict[str, str]]:
    """METHOD.OPTION=VALUE -> the options of each method, as text."""
    found: dict[str, dict[str, str]] = {}
    for text in settings:
        match = re.fullmatch(r"([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)=(.*)", text.strip())
        if match is None:
            raise UserError(f"cannot read --set {text!r}: expected method.option=value")
        found.setdefault(registered_name(match[1]), {})[match[2]] = match[3].strip()
    return found


def _by_method(presets: Sequence[Preset], names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the options of each method's preset."""
    chosen: dict[str, dict[str, str]] = {}
    for preset in presets:
        if preset.method not in names:
            raise UserError(f"--preset {preset.file} is for method {preset.method!r}, which is not part of this run")
        if preset.method in chosen:
            raise UserError(f"--preset: two presets for method {preset.method!r}")
        chosen[preset.method] = preset.options
    return chosen


def recording_of(options: RunOptions) -> Recording:
    """Return what is recorded besides the samples."""
    if options.rerun_noisy and not options.telemetry:
        raise UserError("--rerun-noisy needs --telemetry: without readings nothing is known to be disturbed")
    share = options.record_drafts
    try:
        known = share == "first" or 0 <= float(share) <= 1
    except ValueError:
        known = False
    if not known:
        raise UserError(f"--record-drafts is first, or a share of the questions from 0 to 1, not {share!r}")
    return Recording(options.telemetry, options.rerun_noisy, share, options.trace)


def stopping_rule_of(options: RunOptions) -> StoppingRule | None:
    """Return how narrow intervals must be for the run to make no more repeats; None is as many as were asked for."""
    if options.target_ci is None:
        for name, value in (("--max-repeats", options.max_repeats), ("--budget", options.budget)):
            if value is not None:
                raise UserError(f"{name} needs --target-ci: without it, --repeats says how often prompts are answered")
        return None
    most = MOST_REPEATS if options.max_repeats is None else options.max_repeats
    if most < options.repeats:
        raise UserError(f"--max-repeats {most} is less than --repeats {options.repeats}")
    return StoppingRule(options.target_ci, most, options.budget)


def workers_of(options: RunOptions) -> Workers | None:
    """Return who makes the samples, None where this process does."""
    if options.mode != RAY:
        return None
    check_one_device(options.device, "--executor ray")
    if find_spec("ray") is None:
        raise UserError("--executor ray needs Ray: pip install -e '.[ray]'")
    return Workers(options.workers, options.ray_address)


MOST_IN_FLIGHT = 1024


def in_flight(given: str | None, option: str) -> tuple[int, ...]:
    """'1,2,4' -> (2, 4): numbers of requests at a time besides 1, which is measured in any case."""
    try:
        numbers = [int(part) for part in listed(given)]
    except ValueError:
        raise UserError(f"{option} is a list of whole numbers, as in 1,2,4, not {given!r}") from None
    for number in numbers:
        if not 1 <= number <= MOST_IN_FLIGHT:
            raise UserError(f"{option} must be from 1 to {MOST_IN_FLIGHT}, not {number}")
    return tuple(sorted({*numbers} - {1}))


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


def access_of(options: RunOptions) -> Access:
    """Return how the servers are reached. Raises UserError for a key that is not there or cannot be sent."""
    urls = options.endpoint or []
    names = _each("--api-key-env", options.api_key_env, len(urls))
    keys = [None if name is None else os.environ.get(name, "") for name in names]
    for url, name, key in zip(urls, names, keys, strict=True):
        if key is None:
            continue
        if not key:
            raise UserError(f"--api-key-env {name}: there is no such variable in the environment, or it is empty")
        if not (key.isascii() and key.isprintable()):
            raise UserError(f"--api-key-env {name}: the key has characters that no header holds; use printable ASCII")
        if "@" in urlsplit(url).netloc:
            raise UserError(f"--endpoint {_shown(url)} has a user, and --api-key-env a key: a request has room for one")
    return Access(tuple(url.strip() for url in urls), tuple(keys), options.endpoint_timeout or TIMEOUT_S)


def endpoints_of(options: RunOptions) -> tuple[Endpoint, ...]:
    """Return the servers in their order. Raises UserError for what is none, and for labels that do not fit."""
    urls = options.endpoint or []
    labels = options.label or [f"endpoint-{i + 1}" for i in range(len(urls))]
    if len(labels) != len(urls):
        raise UserError(
            f"{len(urls)} --endpoint and {len(labels)} --label: each server has one label, in the same order"
        )
    for label in labels:
        _check_label(label, labels)
    models = _each("--endpoint-model", options.endpoint_model, len(urls))
    return tuple(Endpoint(label, address(url), model) for label, url, model in zip(labels, urls, models, strict=True))


def _each(name: str, given: list[str] | None, servers: int) -> list[str | None]:
    """Return a value for each server: none, one for all, or one for each."""
    values: list[str | None] = list(given) if given else [None]
    if len(values) not in (1, servers):
        raise UserError(f"{name} is given {len(values)} times for {servers} servers: give it once, or once for each")
    return values * servers if len(values) == 1 else values


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
