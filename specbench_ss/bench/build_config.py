"""RunConfig and OutputOptions from the options of a run; messages use the names of the command line."""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from specbench_ss import registry
from specbench_ss.bench.server_launch import LaunchPlan, read_servers, without_secrets
from specbench_ss.conversations import read_columns
from specbench_ss.engine.sampling import MIN_TEMPERATURE
from specbench_ss.errors import UserError, did_you_mean, expanded
from specbench_ss.models.devices import check_one_device, device_names
from specbench_ss.models.load import template_text
from specbench_ss.options import REFERENCE, MethodSpec, encodable, registered_name, split_methods
from specbench_ss.redaction import redacted_words, without
from specbench_ss.runs.config import GOODPUT, Endpoint, OutputOptions, Recording, RunConfig, StoppingRule, Workers
from specbench_ss.runs.preset import Preset, read_preset
from specbench_ss.runs.run_options import MODEL_MODES, MODES, MOST_REPEATS, RAY, SERVER, TIMEOUT_S, RunOptions, flag
from specbench_ss.stats.intervals import TIMING_FLOOR


def asked_run(options: RunOptions) -> tuple[RunConfig, OutputOptions, Access | None]:
    """Return the run's configuration, its output options, and the access to servers, if any.

    The methods of --plugin files become available. Raise UserError for incompatible options.
    """
    options.check_modes()
    if options.resume and options.out is None:
        raise UserError("--resume requires --out, the directory of the unfinished run")
    config = run_config(options)
    if options.sessions > 1 and (options.target_ci is not None or config.loads):
        other = "--batch-size" if options.target_ci is None else "--target-ci"
        raise UserError(f"--sessions does not go with {other}: each session makes --repeats, one request at a time")
    output = OutputOptions(
        default_out(config, datetime.now()) if options.out is None else expanded(options.out),
        options.resume,
        optional_methods(options.methods or "", config.methods),
        recording_of(options),
        options.timeout,
        stopping_rule_of(options),
        workers_of(options),
        goodput_limits(options),
        options.sessions,
    )
    return config, output, access_of(options) if options.mode == SERVER else None


MODEL = "served"  # model name in configurations of server runs
OWN = {f.name for f in fields(RunConfig)} & {f.name for f in fields(RunOptions)}


def run_config(options: RunOptions) -> RunConfig:
    """Return the run's configuration; the reference method is always included and first."""
    _check_values(options)
    values: dict[str, Any] = {name: getattr(options, name) for name in OWN}
    values["suite"], values["data"] = suite_and_data(options.suite, options.data)
    values["categories"] = listed(options.tasks)
    values["columns"] = tuple(options.columns or ())
    if read_columns(values["columns"]) and values["data"] is None:
        raise UserError("--columns requires --data")
    values["stop"] = tuple(options.stop or ())
    values["rate"] = rates(options.rate)
    values["plugin"] = registry.load_plugins(options.plugin or ())
    if options.mode == SERVER:
        values |= {"model": MODEL, "methods": (), "endpoints": endpoints_of(options)}
        values["concurrency"] = in_flight(options.concurrency, "--concurrency")
        further = _json_object("--extra-body", options.extra_body, SET_ELSEWHERE)
        variables = _template_variables(options)
        values["extra_body"] = _json(further | ({TEMPLATE_FIELD: variables} if variables else {}))
        values["chat_template_kwargs"] = None
        return RunConfig(**values)

    if options.methods is None:
        raise UserError("no methods given; use --methods NAME,NAME, or --endpoint URL or --servers FILE for servers")
    values["concurrency"] = in_flight(options.batch_size, "--batch-size")
    if values["concurrency"] and options.engine == "graph":
        raise UserError("--batch-size does not support --engine graph; use --engine eager")
    values |= {"extra_body": None, "chat_template_kwargs": _json(_template_variables(options))}
    values["presets"] = tuple(read_preset(Path(part)) for part in listed(options.preset))
    _check_plugins(values["presets"])
    values["methods"] = method_specs(options.methods, options.set or (), values["presets"], options.nodes)
    return RunConfig(**values)


