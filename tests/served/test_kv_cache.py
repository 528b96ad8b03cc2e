"""Capacity of a server's KV cache: vLLM's labels, its log, or the reason why it is not known."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specbench_ss.bench.server_kv_cache import read_kv_cache
from specbench_ss.cli.printing import print_concurrency
from specbench_ss.reports.html.report import HtmlReport
from tests.served.fake_server import Behaviour, metrics, serving
from tests.served.test_served_runs import measured, questions
from tests.served.test_started_servers import calm, fake, file_of, port
from tests.served.test_started_servers import measured as started
from tests.tiny import thorough

__all__ = ["calm", "port", "questions"]  # fixtures
BLOCKS = {"block_size": "16", "num_gpu_blocks": "1000"}
RESOLVED = {**BLOCKS, "kv_cache_size_tokens": "12288", "kv_cache_max_concurrency": "3.0"}
NOT_YET = {**BLOCKS, "num_gpu_blocks": "None", "kv_cache_size_tokens": "None"}
LOG = "[a.py:1] GPU KV cache size: 10,240 tokens\n[a.py:2] Maximum concurrency for 4,096 tokens per request: 2.50x\n"
ONE_LINE = "GPU KV cache size: 1,310,720 tokens, Maximum concurrency for 131,072 tokens per request: 10.00x"
SOURCES = ("reported in /metrics", "reported in its log", "not reported: no vllm:cache_config_info in its /metrics")


@pytest.mark.parametrize(
    ("labels", "log", "expected"),
    [
        ((BLOCKS,), "", (16000, None, SOURCES[0])),
        ((RESOLVED,), LOG, (12288, 3.0, SOURCES[0])),
        ((RESOLVED, RESOLVED), "", (24576, 6.0, SOURCES[0])),
        ((BLOCKS,), LOG, (16000, 2.5, SOURCES[0])),
        ((NOT_YET,), LOG + ONE_LINE, (1310720, 10.0, SOURCES[1])),
        ((RESOLVED, NOT_YET), "KV cache size: tokens", (None, None, SOURCES[2])),
        ((), "", (None, None, SOURCES[2])),
    ],
)
def test_the_capacity_is_that_of_the_labels_or_of_the_log(labels: Any, log: str, expected: Any) -> None:
    found = read_kv_cache(metrics(Behaviour(metrics="vllm", cache=labels)), log)
    assert tuple(found.values()) == expected


@thorough
def test_output_and_report_show_the_capacity_of_each_server(questions: Path, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    smaller = {**RESOLVED, "kv_cache_size_tokens": "9216", "kv_cache_max_concurrency": "2.25"}
    plain, drafting = Behaviour(metrics="vllm", cache=(RESOLVED,)), Behaviour(metrics="vllm", cache=(smaller,))
    with serving(plain) as one, serving(drafting) as other, serving() as silent:
        made = measured([one, other, silent], ["plain", "drafting", "silent"], questions, tmp_path / "run")
        alone = measured([silent], ["silent"], questions, tmp_path / "alone")
    shown, nothing, text = io.StringIO(), io.StringIO(), "9,216 tokens, 2.25 requests of 4,096 tokens, 0.75× plain"
    print_concurrency(made, Console(file=shown))
    print_concurrency(alone, Console(file=nothing))
    lines = ["plain: 12,288 tokens, 3.00 requests of 4,096 tokens", f"drafting: {text}"]
    lines.append("silent: not reported: it has no /metrics")
    assert shown.getvalue() == "".join(f"kv cache {line}\n" for line in lines) and not nothing.getvalue()
    HtmlReport().write(made, tmp_path / "report.html")
    assert text in (tmp_path / "report.html").read_text()


def test_the_log_of_a_started_server_is_read(port: int, questions: Path, tmp_path: Path) -> None:
    made = started(file_of(tmp_path, port, {"plain": fake(log=LOG)}), questions, tmp_path / "r", limit=1)
    served = made.manifest["methods"][0]["served"]
    assert (served["kv_cache_size_tokens"], served["kv_cache_max_concurrency"]) == (10240, 2.5)
