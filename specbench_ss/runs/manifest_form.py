"""The form that a stored manifest must have to be read: the fields that reports and --resume rely on.

A manifest may hold more. Fields with a default may be missing, as they are in manifests of older versions; only fields
that allow it may be null.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct


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


class _Suite(Struct):
    name: str
    edition: str
    content_hash: str
    size: int
    prompts: int
    notes: list[str]
    max_new_tokens: int | None = None


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
    origin: dict[str, Any] = {}


class _Method(Struct):
    label: str
    name: str
    summary: str
    paper: str
    lossless: bool
    options: dict[str, Any]
    resolved: dict[str, Any] = {}
    learnt: dict[str, Any] = {}
    advised: dict[str, Any] = {}
    reference: str = ""


class _Worker(Struct):
    machine: str
    environment: _Environment


class _Session(Struct):
    started: str
    environment: _Environment
    workers: list[_Worker] = []
    measures: bool = True


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
    warned_in: dict[str, list[str]] = {}
    sessions: list[_Session] = []
    repeats_made: int | None = None
    baseline: str | None = None


class _ServedModel(Struct):
    name: str
    dtype: str
    device: str


class ServedForm(ManifestForm, kw_only=True):
    """The same of a run of served engines, of whose model little is known."""

    model: _ServedModel  # type: ignore[assignment]