SET_ELSEWHERE = {"model", "messages", "stream", "stream_options", "max_tokens", "temperature", "top_p", "seed", "stop"}


TEMPLATE_FIELD = "chat_template_kwargs"  # of a request, in vLLM and SGLang
TEMPLATE_ARGUMENTS = {"messages", "conversation", "add_generation_prompt", "tokenize"}  # set by this command


def _json_object(name: str, text: str | None, taken: Collection[str] = TEMPLATE_ARGUMENTS) -> dict[str, Any]:
    """Return the fields of a JSON object. Raise UserError for other JSON, or fields that options set."""
    try:
        fields = json.loads(text or "{}")
    except (ValueError, RecursionError) as e:
        raise UserError(f"{name} is no JSON: {e}") from None
    if not isinstance(fields, dict):
        raise UserError(f"{name} must be a JSON object, as in '{{\"enable_thinking\": false}}'")
    if twice := sorted(fields.keys() & taken):
        raise UserError(f"{name} must not set {twice[0]}; use the options of this command")
    return fields


def _json(fields: Mapping[str, Any]) -> str | None:
    return json.dumps(fields, sort_keys=True) if fields else None


def options_of_methods(options: RunOptions) -> RunOptions:
    """Return the options of the methods of a run that also measures servers, whose generation configuration is off."""
    body = _json_object("--extra-body", options.extra_body, SET_ELSEWHERE)
    shared = _json({TEMPLATE_FIELD: body[TEMPLATE_FIELD]} if TEMPLATE_FIELD in body else {})
    return replace(options.part(MODEL_MODES), generation_config="none", extra_body=shared)


def _template_variables(options: RunOptions) -> dict[str, Any]:
    """Return the variables of the chat template: those of --extra-body and, above them, of the option for them."""
    body = _json_object("--extra-body", options.extra_body)
    variables = _json_object(f"--extra-body {TEMPLATE_FIELD}", json.dumps(body.get(TEMPLATE_FIELD, {})))
    if options.mode != SERVER and (further := sorted(body.keys() - {TEMPLATE_FIELD})):
        raise UserError(f"--extra-body with {further[0]} needs {MODES[SERVER]}")
    if options.mode != SERVER and variables:
        warnings.warn("--extra-body: its chat_template_kwargs are used as --chat-template-kwargs", stacklevel=2)
    return variables | _json_object("--chat-template-kwargs", options.chat_template_kwargs)


def _check_values(options: RunOptions) -> None:
    """Raise UserError for invalid values that the option's type allows."""
    device_names(options.device)
    if options.chat_template is not None:
        template_text(options.chat_template)
    if 0 < options.temperature < MIN_TEMPERATURE:
        raise UserError(
            f"--temperature must be 0 (greedy) or at least {MIN_TEMPERATURE:g}, not {options.temperature:g}"
        )
    for text in options.stop or ():
        if not text or not encodable(text):
            raise UserError(f"--stop must be UTF-8 text that is not empty, not {ascii(text)}")


def listed(text: str | None) -> tuple[str, ...]:
    """Split a list: 'a, b' -> ('a', 'b')."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def suite_and_data(suite: str, data: str | Path | None) -> tuple[str, str | None]:
    """Split 'NAME:FILE' into the suite's name and its data. Raise UserError if --data names other data."""
    if suite not in registry.names(registry.SUITES) and expanded(suite).is_file():
        raise UserError(f"--suite {suite} is a file; use --suite jsonl:{suite}")
    name, colon, file = suite.partition(":")
    if colon and (not file or data is not None):
        problem = "names no file after the colon" if not file else "has its data already; omit --data"
        raise UserError(f"--suite {suite} {problem}")
    source = file or data
    return name, None if source is None else str(expanded(source))


