"""Which servers are asked for, from options as the command line or Python has them. Imports nothing heavy."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from specbench_ss.errors import UserError
from specbench_ss.options import encodable, seconds
from specbench_ss.runs.endpoints import Endpoint

LOCAL = (  # options that say something of a model in this process
    "methods", "model", "set", "preset", "plugin", "top_k", "dtype", "device", "engine", "quantize",
    "trust_remote_code", "chat_template", "telemetry", "remake_disturbed", "record_drafts", "trace", "batch_size",
)  # fmt: skip
SERVED = ("label", "endpoint_model", "api_key_env", "concurrency", "endpoint_timeout")
TIMEOUT_S = 120.0
MOST_IN_FLIGHT = 1024
MODEL = "served"  # in the configuration of a run, in place of a model's name


@dataclass(frozen=True, slots=True)
class Access:
    """How the servers are reached. This is no part of what a run measures, and is never written down.

    urls: with user and password, where they have some. keys: of each, or None. timeout_s: the longest wait for the next
    sign of an answer.
    """

    urls: tuple[str, ...]
    keys: tuple[str | None, ...]
    timeout_s: float = TIMEOUT_S

    def hidden(self, words: Sequence[str]) -> list[str]:
        """Return a command line without users, passwords and keys."""
        secrets = [key for key in self.keys if key]
        secrets += [urlsplit(url).netloc.rpartition("@")[0] + "@" for url in self.urls if "@" in urlsplit(url).netloc]
        found = list(words)
        for secret in secrets:
            found = [word.replace(secret, "***@" if secret.endswith("@") else "***") for word in found]
        return found


def check_fit(given: Collection[str], served: bool) -> None:
    """Raises UserError for an option that does not fit. given: names of options that were stated, not left alone."""
    if served and (idle := [name for name in LOCAL if name in given]):
        raise UserError(
            f"{flag(idle[0])} is of a model in this process, and --endpoint measures a server: give one of them"
        )
    if not served and (idle := [name for name in SERVED if name in given]):
        raise UserError(f"{flag(idle[0])} needs --endpoint, the address of a server")


def endpoints_of(values: Mapping[str, Any]) -> tuple[Endpoint, ...]:
    """Return the servers in their order. Raises UserError for what is none, and for labels that do not fit."""
    urls, labels = _texts(values["endpoint"]), _texts(values["label"])
    if not labels:
        labels = [f"endpoint-{i + 1}" for i in range(len(urls))]
    if len(labels) != len(urls):
        raise UserError(
            f"{len(urls)} --endpoint and {len(labels)} --label: each server has one label, in the same order"
        )
    for label in labels:
        _check_label(label, labels)
    models = _each("--endpoint-model", _texts(values["endpoint_model"]), len(urls))
    return tuple(Endpoint(label, address(url), model) for label, url, model in zip(labels, urls, models, strict=True))


def access_of(values: Mapping[str, Any]) -> Access:
    """Return how the servers are reached. Raises UserError for a variable that is not set, and for a bad time."""
    urls = _texts(values["endpoint"])
    names = _each("--api-key-env", _texts(values["api_key_env"]), len(urls))
    for name in names:
        if name is not None and not os.environ.get(name):
            raise UserError(f"--api-key-env {name}: there is no such variable in the environment, or it is empty")
        if name is not None and not (os.environ[name].isascii() and os.environ[name].isprintable()):
            raise UserError(f"--api-key-env {name}: the key has characters that no header holds; use printable ASCII")
    for url, name in zip(urls, names, strict=True):
        if name and "@" in urlsplit(url).netloc:
            raise UserError(f"--endpoint {_shown(url)} has a user, and --api-key-env a key: a request has room for one")
    timeout = values["endpoint_timeout"]
    wait = TIMEOUT_S if timeout is None else seconds("--endpoint-timeout", timeout)
    return Access(tuple(url.strip() for url in urls), tuple(name and os.environ[name] for name in names), wait)


def in_flight(given: Any, option: str = "--concurrency") -> tuple[int, ...]:
    """'1,2,4' -> (2, 4): numbers of requests at a time besides 1, which is measured in any case. Raises UserError."""
    parts = given.split(",") if isinstance(given, str) else [given] if isinstance(given, int) else list(given or ())
    try:
        numbers = [int(str(part)) for part in parts if str(part).strip()]
    except ValueError:
        raise UserError(f"{option} is a list of whole numbers, as in 1,2,4, not {given!r}") from None
    for number in numbers:
        if not 1 <= number <= MOST_IN_FLIGHT:
            raise UserError(f"{option} must be from 1 to {MOST_IN_FLIGHT}, not {number}")
    return tuple(sorted(set(numbers) - {1}))


def address(url: str) -> str:
    """Return an address as it may be written down. Raises UserError for what is no address of an API."""
    try:
        parts = urlsplit(url.strip())
        host, _ = parts.hostname, parts.port
    except ValueError as e:
        raise UserError(f"--endpoint {_shown(url)}: {e}") from None
    if any(c.isspace() or not c.isprintable() for c in url.strip()):
        raise UserError(f"--endpoint {_shown(url)}: an address has no spaces and no control characters")
    if parts.scheme not in ("http", "https") or not host:
        raise UserError(f"--endpoint {_shown(url)}: an address begins with http:// or https:// and names a host")
    if parts.query or parts.fragment:
        raise UserError(f"--endpoint {_shown(url)}: an address has no ? and no #; keys are given with --api-key-env")
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")


def _shown(url: str) -> str:
    """Return what was given, without what may be secret."""
    return ascii(url.partition("?")[0].rpartition("@")[2])


def _check_label(label: str, labels: Sequence[str]) -> None:
    if not label.strip() or not label.isprintable() or not encodable(label) or label != label.strip():
        raise UserError(f"--label {ascii(label)}: a label is printable text, without space at its ends")
    if "," in label:
        raise UserError(f"--label {label!r}: a label has no comma, which separates methods elsewhere")
    if labels.count(label) > 1:
        raise UserError(f"--label {label!r} is given twice: results could not be told apart")


def _texts(given: Any) -> list[str]:
    """Return what was given once or several times as a list."""
    values = [] if given is None else [given] if isinstance(given, str) else list(given)
    if wrong := [value for value in values if not isinstance(value, str)]:
        raise UserError(f"endpoints, labels, models and variables are texts, not {wrong[0]!r}")
    return values


def _each(name: str, given: Sequence[str], servers: int) -> list[str | None]:
    """Return a value for each server: none, one for all, or one for each."""
    if len(given) not in (0, 1, servers):
        raise UserError(f"{name} is given {len(given)} times for {servers} servers: give it once, or once for each")
    values: list[str | None] = list(given) or [None]
    return values * servers if len(values) == 1 else values


def flag(name: str) -> str:
    """Return an option's name as on the command line."""
    return f"--{name.replace('_', '-')}"
