"""Runs of served engines: connection, counters, samples, load levels."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from specbench_ss import registry
from specbench_ss.bench import run_loop
from specbench_ss.bench.build_config import MODEL, Access
from specbench_ss.bench.history import HistorySource
from specbench_ss.bench.preflight import check_questions, count_samples
from specbench_ss.bench.run_loop import ConcurrencySweep, RunCallbacks, Session, Watch, unwatched
from specbench_ss.bench.schedule import (
    Sample,
    arrivals,
    question_blocks,
    sample_seed,
    turns_of_servers,
    warmup_messages,
)
from specbench_ss.bench.server_client import (
    MALFORMED,
    MAX_SILENT_TOKENS,
    REFUSED,
    Answer,
    AnswerError,
    Name,
    Server,
    StatusError,
    settings,
    shown,
)
from specbench_ss.bench.server_counts import NEUTRAL, Reading, SpecCounts, spec_request
from specbench_ss.bench.server_kv_cache import read_kv_cache
from specbench_ss.bench.server_launch import Fleet, LaunchError, described, ending_with_signals
from specbench_ss.bench.server_proof import PROVED, match_greedy, match_sampled
from specbench_ss.bench.timed_sample import gc_disabled, warm_up
from specbench_ss.conversations import read_columns
from specbench_ss.engine.decoder import Step
from specbench_ss.errors import UserError, did_you_mean, error_text
from specbench_ss.runs.config import Endpoint, Load, OutputOptions, RunConfig
from specbench_ss.runs.environment import busy
from specbench_ss.runs.manifest import check_same_config, manifest_of, read_manifest
from specbench_ss.runs.output_match import not_compared
from specbench_ss.runs.records import ConcurrencyResult, OutputMatch, SampleRecord, counted
from specbench_ss.runs.run_dir import RunDir, check_out, read_baseline_answers, read_run
from specbench_ss.runs.server_tokens import decode_seconds
from specbench_ss.suite import Suite, SuiteData, SuiteRequest


def counter_delta(before: Reading | None, after: Reading | None, tokens: int, outputs: int = 1) -> SpecCounts | None:
    """Return a server's counts for some outputs; None if it also served other requests.

    tokens: of these outputs. Other requests are detected by more generated tokens than these and a last step of each
    that went past its end, or by more accepted tokens than these.
    """
    if before is None or after is None:
        return None
    deepest, generated = len(after.accepted_per_pos) or MAX_SILENT_TOKENS, after.generated - before.generated
    if not tokens <= generated <= tokens + (deepest + 1) * outputs:
        return None
    delta = after.since(before, outputs)
    return delta if delta and not delta.fault(tokens, outputs) else None


CHUNK_PER_STEP = ("vLLM",)  # engines that stream a chunk per step, or one for several; llama.cpp streams tokens


def to_record(row: SampleRecord, answer: Answer, counters: SpecCounts | None, engine: str) -> SampleRecord:
    """Fill the record with an answer. counters: what /metrics counted for it alone, used where the answer has none."""
    row.text, row.reasoning = answer.text, answer.reasoning or None
    row.finish, row.tokens = answer.finish, answer.tokens
    row.counted, row.chunks, row.prompt_tokens = answer.counted, answer.chunks, answer.prompt_tokens
    row.token_ids = answer.token_ids or None
    row.prefill_tokens = 1  # in every engine the prefill gives the first token
    row.prefill_s, row.wall_s = answer.ttft_s or 0.0, answer.wall_s
    row.first_chunks, row.first_share = answer.first[0], answer.first_share
    row.decode_s = decode_seconds(row)
    spec = answer.spec or counters
    if spec is not None and spec.drafts is None and counters is not None and counters.accepted == spec.accepted:
        spec = counters  # llama.cpp counts its drafts there alone
    if spec is not None:
        row.drafts = spec.drafts
        row.steps = spec.steps(row.later, answer.chunks if engine in CHUNK_PER_STEP else 0)
        row.draft_nodes, row.accepted_tokens = spec.drafted, spec.accepted
        row.accepted_per_pos = None if spec.accepted_per_pos is None else list(spec.accepted_per_pos)
        row.drafted_per_pos = None if spec.drafted_per_pos is None else list(spec.drafted_per_pos)
    return row


SHOWN = 8  # models listed in a message
VERSIONS = {  # engine -> pages with its version, and the field that has it
    "vLLM": (("/version", "version"),),
    "llama.cpp": (("/props", "build_info"),),
    "SGLang": (("/server_info", "version"), ("/get_server_info", "version")),
}
OWNERS = {"vllm": "vLLM", "llamacpp": "llama.cpp", "sglang": "SGLang"}  # `owned_by` of a model
UNKNOWN_FIELD = (400, 422)  # statuses for a request with an unknown field


class _Model(msgspec.Struct):
    id: Name
    owned_by: Name | None = None
    root: Name | None = None


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
        models = [model for model in _read_models(page.content) if server.hidden(model.id) == model.id]
    except MALFORMED:
        kind = server.hidden(page.headers.get("content-type", "no type").partition(";")[0])
        hint = "" if server.url.endswith("/v1") else f"; is the address {server.shown_url}/v1?"
        raise AnswerError(f"{server.shown_url}/models answers with {kind} instead of a list of models{hint}") from None
    server.engine = next((OWNERS[model.owned_by] for model in models if model.owned_by in OWNERS), "")
    if name := wanted or _chosen(models):
        return name
    names = [model.id for model in models]
    listed = ", ".join(sorted(names)[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    raise AnswerError(
        f"{server.shown_url} has {len(names)} models; choose one with --endpoint-model{': ' * bool(names)}{listed}"
    )


def _read_models(content: bytes) -> list[_Model]:
    """Return the models of a page whose names can be printed."""
    return [model for model in msgspec.json.decode(content, type=_Models).data if model.id.isprintable()]


def _chosen(models: Sequence[_Model]) -> str:
    """Return the name of the only model, the first one if it has several; '' for several models."""
    roots = {model.root or model.id for model in models}
    return models[0].id if len(roots) == 1 else ""


def probe(server: Server, settings: Mapping[str, Any]) -> Answer:
    """Request one short answer, unmeasured. Raise UserError if there is none.

    If the server rejects the fields that ask for counts, later requests omit them, and then `stream_options` too.
    """
    parameters = {**settings, "max_tokens": min(4, int(settings.get("max_tokens", 4)))}
    hello = [{"role": "user", "content": "Hello"}]
    server.fields = spec_request(server.engine) | NEUTRAL.get(server.engine, {})
    refused: AnswerError | None = None
    while True:
        try:
            return server.ask(hello, parameters)
        except AnswerError as e:
            refused = refused or e  # without the fields it may fail for another reason, which was not the cause
            optional = server.fields or server.usage
            if not (optional and isinstance(e, StatusError) and e.code in UNKNOWN_FIELD):
                raise UserError(f"{server.label}: {refused}{_model_hint(server)}") from None
            server.fields, server.usage = {}, server.usage and bool(server.fields)


def _model_hint(server: Server) -> str:
    """Return a list of the server's models if the requested one is not among them, else ''."""
    try:
        names = [model.id for model in _read_models(server.get(f"{server.url}/models").content)]
    except (AnswerError, *MALFORMED):
        return ""
    if server.model in names or not names:
        return ""
    listed = server.hidden(", ".join(sorted(names)[:SHOWN]))
    return f"; it lists no model {server.model!r}{did_you_mean(server.model, names)}: {listed}"


