"""Runs of served engines: connection, counters, samples, concurrency levels."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import msgspec

from specbench_ss import registry
from specbench_ss.bench import run_loop
from specbench_ss.bench.build_config import Access
from specbench_ss.bench.preflight import MOST_SAMPLES, check_ids, check_texts
from specbench_ss.bench.run_loop import ConcurrencySweep, RunCallbacks, Session, Watch, unwatched
from specbench_ss.bench.runner import finished
from specbench_ss.bench.schedule import Sample, warmup_messages
from specbench_ss.bench.server_client import (
    HIDDEN,
    MALFORMED,
    REFUSED,
    Answer,
    AnswerError,
    Counters,
    Server,
    StatusError,
    settings,
)
from specbench_ss.bench.timed_sample import gc_disabled, warm_up
from specbench_ss.engine.decoder import Step
from specbench_ss.errors import UserError, did_you_mean, error_text
from specbench_ss.results.analysis import Results
from specbench_ss.results.summary import counted
from specbench_ss.runs.config import Endpoint, OutputOptions, RunConfig
from specbench_ss.runs.environment import busy
from specbench_ss.runs.manifest import check_same_config, manifest_of
from specbench_ss.runs.records import ConcurrencyResult, OutputMatch, SampleRecord
from specbench_ss.runs.run_dir import RunDir, check_out, read_run
from specbench_ss.suite import Suite, SuiteData, SuiteRequest


def counter_delta(before: Counters | None, after: Counters | None, tokens: int, answers: int = 1) -> Counters | None:
    """Return a server's counts for some answers; None if it also served other requests.

    tokens: of these answers. Other requests are detected by more generated tokens than these and one EOS each, or by
    more accepted tokens than these and the draft tokens past each end.
    """
    delta = after.since(before) if before is not None and after is not None else None
    if delta is None or (delta.generated is not None and delta.generated > tokens + answers):
        return None
    return delta if delta.accepted <= min(delta.drafted, tokens + HIDDEN * answers) else None


def to_record(row: SampleRecord, answer: Answer, counts: Counters | None) -> SampleRecord:
    """Fill the record with an answer and its counts."""
    row.text, row.finish, row.tokens = answer.text, answer.finish, answer.tokens
    row.counted, row.chunks, row.prompt_tokens = answer.counted, answer.chunks, answer.prompt_tokens
    row.prefill_tokens = 1  # in every engine the prefill gives the first token
    row.prefill_s, row.wall_s = answer.ttft_s or 0.0, answer.wall_s
    row.decode_s = answer.wall_s - row.prefill_s
    row.draft_nodes, row.accepted_tokens = answer.drafted, answer.accepted
    if counts is not None:
        row.drafts, row.draft_nodes, row.accepted_tokens = counts.drafts, counts.drafted, counts.accepted
    return row


SHOWN = 8  # models listed in a message
VERSIONS = {
    "/version": "version",
    "/props": "build_info",
    "/get_server_info": "version",
}  # page -> field with the version
UNKNOWN_FIELD = (400, 422)  # statuses for a request with an unknown field


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass(frozen=True, slots=True)
class ProbedServer:
    """A server that answered a probe. about: its description, JSON-ready and without secrets."""

    server: Server
    about: Mapping[str, Any]


def connect(endpoint: Endpoint, url: str, key: str | None, timeout_s: float) -> Server:
    """Return a server with its model. Raise UserError if it is unreachable or its model is missing or ambiguous."""
    server = Server(endpoint.label, url, key, timeout_s)
    try:
        server.model = _model(server, endpoint.model)
    except AnswerError as e:
        server.close()
        raise UserError(f"{endpoint.label}: {e}") from None
    return server


def _model(server: Server, wanted: str | None) -> str:
    """Return the requested model or the only one. Unlisted names are tried: some servers load models on request."""
    page = server.get(f"{server.url}/models")
    server.listed = page.status_code
    if page.status_code != 200:
        if wanted and page.status_code not in REFUSED:
            return wanted
        raise server.refusal(page)
    try:
        names = _names(page)
    except MALFORMED:
        kind = page.headers.get("content-type", "no type").partition(";")[0]
        hint = "" if server.url.endswith("/v1") else f"; is the address {server.shown_url}/v1?"
        raise AnswerError(f"{server.shown_url}/models answers with {kind} instead of a list of models{hint}") from None
    if wanted or len(names) == 1:
        return wanted or names[0]
    listed = ", ".join(sorted(names)[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    raise AnswerError(
        f"{server.shown_url} has {len(names)} models; choose one with --endpoint-model{': ' * bool(names)}{listed}"
    )


def _names(page: httpx.Response) -> list[str]:
    return [model.id for model in msgspec.json.decode(page.content, type=_Models).data]


def probe(server: Server, settings: Mapping[str, Any]) -> Answer:
    """Request one short answer, unmeasured. Raise UserError if there is none.

    If the server rejects `stream_options`, later requests omit it.
    """
    parameters = {**settings, "max_tokens": min(4, int(settings.get("max_tokens", 4)))}
    hello = [{"role": "user", "content": "Hello"}]
    try:
        try:
            return server.ask(hello, parameters)
        except StatusError as e:
            if e.code not in UNKNOWN_FIELD:
                raise
            server.usage = False
            try:
                return server.ask(hello, parameters)
            except AnswerError:
                raise e from None  # the field was not the cause
    except AnswerError as e:
        raise UserError(f"{server.label}: {e}{_model_hint(server)}") from None


def _model_hint(server: Server) -> str:
    """Return a list of the server's models if the requested one is not among them, else ''."""
    try:
        names = _names(server.get(f"{server.url}/models"))
    except (AnswerError, *MALFORMED):
        return ""
    if server.model in names or not names:
        return ""
    return (
        f"; it lists no model {server.model!r}{did_you_mean(server.model, names)}: {', '.join(sorted(names)[:SHOWN])}"
    )


