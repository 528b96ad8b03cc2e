"""Servers that a run starts itself: configurations of a file, one after another on one port."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from specbench_ss.errors import UserError, error_text, expanded, prefixed
from specbench_ss.options import MethodSpec
from specbench_ss.redaction import redacted, redacted_text, redacted_words
from specbench_ss.runs.config import Endpoint
from specbench_ss.user_files import mapping, read_bytes

if TYPE_CHECKING:  # httpx is imported where a server is contacted
    from specbench_ss.bench.server_client import Server

HOST = "127.0.0.1"
POLL_S = 0.2
STOP_S = 30.0  # from SIGTERM to SIGKILL
GONE_S = 10.0  # for the kernel to take away killed processes, and their port
MOST = 1 << 20  # bytes of a file of servers
MOST_OUTPUT = 4 << 20  # bytes of a server's log that are read after its start
LAST_LINES = 400  # of a server's log, in which the reason of a failure is looked for
ERROR = re.compile(r"\b\w*(Error|Exception)\b: .*")
Option = str | int | float | bool
Setting = Option | list[Any] | dict[str, Any]  # also a schedule, or the configuration of a loader


class _Configuration(msgspec.Struct, forbid_unknown_fields=True):
    """A server of the file.

    speculative: the engine's own settings of speculative decoding, under its own names. method: the method in --methods
    that is compared with the server.
    """

    label: str
    engine: Literal["vllm", "llama.cpp", "sglang"] | None = None
    model: str | None = None
    speculative: dict[str, Setting] = {}
    k: int | list[int] | None = None
    args: list[Option] = []
    env: dict[str, Option] = {}
    executable: str | None = None
    command: list[Option] = []
    method: str | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    servers: list[_Configuration]
    port: Annotated[int, msgspec.Meta(gt=0, lt=65536)] = 8000
    blocks: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 4
    ready_s: Annotated[float, msgspec.Meta(gt=0, le=86400)] = 600.0


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The servers of a file, the first of which is the baseline, and how they take turns.

    blocks: parts of the questions; all servers answer one part before the next. ready_s: limit of a server's start.
    methods: label of a server -> label of the method that is compared with it.
    """

    endpoints: tuple[Endpoint, ...]
    port: int
    blocks: int
    ready_s: float
    methods: Mapping[str, str] = field(default_factory=dict)


def read_servers(file: Path) -> LaunchPlan:
    """Read a file of servers. Raise UserError for one that is missing or invalid."""
    path = expanded(file)
    try:
        given = msgspec.convert(_as_json(mapping(read_bytes(path), path)), _File)
    except (UserError, ValueError, RecursionError) as e:
        raise UserError(f"--servers {path}: {' '.join(str(e).split())}") from None
    if not given.servers:
        raise UserError(f"--servers {path}: needs at least one server")
    started = [(one, endpoint) for one in given.servers for endpoint in _endpoints(one, given.port, path)]
    for labels in ([one.label for one in given.servers], [endpoint.label for _, endpoint in started]):
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise UserError(f"--servers {path}: label {twice[0]!r} is given twice; labels must differ")
    with prefixed(f"--servers {path}"):
        methods = {endpoint.label: MethodSpec.parse(one.method).label for one, endpoint in started if one.method}
    return LaunchPlan(tuple(one for _, one in started), given.port, given.blocks, given.ready_s, methods)


def _as_json(content: Any) -> Any:
    """Return the content of a YAML file with dates as text. Raise ValueError for aliases that never end."""
    text, size = list[str](), 0
    for part in json.JSONEncoder(default=str).iterencode(content):
        text.append(part)
        size += len(part)
        if size > MOST:
            raise ValueError(f"it has more than {MOST >> 20} MiB with its aliases expanded")
    return json.loads("".join(text))


def _endpoints(one: _Configuration, port: int, path: Path) -> list[Endpoint]:
    """Return a server for each k. Raise UserError for settings that do not go together."""
    if bool(one.command) == bool(one.engine):
        raise UserError(f"--servers {path}: {one.label} needs either engine or command")
    if one.engine and not one.model:
        raise UserError(f"--servers {path}: {one.label} needs the model of its engine")
    if one.k is not None and not (one.engine and one.speculative):
        raise UserError(f"--servers {path}: {one.label} has k without engine and speculative; add them, or leave k out")
    if one.k == []:
        raise UserError(f"--servers {path}: k of {one.label} is an empty list; leave it out or name a number")
    if one.method and isinstance(one.k, list) and len(one.k) > 1:
        raise UserError(f"--servers {path}: {one.label} has a method and several k; write a server for each k")
    several = isinstance(one.k, list)
    depths: Sequence[int | None] = one.k if isinstance(one.k, list) else [one.k]
    url, env = f"http://{HOST}:{port}/v1", tuple((name, str(value)) for name, value in one.env.items())
    labels = [f"{one.label}-k{k}" if several else one.label for k in depths]
    return [
        Endpoint(label, url, None, tuple(_command(one, k, port)), env, one.label, k)
        for label, k in zip(labels, depths, strict=True)
    ]


