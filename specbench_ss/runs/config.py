"""Run configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specbench_ss.engine.sampling import BLOCK, TOKEN, VerificationRule
from specbench_ss.options import MethodSpec, PluginFile
from specbench_ss.redaction import redacted_text
from specbench_ss.runs.preset import Preset
from specbench_ss.runs.run_options import MOST_REPEATS, RunOptions


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible server.

    label: its name in the results. url: of its API, as `http://localhost:8000/v1`, without credentials. model: its name
    there; None = the server's only model. command: that starts it, of a server that the run starts itself; env:
    environment variables that it gets in addition. group: label of its entry in the file of servers; k: drafted tokens
    that the entry states.
    """

    label: str
    url: str
    model: str | None = None
    command: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    group: str = ""
    k: int | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """Load of one level: requests in flight (closed loop), or Poisson arrivals per second (open loop).

    concurrency: None in an open loop. rate: None in a closed loop.
    """

    concurrency: int | None = 1
    rate: float | None = None

    def __str__(self) -> str:
        return str(self.concurrency) if self.rate is None else f"{self.rate:g}/s"

    @property
    def phrase(self) -> str:
        """Return the load as part of a sentence."""
        return f"with {self.concurrency} concurrent requests" if self.rate is None else f"at {self.rate:g} requests/s"


def loads_of(concurrency: Sequence[int], rate: Sequence[float]) -> list[Load]:
    """Return the loads of a configuration, in addition to one request at a time."""
    return [*(Load(number) for number in concurrency), *(Load(None, one) for one in rate)]


GOODPUT = ("ttft", "tpot", "e2el")  # limits of --goodput, as vLLM's benchmark names them


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Everything that determines what a run measures; stored in the manifest.

    Fields with an option's name have its meaning and default. categories: the option `tasks`. stop: stop strings, which
    stay in the output. presets, plugin: files with options or methods. endpoints: servers that are measured instead of
    methods; the first is the baseline. concurrency: numbers of requests at a time, in addition to one. rate: arrivals
    per second. extra_body: JSON object with further fields of requests to servers, or None. chat_template_kwargs: JSON
    object with variables of the chat template, or None.
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
    verification: VerificationRule = RunOptions.verification
    seed: int = RunOptions.seed
    dtype: str = RunOptions.dtype
    device: str = RunOptions.device
    data: str | None = None
    columns: tuple[str, ...] = ()
    history: str = RunOptions.history
    trust_remote_code: bool = RunOptions.trust_remote_code
    chat_template: str | None = RunOptions.chat_template
    chat_template_kwargs: str | None = RunOptions.chat_template_kwargs
    generation_config: str = RunOptions.generation_config
    stop: tuple[str, ...] = ()
    presets: tuple[Preset, ...] = ()
    plugin: tuple[PluginFile, ...] = ()
    order: str = RunOptions.order
    run_code: bool = RunOptions.run_code
    engine: str = RunOptions.engine
    quantize: str = RunOptions.quantize
    endpoints: tuple[Endpoint, ...] = ()
    concurrency: tuple[int, ...] = ()
    rate: tuple[float, ...] = ()
    extra_body: str | None = RunOptions.extra_body

    def as_dict(self) -> dict[str, Any]:
        """Return the configuration as JSON-ready data, without secrets."""
        parts = ("methods", "presets")
        stored = asdict(self) | {name: [part.as_dict() for part in getattr(self, name)] for name in parts}
        return stored | {"extra_body": self.extra_body and redacted_text(self.extra_body)}

    @property
    def loads(self) -> list[Load]:
        """Return the loads of the run, in addition to one request at a time."""
        return loads_of(self.concurrency, self.rate)

    @property
    def fingerprint(self) -> str:
        """Return a sha256 of everything that determines what a run measures."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Recording:
    """Recordings in addition to the samples; a resumed run may change them.

    telemetry: seconds between readings of the machine; 0 = none. rerun_noisy: maximum re-runs of a noisy sample; None =
    two on a GPU, none elsewhere. record_drafts: `first` (question of each task), or a share of the questions, 0 to 1.
    trace: profile one request of each method.
    """

    telemetry: float = 0.0
    rerun_noisy: int | None = None
    record_drafts: str = "0"
    trace: bool = False


@dataclass(frozen=True, slots=True)
class StoppingRule:
    """Stopping rule of a run that repeats until its intervals are narrow; a resumed run may change it.

    target_ci: half the width of every method's interval, relative to its speedup. max_repeats: of each prompt. budget:
    seconds of decoding; None = no limit.
    """

    target_ci: float
    max_repeats: int = MOST_REPEATS
    budget: float | None = None


@dataclass(frozen=True, slots=True)
class Workers:
    """Ray workers of a run; a resumed run may change them.

    count: None = one per GPU of the cluster, or per machine without GPUs. address: of a Ray cluster; None = from
    the environment, or else a new one on this machine.
    """

    count: int | None = None
    address: str | None = None


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Output options of a run; a resumed run may change them.

    optional: labels of methods that are skipped, with a message, if they do not support the model. recording: extra
    recordings. timeout: seconds after which a sample fails; None = never. goal: stopping rule; None = the requested
    repeats. workers: None = this process. goodput: limits of a request in ms, by the names of `GOODPUT`. sessions:
    number of processes that each make all repeats. session: that of this process, from 0; None = the only one.
    """

    out: Path
    resume: bool = False
    optional: frozenset[str] = frozenset()
    recording: Recording = Recording()
    timeout: float | None = None
    goal: StoppingRule | None = None
    workers: Workers | None = None
    goodput: Mapping[str, float] | None = None
    sessions: int = 1
    session: int | None = None


def decoding(config: Mapping[str, Any]) -> str:
    """Return sampling and stop strings as text: 'greedy', or 'temperature 0.7, top-p 0.9, stop at "Q:"'."""
    parts = ["greedy"]
    if config["temperature"]:
        parts = [f"temperature {config['temperature']:g}"]
        parts += [f"top-p {config['top_p']:g}"] if config["top_p"] < 1 else []
        parts += [f"top-k {config['top_k']}"] if config["top_k"] else []
        parts += ["block verification"] if config.get("verification", TOKEN) == BLOCK else []
    stops = [json.dumps(text, ensure_ascii=False) for text in config.get("stop") or ()]
    return ", ".join([*parts, *([f"stop at {' or '.join(stops)}"] if stops else [])])


def decoding_notes(config: Mapping[str, Any]) -> list[str]:
    """Return sentences on a verification rule that is not the default, and on settings without effect."""
    greedy, block = not config["temperature"], config.get("verification", TOKEN) == BLOCK
    notes = []
    if greedy and (config["top_p"] < 1 or config["top_k"]):
        notes.append("top-p and top-k change nothing at temperature 0")
    if block and greedy:
        notes.append("verification: block, which changes nothing at temperature 0")
    elif block:
        others = "trees and deterministic drafts token by token"
        notes.append(f"verification: block, for chains sampled by the drafter; {others}")
    return notes
