"""HTTP client of OpenAI-compatible servers: streamed chat completions with times and counts.

Counts of drafts and accepted tokens: `server_counts`.

Every fault of a server is an `AnswerError`, whose text is stored in a record.

httpx limits each read of a socket, so it does not detect a server that sends single bytes; `Exchange` does.

Each request has its own connection. No request is sent twice, and redirects are not followed.
"""

from __future__ import annotations

import json
import math
import re
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from ipaddress import ip_address
from itertools import pairwise
from types import TracebackType
from typing import Annotated, Any, Literal
from urllib.parse import unquote, urlsplit

import httpx
import msgspec

from specbench_ss.bench.server_counts import (
    Reading,
    SglangExtension,
    SpecCounts,
    Timings,
    TrtSpec,
    VllmMetrics,
    of_request,
    read_metrics,
)
from specbench_ss.errors import UserError, printable
from specbench_ss.redaction import SHORTEST, without
from specbench_ss.runs.config import RunConfig
from specbench_ss.user_files import Count
from specbench_ss.version import __version__

SEEDS = 2**31  # servers accept seeds below this


def settings(config: RunConfig, longest: int, seed: int) -> dict[str, Any]:
    """Return the decoding parameters of a request. longest: default of max_tokens. Defaults are left out."""
    parameters: dict[str, Any] = {"max_tokens": config.max_new_tokens or longest, "temperature": config.temperature}
    if config.temperature > 0:
        parameters |= {"seed": seed % SEEDS} | ({"top_p": config.top_p} if config.top_p < 1 else {})
    further: dict[str, Any] = json.loads(config.extra_body or "{}")
    return parameters | ({"stop": list(config.stop)} if config.stop else {}) | further


NEEDS = "reading /metrics requires prometheus-client: pip install -e '.[endpoint]'"

DONE = b"[DONE]"
FIELD = re.compile(rb"[\w-]*:|(data|event|id|retry)$")  # start of a line of an event stream
END = re.compile(rb"\r\n|\n|\r(?=[^\n])")  # of a line; a last CR may be half of an end
LINE = 1 << 20  # bytes of one line of an answer
MOST = 64 << 20  # bytes of one answer
SHOWN = 120  # characters of a server's text in messages

MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # errors of the decoder


class AnswerError(UserError):
    """A failed request, with the reason. transient: another request may succeed, after `wait_s` at the earliest."""

    transient, wait_s = False, 0.0


Name = Annotated[str, msgspec.Meta(max_length=1000)]


class Function(msgspec.Struct):
    """A piece of a tool call."""

    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct):
    """One of the tool calls of a piece."""

    function: Function | None = None


class Delta(msgspec.Struct):
    """A piece of an answer. reasoning, reasoning_content: two names of the reasoning text before an answer."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None

    @property
    def text(self) -> str:
        """Return the content, and the names and arguments of tool calls."""
        calls = [call.function for call in self.tool_calls or () if call.function]
        return "".join([self.content or "", *(text for call in calls for text in (call.name, call.arguments) if text)])


class TokenLogprob(msgspec.Struct):
    """Log-probability of an output token under the target model's distribution."""

    token: str
    logprob: float
    top_logprobs: list[TokenLogprob] | None = None


class Logprobs(msgspec.Struct):
    """Log-probabilities of the tokens of a piece of an answer."""

    content: list[TokenLogprob] | None = None


class Choice(msgspec.Struct):
    """One of the answers; only one is requested. token_ids, response_token_ids: as vLLM and SGLang call them."""

    delta: Delta | None = None
    message: Delta | None = None  # in place of `delta`, of an answer in one piece
    finish_reason: Name | None = None
    logprobs: Logprobs | None = None
    token_ids: list[Count] | None = None
    response_token_ids: list[Count] | None = None
    speculative_decoding: TrtSpec | None = None


class Usage(msgspec.Struct):
    """Token counts of the server."""

    completion_tokens: Count
    prompt_tokens: Count | None = None