def default_out(config: RunConfig, now: datetime) -> Path:
    """Return runs/<timestamp>-<model>-<suite>, with only plain characters."""
    model = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(config.model).name or config.model).strip("-.")[:80] or "model"
    return Path("runs") / f"{now:%Y%m%d-%H%M%S}-{model}-{config.suite}"


def _check_plugins(presets: Sequence[Preset]) -> None:
    """Raise UserError for a preset of a plugin method without its --plugin."""
    for preset in presets:
        if preset.plugin and preset.method not in registry.names(registry.METHODS):
            file = preset.plugin["file"]
            raise UserError(f"--preset {preset.file} is for method {preset.method!r} of {file}; use --plugin {file}")


def method_specs(
    methods: str, settings: Sequence[str], presets: Sequence[Preset] = (), nodes: int | None = None
) -> tuple[MethodSpec, ...]:
    """Return the methods with their options, the reference first.

    Options in METHOD[...] override `settings`, which apply to every variant of a method, then `nodes`, the node budget,
    then presets.
    """
    shared, texts = read_settings(settings), split_methods(methods)
    specs = [spec for text in texts for spec in _parse(text, texts)]
    if not specs:
        raise UserError("no method given; use --methods NAME,NAME[option=value],...")
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
            raise UserError(f"method {label!r} is given twice")
    return tuple(sorted(specs, key=lambda s: s.label != REFERENCE))  # stable: the others keep their order


def _options(name: str, given: dict[str, str], preset: dict[str, str], nodes: int | None) -> dict[str, str]:
    """Return a method's options: those given, a node budget where they set none, and the preset's others."""
    if nodes is None and not preset:
        return given
    try:
        kind = registry.method_class(name)
    except UserError:  # reported by the preflight check, where methods of `all` may be left out
        return preset | given
    limits = {"nodes", *kind.node_options}
    if nodes is not None and not kind.node_options and not kind.autoregressive:
        warnings.warn(f"--nodes does not apply to {name}, which sets no node_options", stacklevel=2)
    elif nodes is not None and kind.node_options and not kind._limits_nodes(given):
        given = {"nodes": str(nodes)} | given
    kept = {option: value for option, value in preset.items() if option not in limits or "nodes" not in given}
    return kept | given


def _parse(text: str, texts: Sequence[str]) -> list[MethodSpec]:
    """Return the method of a text; for 'all' every registered one that is not named separately."""
    if text != registry.ALL:
        return [MethodSpec.parse(text)]
    named = [MethodSpec.parse(other).name for other in texts]
    return [MethodSpec(name) for name in registry.names(registry.METHODS) if name not in named]


def _numbered(specs: Sequence[MethodSpec]) -> list[MethodSpec]:
    """Number further copies of the reference: 'ar,ar' compares it with itself, as `ar` and `ar#2`."""
    numbered: list[MethodSpec] = []
    for spec in specs:
        copies = sum(s.name == REFERENCE for s in numbered) if spec.label == REFERENCE else 0
        numbered.append(MethodSpec(spec.name, spec.options, copies + 1) if copies else spec)
    return numbered


def optional_methods(methods: str, specs: Sequence[MethodSpec]) -> frozenset[str]:
    """Return the labels of the methods that only 'all' selects."""
    texts = split_methods(methods)
    named = {MethodSpec.parse(text).name for text in texts} | {REFERENCE}
    return frozenset(s.label for s in specs if s.name not in named) if registry.ALL in texts else frozenset()


