"""HTTP client of OpenAI-compatible servers: streamed chat completions with times and counts.

vLLM counts drafts, drafted and accepted tokens. SGLang has only gauges of its last moments, which belong to no
request, and llama.cpp tells a request's own counts in its answer: `Timings`.

Every mistake of a server is a `AnswerError`, whose text is a clause that a row can hold.

httpx limits each read of a socket, so a server that sends a byte now and then is never late for it.

Each request has a connection of its own. No request is sent twice, and redirects are not followed.
"""

from __future__ import annotations

import math
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from ipaddress import ip_address
from types import TracebackType
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import httpx
import msgspec

from specbench_ss.errors import UserError
from specbench_ss.runs.config import RunConfig
from specbench_ss.version import __version__

SEEDS = 2**31  # servers take seeds below this


def settings(config: RunConfig, longest: int, seed: int) -> dict[str, Any]:
    """Return how to decode. longest: tokens, where the run does not say. Only what is no default is sent besides."""
    asked: dict[str, Any] = {"max_tokens": config.max_new_tokens or longest, "temperature": config.temperature}
    if config.temperature > 0:
        asked |= {"seed": seed % SEEDS} | ({"top_p": config.top_p} if config.top_p < 1 else {})
    return asked | ({"stop": list(config.stop)} if config.stop else {})


NAMES = {
    "drafts": "vllm:spec_decode_num_drafts",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}
GENERATED = "vllm:generation_tokens"
GAUGE = "sglang:spec_accept_length"
ONLY_GAUGE = f"{GAUGE} alone, a mean over its last moments that belongs to no request"
NEEDS = "reading /metrics needs prometheus-client: pip install -e '.[endpoint]'"


@dataclass(frozen=True, slots=True)
class Counters:
    """Counts since the server began, or between two readings. generated: tokens of all its answers, where it tells."""

    drafts: int
    drafted: int
    accepted: int
    generated: int | None = None

    def since(self, before: Counters) -> Counters | None:
        """Return what was counted since an earlier reading; None where a count fell, as after a restart."""
        known = self.generated is not None and before.generated is not None
        grown = Counters(
            self.drafts - before.drafts,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            (self.generated or 0) - (before.generated or 0) if known else None,
        )
        return grown if min(grown.drafts, grown.drafted, grown.accepted, grown.generated or 0) >= 0 else None


def read(text: str, model: str) -> Counters | str:
    """Return the counters of a model; in words, why there are none.

    Samples of several engines are added up; those of another model, which a label names, are left out.
    """
    from prometheus_client.parser import text_string_to_metric_families

    sums: dict[str, float] = {}
    wanted = (*NAMES.values(), GENERATED, GAUGE)
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.removesuffix("_total")
                if name in wanted and sample.labels.get("model_name", model) == model:
                    sums[name] = sums.get(name, 0.0) + sample.value
    except (ValueError, KeyError, IndexError, TypeError):
        return "its /metrics is no text that Prometheus reads"
    if not all(value >= 0 and value.is_integer() for name, value in sums.items() if name != GAUGE):
        return "its /metrics has counts that are no whole numbers"
    if missing := [name for name in NAMES.values() if name not in sums]:
        return f"its /metrics has {ONLY_GAUGE}" if GAUGE in sums else f"its /metrics has no {missing[0]}"
    generated = sums.get(GENERATED)
    drafts, drafted, accepted = (int(sums[name]) for name in NAMES.values())
    if accepted > drafted:
        return f"its /metrics counts {accepted} of {drafted} drafted tokens as accepted"
    return Counters(drafts, drafted, accepted, None if generated is None else int(generated))


DONE = b"[DONE]"
FIELD = re.compile(rb"(data|event|id|retry)?:")  # how a line of a stream of events begins
LINE = 1 << 20  # bytes of one line of an answer
MOST = 64 << 20  # bytes of one answer
SHOWN = 120  # characters of what a server sent

MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # what a decoder raises

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class AnswerError(UserError):
    """A request that failed, and why."""


class Delta(msgspec.Struct):
    """A piece of an answer. reasoning, reasoning_content: what a model thinks before it answers, by two names."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class Choice(msgspec.Struct):
    """One of the answers; only one is asked for."""

    delta: Delta | None = None
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    """How many tokens there were, as the server counts them."""

    completion_tokens: Count
    prompt_tokens: Count | None = None


class Timings(msgspec.Struct):
    """What llama.cpp tells of a request: drafted tokens, and those of them that were accepted."""

    draft_n: Count | None = None
    draft_n_accepted: Count | None = None


class Event(msgspec.Struct):
    """One event of the stream. Fields that are not known are ignored."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    error: Any = None


_read = msgspec.json.Decoder(Event).decode


