"""vLLM and this process compared: `make test-engines` installs it and sets SSBENCH_VLLM, the path of its program."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from specbench_ss import run
from specbench_ss.models.resolve import LAB
from specbench_ss.results.parity import Parity, differences, parity
from specbench_ss.runs.run_dir import read_run
from specbench_ss.time_limit import time_limit
from tests.served.test_started_servers import port as port

VLLM = os.environ.get("SSBENCH_VLLM", "")
pytestmark = pytest.mark.skipif(not VLLM, reason="needs vLLM: make test-engines")
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONPATH": os.environ.get("SSBENCH_VLLM_PYTHONPATH", ""),
}
ARGS = ["--max-model-len", 1024, "--enforce-eager", "--dtype", "float32", "--served-model-name", "lab"]
DRAFTERS: dict[str, tuple[str, dict[str, Any], int]] = {  # label -> the same drafter here, there, and its length
    "eagle3": ("eagle3[total_tokens=5,depth=3,top_k=1]", {"method": "eagle3", "model": str(LAB / "eagle3")}, 4),
    "dflash": ("dflash[mode=chain]", {"method": "dflash", "model": str(LAB / "dflash")}, 7),
    "draft": ("sd[gamma=4]", {"method": "draft_model", "model": str(LAB / "draft")}, 4),
    "ngram": ("pld[length=5]", {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}, 5),
}


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    with time_limit(1800.0):
        yield


def servers(folder: Path, port: int, labels: list[str]) -> Path:
    """Write a file of the plain server and these drafters."""
    entry = {"engine": "vllm", "executable": VLLM, "model": str(LAB / "base"), "args": ARGS, "env": ENVIRONMENT}
    entries: list[dict[str, Any]] = [{"label": "plain", **entry}]
    for label in labels:
        _, speculative, k = DRAFTERS[label]
        entries.append({"label": label, **entry, "speculative": speculative, "k": k})
    file = folder / "servers.yaml"
    file.write_text(yaml.safe_dump({"port": port, "blocks": 1, "servers": entries}))
    return file


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve short prompts of the lab's kinds of text."""
    texts = [
        "Translate to German: The house is small.", "What is 17 plus 25?", "Write a short greeting to a friend.",
        "Name three animals that live in the sea.", "Summarize: The sun is a star. It gives light and warmth.",
        "Who wrote this letter, and why?", "Explain how rain is made.", "List the days of the week.",
        "Repeat after me: one two three four five six seven.", "What colour has grass?",
        "A train has 12 cars with 30 seats each. How many seats are there?", "Tell a story of two sentences.",
    ]  # fmt: skip
    file = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return file


@pytest.fixture(scope="module")
def compared(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Parity]:
    """The parity of every drafter: one run here, one run of servers."""
    folder = tmp_path_factory.mktemp("parity")
    given = {"suite": "jsonl", "data": questions, "max_new_tokens": 40, "warmup": 0}
    with time_limit(1800.0):
        methods = [method for method, _, _ in DRAFTERS.values()]
        here = run(methods, dtype="float32", out=folder / "here", **given)
        there = run(servers=servers(folder, 8123, list(DRAFTERS)), out=folder / "there", **given)
    labels = {label: str(here.manifest["methods"][i]["label"]) for i, label in enumerate(DRAFTERS, start=1)}
    pairs = [("ar", "plain"), *((labels[label], label) for label in DRAFTERS)]
    return {one.server: one for one in parity(read_run(here.path), read_run(there.path), pairs)}


@pytest.mark.parametrize("label", ["plain", *DRAFTERS])
def test_outputs_steps_and_accepted_tokens_are_those_of_this_process(label: str, compared: dict[str, Parity]) -> None:
    found = compared[label]
    assert len(found.prompts) == 12 and found.exact, list(differences(found))


def test_sampled_outputs_are_tested(questions: Path, port: int, tmp_path: Path) -> None:
    """vLLM 0.32 on CPUs samples garbage with speculation; without it, it samples from the model's distribution."""
    given = {"suite": "jsonl", "data": questions, "max_new_tokens": 40, "warmup": 0, "temperature": 0.7}
    made = run(servers=servers(tmp_path, port, ["eagle3"]), out=tmp_path / "r", **given)
    overall = made.summary(all=True).query("task == 'overall'").set_index("method")
    assert overall.loc["plain", "bias"] != "biased"
    assert overall.loc["eagle3", "bias"] == "biased" and overall.loc["eagle3", "comparison"] == "invalid"
