"""Run configuration: what one run is asked to do."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from specbench_ss.engine.numerics import DTYPES
from specbench_ss.models.quantize import QUANTIZE
from specbench_ss.options import MOST_SEED, MethodSpec, PluginFile
from specbench_ss.runs.preset import Preset


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible server.

    label: its name in the results. url: of its API, as `http://localhost:8000/v1`, without user and password. model:
    its name there; None is the only one that the server has.
    """

    label: str
    url: str
    model: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the endpoint as JSON-ready data."""
        return asdict(self)


Engine = Literal["auto", "eager", "graph"]


@dataclass(frozen=True, slots=True)
class Option:
    """What a field says of the option of its name: the kind of its values, their bounds, and where it may be used.

    least, most: of whole numbers. choices: all values there are; () is any. local: it says something of a model in this
    process, so it does not go with --endpoint.
    """

    kind: Literal["whole", "number", "text"]
    least: int = 0
    most: int | None = None
    choices: tuple[str, ...] = ()
    local: bool = False


def option(default: Any, kind: Literal["whole", "number", "text"], **rest: Any) -> Any:
    """Return a dataclass field that is an option of `ssbench run`, of its YAML files and of `run()`."""
    return field(default=default, metadata={"option": Option(kind, **rest)})


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Everything that decides what a run measures. It is stored in the run's manifest.

    order: `suite`, questions as the suite lists them, or `tasks`, in turn as `schedule.tasks_in_turn` has them.
    engine: `eager`, steps made operator by operator, `graph`, replayed, or `auto`: replayed where that works. quantize:
    how weights of linear layers are held.
    """

    methods: tuple[MethodSpec, ...]
    suite: str = option("specbench", "text")
    model: str = option("lab", "text", local=True)
    categories: tuple[str, ...] = ()
    limit: int | None = option(None, "whole")
    repeats: int = option(1, "whole", least=1)
    warmup: int = option(2, "whole")
    max_new_tokens: int | None = option(None, "whole", least=1)
    temperature: float = option(0.0, "number")
    top_p: float = option(1.0, "number")
    top_k: int = option(0, "whole", local=True)
    seed: int = option(0, "whole", most=MOST_SEED)
    dtype: str = option("auto", "text", choices=DTYPES, local=True)
    device: str = option("auto", "text", local=True)
    data: str | None = None
    history: str = option("reference", "text", choices=("reference", "own"))
    trust_remote_code: bool = False
    chat_template: str | None = option(None, "text", local=True)  # name or file; None = the tokenizer's own
    stop: tuple[str, ...] = ()  # texts that end an answer; they stay in it
    presets: tuple[Preset, ...] = ()  # files that some of the methods' options come from
    plugin: tuple[PluginFile, ...] = ()  # files that some of the methods are defined in
    order: str = option("suite", "text", choices=("suite", "tasks"))
    engine: str = option("auto", "text", choices=get_args(Engine), local=True)
    quantize: str = option("none", "text", choices=QUANTIZE, local=True)
    endpoints: tuple[Endpoint, ...] = ()  # servers that are measured in place of methods; the first is the baseline
    concurrency: tuple[int, ...] = ()  # requests in flight to a server, besides one

    def as_dict(self) -> dict[str, Any]:
        """Return the configuration as JSON-ready data."""
        parts = ("methods", "presets", "plugin", "endpoints")
        return asdict(self) | {name: [part.as_dict() for part in getattr(self, name)] for name in parts}

    @property
    def fingerprint(self) -> str:
        """Return a sha256 of everything that decides what a run measures."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()


OPTIONS: dict[str, Option] = {f.name: f.metadata["option"] for f in fields(RunConfig) if "option" in f.metadata}


@dataclass(frozen=True, slots=True)
class TuneConfig:
    """Everything that decides what a tuning session measures.

    limit: prompts of each task; None takes the usual number for the source of the prompts. budget: seconds to measure.
    """

    method: MethodSpec
    suite: str = "specbench"
    model: str = "lab"
    categories: tuple[str, ...] = ()
    data: str | None = None
    limit: int | None = None
    budget: float = 120.0
    max_new_tokens: int = 128
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    engine: str = "auto"
    trust_remote_code: bool = False
    chat_template: str | None = None
    plugin: tuple[PluginFile, ...] = ()


@dataclass(frozen=True, slots=True)
class Recording:
    """What is recorded besides the samples. This is no part of what a run measures, so a resumed run may change it.

    telemetry: seconds between two readings of the machine; 0 reads nothing. remake_disturbed: how often a disturbed
    sample is made again at most; None is twice on a GPU and never elsewhere. record_drafts: `first` (question of each
    task), or a share of the questions, 0 to 1. trace: whether one request of each method is profiled.
    """

    telemetry: float = 0.0
    remake_disturbed: int | None = None
    record_drafts: str = "0"
    trace: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as JSON-ready data."""
        return asdict(self)


RECORDED = Recording(telemetry=0.1, record_drafts="first")  # unless asked otherwise


MOST_REPEATS = 16  # unless asked otherwise


@dataclass(frozen=True, slots=True)
class Goal:
    """When a run that repeats until its intervals are narrow stops. It changes no sample: a resumed run may change it.

    until_ci: half the width of every method's interval, relative to its speedup. max_repeats: of each prompt. budget:
    seconds of decoding; None = no limit.
    """

    until_ci: float
    max_repeats: int = MOST_REPEATS
    budget: float | None = None


@dataclass(frozen=True, slots=True)
class Workers:
    """Processes that make a run's samples, wherever Ray places them. This is no part of what a run measures.

    count: of workers; None = one for each GPU of the cluster, or for each machine where it has none. address: of a
    running Ray cluster; None = the one that the environment names, or else one of this machine's own.
    """

    count: int | None = None
    address: str | None = None


@dataclass(frozen=True, slots=True)
class RunTarget:
    """Where a run's results are written. This is no part of what the run measures.

    optional: labels of methods that are left out, with a message, where they cannot decode with the model.
    recording: what is recorded besides the samples. timeout: seconds after which a sample is given up as failed; None =
    never. goal: how narrow intervals must be for the run to make no more repeats; None = as many as were asked for.
    workers: processes that make the samples; None = this one does.
    """

    out: Path
    resume: bool = False
    optional: frozenset[str] = frozenset()
    recording: Recording = Recording()
    timeout: float | None = None
    goal: Goal | None = None
    workers: Workers | None = None


def decoding(config: Mapping[str, Any]) -> str:
    """Say how tokens are chosen and what ends an answer: 'greedy', or 'temperature 0.7, top-p 0.9, stop at "Q:"'."""
    parts = ["greedy"]
    if config["temperature"]:
        parts = [f"temperature {config['temperature']:g}"]
        parts += [f"top-p {config['top_p']:g}"] if config["top_p"] < 1 else []
        parts += [f"top-k {config['top_k']}"] if config["top_k"] else []
    stops = [json.dumps(text, ensure_ascii=False) for text in config.get("stop") or ()]
    return ", ".join([*parts, *([f"stop at {' or '.join(stops)}"] if stops else [])])
