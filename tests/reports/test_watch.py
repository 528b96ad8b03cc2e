"""`ssbench watch`: a page of a run that goes on, for this machine alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest

from specbench_ss.commands.watch import HOST, LivePage, server
from tests.cli import failing
from tests.conftest import MakeRun

Ask = Callable[..., tuple[HTTPResponse, str]]


@pytest.fixture
def ask(make_run: MakeRun) -> Iterator[Ask]:
    """ask(path, host) gets a page of a run that is being watched."""
    with server(make_run()) as serving:
        thread = threading.Thread(target=serving.serve_forever, args=(0.05,))
        thread.start()
        port = int(serving.server_address[1])

        def asked(path: str = "/", host: str = "") -> tuple[HTTPResponse, str]:
            connection = HTTPConnection(HOST, port, timeout=60)
            connection.request("GET", path, headers={"Host": host or f"localhost:{port}"})
            answer = connection.getresponse()
            return answer, answer.read().decode()

        yield asked
        serving.shutdown()
        thread.join()


def test_the_page_is_the_report_and_asks_again(ask: Ask) -> None:
    answer, text = ask()
    assert answer.status == 200 and "Content-Security-Policy" in text and "lab-s on specbench" in text
    assert answer.headers["Refresh"] == "20" and answer.headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize(("path", "host", "status"), [("/", "evil.example:80", 403), ("/rows.jsonl", "", 404)])
def test_nothing_else_is_given(ask: Ask, path: str, host: str, status: int) -> None:
    answer, text = ask(path, host)
    assert answer.status == status and "lab-s" not in text


def test_it_listens_on_this_machine_alone(make_run: MakeRun) -> None:
    with server(make_run()) as serving:
        assert serving.server_address[0] == "127.0.0.1"


def test_the_page_follows_the_run(make_run: MakeRun) -> None:
    run = make_run()
    rows = run / "rows.jsonl"
    whole = rows.read_bytes()
    lines = whole.splitlines(keepends=True)
    page = LivePage(run, 0.0)
    rows.write_bytes(b"")
    assert b"nothing to report" in page.content()
    rows.write_bytes(b"".join(lines[:9]) + lines[9][:20])  # a line that is being written
    part = page.content()
    assert b"nothing to report" not in part
    rows.write_bytes(whole)
    assert page.content() not in (part, b"")
    made = page.made
    assert page.content() is made, "a run that stands still is not read again"


def test_mistakes_are_one_line(make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not a run directory" in failing(["watch", str(tmp_path)], capsys)
    with server(make_run()) as taken:
        port = str(taken.server_address[1])
        assert f"cannot listen on port {port}" in failing(["watch", str(make_run()), "--port", port], capsys)
