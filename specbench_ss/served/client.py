"""One OpenAI-compatible server: asks it a question and measures how the answer comes.

No request is sent twice, and no other address is contacted: redirects are not followed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx

from specbench_ss.served import counters
from specbench_ss.served.protocol import DONE, AnswerError, Event, event, message_of, payloads
from specbench_ss.version import __version__

Message = Mapping[str, str]
READ_S = 10.0  # for pages other than answers
KEPT_S = 2.0  # that a connection is kept: servers close theirs after some seconds, 5 in uvicorn
REFUSED = {401: "asks for a key, or for another one", 403: "refuses"}
KEY = "--api-key-env names the variable that holds the key"


@dataclass(slots=True)
class Answer:
    """An answer as it came. Times are seconds from the moment that the request was sent.

    counted: whether `tokens` is the server's own count, or the number of `chunks`, pieces of text. ttft_s: to the first
    piece. drafted, accepted: llama.cpp's counts of this request.
    """

    text: str = ""
    finish: str = ""
    tokens: int = 0
    counted: Literal["usage", "chunks"] = "chunks"
    chunks: int = 0
    prompt_tokens: int | None = None
    ttft_s: float | None = None
    wall_s: float = 0.0
    drafted: int | None = None
    accepted: int | None = None
    parts: list[str] = field(default_factory=list)

    def add(self, found: Event, at_s: float) -> None:
        """Take in an event that came `at_s` seconds after the request."""
        for choice in found.choices or ():
            delta = choice.delta
            thought = (delta.reasoning_content or delta.reasoning) if delta else None
            if delta and (delta.content or thought):
                self.parts.append(delta.content or "")
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

    def checked(self) -> Answer:
        """Return the answer when its stream has ended. Raises AnswerError for one that is not whole or has no token."""
        if not self.finish:
            what = f"after {self.chunks} pieces of text" if self.chunks else "before any text"
            raise AnswerError(f"the stream ended {what}, and the server did not say that the answer was finished")
        if self.counted == "usage" and not self.tokens and self.chunks:
            raise AnswerError(f"the server counts 0 tokens in an answer of {self.chunks} pieces of text")
        if self.counted == "chunks":
            self.tokens = self.chunks
        if not self.tokens:
            raise AnswerError("the stream had no text")
        if self.accepted is not None and self.accepted > (self.drafted or 0):
            raise AnswerError(f"the server says that {self.accepted} of {self.drafted} drafted tokens were accepted")
        self.text = "".join(self.parts)
        self.ttft_s = self.wall_s if self.ttft_s is None else self.ttft_s
        return self


class Server:
    """A server that answers. url: of its API, which may hold a user and a password; `shown_url` does not.

    timeout_s: the longest wait for the next sign of an answer. clock: seconds, for tests.
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
        headers = {"User-Agent": f"ssbench/{__version__}", "Accept-Encoding": "identity"}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(
            headers=headers,
            timeout=httpx.Timeout(timeout_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEPT_S),
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

    def get(self, url: str, last: bool = False) -> httpx.Response:
        """Return a page, whatever its status. Raises AnswerError where there is no answer.

        last: nothing else is asked over this connection. A server that fails may close it, so that the next request
        would find nobody.
        """
        with self._told(READ_S):
            headers = {"Connection": "close"} if last else None
            return self._client.get(url, timeout=min(READ_S, self.timeout_s), headers=headers)

    def alive(self) -> bool:
        """Whether it answers at all, or as it did at first: some servers cannot list their models."""
        try:
            return self.get(f"{self.url}/models").status_code in (self.listed, *range(500))
        except AnswerError:
            return False

    def touch(self) -> None:
        """Leave a connection for the next request, so that making one is no part of its time.

        A server that fails on its list of models may close the connection behind that, so it is not asked again.
        """
        if self.listed == 200:
            self.alive()

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
        wait = self.timeout_s if most_s is None else min(self.timeout_s, most_s)
        answer = Answer()
        request = self._client.build_request("POST", f"{self.url}/chat/completions", json=body, timeout=wait)
        with self._told(wait):
            began = self.clock()
            response = self._client.send(request, stream=True)
            try:
                self._check(response)
                pieces = response.iter_raw()
                for data in payloads(pieces):
                    at_s = self.clock() - began
                    if most_s is not None and at_s > most_s:
                        raise AnswerError(f"no whole answer within {most_s:g} s")
                    if data == DONE:
                        _drain(pieces)
                        break
                    answer.add(event(data), at_s)
            finally:
                response.close()
        return answer.checked()

    def _check(self, response: httpx.Response) -> None:
        """Raise AnswerError for a response that is no stream of events."""
        kind = response.headers.get("content-type", "").partition(";")[0].strip()
        if response.status_code == 200 and kind == "text/event-stream":
            return
        with self._told(READ_S):
            response.read()
        if response.status_code == 200:
            raise AnswerError(
                f"{self.shown_url} answers with {kind or 'no type'}, where a stream of events was asked for"
            )
        raise self.refusal(response)

    def refusal(self, response: httpx.Response) -> AnswerError:
        """Return why a page was not given, in words."""
        code, where = response.status_code, without_user(str(response.url))
        if code in REFUSED:
            return AnswerError(f"the server {REFUSED[code]} ({code}): {KEY}")
        hint = f"; is the address {self.shown_url}/v1?" if code == 404 and not self.url.endswith("/v1") else ""
        said = self._hidden(message_of(response.content))
        return StatusError(code, f"{where} answers {code} {response.reason_phrase}: {said}{hint}")

    @contextmanager
    def _told(self, wait_s: float) -> Iterator[None]:
        """Make what goes wrong on the way a AnswerError, in words that hold no secret."""
        try:
            yield
        except AnswerError as e:
            if (said := self._hidden(str(e))) != str(e):
                raise AnswerError(said) from None
            raise
        except httpx.TimeoutException:
            raise AnswerError(f"{self.shown_url} gave no sign for {wait_s:g} s") from None
        except httpx.ConnectError as e:
            raise AnswerError(f"cannot reach {self.shown_url}: {self._hidden(str(e))}") from None
        except (httpx.HTTPError, httpx.StreamError, OSError) as e:
            said = self._hidden(str(e)) or type(e).__name__
            raise AnswerError(f"the connection to {self.shown_url} broke: {said}") from None

    def _hidden(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def _drain(pieces: Iterator[bytes]) -> None:
    """Read what is behind the end, so that the connection can be used again."""
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