def about(server: Server, first: Answer, log: str = "") -> ProbedServer:
    """Describe a server: version, software, available counts and KV cache.

    first: the answer of `probe`. log: output of a server that the run started.
    """
    version, software = _version(server)
    server.counters()
    server.tokenize = _tokenizer(server.model) if first.counted == "chunks" else None
    engine = server.engine or (software or "")
    acceptance = "its counters in /metrics" if not server.no_counters else f"not measured: {server.no_counters}"
    return ProbedServer(
        server,
        {
            "place": "loopback" if server.loopback else "remote",
            "software": engine or None,
            "version": version,
            "tokens": "tokenizer" if server.tokenize else first.counted,
            "acceptance": "reported with each answer" if first.spec is not None else acceptance,
            **read_kv_cache(server.metrics, log, "" if server.metrics else server.no_counters),
        },
    )


def _tokenizer(model: str) -> Callable[[str], int] | None:
    """Return a function that counts the tokens of a text, if the model's tokenizer is on this machine; else None."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    except Exception:  # any of the many ways in which a name is no folder and no model of the cache
        return None
    return lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _version(server: Server) -> tuple[str | None, str | None]:
    """Return the server's version and its header `Server`, if it reports them."""
    software = None
    for page, name in VERSIONS.get(server.engine) or [page for pages in VERSIONS.values() for page in pages]:
        try:
            response = server.get(f"{server.root}{page}")
            software = software or server.hidden(response.headers.get("server", "")) or None
            content = msgspec.json.decode(response.content) if response.status_code == 200 else {}
        except (AnswerError, *MALFORMED):
            continue
        if isinstance(content, dict) and isinstance(content.get(name), str):
            return server.hidden(shown(content[name].encode(errors="replace"))), software
    return None, software


