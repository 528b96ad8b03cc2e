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
    """Return what a server counted for some answers; None where it cannot be told from what it did for others.

    tokens: of these answers. A server that made more than these, and one for the end of each, answered somebody else;
    so did one that accepted more than these, and what a draft may have behind the end of each.
    """
    made = after.since(before) if before is not None and after is not None else None
    if made is None or (made.generated is not None and made.generated > tokens + answers):
        return None
    return made if made.accepted <= min(made.drafted, tokens + HIDDEN * answers) else None


def to_record(row: SampleRecord, answer: Answer, counts: Counters | None) -> SampleRecord:
    """Return the row with what came."""
    row.text, row.finish, row.tokens = answer.text, answer.finish, answer.tokens
    row.counted, row.chunks, row.prompt_tokens = answer.counted, answer.chunks, answer.prompt_tokens
    row.prefill_tokens = 1  # the first token is that of the prompt's pass, in every engine
    row.prefill_s, row.wall_s = answer.ttft_s or 0.0, answer.wall_s
    row.decode_s = answer.wall_s - row.prefill_s
    row.draft_nodes, row.accepted_tokens = answer.drafted, answer.accepted
    if counts is not None:
        row.drafts, row.draft_nodes, row.accepted_tokens = counts.drafts, counts.drafted, counts.accepted
    return row


SHOWN = 8  # models that a message lists
VERSIONS = {
    "/version": "version",
    "/props": "build_info",
    "/get_server_info": "version",
}  # page -> the field that is kept
UNKNOWN_FIELD = (400, 422)  # how a server refuses a request with a field that it does not know


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass(frozen=True, slots=True)
class Found:
    """A server that answers, with what it told of itself. about: JSON-ready; it holds no secret."""

    server: Server
    about: Mapping[str, Any]


def connect(endpoint: Endpoint, url: str, key: str | None, timeout_s: float) -> Server:
    """Return a server with its model. Raises UserError where it cannot be reached or has not the one model."""
    server = Server(endpoint.label, url, key, timeout_s)
    try:
        server.model = _model(server, endpoint.model)
    except AnswerError as e:
        server.close()
        raise UserError(f"{endpoint.label}: {e}") from None
    return server


