"""Servers that a run starts itself, one after another on one port."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from specbench_ss import run
from specbench_ss.bench import server_launch, server_run
from specbench_ss.bench.server_client import Server
from specbench_ss.bench.server_launch import port_free, read_servers, without_secrets
from specbench_ss.cli.main import main
from specbench_ss.errors import RunStopped, UserError
from specbench_ss.runs.config import Endpoint
from specbench_ss.runs.run_dir import read_run
from specbench_ss.time_limit import time_limit
from tests.forked import Forked
from tests.served.fake_server import ticking
from tests.tiny import THOROUGH, few, thorough

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def calm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The machine counts as idle, and a test that waits for ever fails."""
    monkeypatch.setattr(server_run, "busy", lambda: "")
    with time_limit(120.0):
        yield


@pytest.fixture
def port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "questions.jsonl"
    turns = {"a": ["one fish", "two fish"], "b": ["red fish"], "c": ["blue fish"], "d": ["old fish"]}
    file.write_text("".join(json.dumps({"question_id": name, "turns": of}) + "\n" for name, of in turns.items()))
    return file


def fake(**behaviour: Any) -> list[str]:
    return [sys.executable, "-m", "tests.served.fake_server", "{port}", json.dumps(behaviour)]


def file_of(tmp_path: Path, port: int, servers: dict[str, list[str]], **more: Any) -> Path:
    file = tmp_path / "servers.yaml"
    env = {"PYTHONPATH": str(ROOT)}
    entries = [{"label": label, "command": command, "env": env} for label, command in servers.items()]
    file.write_text(yaml.safe_dump({"port": port, "ready_s": 30.0, "blocks": 2, "servers": entries, **more}))
    return file


def measured(servers: Path, questions: Path, out: Path, **more: Any) -> Any:
    given = {"suite": "jsonl", "data": questions, "max_new_tokens": 8, "warmup": 1, "out": out, **more}
    return run(servers=servers, **given)


def test_servers_answer_the_blocks_in_turn_and_all_ends_with_the_run(
    port: int, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_run, "Server", partial(Server, clock=ticking()))
    drafting = fake(metrics="vllm", per_chunk=2, drafted=3)
    servers = file_of(tmp_path, port, {"plain": fake(metrics="vllm"), "drafting": drafting}, blocks=2)
    made = measured(servers, questions, tmp_path / "r", concurrency="2")
    rows = made.samples.sort_values("started")
    assert set(rows["status"]) == {"ok"} and len(rows) == 10
    visits = [label for i, label in enumerate(rows["method"]) if i == 0 or rows["method"].iloc[i - 1] != label]
    assert visits == ["plain", "drafting", "plain"]  # in the second block the baseline is last
    assert [*rows["block"]] == [0] * 6 + [1] * 4 and made.manifest["blocks"] == 2
    assert set(made.concurrency().query("concurrency == 2")["failed"]) == {0}
    entries = {entry["label"]: entry for entry in made.manifest["methods"]}
    assert (
        "fake_server" in entries["drafting"]["resolved"]["command"] and entries["plain"]["served"]["tokens"] == "usage"
    )
    assert made.manifest["drift"] == {"prompts": 2, "ratio": pytest.approx(1.0)}
    found = {check.name: check.sentence for check in made.checks}
    assert "2 prompts repeated" in found["drift"] and "memory" not in found
    assert (tmp_path / "r" / "servers" / "plain.log").exists() and port_free(port)


