"""A run asked for in Python: what `ssbench run` does, without its command line and without its printing."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from specbench_ss import registry
from specbench_ss.benchmark import preflight
from specbench_ss.benchmark.asked import optional_methods
from specbench_ss.benchmark.asked_endpoints import Access, access_of, check_fit
from specbench_ss.benchmark.asked_workers import workers_of
from specbench_ss.benchmark.build_config import as_options, default_out, goal_of, recording_of, run_config
from specbench_ss.benchmark.measure import measure
from specbench_ss.decoding.finite import check_target
from specbench_ss.decoding.target import Target
from specbench_ss.errors import UserError
from specbench_ss.method_spec import PluginFile
from specbench_ss.models.weight_hash import hash_weights
from specbench_ss.options import seconds
from specbench_ss.plugin_file import load_plugin
from specbench_ss.results.run_results import RunResults, load_run
from specbench_ss.runs.config import Recording, RunConfig, RunTarget
from specbench_ss.served import measure as served
from specbench_ss.sharded import measure as sharded

OF_A_MODEL = ("dtype", "device", "engine", "quantize", "chat_template", "trust_remote_code")  # how a model is loaded
PLACE = "run()"  # for messages
RECORDING = tuple(field.name for field in fields(Recording))
NOT_MEASURED = (
    "timeout",
    "api_key_env",
    "endpoint_timeout",
    "until_ci",
    "max_repeats",
    "budget",
    "executor",
    "workers",
    "ray_address",
    "out",
    "resume",
    *RECORDING,
)  # options that say nothing of what is measured


def run(
    methods: str | Sequence[str] | None = None,
    *,
    endpoint: str | Sequence[str] | None = None,
    label: str | Sequence[str] | None = None,
    endpoint_model: str | Sequence[str] | None = None,
    api_key_env: str | Sequence[str] | None = None,
    concurrency: str | int | Sequence[int] = (),
    endpoint_timeout: float | None = None,
    suite: str = "specbench",
    model: str | Path | Target = "lab",
    categories: str | Sequence[str] = (),
    limit: int | None = None,
    set: Mapping[str, Any] | Sequence[str] | None = None,
    preset: str | Path | Sequence[str | Path] | None = None,
    plugin: str | Path | Sequence[str | Path] | None = None,
    data: str | Path | None = None,
    repeats: int = 1,
    until_ci: float | None = None,
    max_repeats: int | None = None,
    budget: float | None = None,
    warmup: int = 2,
    max_new_tokens: int | None = None,
    stop: str | Sequence[str] | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    dtype: str = "auto",
    device: str = "auto",
    engine: str = "auto",
    quantize: str = "none",
    batch_size: str | int | Sequence[int] = (),
    history: str = "reference",
    order: str = "suite",
    trust_remote_code: bool = False,
    chat_template: str | Path | None = None,
    timeout: float | None = None,
    telemetry: float = 0.1,
    remake_disturbed: int | None = None,
    record_drafts: str | float = "first",
    trace: bool = False,
    executor: str = "local",
    workers: int | None = None,
    ray_address: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
) -> RunResults:
    """Decode a suite's questions with several methods, side by side: what `ssbench run` does, without its printing.

    methods: `ss,medusa` or a list; plain decoding, `ar`, is always added. endpoint: in place of methods, addresses of
    servers, the first of which the others are compared with; label, endpoint_model, api_key_env, concurrency and
    endpoint_timeout are of these. set: options of methods, `{"ss.k": 2}` or
    `{"ss": {"k": 2}}`. model: also a target that is loaded already, which then decides dtype, device and engine. The
    other options are those of the command line, under the same names; `timeout`, in seconds, works in the main thread
    alone. Writes the same run directory, by default a new one under `runs/`, and returns it as `load_run` does.
    What the command warns of stands in `manifest["warnings"]`.

    Raises UserError for every mistake that the command tells, before anything is measured. After an interruption,
    `resume=True` with the same `out` goes on.
    """
    given = dict(locals())
    for name in ("out", "data"):
        if not isinstance(given[name], str | Path | None):
            raise UserError(f"{name}= is a path, not {given[name]!r}")

    if resume and out is None:
        raise UserError("resume=True needs out=, the directory of the unfinished run")
    longest = None if timeout is None else seconds("timeout", timeout)
    check_fit({name for name, value in given.items() if value != DEFAULTS[name]}, bool(endpoint))
    loaded = None if isinstance(model, (str, Path)) else _loaded(given)
    if loaded is not None and executor != "local":
        raise UserError("executor='ray' loads the model in its workers: give model= as a name or a folder")
    wanted, texts = _config(given, loaded)
    folder = default_out(wanted, datetime.now()) if out is None else Path(out).expanduser()
    optional = optional_methods(texts["methods"], wanted.methods) if texts["methods"] else frozenset()
    where = RunTarget(folder, bool(resume), optional, recording_of(given), longest, goal_of(given), workers_of(given))
    if endpoint:
        _measure_served(wanted, where, access_of(given), _called(given))
    elif where.workers is not None:
        _measure_sharded(wanted, where, _called(given))
    else:
        measure(preflight.check(wanted, where, loaded), where, [_called(given)])
    return load_run(folder)


def _measure_served(config: RunConfig, where: RunTarget, access: Access, called: str) -> None:
    served.measure(served.check(config, where), where, access, [called])


def _measure_sharded(config: RunConfig, where: RunTarget, called: str) -> None:
    sharded.measure(preflight.check(config, where), where, [called])


def _loaded(given: dict[str, Any]) -> Target:
    """The model that was given as a target, with its hash. Raises UserError for what is none."""
    target = given["model"]
    if not isinstance(target, Target):
        kind = f"an object of type {type(target).__name__}"
        raise UserError(f"model= is a name, a folder or a target, as load_model gives it, not {kind}")
    idle = [name for name in OF_A_MODEL if given[name] != DEFAULTS[name]]
    if idle:
        raise UserError(f"{idle[0]}= makes no difference to a model that is loaded already: give it to load_model")
    try:
        target.weights_hash = target.weights_hash or hash_weights(target.model)
    except NotImplementedError:  # of classes of weights that hold other things than numbers
        raise UserError("model=: its weights cannot be read: quantise with load_model(quantize=...)") from None
    check_target(target)
    return target


def _config(given: Mapping[str, Any], loaded: Target | None) -> tuple[RunConfig, dict[str, Any]]:
    """The run that is asked for, and its options as a command line would have them."""
    plain = {name: value for name, value in given.items() if name not in NOT_MEASURED}
    if loaded is not None:
        plain["model"] = loaded.name
    texts = {**DEFAULTS, **as_options(plain, {*plain}, PLACE)}
    if not isinstance(texts.get("methods"), str | None):
        raise UserError(f"methods are a text or a list of texts, not {given['methods']!r}")
    config = run_config({**texts, "plugin": _plugins(texts["plugin"] or ())})
    if loaded is not None:
        config = replace(config, dtype=loaded.number_format, device=loaded.device_names)
        config = replace(config, quantize=loaded.quantised.partition(":")[0] or "none")
    return config, texts


def _plugins(files: Sequence[str]) -> tuple[PluginFile, ...]:
    """Methods of these files, and of no others, are known from now on."""
    registry.clear_file_methods()
    return tuple(load_plugin(Path(file)) for file in dict.fromkeys(files))


def _called(given: Mapping[str, Any]) -> str:
    """The call as it would be written, options that were left alone left out."""
    told = [
        f"{name}={value!r}" if isinstance(value, (str, int, float, list, tuple, dict)) else f"{name}={str(value)!r}"
        for name, value in given.items()
        if name not in ("methods", "model") and value != DEFAULTS[name]
    ]
    model = given["model"] if isinstance(given["model"], (str, Path)) else f"<{given['model'].name}>"
    told = [f"model={str(model)!r}", *told] if model != DEFAULTS["model"] else told
    told = told if given["methods"] is None else [repr(given["methods"]), *told]
    return f"specbench_ss.run({', '.join(told)})"


DEFAULTS = {name: p.default for name, p in inspect.signature(run).parameters.items()}
