"""A server that speaks the protocol of chat completions, and can misbehave in every way that a real one might."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

WORD = json.dumps({"choices": [{"index": 0, "delta": {"content": "word "}, "finish_reason": None}]})
ENDLESS = {  # mode -> what is sent first, what is sent again and again, and every so many seconds
    "comments": (": a comment\n\n", ": a comment\n\n", 0.02),
    "drip": (f"data: {WORD}\n\n", "d", 0.05),
    "endless line": ("data: ", "x" * (1 << 17), 0.0),
    "endless text": (f"data: {WORD}\n\n", f"data: {WORD}\n\n", 0.0),
    "slow text": (f"data: {WORD}\n\n", f"data: {WORD}\n\n", 0.1),
}


class Clock:
    """Seconds that pass only where somebody lets them."""

    def __init__(self) -> None:
        self.now, self._lock = 0.0, threading.Lock()

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        with self._lock:
            self.now += seconds


def ticking() -> Callable[[], float]:
    """Return a clock that is 10 ms later at each reading: pieces of an answer are 10 ms apart on any machine."""
    return count(0.0, 0.01).__next__


@dataclass
class Behaviour:
    """Behaviour of a server. mode: `ok`, or how it misbehaves, always or `after` so many good answers.

    per_chunk: tokens in a piece of text; each step of a drafting server drafts `drafted`, and all but one of a piece
    are accepted ones.
    delay: seconds that its clock passes for each piece, of all of an answer before the first is sent. buffered: tokens
    of the first piece. pause: seconds that it really waits before each answer. counted: sent as usage in mode
    `miscount`. timings: in place of llama.cpp's.
    page: how it misbehaves at pages: `endless`, `drip`, `silent`, `gzip`, or `deep`. cache: labels of vLLM's metric of
    its KV cache, of each engine. answers: samples of a run by the
    last message; their outputs and counts are sent, as vLLM sends them.
    """

    models: tuple[str, ...] = ("m",)
    mode: str = "ok"
    after: int = 0
    usage: bool = True
    tokens: int = 8
    per_chunk: int = 1
    drafted: int = 0
    delay: float = 0.0
    buffered: int = 0
    pause: float = 0.0
    word: str = "word"
    metrics: str = ""  # 'vllm', 'sglang', 'nan', 'llama.cpp', which counts in its last event, or none
    key: str = ""
    counted: Any = None
    timings: Any = None
    page: str = ""
    cache: tuple[dict[str, str], ...] = ()
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    remembers: bool = False  # twice as many tokens in a piece where a conversation was asked before
    other_tokens: int = 0  # that somebody else asks for meanwhile, at each request
    clock: Clock = field(default_factory=Clock)
    asked: list[dict[str, Any]] = field(default_factory=list)
    most_at_once: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("drafts", "drafted", "accepted", "made"), 0))


class Fake(ThreadingHTTPServer):
    """The server. url: of its API."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, behaviour: Behaviour, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.behaviour, self.lock, self.in_flight = behaviour, threading.Lock(), set[Handler]()
        self.stalled = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback, unless the client has hung up."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