@few(4)
@pytest.mark.parametrize(
    ("command", "stated"),
    [
        ([sys.executable, "-c", "print('ValueError: no such drafter'); raise SystemExit(3)"], "code 3: ValueError: no"),
        (
            [sys.executable, "-c", "import time; print('loading', flush=True); time.sleep(60)"],
            "not healthy after 0.1 s .*: loading",
        ),
        (["no-such-engine", "{port}"], "cannot run no-such-engine"),
        (fake(dies_after=3), "code 7: RuntimeError: the engine core died"),
    ],
    ids=["exits", "never healthy", "not installed", "dies in the middle"],
)
def test_a_server_that_fails_leaves_the_others_alone(
    command: list[str], stated: str, port: int, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = server_launch._wait_healthy

    def wait_until_it_prints(process: server_launch.Process, port: int, ready_s: float) -> None:
        """Give the one that is never healthy little time, from its first line on."""
        never = "not healthy" in stated and process.log.stem == "broken"
        while never and not process.log.stat().st_size:
            time.sleep(0.01)
        wait(process, port, 0.1 if never else ready_s)

    monkeypatch.setattr(server_launch, "_wait_healthy", wait_until_it_prints)
    servers = {"plain": fake(), "broken": command, "other": fake(tokens=4)}
    made = measured(file_of(tmp_path, port, servers), questions, tmp_path / "r")
    rows = made.samples.set_index("method")
    assert set(rows.loc[["plain", "other"], "status"]) == {"ok"} and made.manifest["status"] == "complete"
    failed = rows.loc["broken"].query("status == 'failed'")
    assert len(failed) and failed["error"].str.contains(stated).any()
    assert any(re.search(stated, warning) for warning in made.manifest["warnings"]) and port_free(port)


@thorough
@pytest.mark.parametrize("dies_after", [5, 7] if THOROUGH else [5])
def test_levels_start_servers_afresh_and_leave_out_one_that_dies(
    dies_after: int, port: int, questions: Path, tmp_path: Path
) -> None:
    """A block has a probe and at most three requests, a level a probe and five."""
    servers = {"plain": fake(), "broken": fake(dies_after=dies_after), "other": fake(tokens=4)}
    file, dies = file_of(tmp_path, port, servers, blocks=2), dies_after == 5
    made = measured(file, questions, tmp_path / "r", warmup=0, concurrency="2", rate="200")
    assert set(made.samples["status"]) == {"ok"} and made.manifest["status"] == "complete"
    levels = made.concurrency().query("requests > 0")
    at = {
        name: set(levels.query(where)["method"]) for name, where in (("2", "concurrency == 2"), ("200/s", "rate > 0"))
    }
    assert at == dict.fromkeys(("2", "200/s"), {"plain", "other"} if dies else {*servers}) and port_free(port)
    assert any("engine core died" in warning for warning in made.manifest.get("warnings", ())) == dies


def test_secrets_are_given_to_the_server_and_not_written_down(port: int, questions: Path, tmp_path: Path) -> None:
    file = file_of(tmp_path, port, {"plain": fake()})
    content = yaml.safe_load(file.read_text())
    content["servers"][0]["env"]["HF_TOKEN"] = "very-secret"
    file.write_text(yaml.safe_dump(content))
    made = measured(file, questions, tmp_path / "r", limit=1)
    assert set(made.samples["status"]) == {"ok"} and "HF_TOKEN" in json.dumps(made.manifest)
    assert not any(b"very-secret" in path.read_bytes() for path in (tmp_path / "r").rglob("*") if path.is_file())
    command = ("vllm", "serve", "--api-key", "a", "--hub-token=b", "--port", "1")
    hidden = without_secrets(Endpoint("x", "u", None, command)).command
    assert hidden == ("vllm", "serve", "--api-key", "***", "--hub-token=***", "--port", "1")


def test_secrets_in_json_are_hidden_by_their_names() -> None:
    settings = {"num_speculative_tokens": 4, "loader": [{"hf_token": "a", "path": "/p"}], "credentials": {"user": "b"}}
    words = ("--speculative-config", json.dumps(settings), f"--more={json.dumps({'api_key': 'c'})}", "--tokens", "4")
    config, more = ("--speculative-config", "--more")
    command = without_secrets(Endpoint("x", "u", None, (*words, "--tokenizer", "/t", "[not json"))).command
    shown = {"num_speculative_tokens": 4, "loader": [{"hf_token": "***", "path": "/p"}], "credentials": {"user": "***"}}
    assert command[0] == config and json.loads(command[1]) == shown
    assert command[2] == f"{more}={json.dumps({'api_key': '***'})}"
    assert command[3:] == ("--tokens", "4", "--tokenizer", "/t", "[not json")


def test_a_run_that_is_terminated_ends_its_server(port: int, questions: Path, tmp_path: Path) -> None:
    file = file_of(tmp_path, port, {"plain": fake(pause=0.5)})
    words = ["run", "--servers", str(file), "--suite", f"jsonl:{questions}", "--out", str(tmp_path / "r")]
    run_process = Forked(lambda: main(words))
    while port_free(port):
        time.sleep(0.01)
    run_process.send_signal(signal.SIGTERM)
    assert run_process.wait(60) != 0 and port_free(port)


@thorough
def test_a_baseline_that_fails_ends_the_run_which_can_be_resumed(port: int, questions: Path, tmp_path: Path) -> None:
    mended, out = tmp_path / "mended", tmp_path / "r"
    servers = {"plain": fake(dies_after=3, unless=str(mended)), "other": fake(tokens=4)}
    file = file_of(tmp_path, port, servers, blocks=1)
    with pytest.raises(RunStopped, match="the engine core died.*--resume"):
        measured(file, questions, out, warmup=0)
    before = read_run(out)
    good = {row.key: row.started for row in before.rows if row.ok}
    assert before.manifest["status"] == "failed" and len(good) == 2 and port_free(port)
    mended.touch()
    made = measured(file, questions, out, warmup=0, resume=True)
    assert set(made.samples["status"]) == {"ok"} and len(made.samples) == 10
    assert good.items() <= {row.key: row.started for row in read_run(out).rows}.items()


def test_a_taken_port_is_one_line(port: int, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_launch, "GONE_S", 0.2)
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        file = file_of(tmp_path, port, {"plain": fake()})
        with pytest.raises(UserError, match=f"port {port} is in use") as e:
            measured(file, questions, tmp_path / "r")
        assert "\n" not in str(e.value)
        command = ["run", "--servers", str(file), "--suite", f"jsonl:{questions}", "--out", str(tmp_path / "again")]
        assert main(command) == 2


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        ("servers: []", "at least one server"),
        ("servers: [{label: a}]", "either engine or command"),
        ("servers: [{label: a, engine: vllm}]", "needs the model"),
        ("servers: [{label: a, engine: tgi, model: m}]", "tgi"),
        ("servers: [{label: a, engine: vllm, model: m, k: 3}]", "k without"),
        ("servers: [{label: a, engine: vllm, model: m, draft: x}]", "draft"),
        ("servers: [{label: a, command: [x], method: 'x['}]", "cannot read method"),
        ("servers: [{label: a, engine: vllm, model: m, speculative: {m: x}, k: [1, 2], method: x}]", "several k"),
        ("servers: [{label: a, command: [x]}, {label: a, command: [x]}]", "given twice"),
        (
            "servers: [{label: a, engine: vllm, model: m, speculative: {m: x}, k: [1]}, {label: a, command: [x]}]",
            "twice",
        ),
        ("servers: [{label: a, engine: vllm, model: m, speculative: {method: x}, k: []}]", "empty list"),
        ("ready_s: soon\nservers: [{label: a, command: [x]}]", "ready_s"),
        ("ready_s: .nan\nservers: [{label: a, command: [x]}]", "ready_s"),
        ("ready_s: .inf\nservers: [{label: a, command: [x]}]", "ready_s"),
        ("port: 2024-01-01\nservers: [{label: a, command: [x]}]", "port"),
        ("blocks: 0\nservers: [{label: a, command: [x]}]", "blocks"),
        ("servers: " + "[" * 5000, "nested"),
        ("servers: [{label: a, command: [x], env: {A: 2024-99-99}}]", "YAML"),
        ("a: &a [x, x]\nservers: &s [{label: a, speculative: {x: *s}}]", "[Cc]ircular"),
        ("".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}' if i else 'x'] * 9)}]\n" for i in range(9)), "aliases"),
        ("servers: [", "parsing"),
    ],
)
def test_a_bad_file_of_servers_is_one_line(text: str, stated: str, tmp_path: Path) -> None:
    file = tmp_path / "servers.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=stated) as e:
        read_servers(file)
    assert "\n" not in str(e.value)


