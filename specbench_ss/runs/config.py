"""Run configuration: what one run is asked to do."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specbench_ss.options import MethodSpec, PluginFile
from specbench_ss.runs.preset import Preset
from specbench_ss.runs.run_options import MOST_REPEATS, RunOptions


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


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Everything that decides what a run measures. It is stored in the run's manifest.

    A field of an option's name has the option's meaning and default. stop: texts that end an answer and stay in it.
    presets, plugin: files that some of the methods' options come from, or that some of the methods are defined in.
    endpoints: servers that are measured in place of methods; the first is the baseline. concurrency: requests at a
    time, besides one.
    """

    methods: tuple[MethodSpec, ...]
    suite: str = RunOptions.suite
    model: str = RunOptions.model
    categories: tuple[str, ...] = ()
    limit: int | None = RunOptions.limit
    repeats: int = RunOptions.repeats
    warmup: int = RunOptions.warmup
    max_new_tokens: int | None = RunOptions.max_new_tokens
    temperature: float = RunOptions.temperature
    top_p: float = RunOptions.top_p
    top_k: int = RunOptions.top_k
    seed: int = RunOptions.seed
    dtype: str = RunOptions.dtype
    device: str = RunOptions.device
    data: str | None = None
    history: str = RunOptions.history
    trust_remote_code: bool = RunOptions.trust_remote_code
    chat_template: str | None = RunOptions.chat_template
    stop: tuple[str, ...] = ()
    presets: tuple[Preset, ...] = ()
    plugin: tuple[PluginFile, ...] = ()
    order: str = RunOptions.order
    engine: str = RunOptions.engine
    quantize: str = RunOptions.quantize
    endpoints: tuple[Endpoint, ...] = ()
    concurrency: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the configuration as JSON-ready data."""
        parts = ("methods", "presets", "plugin", "endpoints")
        return asdict(self) | {name: [part.as_dict() for part in getattr(self, name)] for name in parts}

    @property
    def fingerprint(self) -> str:
        """Return a sha256 of everything that decides what a run measures."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Recording:
    """What is recorded besides the samples. This is no part of what a run measures, so a resumed run may change it.

    telemetry: seconds between two readings of the machine; 0 reads nothing. remake_disturbed: how often a disturbed
    sample is made again at most; None is twice on a GPU and never elsewhere. record_drafts: `first` (question of each
    task), or a share of the questions, 0 to 1. trace: whether one request of each method is profiled.
    """

    telemetry: float = 0.0
    rerun_noisy: int | None = None
    record_drafts: str = "0"
    trace: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as JSON-ready data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class StoppingRule:
    """When a run that repeats until its intervals are narrow stops. It changes no sample: a resumed run may change it.

    until_ci: half the width of every method's interval, relative to its speedup. max_repeats: of each prompt. budget:
    seconds of decoding; None = no limit.
    """

    target_ci: float
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
class OutputOptions:
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
    goal: StoppingRule | None = None
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