def about(server: Server, first: Answer) -> ProbedServer:
    """Describe a server: version, software and available counts. first: the answer of `probe`."""
    version, software = _version(server)
    server.counters()
    in_answers = first.accepted is not None
    acceptance = "its counters in /metrics" if not server.no_counters else f"not measured: {server.no_counters}"
    return ProbedServer(
        server,
        {
            "place": "loopback" if server.loopback else "remote",
            "software": software,
            "version": version,
            "tokens": "usage" if first.counted == "usage" else "chunks",
            "acceptance": "reported with each answer" if in_answers else acceptance,
        },
    )


def _version(server: Server) -> tuple[str | None, str | None]:
    """Return the server's version and its header `Server`, if it reports them."""
    software = None
    for page, name in VERSIONS.items():
        try:
            response = server.get(f"{server.root}{page}")
            software = software or response.headers.get("server")
            content = msgspec.json.decode(response.content) if response.status_code == 200 else {}
        except (AnswerError, *MALFORMED):
            continue
        if isinstance(content, dict) and isinstance(content.get(name), str):
            return content[name], software
    return None, software


AS_SERVED = "as served"  # number format and device of a served model


def manifest_for(
    config: RunConfig, data: SuiteData, probed: Sequence[ProbedServer], command: Sequence[str]
) -> Mapping[str, Any]:
    """Return the manifest of a run that is about to start, as JSON-ready data."""
    baseline = probed[0].server
    model = dict.fromkeys(("hash", "parameters", "context_length", "chat_template"))
    model |= {"name": baseline.model, "dtype": AS_SERVED, "device": AS_SERVED}
    methods = [_entry(server, baseline.label) for server in probed]
    return manifest_of(config, data, command, model, methods) | {"baseline": baseline.label}


def _entry(probed: ProbedServer, baseline: str) -> dict[str, Any]:
    server, about = probed.server, probed.about
    version = {"version": about["version"]} if about["version"] else {}
    return {
        "label": server.label,
        "name": "endpoint",
        "options": {},
        "resolved": {"url": server.shown_url, "model": server.model, **version},  # must be equal for --resume
        "served": {name: value for name, value in about.items() if name != "version"},
        "lossless": False,
        "reference": baseline,
        "summary": f"served at {server.shown_url}",
        "paper": "",
    }


Messages = list[dict[str, str]]
ServerRequest = tuple[SampleRecord, Messages]