AS_SERVED = "as served"  # number format and device of a served model


def manifest_for(
    config: RunConfig, data: SuiteData, probed: Sequence[ProbedServer], command: Sequence[str], blocks: int | None
) -> Mapping[str, Any]:
    """Return the manifest of a run that is about to start, as JSON-ready data.

    probed: empty if the run starts servers. blocks: of questions, in which they take turns; else None.
    """
    baseline = config.endpoints[0].label
    model = dict.fromkeys(("hash", "parameters", "context_length", "chat_template"))
    model |= {"name": probed[0].server.model if probed else MODEL, "dtype": AS_SERVED, "device": AS_SERVED}
    servers: list[ProbedServer | Endpoint] = [*probed, *(one for one in config.endpoints if one.command)]
    methods = [_entry(one, baseline) for one in servers]
    return manifest_of(config, data, command, model, methods) | {"baseline": baseline, "blocks": blocks}


def _entry(one: ProbedServer | Endpoint, baseline: str) -> dict[str, Any]:
    """Return the entry of a server; its first start adds what a server is that the run starts itself."""
    served: Mapping[str, Any] = {}
    if isinstance(one, Endpoint):
        label, resolved, summary = one.label, described(one), "started by the run"
    else:
        label, summary = one.server.label, f"served at {one.server.shown_url}"
        version = {"version": one.about["version"]} if one.about["version"] else {}
        resolved = {"url": one.server.shown_url, "model": one.server.model, **version}  # must be equal for --resume
        served = {name: value for name, value in one.about.items() if name != "version"}
    return {
        "label": label,
        "name": "endpoint",
        "options": {},
        "resolved": resolved,
        "served": served,
        "lossless": True,  # as speculative decoding promises
        "reference": baseline,
        "summary": summary,
        "paper": "",
    }


Messages = list[dict[str, str]]
MOST_THREADS = 512  # requests in flight in an open loop
NOT_SENT = f"not sent, since {MOST_THREADS} requests were in flight, the most of this client; use a lower --rate"


@dataclass(frozen=True, slots=True)
class Arrival:
    """Planned arrival of a request in an open loop.

    number: from 0. at: reading of the server's clock. started: the same moment as a Unix time. over: ends the wait.
    """

    number: int
    at: float
    started: float
    over: threading.Event

    def wait(self, clock: Callable[[], float]) -> bool:
        """Wait for the arrival. Return False if it passed while the request had no thread."""
        left = self.at - clock()
        if left < 0 and self.number >= MOST_THREADS:
            return False
        self.over.wait(max(0.0, left))
        return True


