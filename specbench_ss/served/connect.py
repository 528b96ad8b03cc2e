"""Before anything is measured: which model a server has, what it tells of itself, and whether it answers at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from specbench_ss.benchmark.asked_endpoints import Access
from specbench_ss.errors import UserError, did_you_mean
from specbench_ss.runs.endpoints import Endpoint
from specbench_ss.served.answer import Answer
from specbench_ss.served.client import REFUSED, Server, StatusError
from specbench_ss.served.protocol import MALFORMED, AnswerError

SHOWN = 8  # models that a message lists
MODELS = "a list of models"
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


def connect_all(endpoints: Sequence[Endpoint], access: Access) -> list[Server]:
    """Return all servers, as `connect` does; where one cannot be reached, the others are closed."""
    made: list[Server] = []
    try:
        for endpoint, url, key in zip(endpoints, access.urls, access.keys, strict=True):
            made.append(connect(endpoint, url, key, access.timeout_s))
    except UserError:
        for server in made:
            server.close()
        raise
    return made


def _model(server: Server, wanted: str | None) -> str:
    """Return the model to ask for. A name that the server does not list is tried: some load what they are asked for."""
    page = server.get(f"{server.url}/models")
    server.listed = page.status_code
    if page.status_code != 200:
        if wanted and page.status_code not in REFUSED:
            return wanted
        raise server.refusal(page)
    try:
        names = [model.id for model in msgspec.json.decode(page.content, type=_Models).data]
    except MALFORMED:
        kind = page.headers.get("content-type", "no type").partition(";")[0]
        hint = "" if server.url.endswith("/v1") else f"; is the address {server.shown_url}/v1?"
        raise AnswerError(f"{server.shown_url}/models answers with {kind}, which is no list of models{hint}") from None
    if wanted:
        return wanted
    if len(names) == 1:
        return names[0]
    listed = ", ".join(sorted(names)[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    raise AnswerError(
        f"{server.shown_url} has {len(names)} models: name one with --endpoint-model{': ' * bool(names)}{listed}"
    )


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
        names = [m.id for m in msgspec.json.decode(server.get(f"{server.url}/models").content, type=_Models).data]
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