class ServedConcurrencySweep(ConcurrencySweep[Messages]):
    """Sends the requests of each level to the session's servers."""

    session: ServedSession

    def prompt(self, sample: Sample) -> Messages:
        """Return the conversation up to the question."""
        return sample.question.messages(self.session.history(sample))

    def level(self, label: str, concurrency: int, repeat: int) -> None:
        """Run one concurrency level and store it."""
        self.session.events.on_sample_start(label, f"{concurrency} in flight")
        server, requests = self.session.servers[label], list(self.asked(label, concurrency, repeat))
        with _in_flight(server, concurrency) as pool:
            before = server.counters()
            started, began = time.time(), server.clock()
            with gc_disabled():
                sent = [pool.submit(self._run_request, server, row, text) for row, text in requests if text is not None]
                rows = [self._reported(future) for future in as_completed(sent)]
            ended, wall_s = time.time(), server.clock() - began
        after = None if before is None else server.counters()
        rows += [row for row, messages in requests if messages is None]  # the history is missing
        rows.sort(key=lambda row: row.index)
        level = ConcurrencyResult(label, concurrency, repeat, started, ended, wall_s, len(rows))
        self.run_dir.append_concurrency(_counted(level, rows, before, after), rows)

    def _run_request(self, server: Server, row: SampleRecord, messages: Messages) -> SampleRecord:
        """Run one request in a thread and return its record, a failed one if there is no answer."""
        row.started = time.time()
        try:
            answer = server.ask(messages, self.session.settings(row.seed), self.session.timeout)
        except AnswerError as e:
            row.status, row.error, row.started = "failed", error_text(e), None
            return row
        row.ended = time.time()
        return to_record(row, answer, None)

    def _reported(self, future: Future[SampleRecord]) -> SampleRecord:
        row = future.result()
        self.session.events.on_sample(row)
        self.session.ended(row)
        return row


@contextmanager
def _in_flight(server: Server, concurrency: int) -> Iterator[ThreadPoolExecutor]:
    """Provide threads; if the block fails, cancel unsent requests and close those in flight."""
    pool = ThreadPoolExecutor(concurrency)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        server.close()
        raise
    pool.shutdown()


def _counted(
    level: ConcurrencyResult, rows: Sequence[SampleRecord], before: Counters | None, after: Counters | None
) -> ConcurrencyResult:
    """Return the level with draft counts: from the server's counters, or summed over the answers."""
    good = [row for row in rows if row.ok]
    delta = counter_delta(before, after, sum(row.tokens or 0 for row in good), len(good))
    if delta is not None and len(good) == len(rows):
        return replace(level, drafts=delta.drafts, draft_nodes=delta.drafted, accepted_tokens=delta.accepted)
    return replace(level, draft_nodes=counted(good, "draft_nodes"), accepted_tokens=counted(good, "accepted_tokens"))


IN_A_ROW = 3  # failed requests after which the server's availability is checked


