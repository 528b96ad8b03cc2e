"""The stream of a chat completion, as OpenAI-compatible servers send it: bytes to events, and what is none of these.

Every mistake of a server is a `AnswerError`, whose text is a clause that a row can hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import msgspec

from specbench_ss.errors import UserError

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
