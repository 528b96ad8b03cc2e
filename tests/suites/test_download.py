"""Fetching through a loopback server: what is kept, what is retried, what is stated. No real network."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from specbench_ss.errors import UserError
from specbench_ss.storage import file_sha256
from specbench_ss.suites.download import ATTEMPTS, download
from tests.loopback import Quiet, listening

BODY = b'{"question_id": 1}\n' * 20_000
SHA = hashlib.sha256(BODY).hexdigest()


@dataclass
class Site:
    """A server that answers the statuses in turn, the last one for ever."""

    url: str = ""
    body: bytes = BODY
    missing_bytes: int = 0  # how much of the body is announced, but not sent
    statuses: list[int] = field(default_factory=lambda: [200])
    requests: int = 0


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    site = Site()

    class Handler(Quiet, BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status = site.statuses[min(site.requests, len(site.statuses) - 1)]
            site.requests += 1
            body = site.body if status == 200 else b"no"
            self.send_response(status)
            if status in (301, 302):
                self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) - site.missing_bytes])

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with listening(Handler) as url:
        site.url = f"{url}/question.jsonl"
        yield site


def fetch(site: Site, path: Path, sha256: str = SHA) -> Path:
    return download(site.url, sha256, path, pause=0.001)


def test_a_file_comes_whole_and_leaves_nothing_next_to_it(site: Site, tmp_path: Path) -> None:
    path = fetch(site, tmp_path / "new" / "folder" / "question.jsonl")
    assert path.read_bytes() == BODY
    assert file_sha256(path) == SHA
    assert [file.name for file in path.parent.iterdir()] == ["question.jsonl"]
    assert site.requests == 1


def test_a_wrong_hash_keeps_what_was_there(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "question.jsonl"
    path.write_text("old")
    with pytest.raises(UserError, match="sha256 .* discarded") as caught:
        fetch(site, path, sha256="0" * 64)
    assert "\n" not in str(caught.value)
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1
    assert site.requests == 1


def test_a_truncated_body_is_retried_then_refused(site: Site, tmp_path: Path) -> None:
    site.missing_bytes = 1000
    with pytest.raises(UserError, match="interrupted"):
        fetch(site, tmp_path / "question.jsonl")
    assert list(tmp_path.iterdir()) == []
    assert site.requests == ATTEMPTS


def test_a_busy_server_is_asked_again(site: Site, tmp_path: Path) -> None:
    site.statuses = [503, 503, 200]
    assert fetch(site, tmp_path / "question.jsonl").read_bytes() == BODY
    assert site.requests == 3
