"""A real server: `transformers serve` with the lab's own model, on loopback. Skipped where its packages are missing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import specbench_ss
from specbench_ss import run
from tests.tiny import thorough

for package in ("fastapi", "uvicorn"):
    pytest.importorskip(package, reason="transformers[serving] is not installed")

MODEL = Path(specbench_ss.__file__).parent / "lab" / "base"
STARTS_WITHIN_S = 180
pytestmark = [thorough, pytest.mark.slow]  # the quick suite has a server in one process: test_served_runs.py


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not (MODEL / "config.json").is_file():
        pytest.skip("the lab's model is not there")
    home = tmp_path_factory.mktemp("hub")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    words = ["serve", str(MODEL), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    given = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(home), "OMP_NUM_THREADS": "1"}
    log = (home / "log.txt").open("wb")
    server = subprocess.Popen(
        [sys.executable, "-m", "transformers.cli.transformers", *words], env=given, stdout=log, stderr=log
    )
    try:
        for _ in range(STARTS_WITHIN_S):
            if server.poll() is not None:
                pytest.skip(f"transformers serve does not start: {(home / 'log.txt').read_text()[-300:]}")
            try:
                httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
                break
            except httpx.HTTPError:
                time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(30)
        log.close()


def test_a_run_is_made_and_resumed(url: str, tmp_path: Path) -> None:
    prompts = tmp_path / "q.jsonl"
    prompts.write_text('{"question_id": "a", "turns": ["Name two colours.", "And one more?"]}\n')
    given = {"endpoint": [url, url], "label": ["one", "again"], "endpoint_model": str(MODEL), "suite": "jsonl"}
    more = {"data": prompts, "max_new_tokens": 8, "warmup": 0, "concurrency": 2, "out": tmp_path / "r"}
    made = run(**given, **more)  # type: ignore[arg-type]
    assert set(made.samples["status"]) == {"ok"}, made.samples["error"].tolist()
    assert len(made.samples) == 4 and (made.samples["tokens"] <= 8).all() and (made.samples["wall_s"] > 0).all()
    assert set(made.output_match["verdict"]) == {"identical"}  # greedy, by the same server
    assert set(made.concurrency()["requests"]) == {2} and not made.unfinished
    again = run(**given, **more, resume=True)  # type: ignore[arg-type]
    assert again.samples["started"].equals(made.samples["started"])