def _command(one: _Configuration, k: int | None, port: int) -> list[str]:
    """Return the command that starts a server."""
    if one.command:
        return [str(word).replace("{port}", str(port)) for word in one.command]
    where, model = ["--host", HOST, "--port", str(port)], one.model or ""
    match one.engine:
        case "vllm":
            command = [one.executable or "vllm", "serve", model, *where]
            settings = one.speculative | ({} if k is None else {"num_speculative_tokens": k})
            if settings:
                command += ["--speculative-config", json.dumps(settings)]
                command += ["--per-request-spec-decode-metrics", "detailed"]
        case "llama.cpp":
            command = [one.executable or "llama-server", "-m", model, *where, "--metrics"]
            command += _options(one.speculative | ({} if k is None else {"spec-draft-n-max": k}))
        case _:
            command = [*shlex.split(one.executable or "python -m sglang.launch_server"), "--model-path", model, *where]
            chain = {} if k is None else {"speculative-num-steps": k, "speculative-num-draft-tokens": k + 1}
            command += [*_options(one.speculative | chain), "--enable-metrics"]
    return command + [str(word) for word in one.args]


def _options(settings: Mapping[str, Setting]) -> list[str]:
    """Return settings as options of a command line; True is a flag, lists and objects are JSON."""
    words = list[str]()
    for name, value in settings.items():
        if value is not False:
            text = json.dumps(value) if isinstance(value, list | dict) else str(value)
            words += [f"--{name.lstrip('-')}", *([] if value is True else [text])]
    return words


class LaunchError(Exception):
    """A server that does not run, with the reason and the end of its log."""


@dataclass(slots=True)
class Process:
    """A running server in a process group of its own. log: file of its output."""

    child: subprocess.Popen[bytes]
    log: Path
    began: int  # bytes of the log before this start

    def fault(self) -> str:
        """Return why the server has ended, or '' while it runs."""
        code = self.child.poll()
        if code is None:
            return ""
        how = f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
        return f"the server {how}: {last_line(self.log, self.began)} ({self.log})"

    def output(self) -> str:
        """Return the server's output since its start, as far as it has MOST_OUTPUT bytes."""
        with self.log.open("rb") as file:
            file.seek(self.began)
            return file.read(MOST_OUTPUT).decode(errors="replace")

    def stop(self) -> None:
        """End the server and everything that it started; whatever is left after STOP_S is killed."""
        try:
            with suppress(ProcessLookupError):
                os.killpg(self.child.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.child.wait(STOP_S)
        finally:  # also when a second Ctrl-C ends the wait
            with suppress(ProcessLookupError):
                os.killpg(self.child.pid, signal.SIGKILL)  # workers may outlive their parent
            self.child.wait()
        until = time.monotonic() + GONE_S
        while _group_exists(self.child.pid) and time.monotonic() < until:
            time.sleep(POLL_S)


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def last_line(log: Path, began: int = 0) -> str:
    """Return the first of the last errors in a log, which engines then report again and again, else its last line.

    began: bytes before the first line.
    """
    with log.open("rb") as file:
        file.seek(began)
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()[-LAST_LINES:]]
    errors = [found.group() for line in lines if (found := ERROR.search(line)) and "`" not in found.group()[:40]]
    shown = errors[:1] or [line for line in lines if line][-1:]
    return redacted_text(shown[0][:300]) if shown else "it printed nothing"


def start(endpoint: Endpoint, port: int, ready_s: float, log: Path) -> Process:
    """Start a server and wait until it is healthy.

    Raise LaunchError if the port is taken, the command cannot be run, ends, or is not healthy in time.
    """
    until = time.monotonic() + GONE_S
    while not port_free(port):
        if time.monotonic() > until:
            raise LaunchError(f"port {port} is in use; stop the program that uses it")
        time.sleep(POLL_S)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        began = file.tell()
        try:
            child = subprocess.Popen(
                endpoint.command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **dict(endpoint.env)},
                start_new_session=True,
            )
        except (OSError, ValueError) as e:
            text = f"cannot run {endpoint.command[0]}: {e}; is the engine installed?"
            raise LaunchError(redacted_text(text)) from None
    process = Process(child, log, began)
    try:
        _wait_healthy(process, port, ready_s)
    except BaseException:
        process.stop()
        raise
    return process