@contextmanager
def serving(behaviour: Behaviour | None = None) -> Iterator[Fake]:
    server = Fake(behaviour or Behaviour())
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stalled.set()
        server.shutdown()
        server.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Fake

    def log_message(self, *_: Any) -> None:
        pass

    @property
    def how(self) -> Behaviour:
        return self.server.behaviour

    def _send(self, code: int, body: str, kind: str = "application/json") -> None:
        data = body.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _forever(self, data: bytes, every_s: float) -> None:
        """Write until the client hangs up or the test is over."""
        while not self.server.stalled.wait(every_s):
            self.wfile.write(data)
        self.close_connection = True

    def _misbehaved(self) -> bool:
        """Answer a page as `page` has it."""
        if self.how.page == "silent":
            self.server.stalled.wait(30)
        elif self.how.page == "deep":
            self._send(200, '{"data":' + "[" * 200_000)
        elif self.how.page:
            self.send_response(200)
            if self.how.page == "gzip":
                self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            if self.how.page == "endless":
                self._forever(b" " * (1 << 18), 0)
            else:
                self._forever(b" ", 0.05)
        return bool(self.how.page)

    def _refused(self) -> bool:
        if self.how.key and self.headers.get("Authorization") != f"Bearer {self.how.key}":
            self._send(401, json.dumps({"error": {"message": f"bad key {self.headers.get('Authorization')}"}}))
            return True
        return False

    def do_GET(self) -> None:
        if self._misbehaved():
            return
        if self.path == "/metrics" and self.how.metrics not in ("", "llama.cpp"):
            self._send(200, metrics(self.how), "text/plain; version=0.0.4")
        elif self.path == "/version" and self.how.metrics == "vllm":
            self._send(200, '{"version": "0.99.1"}')
        elif self.path != "/v1/models":
            self._send(404, '{"detail": "Not Found"}')
        elif self.how.mode == "page":
            self._send(200, "<html><body>hello</body></html>", "text/html")
        elif not self._refused():
            self._send(200, json.dumps({"data": [{"id": name} for name in self.how.models]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._refused():
            return
        if self.path != "/v1/chat/completions":
            self._send(404, '{"detail": "Not Found"}')
            return
        with self.server.lock:
            self.how.asked.append(body)
            number = len(self.how.asked)
            self.server.in_flight.add(self)
            self.how.most_at_once = max(self.how.most_at_once, len(self.server.in_flight))
        try:
            time.sleep(self.how.pause)
            self._answer(body, self.how.mode if number > self.how.after else "ok")
        finally:
            self._leave()

    def _leave(self) -> None:
        """Count the request as answered; called before the end is sent, since the client may then send another one."""
        with self.server.lock:
            self.server.in_flight.discard(self)

    def _answer(self, body: dict[str, Any], mode: str) -> None:
        if body["model"] not in self.how.models:
            self._send(404, json.dumps({"error": {"message": f"The model `{body['model']}` does not exist."}}))
        elif mode == "strict" and "stream_options" in body:
            self._send(400, json.dumps({"error": {"message": "stream_options: extra field"}}))
        elif mode in ("500", "page"):
            self._send(500, "<html><body>Bad gateway</body></html>", "text/html")
        elif mode == "html":
            self._send(200, "<html><body>hello</body></html>", "text/html")
        elif mode == "drop":
            self.close_connection = True
            self.connection.close()
        elif mode == "no headers":
            self.server.stalled.wait(30)
        else:
            self._stream(body, mode)

    def _stream(self, body: dict[str, Any], mode: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if mode in ENDLESS:
            first, then, every_s = ENDLESS[mode]
            self._chunk(first)
            while not self.server.stalled.wait(every_s):
                self._chunk(then)
        if mode == "no end":
            self._chunk("\n".join([*self._lines(body, 1, True), ""]))
            self._forever(b"", 0.05)
        if self.server.stalled.is_set():
            return
        made = min(self.how.tokens, body["max_tokens"])
        asked_usage = body.get("stream_options", {}).get("include_usage")
        lines = [] if mode == "empty" else list(self._lines(body, made, bool(asked_usage)))
        if mode == "garbage":
            lines = ["\x00\x01 this is no stream"]
        if mode == "error":
            lines[2:] = ['data: {"error": {"message": "out of memory"}}', ""]
        if mode == "miscount":
            usage = {"prompt_tokens": 3, "completion_tokens": self.how.counted}
            lines[-4:] = [f"data: {json.dumps({'choices': [], 'usage': usage})}", ""]
        if mode == "nan":
            lines[-2:] = ['data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": NaN}}', ""]
        for i, line in enumerate(lines):
            if mode == "stall" and i == 4:
                self.server.stalled.wait(30)
                self.close_connection = True
                self.connection.close()
                return
            self._chunk(f"{line}\n")
        self._leave()
        self.wfile.write(b"0\r\n\r\n")
        with self.server.lock:
            self.how.counts["made"] += made + self.how.other_tokens

    def _chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _lines(self, body: dict[str, Any], made: int, usage: bool) -> Iterator[str]:
        yield ": a comment"
        yield ""
        stated = body["messages"][-1]["content"]
        if stated in self.how.answers:
            yield from _answered(self.how.answers[stated])
            return
        repeated = sum(asked["messages"] == body["messages"] for asked in self.how.asked) > 1
        size = self.how.per_chunk * (2 if self.how.remembers and repeated else 1)
        first = min(self.how.buffered, made)
        pieces = [first] * bool(first) + [min(size, made - i) for i in range(first, made, size)]
        for i, size in enumerate(pieces):
            self.how.clock.pass_by(self.how.delay)
            with self.server.lock:
                self.how.counts["drafts"] += bool(self.how.drafted)
                self.how.counts["drafted"] += self.how.drafted
                self.how.counts["accepted"] += (size - 1) if self.how.drafted else 0
            text = "" if self.how.remembers and i else f"{self.how.word}{i} of {len(stated)} "
            text = "a b " * size if self.how.buffered else text
            yield "data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})
            yield ""
        finish = "length" if made == body["max_tokens"] else "stop"
        last: dict[str, Any] = {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}], "usage": None}
        if self.how.metrics == "llama.cpp":
            drafted = self.how.drafted * len(pieces)
            last["timings"] = self.how.timings or {
                "predicted_n": made,
                "draft_n": drafted,
                "draft_n_accepted": made - len(pieces),
            }
        yield "data: " + json.dumps(last)
        yield ""
        if self.how.usage and usage:
            reported = {"prompt_tokens": 3, "completion_tokens": made, "total_tokens": made + 3}
            yield "data: " + json.dumps({"choices": [], "usage": reported})
            yield ""
        yield "data: [DONE]"
        yield ""


def _answered(row: dict[str, Any]) -> Iterator[str]:
    """The events of the output of a sample, whose steps all had a draft."""
    text = {"index": 0, "delta": {"content": row["text"]}, "token_ids": row["token_ids"], "finish_reason": None}
    yield f"data: {json.dumps({'choices': [text]})}"
    yield ""
    counts = {
        "num_spec_steps": row["steps"],
        "num_accepted_draft_tokens": row["accepted_tokens"],
        "num_draft_tokens": row["draft_nodes"],
    }
    end = {"index": 0, "delta": {}, "finish_reason": "length"}
    usage = {"prompt_tokens": row["prompt_tokens"], "completion_tokens": row["tokens"]}
    last = {"choices": [end], "usage": usage, "metrics": {"speculative_decoding": counts}}
    yield f"data: {json.dumps(last)}"
    yield ""
    yield "data: [DONE]"
    yield ""


def metrics(how: Behaviour) -> str:
    """The page of counters."""
    if how.metrics == "sglang":
        return 'sglang:spec_accept_length{model_name="m"} 2.9\n'
    label = '{engine="0",model_name="m"}'
    made = f"# TYPE vllm:generation_tokens counter\nvllm:generation_tokens_total{label} {float(how.counts['made'])}\n"
    for engine, labels in enumerate(how.cache):
        listed = ",".join(f'{name}="{value}"' for name, value in {**labels, "engine": engine}.items())
        made += f"# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{{listed}}} 1.0\n"
    if not how.drafted and how.metrics != "nan":
        return made
    names = {"drafts": "drafts", "drafted": "draft_tokens", "accepted": "accepted_tokens"}
    lines = []
    for name, full in names.items():
        value: Any = "NaN" if how.metrics == "nan" else float(how.counts[name])
        lines += [f"# TYPE vllm:spec_decode_num_{full} counter", f"vllm:spec_decode_num_{full}_total{label} {value}"]
        lines += [f"vllm:spec_decode_num_{full}_created{label} {time.time()}"]
        lines += [f'vllm:spec_decode_num_{full}_total{{engine="0",model_name="another"}} 1000000.0']
    return "\n".join(lines) + "\n" + made


def main() -> None:
    """Serve on a port with a behaviour in JSON, until the process is ended.

    dies_after: exit after so many requests, unless the file `unless` exists. log: printed at the start.
    """
    port, given = int(sys.argv[1]), json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}")
    dies_after, unless = given.pop("dies_after", None), given.pop("unless", "")
    print(given.pop("log", ""), flush=True)
    server = Fake(Behaviour(**given), port)

    class Mortal(Handler):
        def do_POST(self) -> None:
            if dies_after is not None and len(self.how.asked) >= dies_after and not os.path.exists(unless):
                print("RuntimeError: the engine core died", flush=True)
                os._exit(7)
            super().do_POST()

    server.RequestHandlerClass = Mortal
    server.serve_forever()


if __name__ == "__main__":
    main()
