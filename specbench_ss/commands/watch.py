"""`ssbench watch`: the report of a run that goes on, as a page on this machine alone."""

from __future__ import annotations

import html
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated

import typer

from specbench_ss.errors import UserError, os_reason

HOST = "127.0.0.1"
NAMES = ("localhost", HOST)  # under which a browser on this machine asks: other names may be a trap of another page
WAITING = "<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><h1>{title}</h1><p>{said}</p>"


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run, which may be going on.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine. 0: any that is free.")] = 0,
    every: Annotated[
        float, typer.Option(min=1.0, help="Seconds from one look at the run to the next; the page asks as often.")
    ] = 20.0,
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Show the report of a run while it goes on, on this machine alone. Ctrl-C ends it; the run is not touched."""
    import webbrowser

    from specbench_ss.runs.run_directory import read_run

    read_run(run)
    with server(run, port, every) as serving:
        address = f"http://{HOST}:{serving.server_address[1]}/"
        print(f"report: {address} (Ctrl-C ends it)", flush=True)
        if open_it:
            webbrowser.open(address)
        try:
            serving.serve_forever()
        except KeyboardInterrupt:
            print("ended; the run goes on by itself")


def server(run: Path, port: int = 0, every: float = 20.0) -> ThreadingHTTPServer:
    """Return a server of the page, on the loopback device alone. Raises UserError where the port is taken."""
    page = LivePage(run, every)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
            if host not in NAMES:
                self.send_error(403)
            elif self.path.partition("?")[0] != "/":
                self.send_error(404)
            else:
                self._send(page.content())

        def _send(self, content: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Refresh", f"{every:.0f}")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    try:
        made = ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise UserError(f"cannot listen on port {port}: {os_reason(error)}") from error
    made.daemon_threads = True
    return made


class LivePage:
    """The page of a run, made again at most every so many seconds, and only where the run has gone on."""

    def __init__(self, run: Path, every: float) -> None:
        self.run, self.every = run, every
        self.lock, self.looked, self.state, self.made = threading.Lock(), -every, "", b""

    def content(self) -> bytes:
        """Return the page as of the last look."""
        with self.lock:
            now = time.monotonic()
            if now - self.looked >= self.every:
                state = self._state()
                if state != self.state or not self.made:
                    self.state, self.made = state, self._page()
                self.looked = now
            return self.made

    def _state(self) -> str:
        """Say in what state the run's files are."""
        files = sorted(p for p in self.run.glob("*.json*") if p.is_file())
        return repr([(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files])

    def _page(self) -> bytes:
        from specbench_ss.commands.report import write_report
        from specbench_ss.runs.run_directory import read_run

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "report.html"
            try:
                write_report(read_run(self.run), "html", path)
                return path.read_bytes()
            except UserError as error:  # no sample yet, or a file that is being written
                title = html.escape(self.run.name)
                return WAITING.format(title=title, said=html.escape(str(error))).encode()
