"""Schema of a stored manifest: the fields that reports and --resume rely on. A manifest may hold more."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from specbench_ss.models.learnt_form import Learnt

Amount = Annotated[float, Meta(ge=0)]


class _Gpu(Struct):
    name: str


class _Revision(Struct):
    commit: str
    dirty: bool


class _Environment(Struct):
    python: str
    platform: str
    packages: dict[str, Any]
    gpus: list[_Gpu]
    cpu: dict[str, Any] | None = None
    threads: dict[str, Any] | None = None
    memory_bytes: float | None = None
    driver: str | None = None
    cuda: str | None = None
    revision: _Revision | None = None


class AskedMethod(Struct):
    """A method as the configuration of a run names it."""

    name: str
    options: dict[str, Any]
    copy: int = 1


class _PluginFile(Struct):
    file: str
    sha256: str


class _Preset(Struct):
    method: str


class _Endpoint(Struct):
    label: str
    url: str
    model: str | None = None


class _Config(Struct):
    temperature: float
    top_p: float
    top_k: int
    repeats: int
    stop: list[str] = []
    methods: list[AskedMethod] = []
    presets: list[_Preset] = []
    plugin: list[_PluginFile] = []
    endpoints: list[_Endpoint] = []
    concurrency: list[int] = []
    data: str | None = None
    engine: str | None = None


class _Suite(Struct):
    name: str
    edition: str
    content_hash: str
    size: int
    prompts: int
    notes: list[str]
    max_new_tokens: int | None = None


class _Gguf(Struct):
    types: dict[str, Any] | None = None


class _Origin(Struct):
    gguf: _Gguf | None = None


class _Model(Struct):
    name: str
    hash: str
    parameters: int
    dtype: str
    device: str
    context_length: int
    chat_template: str | None = None
    engine: str = ""
    dtype_choice: str = ""
    origin: _Origin | None = None
    attention: str | None = None
    computed: str | None = None
    quantised: str = ""
    layers_on: dict[str, list[Any]] = {}


class _Served(Struct, frozen=True):
    software: str | None = None
    tokens: str | None = None
    acceptance: str | None = None


class _Method(Struct):
    label: str
    name: str
    summary: str
    paper: str
    lossless: bool
    options: dict[str, Any]
    resolved: dict[str, Any] = {}
    learnt: Learnt | None = None
    advised: dict[str, Any] = {}
    reference: str = ""
    served: _Served = _Served()


class _Worker(Struct):
    machine: str
    environment: _Environment


class _Session(Struct):
    started: str
    environment: _Environment
    workers: list[_Worker] = []
    measures: bool = True


class _Limits(Struct):
    read_bytes_per_s: Amount | None = None
    flops_per_s: dict[str, Amount] | None = None
    launch_s: Amount | None = None
    busy: str = ""


class _Drafter(Struct):
    weight_bytes: Amount
    matrix_parameters: Amount


class _OwnWork(Struct):
    step: Amount = 0.0
    node: Amount = 0.0
    dropped: Amount = 0.0


class Shape(Struct):
    """Cost of a forward pass."""

    weight_bytes: Amount
    matrix_parameters: Amount
    kv_bytes: Amount
    attention_flops: Amount
    windows: list[Amount | None]
    drafter: _Drafter | None = None
    own: _OwnWork | None = None


class _Machine(Struct):
    limits: _Limits | None = None
    shapes: dict[str, dict[str, Any] | None] | None = None  # of those with a number of bytes, `Shape`


class _Gaps(Struct):
    number: Amount
    mean_s: Amount
    longest_s: Amount


class Trace(Struct):
    """Profile of one request."""

    what: str
    tokens: Amount
    wall_s: Amount
    busy_share: Amount
    gaps: _Gaps
    span_s: Amount
    timeline: list[Amount]
    launches_per_token: Amount | None


class _Reached(Struct):
    why: str


class ManifestForm(Struct):
    """The whole of manifest.json, as `specbench_ss.runs.manifest.manifest_for` makes it."""

    format: int
    version: str
    command: list[str]
    config: _Config
    fingerprint: str
    suite: _Suite
    model: _Model
    methods: list[_Method]
    environment: _Environment
    created: str
    finished: str | None
    status: str
    warnings: list[str] = []
    sessions: list[_Session] = []
    repeats_made: int | None = None
    baseline: str | None = None
    machine: _Machine | None = None
    traces: dict[str, dict[str, Any] | None] | None = None  # of those with a timeline, `Trace`
    until_ci: _Reached | None = None


class _ServedModel(Struct):
    name: str
    dtype: str
    device: str


class ServedForm(ManifestForm, kw_only=True):
    """The same of a run of served engines, of whose model little is known."""

    model: _ServedModel  # type: ignore[assignment]