def _wait_healthy(process: Process, port: int, ready_s: float) -> None:
    import httpx

    until = time.monotonic() + ready_s
    with httpx.Client(timeout=5, trust_env=False) as client:
        while True:
            if fault := process.fault():
                raise LaunchError(fault)
            for page in ("/health", "/v1/models"):  # some servers have no page of their health
                with suppress(httpx.HTTPError):
                    if (status := client.get(f"http://{HOST}:{port}{page}").status_code) == 200:
                        return
                    if status != 404:
                        break
            if time.monotonic() > until:
                line = last_line(process.log, process.began)
                raise LaunchError(f"the server is not healthy after {ready_s:g} s (ready_s): {line} ({process.log})")
            time.sleep(POLL_S)


def port_free(port: int) -> bool:
    """Return True if nothing listens on a port of this machine."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((HOST, port)) != 0


@dataclass(slots=True)
class Fleet:
    """The servers of a run, of which at most one that the run starts itself is running.

    connected: servers that are reachable from the start. plan: of those that are started. connect: takes a started
    server and its output so far, and returns it ready for requests. logs: folder of their output.
    """

    connected: Mapping[str, Server]
    plan: LaunchPlan | None = None
    connect: Callable[[Endpoint, str], Server] | None = None
    logs: Path = Path()
    running: str = ""
    _process: Process | None = field(default=None, repr=False)
    _server: Server | None = field(default=None, repr=False)

    def get(self, label: str) -> Server:
        """Return a server; start it in place of the running one if need be. Raise LaunchError."""
        if self.plan is None:
            return self.connected[label]
        if self.running != label or self._server is None:
            self.stop()
            endpoint = next(one for one in self.plan.endpoints if one.label == label)
            self._process = start(endpoint, self.plan.port, self.plan.ready_s, self.logs / f"{_plain(label)}.log")
            try:
                assert self.connect is not None
                self._server = self.connect(endpoint, self._process.output())
            except UserError as e:
                reason = self._process.fault() or error_text(e)
                self.stop()
                raise LaunchError(reason) from None
            self.running = label
        return self._server

    def fault(self, wait_s: float = 0.0) -> str:
        """Return why the running server has ended; '' while it runs, or if the run did not start it.

        wait_s: for a server that has closed its connections and is about to end.
        """
        if self._process is None:
            return ""
        with suppress(subprocess.TimeoutExpired):
            self._process.child.wait(wait_s)
        return self._process.fault()

    def stop(self) -> None:
        """Stop the running server."""
        if self._server is not None:
            self._server.close()
        if self._process is not None:
            self._process.stop()
        self._process, self._server, self.running = None, None, ""


def _plain(label: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in label)


def without_secrets(endpoint: Endpoint) -> Endpoint:
    """Return an endpoint for the manifest: values of variables and options that are named like secrets are hidden."""
    env = tuple((name, redacted(value, name)) for name, value in endpoint.env)
    return replace(endpoint, command=tuple(redacted_words(endpoint.command)), env=env)


def check_programs(plan: LaunchPlan) -> None:
    """Raise UserError for a server whose program is neither a file nor on the PATH that it gets."""
    for one in plan.endpoints:
        path = dict(one.env).get("PATH", os.environ.get("PATH"))
        if shutil.which(one.command[0], path=path) is None:
            name = redacted_text(one.command[0])
            raise UserError(f"{one.label}: {name} is not on the PATH; install it, or set executable to its path")


def starts(plan: LaunchPlan, questions: int, levels: int) -> int:
    """Return how often servers start.

    They start in each block, for each load level, and once more for the baseline if the number of blocks is odd.
    """
    servers, blocks = len(plan.endpoints), min(plan.blocks, questions)
    return (servers * blocks + blocks % 2 if servers > 1 else 1) + servers * levels


def described(endpoint: Endpoint) -> dict[str, Any]:
    """Return how a server is started, JSON-ready."""
    return {"command": shlex.join(endpoint.command), "env": dict(endpoint.env)}


@contextmanager
def ending_with_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt, so that started servers end with the run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: object) -> None:
        raise KeyboardInterrupt(f"signal {number}")

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