class ServedConcurrencySweep(ConcurrencySweep[Messages]):
    """Sends the requests of each level to the session's servers.

    In an open loop the times of a request count from its planned arrival, so that they contain the wait of a request
    that this client sends late.
    """

    session: ServedSession

    def prompt(self, sample: Sample) -> Messages:
        """Return the conversation up to the question."""
        return sample.question.messages(self.session.history(sample))

    def level(self, label: str, load: Load, repeat: int) -> None:
        """Run one level and store it. A server that the run starts begins each level with empty caches."""
        self.session.fleet.stop()
        if (server := self.session.ready(label)) is None:
            return
        self.session.events.on_sample_start(label, f"level {load}")
        requests, self._answers = list(self.asked(label, load, repeat)), list[tuple[SampleRecord, Answer]]()
        due: Sequence[float | None] = [None] * len(requests)
        if load.rate is not None:  # of all requests, so that those of every server arrive at the same times
            due = arrivals(len(requests), load.rate, self.session.config.seed, repeat)
        todo = [(row, messages, s) for (row, messages), s in zip(requests, due, strict=True) if messages is not None]
        over = threading.Event()
        with _in_flight(server, load.concurrency or min(len(todo), MOST_THREADS), over) as pool:
            before = server.counters()
            started, began = time.time(), server.clock()
            planned = [
                None if s is None else Arrival(i, began + s, started + s, over) for i, (_, _, s) in enumerate(todo)
            ]
            with gc_disabled():
                sent = [
                    pool.submit(self._run_request, server, row, messages, arrival)
                    for (row, messages, _), arrival in zip(todo, planned, strict=True)
                ]
                reported = [self._reported(future, over) for future in as_completed(sent)]
        rows, wall_s = [row for row, _ in reported], max(end for _, end in reported) - began
        for row, answer in self._answers if server.tokenize else ():
            to_record(row, answer.count_tokens(server.tokenize), None, server.engine)
        after = server.counters_with(before, sum(row.tokens or 0 for row in rows if row.ok))
        if label in self.session.dropped:  # --resume makes the level again
            return
        if not_sent := sum(row.error == NOT_SENT for row in rows):
            self.session.warn_and_keep(f"{label} {load.phrase}: {not_sent} of {len(rows)} {NOT_SENT}")
        rows += [row for row, messages in requests if messages is None]  # the history is missing
        rows.sort(key=lambda row: row.index)
        level = ConcurrencyResult(
            label, load.concurrency, repeat, started, started + wall_s, wall_s, len(rows), rate=load.rate
        )
        self.run_dir.append_concurrency(_counted(level, rows, before, after), rows)

    def _run_request(
        self, server: Server, row: SampleRecord, messages: Messages, arrival: Arrival | None
    ) -> tuple[SampleRecord, float]:
        """Run one request; return its record, a failed one without an answer, and the server's clock at its end."""
        if arrival is not None and not arrival.wait(server.clock):
            row.status, row.error = "failed", NOT_SENT
            return row, server.clock()
        started = time.time()
        try:
            answer = server.ask(messages, self.session.settings(row.seed, row.question_id), self.session.timeout)
        except AnswerError as e:
            row.status, row.error = "failed", error_text(e)
            return row, server.clock()
        row.started, row.ended = started, time.time()
        if arrival is not None:
            row.started = arrival.started
            answer.count_from(arrival.at)
        self._answers.append((row, answer))
        return to_record(row, answer, None, server.engine), server.clock()

    def _reported(
        self, future: Future[tuple[SampleRecord, float]], over: threading.Event
    ) -> tuple[SampleRecord, float]:
        """Report an ended request. End the waits of the others if its server is not measured further."""
        row, end = future.result()
        self.session.events.on_sample(row)
        if row.error != NOT_SENT:  # no failure of the server
            self.session.ended(row)
        if row.method in self.session.dropped:
            over.set()
        return row, end


@contextmanager
def _in_flight(server: Server, threads: int, over: threading.Event) -> Iterator[ThreadPoolExecutor]:
    """Provide threads; if the block fails, cancel unsent requests, close those in flight, and set `over`."""
    pool = ThreadPoolExecutor(threads)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        server.close()
        over.set()
        raise
    pool.shutdown()