class ServedSession(Session):
    """Session with served engines; answers are compared with those of the first server."""

    run_dir: RunDir

    def __init__(
        self,
        config: RunConfig,
        suite: Suite,
        data: SuiteData,
        servers: Mapping[str, Server],
        run_dir: RunDir,
        events: RunCallbacks,
        where: OutputOptions,
    ) -> None:
        super().__init__(config, data, list(servers), run_dir, events, where.goal)
        self.suite = suite
        self.servers, self.timeout = servers, where.timeout
        self._failed: Counter[str] = Counter()

    @property
    def baseline(self) -> str:
        return self.labels[0]

    def lossless_reference(self, label: str) -> str:
        return self.baseline

    def busy(self) -> str:
        return busy() if any(server.loopback for server in self.servers.values()) else ""

    def warm_up(self) -> None:
        prompts = warmup_messages(self.data.questions, self.config.warmup)

        def failed(label: str, error: BaseException) -> None:  # its samples are requested anyway
            self.warn_and_keep(f"{label} failed during warm-up: {error_text(error)}")

        warm_up(self.servers, prompts, self._warm_sample, self.warn_and_keep, failed)

    def _warm_sample(self, label: str, messages: list[dict[str, str]], max_new_tokens: int) -> float:
        """Return seconds per token of one unrecorded request."""
        self.events.on_warm_up(label)
        parameters = self.settings(self.config.seed)
        parameters["max_tokens"] = min(max_new_tokens, parameters["max_tokens"])
        answer = self.servers[label].ask(messages, parameters, self.timeout)
        return answer.wall_s / answer.tokens

    def run_sample(self, blank: SampleRecord, sample: Sample) -> tuple[SampleRecord, list[Step]]:
        server, messages = self.servers[sample.method], sample.question.messages(self.history(sample))
        before = server.counters()
        blank.started = time.time()
        with gc_disabled():
            try:
                answer = server.ask(messages, self.settings(blank.seed), self.timeout)
            except AnswerError:
                self._failed[server.label] += 1
                raise
        blank.ended = time.time()
        after = None if before is None else server.counters()
        self._failed[sample.method] = 0
        return to_record(blank, answer, counter_delta(before, after, answer.tokens)), []

    def settings(self, seed: int) -> dict[str, Any]:
        """Return the decoding parameters of one answer."""
        return settings(self.config, self.data.max_new_tokens, seed)

    def ended(self, row: SampleRecord) -> None:
        """Count a failed request of a level. Raise UserError if the server does not answer any more."""
        self._failed[row.method] = 0 if row.ok else self._failed[row.method] + 1
        if not row.ok:
            self.after_failure(row)

    def after_failure(self, row: SampleRecord) -> None:
        server = self.servers[row.method]
        if self._failed[row.method] >= IN_A_ROW and not server.alive():
            raise UserError(
                f"{row.method} at {server.shown_url} failed {self._failed[row.method]} times in a row; "
                f"the run is intact, continue it with --resume --out {self.run_dir.path}"
            )

    def verdict(self, sample: Sample, row: SampleRecord, reference: SampleRecord) -> OutputMatch:
        """Compare two answers as texts, since a server sends no tokens."""
        text, expected = row.text or "", reference.text or ""
        if text == expected:
            return OutputMatch(*row.key, verdict="identical")
        at = next(
            (i for i, (a, b) in enumerate(zip(text, expected, strict=False)) if a != b), min(len(text), len(expected))
        )
        return OutputMatch(*row.key, verdict="text differs", reason=f"from character {at} on")

    def finalize(self, samples: Sequence[Sample]) -> None:
        ServedConcurrencySweep(self, self.run_dir).make()


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked run. samples: number of samples with one request in flight."""

    config: RunConfig
    suite: Suite
    data: SuiteData
    samples: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PreparedRun(run_loop.PreparedRun):
    """A run about to start."""

    found: Sequence[ProbedServer]


def check(config: RunConfig, where: OutputOptions) -> Plan:
    """Check a run without contacting servers or writing files. Raise UserError."""
    suite = registry.load_suite(config.suite)
    if check_out(where):
        check_same_config(where.out, read_run(where.out).manifest["config"], config.as_dict())
    data = suite.load(SuiteRequest(config.categories, config.limit, None if config.data is None else Path(config.data)))
    check_ids(data)
    check_texts(data)
    samples = sum(len(q.turns) for q in data.questions) * config.repeats * len(config.endpoints)
    if samples > MOST_SAMPLES:
        raise UserError(f"the run would have {samples:,} samples, more than {MOST_SAMPLES:,}; use fewer --repeats")
    return Plan(config, suite, data, samples)


def measure(
    plan: Plan, where: OutputOptions, access: Access, command: Sequence[str], watch: Watch = unwatched
) -> Results:
    """Run or continue the checked run. command: the command line, for the manifest.

    Raise UserError if a server does not answer a probe.
    """
    config, data = plan.config, plan.data
    with connected(config, access) as servers, ExitStack() as stack:
        parameters = settings(config, data.max_new_tokens, config.seed)
        probed = [about(server, probe(server, parameters)) for server in servers]
        manifest = dict(manifest_for(config, data, probed, access.hidden(command)))
        run_dir = stack.enter_context(RunDir.open(where, manifest, data.questions))
        events = stack.enter_context(watch(PreparedRun(plan=plan, run_dir=run_dir, found=probed)))
        by_label = {server.label: server for server in servers}
        ServedSession(config, plan.suite, data, by_label, run_dir, events, where).run()
        return finished(run_dir, events)


@contextmanager
def connected(config: RunConfig, access: Access) -> Iterator[list[Server]]:
    """Connect to the servers with their models, and close the connections at the end."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(closing(connect(endpoint, url, key, access.timeout_s)))
            for endpoint, url, key in zip(config.endpoints, access.urls, access.keys, strict=True)
        ]
