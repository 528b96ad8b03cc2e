"""vLLM and this process compared: `make test-engines` installs it and sets SSBENCH_VLLM, the path of its program."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from lab.text import conversations
from specbench_ss import run
from specbench_ss.bench import server_launch
from specbench_ss.bench.server_launch import port_free
from specbench_ss.cli.main import main
from specbench_ss.errors import UserError
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
MADE = "{made}"  # stands for the folder of drafters that `made` writes
DRAFTERS: dict[str, tuple[str, dict[str, Any], int]] = {  # label -> the same drafter here, there, and its length
    "eagle3": ("eagle3[total_tokens=5,depth=3,top_k=1]", {"method": "eagle3", "model": str(LAB / "eagle3")}, 4),
    "dflash": ("dflash[mode=chain]", {"method": "dflash", "model": str(LAB / "dflash")}, 7),
    "draft": ("sd[gamma=4]", {"method": "draft_model", "model": str(LAB / "draft")}, 4),
    "ngram": ("pld[length=5]", {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}, 5),
    "medusa": (f"medusa[tree={MADE}/chain.json]", {"method": "medusa", "model": f"{MADE}/medusa"}, 4),
    "eagle": (f"eagle[tree={MADE}/chain.json]", {"method": "eagle", "model": f"{MADE}/eagle"}, 4),
    "eagle3-speculators": (
        f"eagle3[weights={MADE}/eagle3,total_tokens=5,depth=3,top_k=1]",
        {"method": "eagle3", "model": f"{MADE}/eagle3"}, 4,
    ),
    "dflash-speculators": (
        f"dflash[weights={MADE}/dflash,mode=chain]", {"method": "dflash", "model": f"{MADE}/dflash"}, 7,
    ),
    "peagle": (
        f"peagle[weights={MADE}/peagle]",
        {"method": "eagle3", "parallel_drafting": True, "model": f"{MADE}/peagle"}, 8,
    ),
}  # fmt: skip
TRAINING = ["--steps", 60, "--lr", 3e-3, "--length", 256, "--batch-size", 4, "--anchors", 32, "--format", "speculators"]


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    with time_limit(1800.0):
        yield


def servers(folder: Path, port: int, labels: Iterable[str] = (), made: Path = Path(), ready_s: float = 600.0) -> Path:
    """Write a file of the plain server and these drafters. Every process of theirs has a variable MARK, the folder."""
    env = ENVIRONMENT | {"MARK": str(folder)}
    entry = {"engine": "vllm", "executable": VLLM, "model": str(LAB / "base"), "args": ARGS, "env": env}
    entries: list[dict[str, Any]] = [{"label": "plain", **entry}]
    for label in labels:
        _, speculative, k = DRAFTERS[label]
        entries.append({"label": label, **entry, "speculative": speculative, "k": k})
    file = folder / "servers.yaml"
    text = yaml.safe_dump({"port": port, "blocks": 1, "ready_s": ready_s, "servers": entries})
    file.write_text(text.replace(MADE, str(made)))
    return file


def left(folder: Path) -> list[str]:
    """Return the command lines of processes of the servers whose file is in this folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("MARK") == str(folder):
                found.append(" ".join(process.cmdline()))
    return found


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
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with converted drafters of the lab, a trained one, and the draft tree of a chain of four."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "chain.json").write_text(json.dumps([[0] * depth for depth in range(1, 5)]))
    for method in ("medusa", "eagle", "eagle3", "dflash"):
        assert main(["models", "convert", method, "--out", str(folder / method)]) == 0
    with (folder / "chats.jsonl").open("w") as file:
        for example in islice(conversations("train", 0), 400):
            file.write(json.dumps({"prompt": example.turns[0], "completion": example.answers[0][0]}) + "\n")
    words = ["train", "peagle", "--data", folder / "chats.jsonl", "--out", folder / "peagle", *TRAINING]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSBENCH_CACHE", str(folder / "cache"))
        assert main([str(word) for word in words]) == 0
    return folder


@pytest.fixture(scope="module")
def compared(questions: Path, made: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Parity]:
    """The parity of every drafter: one run here, one run of servers."""
    folder = tmp_path_factory.mktemp("parity")
    given = {"suite": "jsonl", "data": questions, "max_new_tokens": 40, "warmup": 0}
    with time_limit(1800.0):
        methods = [method.replace(MADE, str(made)) for method, _, _ in DRAFTERS.values()]
        here = run(methods, dtype="float32", out=folder / "here", **given)
        there = run(servers=servers(folder, 8123, DRAFTERS, made), out=folder / "there", **given)
    labels = {label: str(here.manifest["methods"][i]["label"]) for i, label in enumerate(DRAFTERS, start=1)}
    pairs = [("ar", "plain"), *((labels[label], label) for label in DRAFTERS)]
    return {one.server: one for one in parity(read_run(here.path), read_run(there.path), pairs)}


@pytest.mark.parametrize("label", ["plain", *DRAFTERS])
def test_outputs_steps_and_accepted_tokens_are_those_of_this_process(label: str, compared: dict[str, Parity]) -> None:
    found = compared[label]
    assert len(found.prompts) == 12 and found.exact, list(differences(found))
    assert label == "plain" or sum(prompt.accepted_tokens[0] or 0 for prompt in found.prompts) > 0


def test_sampled_outputs_are_tested(questions: Path, port: int, tmp_path: Path) -> None:
    """vLLM 0.32 on CPUs samples garbage with speculation; without it, it samples from the model's distribution."""
    given = {"suite": "jsonl", "data": questions, "max_new_tokens": 40, "warmup": 0, "temperature": 0.7}
    made = run(servers=servers(tmp_path, port, ["eagle3"]), out=tmp_path / "r", **given)
    overall = made.summary(all=True).query("task == 'overall'").set_index("method")
    assert overall.loc["plain", "bias"] != "biased"
    assert overall.loc["eagle3", "bias"] == "biased" and overall.loc["eagle3", "comparison"] == "invalid"


def test_a_killed_server_is_named_and_nothing_of_it_is_left(
    questions: Path, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The baseline's program is killed while it answers, as by a kernel that is out of memory."""
    start = server_launch.start

    def started(*args: Any) -> server_launch.Process:
        process = start(*args)
        threading.Thread(target=kill_in_the_middle, args=(process,), daemon=True).start()
        return process

    monkeypatch.setattr(server_launch, "start", started)
    given = {"suite": "jsonl", "data": questions, "max_new_tokens": 40, "warmup": 0}
    with pytest.raises(UserError, match="ended by signal 9.*--resume"):
        run(servers=servers(tmp_path, port), out=tmp_path / "r", **given)
    assert 0 < sum(row.ok for row in read_run(tmp_path / "r").rows) < 12
    assert port_free(port) and not left(tmp_path)


def kill_in_the_middle(process: server_launch.Process) -> None:
    while process.log.read_text(errors="replace").count('"POST /v1/chat/completions') < 6:
        time.sleep(0.05)
    process.child.kill()


def test_a_server_that_is_not_healthy_in_time_is_ended(questions: Path, port: int, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not healthy after 5 s"):
        run(servers=servers(tmp_path, port, ready_s=5.0), suite="jsonl", data=questions, out=tmp_path / "r")
    assert port_free(port) and not left(tmp_path)