def _model(server: Server, wanted: str | None) -> str:
    """Return the model to ask for. A name that the server does not list is tried: some load what they are asked for."""
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
        raise AnswerError(f"{server.shown_url}/models answers with {kind}, which is no list of models{hint}") from None
    if wanted or len(names) == 1:
        return wanted or names[0]
    listed = ", ".join(sorted(names)[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    raise AnswerError(
        f"{server.shown_url} has {len(names)} models: name one with --endpoint-model{': ' * bool(names)}{listed}"
    )


def _names(page: httpx.Response) -> list[str]:
    return [model.id for model in msgspec.json.decode(page.content, type=_Models).data]


def probe(server: Server, settings: Mapping[str, Any]) -> Answer:
    """Ask for one short answer, unmeasured. Raises UserError where there is none.

    A server that refuses to be asked for its count of tokens is asked without from then on.
    """
    asked = {**settings, "max_tokens": min(4, int(settings.get("max_tokens", 4)))}
    hello = [{"role": "user", "content": "Hello"}]
    try:
        try:
            return server.ask(hello, asked)
        except StatusError as e:
            if e.code not in UNKNOWN_FIELD:
                raise
            server.usage = False
            try:
                return server.ask(hello, asked)
            except AnswerError:
                raise e from None  # the field was not what it minded
    except AnswerError as e:
        raise UserError(f"{server.label}: {e}{_known(server)}") from None


def _known(server: Server) -> str:
    """Say which models there are, where the one that is asked for is not among them."""
    try:
        names = _names(server.get(f"{server.url}/models"))
    except (AnswerError, *MALFORMED):
        return ""
    if server.model in names or not names:
        return ""
    return (
        f"; it lists no model {server.model!r}{did_you_mean(server.model, names)}: {', '.join(sorted(names)[:SHOWN])}"
    )


def about(server: Server, first: Answer) -> Found:
    """Return a server with what it tells: its version, its software, and which counts can be had. first: of `probe`."""
    version, software = _version(server)
    server.counters()
    told = first.accepted is not None
    acceptance = "its counters in /metrics" if not server.no_counters else f"not measured: {server.no_counters}"
    return Found(
        server,
        {
            "place": "loopback" if server.loopback else "remote",
            "software": software,
            "version": version,
            "tokens": "usage" if first.counted == "usage" else "chunks",
            "acceptance": "what it tells with each answer" if told else acceptance,
        },
    )


def _version(server: Server) -> tuple[str | None, str | None]:
    """Return the server's version and its header `Server`, as far as it tells them."""
    software = None
    for page, name in VERSIONS.items():
        try:
            found = server.get(f"{server.root}{page}")
            software = software or found.headers.get("server")
            said = msgspec.json.decode(found.content) if found.status_code == 200 else {}
        except (AnswerError, *MALFORMED):
            continue
        if isinstance(said, dict) and isinstance(said.get(name), str):
            return said[name], software
    return None, software


AS_SERVED = "as served"  # where a local run names a number format or a device


def manifest_for(
    config: RunConfig, data: SuiteData, found: Sequence[Found], command: Sequence[str]
) -> Mapping[str, Any]:
    """Return the manifest of a run that is about to start, as JSON-ready data."""
    baseline = found[0].server
    model = dict.fromkeys(("hash", "parameters", "context_length", "chat_template"))
    model |= {"name": baseline.model, "dtype": AS_SERVED, "device": AS_SERVED}
    methods = [_entry(one, baseline.label) for one in found]
    return manifest_of(config, data, command, model, methods) | {"baseline": baseline.label}


def _entry(found: Found, baseline: str) -> dict[str, Any]:
    server, about = found.server, found.about
    version = {"version": about["version"]} if about["version"] else {}
    return {
        "label": server.label,
        "name": "endpoint",
        "options": {},
        "resolved": {"url": server.shown_url, "model": server.model, **version},  # what --resume must find again
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
        """Make one level and commit it."""
        self.session.events.on_sample_start(label, f"{concurrency} in flight")
        server, asked = self.session.servers[label], list(self.asked(label, concurrency, repeat))
        with _in_flight(server, concurrency) as pool:
            before = server.counters()
            started, began = time.time(), server.clock()
            with gc_disabled():
                sent = [pool.submit(self._answered, server, row, said) for row, said in asked if said is not None]
                rows = [self._told(future) for future in as_completed(sent)]
            ended, wall_s = time.time(), server.clock() - began
        after = None if before is None else server.counters()
        rows += [row for row, messages in asked if messages is None]  # whose history is missing
        rows.sort(key=lambda row: row.index)
        level = ConcurrencyResult(label, concurrency, repeat, started, ended, wall_s, len(rows))
        self.run_dir.append_concurrency(_counted(level, rows, before, after), rows)

    def _answered(self, server: Server, row: SampleRecord, messages: Messages) -> SampleRecord:
        """Return the row of one request, filled; a failed one where there is no answer. Runs in a thread."""
        row.started = time.time()
        try:
            answer = server.ask(messages, self.session.settings(row.seed), self.session.timeout)
        except AnswerError as e:
            row.status, row.error, row.started = "failed", error_text(e), None
            return row
        row.ended = time.time()
        return to_record(row, answer, None)

    def _told(self, future: Future[SampleRecord]) -> SampleRecord:
        row = future.result()
        self.session.events.on_sample(row)
        self.session.ended(row)
        return row


@contextmanager
def _in_flight(server: Server, concurrency: int) -> Iterator[ThreadPoolExecutor]:
    """Give threads; where the block fails, what was not sent is not sent, and what is in flight is cut off."""
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
    """Return the level with the counts of drafts: the server's own, or those that it told with each answer."""
    good = [row for row in rows if row.ok]
    made = counter_delta(before, after, sum(row.tokens or 0 for row in good), len(good))
    if made is not None and len(good) == len(rows):
        return replace(level, drafts=made.drafts, draft_nodes=made.drafted, accepted_tokens=made.accepted)
    return replace(level, draft_nodes=counted(good, "draft_nodes"), accepted_tokens=counted(good, "accepted_tokens"))


IN_A_ROW = 3  # failed requests after which a server is asked whether it is there at all


class ServedSession(Session):
    """Asks servers, whose answers are compared with those of the first one. servers: by label, in order."""

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

        def failed(label: str, error: BaseException) -> None:  # each of its samples is asked for all the same
            self.warn_and_keep(f"{label} failed during warm-up: {error_text(error)}")

        warm_up(self.servers, prompts, self._warm_sample, self.warn_and_keep, failed)

    def _warm_sample(self, label: str, messages: list[dict[str, str]], max_new_tokens: int) -> float:
        """Return seconds per token of one unrecorded request."""
        self.events.on_warm_up(label)
        asked = self.settings(self.config.seed)
        asked["max_tokens"] = min(max_new_tokens, asked["max_tokens"])
        answer = self.servers[label].ask(messages, asked, self.timeout)
        return answer.wall_s / answer.tokens

    def run_sample(self, blank: SampleRecord, sample: Sample) -> tuple[SampleRecord, list[Step]]:
        server, asked = self.servers[sample.method], sample.question.messages(self.history(sample))
        before = server.counters()
        blank.started = time.time()
        with gc_disabled():
            try:
                answer = server.ask(asked, self.settings(blank.seed), self.timeout)
            except AnswerError:
                self._failed[server.label] += 1
                raise
        blank.ended = time.time()
        after = None if before is None else server.counters()
        self._failed[sample.method] = 0
        return to_record(blank, answer, counter_delta(before, after, answer.tokens)), []

    def settings(self, seed: int) -> dict[str, Any]:
        """Return how one answer is to be decoded."""
        return settings(self.config, self.data.max_new_tokens, seed)

    def ended(self, row: SampleRecord) -> None:
        """Count a failed request of a level. Raises UserError where the server is gone."""
        self._failed[row.method] = 0 if row.ok else self._failed[row.method] + 1
        if not row.ok:
            self.after_failure(row)

    def after_failure(self, row: SampleRecord) -> None:
        server = self.servers[row.method]
        if self._failed[row.method] >= IN_A_ROW and not server.alive():
            raise UserError(
                f"{row.method} at {server.shown_url} failed {self._failed[row.method]} times in a row and does not "
                f"answer any more: what is in {self.run_dir.path} is whole, and --resume goes on"
            )

    def verdict(self, sample: Sample, row: SampleRecord, reference: SampleRecord) -> OutputMatch:
        """Compare two answers as texts: a server sends no tokens, and does not promise the same ones."""
        mine, theirs = row.text or "", reference.text or ""
        if mine == theirs:
            return OutputMatch(*row.key, verdict="identical")
        at = next(
            (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs))
        )
        return OutputMatch(*row.key, verdict="text differs", reason=f"from character {at} on")

    def finalize(self, samples: Sequence[Sample]) -> None:
        ServedConcurrencySweep(self, self.run_dir).make()


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run will do. samples: those with one request in flight."""

    config: RunConfig
    suite: Suite
    data: SuiteData
    samples: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PreparedRun(run_loop.PreparedRun):
    """A run about to start."""

    found: Sequence[Found]


def check(config: RunConfig, where: OutputOptions) -> Plan:
    """Return what is asked for. Raises UserError, before any server is contacted. Leaves nothing behind."""
    suite = registry.load_suite(config.suite)
    if check_out(where):
        check_same_config(where.out, read_run(where.out).manifest["config"], config.as_dict())
    data = suite.load(SuiteRequest(config.categories, config.limit, None if config.data is None else Path(config.data)))
    check_ids(data)
    check_texts(data)
    samples = sum(len(q.turns) for q in data.questions) * config.repeats * len(config.endpoints)
    if samples > MOST_SAMPLES:
        raise UserError(f"the run would have {samples:,} samples; at most {MOST_SAMPLES:,} are made: fewer --repeats")
    return Plan(config, suite, data, samples)


def measure(
    plan: Plan, where: OutputOptions, access: Access, command: Sequence[str], watch: Watch = unwatched
) -> Results:
    """Make the run that was checked, or go on with it. command: how it was asked for, for its manifest.

    Raises UserError where a server does not answer a first short question.
    """
    config, data = plan.config, plan.data
    with connected(config, access) as servers, ExitStack() as stack:
        asked = settings(config, data.max_new_tokens, config.seed)
        found = [about(server, probe(server, asked)) for server in servers]
        manifest = dict(manifest_for(config, data, found, access.hidden(command)))
        run_dir = stack.enter_context(RunDir.open(where, manifest, data.questions))
        events = stack.enter_context(watch(PreparedRun(plan=plan, run_dir=run_dir, found=found)))
        by_label = {server.label: server for server in servers}
        ServedSession(config, plan.suite, data, by_label, run_dir, events, where).run()
        return finished(run_dir, events)


@contextmanager
def connected(config: RunConfig, access: Access) -> Iterator[list[Server]]:
    """Give the servers, each with its model, as `connect` does, and close them at the end."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(closing(connect(endpoint, url, key, access.timeout_s)))
            for endpoint, url, key in zip(config.endpoints, access.urls, access.keys, strict=True)
        ]