def read_settings(settings: Sequence[str]) -> dict[str, dict[str, str]]:
    """Parse METHOD.OPTION=VALUE settings into the options of each method, as text."""
    parsed: dict[str, dict[str, str]] = {}
    for text in settings:
        match = re.fullmatch(r"([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)=(.*)", text.strip())
        if match is None:
            raise UserError(f"cannot read --set {text!r}: expected method.option=value")
        parsed.setdefault(registered_name(match[1]), {})[match[2]] = match[3].strip()
    return parsed


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
    """Return the settings of telemetry, draft records and traces."""
    if options.rerun_noisy and not options.telemetry:
        raise UserError("--rerun-noisy requires --telemetry, which detects noisy samples")
    share = options.record_drafts
    try:
        valid = share == "first" or 0 <= float(share) <= 1
    except ValueError:
        valid = False
    if not valid:
        raise UserError(f"--record-drafts must be first, or a share of the questions from 0 to 1, not {share!r}")
    return Recording(options.telemetry, options.rerun_noisy, share, options.trace)


def stopping_rule_of(options: RunOptions) -> StoppingRule | None:
    """Return the rule that ends the repeats; None for a fixed number."""
    if options.target_ci is None:
        for name, value in (("--max-repeats", options.max_repeats), ("--budget", options.budget)):
            if value is not None:
                raise UserError(f"{name} requires --target-ci; without it, --repeats sets the number of repeats")
        return None
    most = MOST_REPEATS if options.max_repeats is None else options.max_repeats
    if most < options.repeats:
        raise UserError(f"--max-repeats {most} is less than --repeats {options.repeats}")
    if (options.endpoint or options.servers) and options.target_ci <= 2 * TIMING_FLOOR:
        raise UserError(
            f"--target-ci must be above {2 * TIMING_FLOOR:g} for servers: each process adds {TIMING_FLOOR:g}"
        )
    return StoppingRule(options.target_ci, most, options.budget)


def workers_of(options: RunOptions) -> Workers | None:
    """Return the Ray workers of the run, None for a local run."""
    if options.mode != RAY:
        return None
    check_one_device(options.device, "--executor ray")
    if find_spec("ray") is None:
        raise UserError("--executor ray requires Ray: pip install -e '.[ray]'")
    return Workers(options.workers, options.ray_address)


MOST_IN_FLIGHT = 1024


def in_flight(given: str | None, option: str) -> tuple[int, ...]:
    """Parse '1,2,4' -> (2, 4): concurrency levels above 1, which is always measured."""
    try:
        numbers = [int(part) for part in listed(given)]
    except ValueError:
        raise UserError(f"{option} must be a list of whole numbers, as in 1,2,4, not {given!r}") from None
    for number in numbers:
        if not 1 <= number <= MOST_IN_FLIGHT:
            raise UserError(f"{option} must be from 1 to {MOST_IN_FLIGHT}, not {number}")
    return tuple(sorted({*numbers} - {1}))


LEAST_RATE, MOST_RATE = 0.001, 1000.0  # requests per second


def rates(given: str | None) -> tuple[float, ...]:
    """Parse '2,0.5' -> (0.5, 2.0): arrivals per second."""
    try:
        numbers = [float(part) for part in listed(given)]
    except ValueError:
        raise UserError(f"--rate must be a list of numbers, as in 0.5,2,4, not {given!r}") from None
    for number in numbers:
        if not LEAST_RATE <= number <= MOST_RATE:
            raise UserError(f"--rate must be from {LEAST_RATE:g} to {MOST_RATE:g} requests per second, not {number:g}")
    return tuple(sorted({*numbers}))


def goodput_limits(options: RunOptions) -> dict[str, float] | None:
    """Parse 'ttft:500,tpot:50' -> {'ttft': 500.0, 'tpot': 50.0}: limits of a request in milliseconds."""
    if options.goodput is None:
        return None
    if not (options.concurrency or options.rate):
        raise UserError("--goodput needs load levels; add --concurrency or --rate")
    limits: dict[str, float] = {}
    for part in listed(options.goodput) or ("",):
        name, _, text = part.partition(":")
        try:
            limit = float(text)
        except ValueError:
            limit = math.nan
        if name not in GOODPUT or name in limits or not 0 < limit < math.inf:
            raise UserError(f"--goodput must be limits as in ttft:500,tpot:50,e2el:9000, once each, not {part!r}")
        limits[name] = limit
    return limits