def _counted(
    level: ConcurrencyResult, rows: Sequence[SampleRecord], before: Reading | None, after: Reading | None
) -> ConcurrencyResult:
    """Return the level with draft counts: summed over the answers, or from the server's counters."""
    good = [row for row in rows if row.ok]
    delta = counter_delta(before, after, sum(row.tokens or 0 for row in good), len(good))
    if all(row.steps is not None for row in good):
        drafts = delta.drafts if delta and len(good) == len(rows) else None  # llama.cpp counts its drafts there alone
        return replace(
            level,
            steps=max(sum(row.steps or 0 for row in good), drafts or 0),
            drafts=counted(good, "drafts"),
            draft_nodes=counted(good, "draft_nodes"),
            accepted_tokens=counted(good, "accepted_tokens"),
        )
    if delta is None or len(good) < len(rows):
        return level
    steps = delta.steps(sum(row.later for row in good))
    return replace(level, steps=steps, drafts=delta.drafts, draft_nodes=delta.drafted, accepted_tokens=delta.accepted)


DRIFT = 8  # prompts that the baseline answers again at the end
IN_A_ROW = 3  # failed requests after which the server's availability is checked


class ServedSession(Session):
    """Session with served engines; answers are compared with those of the first server.

    Servers that the run starts itself answer a block of questions each in turn, in an order that the manifest
    determines. Later turns continue the baseline's answers. In a block in which the baseline runs last, these are
    untimed answers that it gave in the block before.
    """

    run_dir: RunDir

    def __init__(
        self,
        config: RunConfig,
        suite: Suite,
        data: SuiteData,
        fleet: Fleet,
        run_dir: RunDir,
        events: RunCallbacks,
        output: OutputOptions,
    ) -> None:
        super().__init__(config, data, [one.label for one in config.endpoints], run_dir, events, output.goal)
        self.suite = suite
        self.fleet, self.timeout = fleet, output.timeout
        self._failed: Counter[str] = Counter()
        self._proved: Counter[str] = Counter()  # sampled tokens that were compared
        self._tools: dict[str, dict[str, Any]] = {q.id: {"tools": list(q.tools)} for q in data.questions if q.tools}
        blocks = run_dir.manifest.get("blocks")
        self._block: Mapping[str, int] = {}  # of each question
        if blocks:
            self._block = question_blocks(data.questions, blocks if len(self.labels) > 1 else 1)
        answers = read_baseline_answers(run_dir.path)
        self._history = HistorySource(self.baseline, config.history == "own", run_dir.rows, answers)

    @property
    def baseline(self) -> str:
        return self.labels[0]

    def lossless_reference(self, label: str) -> str:
        return self.baseline

    def busy(self) -> str:
        here = self.fleet.plan is not None or any(server.loopback for server in self.fleet.connected.values())
        return busy() if here else ""

    def warm_up(self) -> None:
        if self.fleet.plan is None:
            self._warm(self.labels)

    def _warm(self, labels: Sequence[str]) -> None:
        prompts = warmup_messages(self.data.questions, self.config.warmup)

        def failed(label: str, error: BaseException) -> None:  # its samples are requested anyway
            self.warn_and_keep(f"{label} failed during warm-up: {error_text(error)}")

        warm_up(labels, prompts, self._warm_sample, self.warn_and_keep, failed)

    def ready(self, label: str) -> Server | None:
        """Return a server; one that the run has to start is warmed up. None: it does not start, and is dropped.

        Raise UserError if that is the baseline.
        """
        if label in self.dropped:
            return None
        started = self.fleet.plan is not None and self.fleet.running != label
        if started:
            self.events.on_sample_start(label, "start of the server")
        try:
            server = self.fleet.get(label)
        except LaunchError as e:
            self._drop(label, str(e))
            return None
        if started and self.config.warmup:
            self._warm([label])
        return server

    def _drop(self, label: str, reason: str) -> None:
        """Measure no more of a server. Raise UserError if it is the baseline."""
        if label == self.baseline:
            raise UserError(f"{label}: {reason}; {self.run_dir.path} is intact, continue with --resume")
        self.dropped[label] = reason
        self.warn_and_keep(f"{label} is not measured further: {reason}")

    def run_pending(self, samples: Sequence[Sample]) -> None:
        if self.fleet.plan is None:
            super().run_pending(samples)
            return
        visited, number = False, 1 + max(self._block.values())
        blocks = [[s for s in samples if self._block[s.question.id] == block] for block in range(number)]
        for block, turns in enumerate(turns_of_servers(self.labels, number, self.config.seed)):
            own = {label: [sample for sample in blocks[block] if sample.method == label] for label in turns}
            pending = [label for label in turns if self._is_pending(own[label])]
            if pending and len(turns) > 1:
                self.fleet.stop()  # each block has processes of its own
                self._precompute(block, blocks[block])  # what the block before has not stored
            for label in pending:
                self._visit(label, own[label])
                if label == self.baseline and block + 1 < number:
                    self._precompute(block + 1, blocks[block + 1])
            visited = visited or bool(pending)
        uncompared = [s for s in samples if s.key not in self.run_dir.compared_keys and not self._is_reference(s)]
        if (visited or uncompared) and self.ready(self.baseline):
            if visited:
                self._measure_drift(samples)
            for sample in uncompared:
                self._judge(sample)

    def _is_pending(self, own: Sequence[Sample]) -> bool:
        """Return whether samples of a server are missing, or were not compared."""
        return any(sample.key not in self.run_dir.rows for sample in own) or self._untested(own)

    def _precompute(self, block: int, samples: Sequence[Sample]) -> None:
        """Store baseline answers for later turns of a block in which the baseline runs last. samples: of the block."""
        answers = self._history.baseline_answers
        continued = {(s.question.id, s.turn): s for s in samples if s.turn + 1 < len(s.question.turns)}
        missing = [sample for prompt, sample in continued.items() if prompt not in answers]
        if not missing or not self._history.is_precomputed(block):
            return
        self.ready(self.baseline)
        for sample in missing:
            question, turn = sample.question, sample.turn
            self.events.on_sample_start(self.baseline, f"{question.id}, to be continued")
            try:
                messages = question.messages(self.history(sample))
                seed = sample_seed(self.config.seed, question.id, turn, 0)
                text = self._ask(self.baseline, messages, seed, question.id).text
            except LookupError:  # an earlier turn failed
                continue
            except AnswerError as e:  # later turns fail, and --resume makes them
                what = f"{question.id} turn {turn + 1}, which later turns continue"
                self.warn_and_keep(f"{self.baseline} failed on {what}: {error_text(e)}")
                self._check_server(self.baseline)
                continue
            self.run_dir.append_baseline_answer(question.id, turn, text)
            answers[question.id, turn] = text

    def history(self, sample: Sample) -> list[str]:
        return self._history.answers(sample.key, self._block.get(sample.question.id))

    def _is_reference(self, sample: Sample) -> bool:
        """Return whether a greedy output is what all others of its prompt are compared with."""
        return self.config.temperature == 0 and (sample.method, sample.repeat) == (self.baseline, 0)

    def _untested(self, own: Sequence[Sample]) -> bool:
        """Return whether sampled outputs of a server were not compared, as after an interruption."""
        return self.config.temperature > 0 and any(s.key not in self.run_dir.compared_keys for s in own)

    def _visit(self, label: str, own: Sequence[Sample]) -> None:
        """Make the missing samples of a server; compare sampled outputs while it runs."""
        self.ready(label)
        for sample in own:
            if sample.key not in self.run_dir.rows:
                self._make(sample)
        if self.config.temperature > 0:
            for sample in own:
                self._judge(sample)

    def _measure_drift(self, samples: Sequence[Sample]) -> None:
        """Store how much longer the baseline's tokens take at the end of the run, without the first of each output."""
        first = [s for s in samples if s.method == self.baseline and s.turn == 0 and not self._block[s.question.id]]
        rows = [self.run_dir.rows[sample.key] for sample in first]
        chosen = [row for row in rows if row.ok and row.tpot_s][:DRIFT]
        by_id = {question.id: question for question in self.data.questions}
        before, after, prompts = 0.0, 0.0, 0
        try:
            for row in chosen:
                messages = by_id[row.question_id].messages([])
                server = self.fleet.get(self.baseline)
                answer = server.ask(messages, self.settings(row.seed, row.question_id), self.timeout)
                again = to_record(replace(row), answer.count_tokens(server.tokenize), None, "")
                if (then := row.tpot_s) and (now := again.tpot_s):
                    before, after, prompts = before + then, after + now, prompts + 1
        except AnswerError as e:
            self.warn_and_keep(f"the baseline's drift was not measured: {error_text(e)}")
        else:
            if before:
                self.run_dir.update(drift={"prompts": prompts, "ratio": after / before})

    def _warm_sample(self, label: str, messages: list[dict[str, str]], max_new_tokens: int) -> float:
        """Return seconds per token of one unrecorded request."""
        self.events.on_warm_up(label)
        parameters = self.settings(self.config.seed)
        parameters["max_tokens"] = min(max_new_tokens, parameters["max_tokens"])
        answer = self.fleet.get(label).ask(messages, parameters, self.timeout)
        self.token_s[label] = answer.wall_s / answer.tokens
        return self.token_s[label]

    def run_sample(self, blank: SampleRecord, sample: Sample) -> tuple[SampleRecord, list[Step]]:
        server, messages = self.fleet.get(sample.method), sample.question.messages(self.history(sample))
        before = server.counters()
        blank.started = time.time()
        with gc_disabled():
            answer = self._ask(sample.method, messages, blank.seed, blank.question_id)
        blank.ended, blank.block = time.time(), self._block.get(sample.question.id)
        answer.count_tokens(server.tokenize)
        after = server.counters_with(before, answer.tokens)
        return to_record(blank, answer, counter_delta(before, after, answer.tokens), server.engine), []

    def _ask(self, label: str, messages: Messages, seed: int, question_id: str) -> Answer:
        """Return a server's answer to a conversation, and count its failures in a row."""
        try:
            answer = self.fleet.get(label).ask(messages, self.settings(seed, question_id), self.timeout)
        except AnswerError:
            self._failed[label] += 1
            raise
        self._failed[label] = 0
        return answer

    def settings(self, seed: int, question_id: str = "") -> dict[str, Any]:
        """Return the decoding parameters of one answer, and the tools of its question."""
        return settings(self.config, self.data.max_new_tokens, seed) | self._tools.get(question_id, {})

    def ended(self, row: SampleRecord) -> None:
        """Count a failed request of a level. Raise UserError if the server does not answer any more."""
        self._failed[row.method] = 0 if row.ok else self._failed[row.method] + 1
        if not row.ok:
            self.after_failure(row)

    def after_failure(self, row: SampleRecord) -> None:
        self._check_server(row.method)

    def _check_server(self, label: str) -> None:
        """Drop a started server that has ended or is silent. Raise UserError for any other, and for the baseline."""
        if label in self.dropped:
            return
        started = self.fleet.plan is not None
        if fault := self.fleet.fault(wait_s=1.0):
            self._stop_and_drop(label, fault)
        elif self._failed[label] >= IN_A_ROW and not (server := self.fleet.get(label)).alive():
            reason = f"failed {self._failed[label]} times in a row"
            if started:
                self._stop_and_drop(label, f"{reason} and does not answer any more")
                return
            raise UserError(
                f"{label} at {server.shown_url} {reason}; {self.run_dir.path} is intact, continue with --resume"
            )

    def _stop_and_drop(self, label: str, reason: str) -> None:
        self.fleet.stop()
        self._drop(label, reason)

    def verdict(self, sample: Sample, row: SampleRecord, reference: SampleRecord) -> OutputMatch:
        baseline, messages = self.fleet.get(reference.method), sample.question.messages(self.history(sample))
        match = match_greedy(row, reference, baseline, messages, self.settings(row.seed, row.question_id))
        if fault := self.fleet.fault():
            self._stop_and_drop(reference.method, fault)  # --resume compares this output again
        return match

    def sampled(self, sample: Sample, row: SampleRecord) -> OutputMatch | None:
        if self._proved[row.method] >= PROVED:
            return None
        if row.method in self.dropped or (self.fleet.plan is not None and self.fleet.running != row.method):
            return not_compared(row, "the server did not run any more")
        messages = sample.question.messages(self.history(sample))
        server, parameters = self.fleet.get(row.method), self.settings(row.seed, row.question_id)
        match = match_sampled(row, server, messages, parameters)
        if fault := self.fleet.fault():
            self._stop_and_drop(row.method, fault)
        self._proved[row.method] += match.sampled.tokens + match.sampled.tail if match.sampled else 0
        return match

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

    def whole_suite(self) -> SuiteData:
        """Return the questions of the suite without a limit."""
        return self.suite.load(_suite_request(self.config, 0))