def test_a_device_is_no_file_of_servers() -> None:
    with pytest.raises(UserError, match="device"):
        read_servers(Path("/dev/zero"))


def test_engines_are_started_by_their_own_names(tmp_path: Path) -> None:
    file = tmp_path / "servers.yaml"
    vllm = {"label": "e", "engine": "vllm", "model": "M", "speculative": {"method": "eagle3"}, "k": [2, 4]}
    ranges = {"num_speculative_tokens_per_batch_size": [[1, 3, 4], [4, 4, 2]]}
    vllm["speculative"] |= ranges
    llama = {"label": "l", "engine": "llama.cpp", "model": "M.gguf", "speculative": {"model-draft": "D"}, "k": 4}
    sglang = {"label": "s", "engine": "sglang", "model": "M", "speculative": {"speculative-args": {"a": [1]}}}
    plain = {"label": "p", "engine": "vllm", "model": "M", "args": ["--seed", 5], "executable": "/x/vllm"}
    file.write_text(yaml.safe_dump({"port": 8123, "servers": [plain, vllm, llama, sglang]}))
    endpoints = read_servers(file).endpoints
    commands = {one.label: list(one.command) for one in endpoints}
    assert list(commands) == ["p", "e-k2", "e-k4", "l", "s"]
    assert [(one.group, one.k) for one in endpoints] == [("p", None), ("e", 2), ("e", 4), ("l", 4), ("s", None)]
    assert " ".join(commands["p"]) == "/x/vllm serve M --host 127.0.0.1 --port 8123 --seed 5"
    given = commands["e-k4"][commands["e-k4"].index("--speculative-config") + 1]
    assert json.loads(given) == {"method": "eagle3", "num_speculative_tokens": 4, **ranges}
    assert " ".join(commands["l"]).endswith("--model-draft D --spec-draft-n-max 4")
    assert json.loads(commands["s"][commands["s"].index("--speculative-args") + 1]) == {"a": [1]}
