"""HTTP client of an OpenAI-compatible server: chat completions as timed streams, and pages.

Each request has a connection of its own. No request is sent twice, and redirects are not followed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import httpx

from specbench_ss.served import counters
from specbench_ss.served.answer import Answer
from specbench_ss.served.exchange import Exchange
from specbench_ss.served.protocol import DONE, AnswerError, event, message_of, payloads
from specbench_ss.version import __version__

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
        self.no_counters = "" if counters.readable() else counters.NEEDS  # why its counters are not read, in words
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
        """Whether it is on this machine."""
        host = urlsplit(self.url).hostname or ""
        try:
            return host == "localhost" or ip_address(host).is_loopback
        except ValueError:
            return False

    @property
    def root(self) -> str:
        """The address below which the pages lie that are no part of the API, `/metrics` among them."""
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
        """Whether it answers at all, or as it did at first: some servers cannot list their models."""
        try:
            return self.get(f"{self.url}/models").status_code in (self.listed, *range(500))
        except AnswerError:
            return False

    def counters(self) -> counters.Counters | None:
        """Return what it has counted; None where that cannot be known, which `no_counters` explains from then on."""
        if self.no_counters:
            return None
        try:
            page = self.get(f"{self.root}/metrics")
        except AnswerError as e:
            found: counters.Counters | str = f"its /metrics does not answer: {e}"
        else:
            found = counters.read(page.text, self.model) if page.status_code == 200 else "it has no /metrics"
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
                    at_s = exchange.elapsed()
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
                if exchange.total_is_next:
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