@dataclass(frozen=True, slots=True)
class Access:
    """Access to the servers, which is not stored with the run.

    urls: possibly with user and password. keys: of each, or None. timeout_s: maximum wait for the next sign of an
    answer. launch: the servers that the run starts itself, in place of all others.
    """

    urls: tuple[str, ...]
    keys: tuple[str | None, ...]
    timeout_s: float = TIMEOUT_S
    launch: LaunchPlan | None = None

    def hidden(self, words: Sequence[str]) -> list[str]:
        """Return a command line without users, passwords and keys."""
        return [without(word, filter(None, self.keys)) for word in redacted_words(words)]


def access_of(options: RunOptions) -> Access:
    """Return the access to the servers. Raise UserError for a missing key or one that cannot be sent."""
    timeout_s = options.endpoint_timeout or TIMEOUT_S
    if options.servers is not None:
        return Access((), (), timeout_s, read_servers(options.servers))
    urls = options.endpoint or []
    names = _each("--api-key-env", options.api_key_env, len(urls))
    keys = [None if name is None else os.environ.get(name, "") for name in names]
    for url, name, key in zip(urls, names, keys, strict=True):
        if key is None:
            continue
        if not key:
            raise UserError(f"--api-key-env {name}: the variable is not set or empty")
        if not (key.isascii() and key.isprintable()):
            raise UserError(f"--api-key-env {name}: the key must be printable ASCII")
        if "@" in urlsplit(url).netloc:
            raise UserError("give either credentials in the --endpoint URL or --api-key-env, not both")
    return Access(tuple(url.strip() for url in urls), tuple(keys), timeout_s)


def endpoints_of(options: RunOptions) -> tuple[Endpoint, ...]:
    """Return the servers in order. Raise UserError for invalid addresses or labels."""
    if options.servers is not None:
        for name in ("endpoint", "label", "endpoint_model", "api_key_env"):
            if getattr(options, name):
                raise UserError(f"--servers does not go with {flag(name)}; the file has all that it needs")
        endpoints = read_servers(options.servers).endpoints
        for endpoint in endpoints:
            _check_label(endpoint.label, [endpoint.label])
        return tuple(map(without_secrets, endpoints))
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
    """Return a value for each server from none, one for all, or one for each."""
    values: list[str | None] = list(given) if given else [None]
    if len(values) not in (1, servers):
        raise UserError(f"{name} is given {len(values)} times for {servers} servers; give it once, or once for each")
    return values * servers if len(values) == 1 else values


def address(url: str, option: str = "--endpoint") -> str:
    """Return an address without credentials. Raise UserError for an invalid API address."""
    try:
        parts = urlsplit(url.strip())
        host, _ = parts.hostname, parts.port
    except ValueError as e:
        raise UserError(f"{option} {_shown(url)}: {e}") from None
    if any(c.isspace() or not c.isprintable() for c in url.strip()):
        raise UserError(f"{option} {_shown(url)}: an address has no spaces and no control characters")
    if parts.scheme not in ("http", "https") or not host:
        raise UserError(f"{option} {_shown(url)}: an address must start with http:// or https:// and have a host")
    if parts.query or parts.fragment:
        raise UserError(f"{option} {_shown(url)}: an address must not have ? or #; use --api-key-env for keys")
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")


def _shown(url: str) -> str:
    """Return the address for messages, without possible secrets."""
    return ascii(url.partition("?")[0].rpartition("@")[2])


def _check_label(label: str, labels: Sequence[str]) -> None:
    if not label.strip() or not label.isprintable() or not encodable(label) or label != label.strip():
        raise UserError(f"--label {ascii(label)}: a label is printable text, without space at its ends")
    if "," in label:
        raise UserError(f"--label {label!r}: a label has no comma, which separates methods elsewhere")
    if labels.count(label) > 1:
        raise UserError(f"--label {label!r} is given twice: labels must differ")