def payloads(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the data of each event as soon as its line is whole. Raises AnswerError for any other line."""
    for line in _lines(pieces):
        if line.startswith(b"data:"):
            yield line[5:].strip()
        elif line and not FIELD.match(line):
            raise AnswerError(f"the response is not a server-sent event stream: {shown(line)}")


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines; a byte is copied a few times at most. Raises AnswerError where a line or all is too long."""
    held, size = bytearray(), 0
    for piece in pieces:
        size += len(piece)
        if size > MOST:
            raise AnswerError(f"the server sent over {MOST >> 20} MiB in one answer")
        held += piece
        if b"\n" in piece:
            *whole, held = held.split(b"\n")
            for line in whole:
                yield bytes(_bounded(line).rstrip(b"\r"))
        _bounded(held)
    yield bytes(held.rstrip(b"\r"))


def _bounded(line: bytearray) -> bytearray:
    if len(line) > LINE:
        raise AnswerError(f"the server sent a line over {LINE >> 20} MiB")
    return line


def event(data: bytes) -> Event:
    """Return what an event says. Raises AnswerError for what is none, and for an error that the server tells."""
    try:
        found = _read(data)
    except MALFORMED as e:
        raise AnswerError(f"the server sent what is no part of a chat completion ({e}): {shown(data)}") from None
    if found.error is not None:
        raise AnswerError(f"the server says: {message_of(data)}")
    return found


def message_of(body: bytes) -> str:
    """Return what an error of a server says, on one line; of a page of HTML that it is one."""
    try:
        said = msgspec.json.decode(body)
    except MALFORMED:
        return "a page of HTML" if b"<html" in body[:2000].lower() else shown(body)
    for name in ("error", "message", "detail"):
        said = said[name] if isinstance(said, dict) and said.get(name) else said
    return shown((said if isinstance(said, str) else msgspec.json.encode(said).decode()).encode())


def shown(data: bytes) -> str:
    """Return the beginning of what a server sent, on one line and without control characters."""
    text = " ".join(data[: 4 * SHOWN].decode(errors="replace").split())
    plain = "".join(c if c.isprintable() else "?" for c in text)
    return plain[:SHOWN] + ("…" if len(plain) > SHOWN else "") if plain else "nothing"


class Exchange:
    """Shut the connection of a request down when the response is overdue.

    progress_s: longest time between signs of progress, which `renew` reports.
    total_s: longest time of the whole response.
    clock: seconds, for the times that are measured.

    `trace` is the request's trace extension of httpx: it yields the socket and the moment of sending. The request needs
    a connection of its own.
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
        """Take in an event of httpcore: a new connection, TLS around it, or the request that is sent next."""
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):  # a handshake has one limit for all of it
            self._socket = info["return_value"].get_extra_info("socket")
            if self.overdue:
                self._shut_down()
        elif event.endswith(".send_request_headers.started"):
            self.sent_at = self.clock()
            self.end = time.monotonic() + self.total_s
            self.renew()

    def renew(self) -> None:
        """Begin the time until the next sign of progress again."""
        self.until = min(time.monotonic() + self.progress_s, self.end)

    def finish(self, seconds: float) -> None:
        """Set the time that is left once the response is whole. It is never overdue then."""
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
        """End the connection, so that a read or a write that waits for it returns."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


OVER = 1  # tokens above max_tokens that are accepted: an end token that is counted beside them
HIDDEN = 16  # tokens without text that are accepted: end tokens, markers of thinking, what a draft has behind the end


@dataclass(slots=True)
class Answer:
    """An answer as it came. Times are seconds from the moment that the request was sent.

    max_tokens, stop: as they were asked for. counted: whether `tokens` is the server's own count, or the number of
    `chunks`, pieces of text. text_bytes: of the text and of the thinking. ttft_s: to the first piece. drafted,
    accepted: llama.cpp's counts of this request.
    """

    max_tokens: int = 0
    stop: Sequence[str] = ()
    text: str = ""
    finish: str = ""
    tokens: int = 0
    counted: Literal["usage", "chunks"] = "chunks"
    chunks: int = 0
    text_bytes: int = 0
    prompt_tokens: int | None = None
    ttft_s: float | None = None
    wall_s: float = 0.0
    drafted: int | None = None
    accepted: int | None = None
    parts: list[str] = field(default_factory=list)

    def add(self, found: Event, at_s: float) -> bool:
        """Take in an event that came `at_s` seconds after the request, and return whether the answer grew or ended.

        Raises AnswerError for more pieces of text than there can be tokens.
        """
        before = self.chunks, self.finish
        for choice in found.choices or ():
            delta = choice.delta
            thought = (delta.reasoning_content or delta.reasoning or "") if delta else ""
            if delta and (delta.content or thought):
                self.parts.append(delta.content or "")
                self.text_bytes += len((self.parts[-1] + thought).encode(errors="surrogatepass"))
                self.chunks += 1
                self.ttft_s = at_s if self.ttft_s is None else self.ttft_s
                self.wall_s = at_s
            if choice.finish_reason:
                self.finish, self.wall_s = choice.finish_reason, at_s
        if found.usage is not None:
            self.tokens, self.prompt_tokens = found.usage.completion_tokens, found.usage.prompt_tokens
            self.counted = "usage"
        if found.timings is not None:
            self.drafted, self.accepted = found.timings.draft_n, found.timings.draft_n_accepted
        if self.chunks > self.max_tokens + HIDDEN:
            raise AnswerError(f"the server sent {self.chunks} pieces of text with max_tokens {self.max_tokens}")
        return before != (self.chunks, self.finish)

    def checked(self) -> Answer:
        """Return the answer when its stream has ended. Raises AnswerError for one that is not whole or cannot be."""
        if not self.finish:
            what = f"after {self.chunks} pieces of text" if self.chunks else "before any text"
            raise AnswerError(f"the stream ended {what}, and the server did not say that the answer was finished")
        if self.counted == "usage" and not self.tokens and self.chunks:
            raise AnswerError(f"the server counts 0 tokens in an answer of {self.chunks} pieces of text")
        if self.counted == "chunks":
            self.tokens = self.chunks
        if not self.tokens:
            raise AnswerError("the stream had no text")
        self._check_tokens()
        self._check_drafts()
        self.text = "".join(self.parts)
        self.ttft_s = self.wall_s if self.ttft_s is None else self.ttft_s
        return self

    def _check_tokens(self) -> None:
        """Raise AnswerError for more tokens than were asked for, or than the text has bytes."""
        if self.tokens > self.max_tokens + OVER:
            what = "counts" if self.counted == "usage" else "sent pieces of text that count as"
            raise AnswerError(f"the server {what} {self.tokens} tokens with max_tokens {self.max_tokens}")
        stop = max((len(text.encode()) for text in self.stop), default=0)  # a server keeps it out of the text
        if self.tokens > self.text_bytes + stop + HIDDEN:
            raise AnswerError(f"the server counts {self.tokens} tokens in a text of {self.text_bytes} bytes")

    def _check_drafts(self) -> None:
        """Raise AnswerError for more accepted tokens than were drafted, or than the answer has."""
        accepted, drafted = self.accepted or 0, self.drafted or 0
        if accepted > drafted:
            raise AnswerError(f"the server counts {accepted} of {drafted} drafted tokens as accepted")
        if accepted > self.tokens + (HIDDEN if self.counted == "chunks" else -1):
            raise AnswerError(f"the server counts {accepted} accepted tokens in an answer of {self.tokens} tokens")


Message = Mapping[str, str]
PAGE_S = 10.0  # for a page other than an answer
PAGE = 4 << 20  # bytes of such a page
DRAIN_S = 1.0  # for a stream to end behind its last event
REFUSED = {401: "asks for a key, or for another one", 403: "refuses"}
TEXT = "text"
KEY = "--api-key-env names the variable that holds the key"


class Server:
    """A server that answers. url: of its API, which may hold a user and a password; `shown_url` does not.

    timeout_s: the longest wait for the next piece of an answer. clock: seconds, for tests.
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
        self.shown_url, self.model, self.usage = without_user(self.url), "", True
        self.listed = 200  # how it answered when it was first asked for its models
        self.no_counters = "" if find_spec("prometheus_client") else NEEDS  # why its counters are not read, in words
        self._secrets = [secret for secret in (key, urlsplit(url).password) if secret]
        headers = {"User-Agent": f"ssbench/{__version__}", "Accept-Encoding": "identity", "Connection": "close"}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(
            headers=headers,
            timeout=httpx.Timeout(timeout_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=not self.loopback,  # a proxy is for what is far away
        )

    @property
    def loopback(self) -> bool:
        """Return True if it is on this machine."""
        host = urlsplit(self.url).hostname or ""
        try:
            return host == "localhost" or ip_address(host).is_loopback
        except ValueError:
            return False

    @property
    def root(self) -> str:
        """Return the address below which the pages lie that are no part of the API, `/metrics` among them."""
        return self.url.removesuffix("/v1")

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    def get(self, url: str) -> httpx.Response:
        """Return a page, whatever its status. Raises AnswerError where there is none in time, or a longer one."""
        with self._exchange("whole page", min(PAGE_S, self.timeout_s)) as exchange:
            response = self._send("GET", url, exchange)
            try:
                return _whole(response)
            finally:
                response.close()

    def alive(self) -> bool:
        """Return True if it answers at all, or as it did at first: some servers cannot list their models."""
        try:
            return self.get(f"{self.url}/models").status_code in (self.listed, *range(500))
        except AnswerError:
            return False

    def counters(self) -> Counters | None:
        """Return what it has counted; None where that cannot be known, which `no_counters` explains from then on."""
        if self.no_counters:
            return None
        try:
            page = self.get(f"{self.root}/metrics")
        except AnswerError as e:
            found: Counters | str = f"its /metrics does not answer: {e}"
        else:
            found = read(page.text, self.model) if page.status_code == 200 else "it has no /metrics"
        if isinstance(found, str):
            self.no_counters = found
            return None
        return found

    def ask(self, messages: Sequence[Message], settings: Mapping[str, Any], most_s: float | None = None) -> Answer:
        """Return its answer to a conversation, streamed. most_s: seconds after which the answer is given up.

        Raises AnswerError for whatever is no whole answer.
        """
        body = {"model": self.model, "messages": list(messages), "stream": True, **settings}
        body |= {"stream_options": {"include_usage": True}} if self.usage else {}
        answer = Answer(settings["max_tokens"], settings.get("stop", ()))
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
                    if answer.add(event(data), at_s):
                        exchange.renew()
            finally:
                response.close()
        return answer.checked()

    def _send(self, method: str, url: str, exchange: Exchange, body: Any = None) -> httpx.Response:
        """Return the response to a request as soon as its headers are there; its body is not read."""
        wait = min(exchange.progress_s, exchange.total_s)
        traced = {"trace": exchange.trace}
        request = self._client.build_request(method, url, json=body, timeout=wait, extensions=traced)
        return self._client.send(request, stream=True)

    def _check(self, response: httpx.Response) -> None:
        """Raise AnswerError for a response that is no stream of events."""
        kind = response.headers.get("content-type", "").partition(";")[0].strip()
        if response.status_code != 200:
            raise self.refusal(_whole(response))
        if kind != "text/event-stream":
            raise AnswerError(
                f"{self.shown_url} answers with {kind or 'no type'}, where a stream of events was asked for"
            )

    def refusal(self, response: httpx.Response) -> AnswerError:
        """Return why a page was not given, in words."""
        code, where = response.status_code, without_user(str(response.url))
        if code in REFUSED:
            return AnswerError(f"the server {REFUSED[code]} ({code}): {KEY}")
        hint = f"; is the address {self.shown_url}/v1?" if code == 404 and not self.url.endswith("/v1") else ""
        said = self._hidden(message_of(response.content))
        return StatusError(code, f"{where} answers {code} {response.reason_phrase}: {said}{hint}")

    @contextmanager
    def _exchange(self, awaited: str, progress_s: float, total_s: float = math.inf) -> Iterator[Exchange]:
        """Give the time limits of a request, and make every failure within an AnswerError without secrets.

        awaited: the sign of progress, for the message.
        """
        with Exchange(progress_s, total_s, self.clock) as exchange:
            try:
                yield exchange
                late = exchange.overdue  # the end of a connection may be that of a body, too
            except (AnswerError, httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, UnicodeError, OSError) as e:
                late = exchange.overdue or isinstance(e, httpx.TimeoutException)
                if not late:
                    raise self._failure(e) from None
            if late:
                limit = f"no {awaited} within {progress_s:g} s" + " (--endpoint-timeout)" * (awaited == TEXT)
                if exchange.until >= exchange.end or total_s < progress_s:
                    limit = f"no whole answer within {total_s:g} s (--timeout)"
                raise AnswerError(f"{self.shown_url} sent {limit}")

    def _failure(self, error: Exception) -> AnswerError:
        said = self._hidden(str(error)) or type(error).__name__
        if isinstance(error, AnswerError):
            return error if said == str(error) else AnswerError(said)
        if isinstance(error, httpx.InvalidURL | UnicodeError):
            return AnswerError(f"{ascii(self.shown_url)} is no address of a server: {said}")
        if isinstance(error, httpx.ConnectError):
            return AnswerError(f"cannot reach {self.shown_url}: {said}")
        return AnswerError(f"the connection to {self.shown_url} broke: {said}")

    def _hidden(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def _whole(response: httpx.Response) -> httpx.Response:
    """Return a response with its body. Raises AnswerError for a body over the limit."""
    body = bytearray()
    for piece in response.iter_bytes():
        body += piece
        if len(body) > PAGE:
            raise AnswerError(f"{without_user(str(response.url))} answers with over {PAGE >> 20} MiB")
    kept = {name: response.headers[name] for name in ("content-type", "server") if name in response.headers}
    return httpx.Response(response.status_code, headers=kept, content=bytes(body), request=response.request)


def _drain(pieces: Iterator[bytes], exchange: Exchange) -> None:
    """Read what is behind the last event for a moment: a server may take a connection cut there for a cancellation."""
    exchange.finish(DRAIN_S)
    with suppress(httpx.HTTPError):
        for _ in pieces:
            pass


class StatusError(AnswerError):
    """A refusal with its status."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def without_user(url: str) -> str:
    """Return an address without user and password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
