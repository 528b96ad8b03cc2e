"""llama.cpp's server, plain and with n-gram lookup: counts of drafts, and equal greedy outputs.

llama-server is on the PATH, or SSBENCH_LLAMA_SERVER names it. SSBENCH_LLAMA_MODEL is a GGUF file of a chat model in
F32 or F16: with fewer bits, sums of several tokens may round to other tokens.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml

from specbench_ss import run
from specbench_ss.time_limit import time_limit
from tests.served.test_started_servers import port as port

SERVER = os.environ.get("SSBENCH_LLAMA_SERVER", "") or shutil.which("llama-server") or ""
MODEL = os.environ.get("SSBENCH_LLAMA_MODEL", "")
pytestmark = [
    pytest.mark.skipif(not SERVER, reason="needs llama-server on the PATH or in SSBENCH_LLAMA_SERVER"),
    pytest.mark.skipif(not MODEL, reason="SSBENCH_LLAMA_MODEL names no GGUF file"),
]
TEXTS = ["Repeat ten times: the cat sat on the mat.", "Count from 1 to 20.", "Say hello to each day of the week."]
NGRAM = {"spec-type": "ngram-simple", "spec-ngram-simple-size-n": 3, "spec-ngram-simple-size-m": 8}


def test_lookup_drafts_and_changes_no_output(port: int, tmp_path: Path) -> None:
    entry = {"engine": "llama.cpp", "executable": SERVER, "model": MODEL, "args": ["-c", 2048, "-np", 1]}
    entries = [{"label": "plain", **entry}, {"label": "ngram", **entry, "speculative": NGRAM}]
    questions, servers = tmp_path / "questions.jsonl", tmp_path / "servers.yaml"
    questions.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    servers.write_text(yaml.safe_dump({"port": port, "blocks": 1, "servers": entries}))
    with time_limit(1800.0):
        made = run(servers=servers, suite="jsonl", data=questions, max_new_tokens=64, warmup=0, out=tmp_path / "r")
    rows = made.samples.set_index(["method", "question_id"])
    plain, ngram = rows.loc["plain"], rows.loc["ngram"]
    assert set(rows["status"]) == {"ok"} and len(plain) == len(ngram) == len(TEXTS)
    assert ngram["text"].equals(plain["text"].reindex(ngram.index))
    assert (plain["steps"] == plain["step_tokens"]).all() and not plain["accepted_tokens"].any()
    assert 0 < ngram["accepted_tokens"].sum() <= ngram["draft_nodes"].sum()
    assert (ngram["steps"] + ngram["accepted_tokens"] >= ngram["step_tokens"]).all()