class Event(msgspec.Struct):
    """One event of the stream. Unknown fields are ignored."""

    choices: Annotated[list[Choice], msgspec.Meta(max_length=1)] | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    metrics: VllmMetrics | None = None
    sglext: SglangExtension | None = None
    error: Any = None


_read = msgspec.json.Decoder(Event).decode
_skip = msgspec.json.Decoder(msgspec.Raw).decode  # checks the syntax alone


def payloads(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the data of each event, as the standard of server-sent events has it. Raise AnswerError for other text."""
    data = bytearray()
    for line in _lines(pieces):
        if line.startswith(b"data:"):
            data += line[5:].removeprefix(b" ") + b"\n"
            _check_length(data)
            line = b"" if data.count(b"\n") == 1 and _is_whole(data[:-1]) else line  # some servers send no empty line
        if not line and data:  # the end of an event
            yield bytes(data[:-1])
            data = bytearray()
        elif line and not FIELD.match(line):
            raise AnswerError(f"the response is not a server-sent event stream: {shown(line)}")
    if data:
        yield bytes(data[:-1])


def _is_whole(data: bytes | bytearray) -> bool:
    with suppress(*MALFORMED):
        return bool(_skip(data))
    return data == DONE


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines; a byte is copied a few times at most. Raise AnswerError if a line or the total is too long."""
    buffer, size = bytearray(), 0
    for piece in pieces:
        size += len(piece)
        if size > MOST:
            raise AnswerError(f"the server sent over {MOST >> 20} MiB in one answer")
        buffer += piece
        if b"\n" in piece or b"\r" in piece:
            *whole, rest = END.split(buffer)
            for line in whole:
                _check_length(line)
                yield bytes(line)
            buffer = bytearray(rest)
        _check_length(buffer)
    yield bytes(buffer.rstrip(b"\r"))


def _check_length(line: bytes | bytearray) -> None:
    if len(line) > LINE:
        raise AnswerError(f"the server sent a line over {LINE >> 20} MiB")


def event(data: bytes) -> Event:
    """Parse an event. Raise AnswerError for a malformed event, and for an error reported by the server."""
    try:
        parsed = _read(data)
    except MALFORMED as e:
        raise AnswerError(f"the server sent a malformed chat completion chunk ({e}): {shown(data)}") from None
    if parsed.error is not None:
        raise AnswerError(f"the server reports: {message_of(data)}")
    return parsed


def message_of(body: bytes) -> str:
    """Return the message of a server's error on one line, or a note for an HTML page."""
    try:
        content = msgspec.json.decode(body)
    except MALFORMED:
        return "a page of HTML" if b"<html" in body[:2000].lower() else shown(body)
    for name in ("error", "message", "detail"):
        content = content[name] if isinstance(content, dict) and content.get(name) else content
    return shown((content if isinstance(content, str) else msgspec.json.encode(content).decode()).encode())


def shown(data: bytes) -> str:
    """Return the start of a server's text on one line without control characters."""
    plain = printable(" ".join(data[: 4 * SHOWN].decode(errors="replace").split()))
    return plain[:SHOWN] + ("…" if len(plain) > SHOWN else "") if plain else "nothing"


class Exchange:
    """Shut down the connection of a request when the response is overdue.

    progress_s: maximum time between signs of progress, which `renew` reports.
    total_s: maximum time of the whole response.
    clock: returns seconds, for measured times.

    `trace` is the request's trace extension of httpx: it gives the socket and the time of sending. The request needs
    its own connection.
    """

    def __init__(
        self, progress_s: float, total_s: float = math.inf, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.progress_s, self.total_s, self.clock = progress_s, total_s, clock
        self.overdue, self._whole = False, False
        self.sent_at = clock()
        self.end = time.monotonic() + total_s
        self.until = min(time.monotonic() + progress_s, self.end)
        self._socket: socket.socket | None = None
        self._changed, self._over = threading.Event(), False
        self._watch = threading.Thread(target=self._keep_time, name="exchange", daemon=True)

    def __enter__(self) -> Exchange:
        self._watch.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over = True
        self._changed.set()
        self._watch.join()

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Handle an event of httpcore: a new connection, TLS around it, or the start of the request."""
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):  # one limit for the whole handshake
            self._socket = info["return_value"].get_extra_info("socket")
            if self.overdue:
                self._shut_down()
        elif event.endswith(".send_request_headers.started"):
            self.sent_at = self.clock()
            self.end = time.monotonic() + self.total_s
            self.renew()

    def renew(self) -> None:
        """Restart the time limit of the next sign of progress."""
        self.until = min(time.monotonic() + self.progress_s, self.end)

    def finish(self, seconds: float) -> None:
        """Set the remaining time after a complete response, which cannot be overdue."""
        self._whole = True
        self.until = min(self.until, time.monotonic() + seconds)
        self._changed.set()

    def _keep_time(self) -> None:
        while not self._over:
            left = self.until - time.monotonic()
            if left <= 0:
                self.overdue = not self._whole
                self._shut_down()
                return
            if self._changed.wait(min(left, threading.TIMEOUT_MAX)):
                self._changed.clear()

    def _shut_down(self) -> None:
        """Shut down the connection, so that a blocked read or write returns."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


OVER = 1  # allowed tokens above max_tokens: a counted EOS
MAX_SILENT_TOKENS = 16  # allowed tokens without text: EOS, reasoning markers
TOKEN = 1 << 10  # bytes of one token's text, at most
TEMPLATE = 1 << 16  # tokens that a chat template adds, at most
TOGETHER, TOGETHER_S = 0.1, 2e-4  # pieces with gaps below this share of the mean gap, or seconds, were sent together
SILENT = ("ignore_eos", "min_tokens")  # settings by which tokens without text follow the end of a text


@dataclass(slots=True)
class Answer:
    """A received answer. Times are in seconds since the request was sent, or since an earlier moment (`count_from`)."""

    max_tokens: int = 0  # as requested
    stop: Sequence[str] = ()  # as requested
    prompt_bytes: int = 0  # of the request
    silent: bool = False  # tokens without text were requested
    text: str = ""
    reasoning: str = ""  # text before the answer, of models that think
    finish: str = ""
    tokens: int = 0
    counted: Literal["usage", "tokenizer", "chunks"] = "chunks"  # source of `tokens`; `chunks` is a guess
    chunks: int = 0  # pieces of text
    text_bytes: int = 0  # of text and reasoning
    first: tuple[int, int, int] = (0, 0, 0)  # chunks, bytes and token ids that arrived with the first piece of text
    arrivals: list[tuple[float, int, int, int]] = field(
        default_factory=list
    )  # time of each piece, `first` if it was last
    prompt_tokens: int | None = None
    ttft_s: float | None = None  # to the first piece
    wall_s: float = 0.0
    sent_at: float = 0.0  # reading of the clock
    spec: SpecCounts | None = None  # counts that the server sent with the answer
    token_ids: list[int] = field(default_factory=list)  # empty: not sent
    logprobs: list[TokenLogprob] = field(default_factory=list)  # empty: not requested
    parts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)

    @property
    def first_share(self) -> float:
        """Return the share of the output that arrived with the first text, by token ids if all are there."""
        _, text_bytes, ids = self.first
        if self.token_ids and len(self.token_ids) == self.tokens:
            return ids / self.tokens
        return text_bytes / self.text_bytes if self.text_bytes else 1.0

    def add(self, event: Event, at_s: float) -> bool:
        """Add an event at `at_s` seconds after the request; return True if the answer grew or ended.

        Raise AnswerError for more text or tokens than max_tokens allows.
        """
        before = self.chunks, self.finish
        for choice in event.choices or ():
            delta = choice.delta or choice.message
            reasoning = (delta.reasoning_content or delta.reasoning or "") if delta else ""
            self.token_ids += choice.token_ids or choice.response_token_ids or ()
            self.logprobs += (choice.logprobs and choice.logprobs.content) or ()
            if delta and (delta.text or reasoning):
                self.parts.append(delta.text)
                self.thoughts.append(reasoning)
                self.text_bytes += len((self.parts[-1] + reasoning).encode(errors="surrogatepass"))
                self.chunks += 1
                self.ttft_s = at_s if self.ttft_s is None else self.ttft_s
                self.wall_s = at_s
                self.arrivals.append((at_s, self.chunks, self.text_bytes, len(self.token_ids)))
            if choice.finish_reason and not self.finish:
                self.finish, self.wall_s = choice.finish_reason, at_s
        if event.usage is not None:
            self.tokens, self.prompt_tokens = event.usage.completion_tokens, event.usage.prompt_tokens
            self.counted = "usage"
        reports = [event.timings, event.metrics, event.sglext]
        for report in (*reports, *(choice.speculative_decoding for choice in event.choices or ())):
            if report is not None:
                self.spec = of_request(report) or self.spec
        pieces, most = max(self.chunks, len(self.token_ids), len(self.logprobs)), self.max_tokens + MAX_SILENT_TOKENS
        sizes = (("tokens", self.tokens), ("pieces of text", pieces), ("KiB of text", self.text_bytes // TOKEN))
        for name, size in sizes:
            if size > most:
                raise AnswerError(f"the server sent {size} {name} with max_tokens {self.max_tokens}")
        if (self.prompt_tokens or 0) > self.prompt_bytes + TEMPLATE:
            raise AnswerError(f"the server counts {self.prompt_tokens} tokens in a prompt of {self.prompt_bytes} bytes")
        return before != (self.chunks, self.finish)

    def count_from(self, moment: float) -> None:
        """Count the times of a checked answer from this reading of the clock."""
        waited = self.sent_at - moment
        self.ttft_s, self.wall_s, self.sent_at = (self.ttft_s or 0.0) + waited, self.wall_s + waited, moment

    def count_tokens(self, tokenize: Callable[[str], int] | None) -> Answer:
        """Count the tokens of the text if the server did not: after a measurement, since it takes time."""
        if tokenize is not None and self.counted == "chunks" and self.chunks:
            self.tokens, self.counted = max(1, tokenize(self.reasoning + self.text)), "tokenizer"
        return self

    def checked(self) -> Answer:
        """Return the answer after the end of its stream. Raise AnswerError if it is incomplete or implausible."""
        if not self.finish:
            position = f"after {self.chunks} pieces of text" if self.chunks else "before any text"
            raise AnswerError(f"the stream ended {position}, without a finish reason")
        if self.counted == "usage" and not self.tokens and self.chunks:
            raise AnswerError(f"the server counts 0 tokens in an answer of {self.chunks} pieces of text")
        self.text, self.reasoning = "".join(self.parts), "".join(self.thoughts)
        if self.counted == "chunks":
            self.tokens = self.chunks
        if not self.tokens:
            raise AnswerError("the stream had no text")
        self._check_counts()
        longest = max(TOGETHER_S, TOGETHER * (self.wall_s - (self.ttft_s or 0.0)) / max(1, self.chunks - 1))
        gaps = ((piece[1:], after[0] - piece[0]) for piece, after in pairwise([*self.arrivals, (math.inf, 0, 0, 0)]))
        self.first = next((first for first, gap in gaps if gap >= longest), self.first)
        self.ttft_s = self.wall_s if self.ttft_s is None else self.ttft_s
        return self

    def _check_counts(self) -> None:
        """Raise AnswerError for more tokens than requested or than the text can have, and for impossible drafts.

        Tokens without text fill an output up to max_tokens, if they were requested, or if token ids prove them.
        """
        if self.tokens > self.max_tokens + OVER:
            verb = "counts" if self.counted == "usage" else "sent text of"
            raise AnswerError(f"the server {verb} {self.tokens} tokens with max_tokens {self.max_tokens}")
        stop = max((len(text.encode()) for text in self.stop), default=0)  # not part of the text
        full = self.finish == "length" and self.tokens >= self.max_tokens
        explained = full or self.silent or len(self.token_ids) == self.tokens
        if not explained and self.tokens > self.text_bytes + stop + MAX_SILENT_TOKENS:
            raise AnswerError(f"the server counts {self.tokens} tokens in a text of {self.text_bytes} bytes")
        most = self.max_tokens if self.counted == "chunks" else self.tokens
        if self.spec is not None and (fault := self.spec.fault(most)):
            raise AnswerError(f"the server {fault}")


Message = Mapping[str, Any]
PAGE_S = 10.0  # time limit of pages other than answers
PAGE = 4 << 20  # bytes of such a page
LAGS, LAG_S = 5, 0.05  # readings of counters that lag behind an answer, and seconds between them
DRAIN_S = 1.0  # for a stream to end after its last event
TRANSIENT = (408, 409, 429)  # statuses after which another request may succeed, as after those from 500 on
REFUSED = {401: "requires a key, or another one", 403: "refuses access"}
TEXT = "text"


class Server:
    """Client of one server. url: of its API, possibly with user and password; `shown_url` has neither.

    timeout_s: maximum wait for the next piece of an answer. clock: returns seconds, for tests.
    """

    def __init__(
        self,
        label: str,
        url: str,
        key: str | None = None,
        timeout_s: float = 120.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.label, self.url, self.clock, self.timeout_s = label, url.rstrip("/"), clock, timeout_s
        self.key_hint = "--api-key-env names the variable with the key"
        self.shown_url, self.model, self.usage = without_user(self.url), "", True
        self.engine = ""  # as `server_counts.ENGINES` names it; empty: unknown
        self.fields: Mapping[str, Any] = {}  # of every request, in addition to the decoding parameters
        self.listed = 200  # status of the first request for its models
        self.no_counters = "" if find_spec("prometheus_client") else NEEDS  # reason why its counters are not read
        self.metrics = ""  # last page of its counters
        self._missed = 0  # readings of its counters that failed
        self.tokenize: Callable[[str], int] | None = None  # counts tokens that the server does not count
        parts = urlsplit(url)
        known = (key, parts.password, unquote(parts.password or ""))
        basic = b64encode(unquote(f"{parts.username}:{parts.password}").encode()).decode() if parts.password else ""
        self._secrets = [secret for secret in (basic, *known) if secret]
        headers = {"User-Agent": f"ssbench/{__version__}", "Accept-Encoding": "identity", "Connection": "close"}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(
            headers=headers,
            timeout=httpx.Timeout(timeout_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=not self.loopback,  # proxies for remote servers only
        )

    @property
    def loopback(self) -> bool:
        """Return True if the server is on this machine."""
        host = urlsplit(self.url).hostname or ""
        try:
            return host == "localhost" or ip_address(host).is_loopback
        except ValueError:
            return False

    @property
    def root(self) -> str:
        """Return the base address of pages outside the API, such as `/metrics`."""
        return self.url.removesuffix("/v1")

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    def get(self, url: str) -> httpx.Response:
        """Return a page with any status. Raise AnswerError if it is late or too long."""
        with self._exchange("whole page", min(PAGE_S, self.timeout_s)) as exchange:
            response = self._send("GET", url, exchange)
            return self._whole(response)

    def alive(self) -> bool:
        """Return True if the server answers, or as at the start: some servers cannot list their models."""
        try:
            return self.get(f"{self.url}/models").status_code in (self.listed, *range(500))
        except AnswerError:
            return False

    def counters(self) -> Reading | None:
        """Return the server's counters; None if unavailable, with the reason in `no_counters`."""
        if self.no_counters:
            return None
        try:
            page = self.get(f"{self.root}/metrics")
        except AnswerError as e:  # it may answer the next time
            self._missed += 1
            self.no_counters = str(e) if self._missed > LAGS else ""
            return None
        self.metrics = page.content.decode(errors="replace") if page.status_code == 200 else ""
        counters = read_metrics(self.metrics, self.model) if page.status_code == 200 else "it has no /metrics"
        if isinstance(counters, str):
            self.no_counters = counters
            return None
        return counters

    def counters_with(self, before: Reading | None, tokens: int) -> Reading | None:
        """Return the counters once they have so many more generated tokens; the last ones if that takes too long."""
        after = None if before is None else self.counters()
        for _ in range(LAGS):
            if before is None or after is None or after.generated - before.generated >= tokens:
                break
            time.sleep(LAG_S)
            after = self.counters()
        return after

    def ask(self, messages: Sequence[Message], settings: Mapping[str, Any], most_s: float | None = None) -> Answer:
        """Request a streamed answer to a conversation. most_s: time limit of the answer.

        Raise AnswerError for an incomplete answer.
        """
        body = {"model": self.model, "messages": list(messages), "stream": True, **self.fields, **settings}
        body |= {"stream_options": {"include_usage": True}} if self.usage else {}
        silent = any(body.get(name) for name in SILENT)
        answer = Answer(settings["max_tokens"], settings.get("stop", ()), len(json.dumps(body)), silent)
        with self._exchange(TEXT, self.timeout_s, math.inf if most_s is None else most_s) as exchange:
            response = self._send("POST", f"{self.url}/chat/completions", exchange, body)
            try:
                self._check(response)
                pieces = response.iter_raw()
                for data in payloads(pieces):
                    at_s = exchange.clock() - exchange.sent_at
                    if data == DONE:
                        _drain(pieces, exchange)
                        break
                    if answer.add(event(self._cleaned(data)), at_s):
                        exchange.renew()
            finally:
                response.close()
        answer.sent_at = exchange.sent_at
        answer.checked()
        answer.text, answer.reasoning = (self.hidden(text, SHORTEST) for text in (answer.text, answer.reasoning))
        return answer

    def ask_whole(self, messages: Sequence[Message], settings: Mapping[str, Any]) -> Answer:
        """Request an answer in one piece, within `timeout_s`. Only its text and its counts are set."""
        body = {"model": self.model, "messages": list(messages), **settings}
        answer = Answer(settings["max_tokens"], prompt_bytes=len(json.dumps(body)))
        with self._exchange("whole answer", self.timeout_s) as exchange:
            page = self._whole(self._send("POST", f"{self.url}/chat/completions", exchange, body))
            if page.status_code != 200:
                raise self.refusal(page)
            content = event(page.content)
            if not content.choices:
                raise AnswerError(f"{self.shown_url} gave no OpenAI-compatible answer: {shown(page.content)}")
            answer.add(content, 0.0)
        answer.text = self.hidden("".join(answer.parts), SHORTEST)
        return answer

    def _send(self, method: str, url: str, exchange: Exchange, body: Any = None) -> httpx.Response:
        """Send a request and return the response after its headers; the body is not read."""
        wait = min(exchange.progress_s, exchange.total_s)
        extensions = {"trace": exchange.trace}
        request = self._client.build_request(method, url, json=body, timeout=wait, extensions=extensions)
        response = self._client.send(request, stream=True)
        if (encoding := response.headers.get("content-encoding", "identity")) not in ("", "identity"):
            response.close()
            raise AnswerError(f"{self.shown_url} answers in an encoding that was not requested: {encoding[:SHOWN]}")
        return response

    def _check(self, response: httpx.Response) -> None:
        """Raise AnswerError for a response that is no event stream."""
        kind = response.headers.get("content-type", "").partition(";")[0].strip()
        if response.status_code != 200:
            raise self.refusal(self._whole(response))
        if kind != "text/event-stream":
            raise AnswerError(f"{self.shown_url} answers with {shown(kind.encode())} instead of an event stream")

    def refusal(self, response: httpx.Response) -> AnswerError:
        """Return the error for a refused page."""
        code, url = response.status_code, without_user(str(response.url))
        hint = f"; is the address {self.shown_url}/v1?" if code == 404 and not self.url.endswith("/v1") else ""
        hint = "; redirects are not followed" if response.is_redirect else hint
        wait_s = response.headers.get("retry-after", "")
        text = f"{url} answers {code} {response.reason_phrase}: {message_of(response.content)}{hint}"
        if code in REFUSED:
            text = (
                f"the server {REFUSED[code]} ({code}): {self.key_hint}; its answer is: {message_of(response.content)}"
            )
        return StatusError(code, self.hidden(text), float(wait_s) if wait_s.isdecimal() else 0.0)

    @contextmanager
    def _exchange(self, awaited: str, progress_s: float, total_s: float = math.inf) -> Iterator[Exchange]:
        """Apply the time limits of a request; turn every failure into an AnswerError without secrets.

        awaited: name of the sign of progress, for the message.
        """
        with Exchange(progress_s, total_s, self.clock) as exchange:
            try:
                yield exchange
                late = exchange.overdue  # a closed connection may look like the end of the body
            except FAULTS as e:
                late = exchange.overdue or isinstance(e, httpx.TimeoutException)
                if not late:
                    raise self._failure(e) from None
            if late:
                limit = f"no {awaited} within {progress_s:g} s" + " (--endpoint-timeout)" * (awaited == TEXT)
                if exchange.until >= exchange.end or total_s < progress_s:
                    limit = f"no complete answer within {total_s:g} s (--timeout)"
                raise AnswerError(f"{self.shown_url} sent {limit}")

    def _failure(self, error: Exception) -> AnswerError:
        content = self.hidden(str(error)) or type(error).__name__
        if isinstance(error, AnswerError):
            return error if content == str(error) else AnswerError(content)
        if isinstance(error, httpx.InvalidURL | UnicodeError):
            return AnswerError(f"{ascii(self.shown_url)} is no server address: {content}")
        unreached = isinstance(error, httpx.ConnectError)
        text = f"cannot reach {self.shown_url}" if unreached else f"the connection to {self.shown_url} failed"
        failure = AnswerError(f"{text}: {content}")
        failure.transient = True
        return failure

    def hidden(self, text: str, shortest: int = 1) -> str:
        """Return a text without the key and the password. shortest: characters of these."""
        return without(text, (secret for secret in self._secrets if len(secret) >= shortest))

    def _cleaned(self, data: bytes) -> bytes:
        return self.hidden(data.decode("latin-1"), SHORTEST).encode("latin-1")

    def _whole(self, response: httpx.Response) -> httpx.Response:
        """Return a response with its body, and close it. Raise AnswerError for a body over the limit."""
        body = bytearray()
        try:
            for piece in response.iter_raw():
                body += piece
                if len(body) > PAGE:
                    raise AnswerError(f"{without_user(str(response.url))} answers with over {PAGE >> 20} MiB")
        finally:
            response.close()
        kept = ("content-type", "server", "retry-after")
        headers = {name: shown(response.headers[name].encode()) for name in kept if name in response.headers}
        content, code = self._cleaned(bytes(body)), response.status_code
        return httpx.Response(code, headers=headers, content=content, request=response.request)


def _drain(pieces: Iterator[bytes], exchange: Exchange) -> None:
    """Read until the end of the stream for a moment: some servers treat an early close as a cancellation."""
    exchange.finish(DRAIN_S)
    with suppress(httpx.HTTPError):
        for _ in pieces:
            pass


FAULTS = (
    AnswerError,
    httpx.HTTPError,
    httpx.StreamError,
    httpx.InvalidURL,
    UnicodeError,
    OSError,
    RuntimeError,  # of httpx: the client was closed, since the server is not measured any more
)


class StatusError(AnswerError):
    """An HTTP error with its status."""

    def __init__(self, code: int, text: str, wait_s: float = 0.0) -> None:
        super().__init__(text)
        self.code, self.wait_s, self.transient = code, wait_s, code >= 500 or code in TRANSIENT


def without_user(url: str) -> str:
    """Return an address without user and password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