@dataclass(frozen=True, kw_only=True)
class PreparedRun(run_loop.PreparedRun):
    """A run about to start."""

    found: Sequence[ProbedServer]


def check(config: RunConfig, output: OutputOptions, data: SuiteData | None = None) -> Plan:
    """Check a run without contacting servers or writing files. Raise UserError.

    data: questions of the run of methods that the servers are compared with; a suite may choose them by the model.
    """
    suite = registry.load_suite(config.suite)
    suite.run_code = config.run_code
    if check_out(output):
        check_same_config(output.out, read_run(output.out).manifest["config"], config.as_dict())
    data = data or suite.load(_suite_request(config, config.limit))
    check_questions(data)
    return Plan(config, suite, data, count_samples(config, data, len(config.endpoints), "--concurrency"))


def _suite_request(config: RunConfig, limit: int | None) -> SuiteRequest:
    data = None if config.data is None else Path(config.data)
    return SuiteRequest(config.categories, limit, data, columns=read_columns(config.columns))


def measure(
    plan: Plan, output: OutputOptions, access: Access, command: Sequence[str], watch: Watch = unwatched
) -> Path:
    """Run or continue the checked run. command: the command line, for the manifest.

    Raise UserError if a server does not answer a probe.
    """
    config, data = plan.config, plan.data
    parameters = settings(config, data.max_new_tokens, config.seed)
    with connected(config, access) as servers, ExitStack() as stack:
        if access.launch is not None:
            stack.enter_context(ending_with_signals())
        probed = [about(server, probe(server, parameters)) for server in servers]
        blocks = access.launch.blocks if access.launch else None
        if check_out(output):
            _check_same_blocks(output.out, blocks)
        manifest = dict(manifest_for(config, data, probed, access.hidden(command), blocks))
        run_dir = stack.enter_context(RunDir.open(output, manifest, data.questions))
        if output.goodput:
            run_dir.update(goodput=dict(output.goodput))
        fleet = Fleet({server.label: server for server in servers}, access.launch, logs=run_dir.path / "servers")
        fleet.connect = partial(_connect_started, run_dir, parameters, access.timeout_s)
        stack.callback(fleet.stop)
        events = stack.enter_context(watch(PreparedRun(plan=plan, run_dir=run_dir, found=probed)))
        ServedSession(config, plan.suite, data, fleet, run_dir, events, output).run()
        return run_dir.path


def _check_same_blocks(path: Path, blocks: int | None) -> None:
    """Raise UserError if the servers of a run that is resumed would take turns in another order."""
    before = read_manifest(path).get("blocks")
    if blocks and before is None:
        raise UserError(f"--resume: the servers of the run in {path} took turns in an earlier order; use another --out")
    if blocks != before:
        raise UserError(f"--resume: the run in {path} has {before} blocks, not {blocks}; set blocks: {before}")


def _connect_started(
    run_dir: RunDir, parameters: Mapping[str, Any], timeout_s: float, endpoint: Endpoint, log: str
) -> Server:
    """Return a server that was just started, and keep in the manifest what it is. log: its output so far."""
    server = connect(endpoint, endpoint.url, None, timeout_s)
    about_it = about(server, probe(server, parameters), log).about
    known = next(one for one in run_dir.manifest["methods"] if one["label"] == endpoint.label)["served"].get("version")
    if known and known != about_it["version"]:
        server.close()
        raise UserError(f"its version was {known} and is {about_it['version']}: start a new run")
    entries = [
        entry | {"served": {**about_it, "model": server.model}} if entry["label"] == endpoint.label else entry
        for entry in run_dir.manifest["methods"]
    ]
    run_dir.update(methods=entries)
    return server


@contextmanager
def connected(config: RunConfig, access: Access) -> Iterator[list[Server]]:
    """Connect to the servers that run already, with their models, and close the connections at the end."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(closing(connect(endpoint, url, key, access.timeout_s)))
            for endpoint, url, key in zip(config.endpoints, access.urls, access.keys, strict=False)
        ]
