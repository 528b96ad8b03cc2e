"""One command for --methods and --servers: two runs with the same prompts, and their parity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specbench_ss import UserError, load_run, run
from specbench_ss.cli.main import main
from specbench_ss.results.parity import METHODS, PARITY, SERVERS, pairs_of
from specbench_ss.runs.run_dir import read_run
from tests.served.test_started_servers import calm, fake, file_of, port
from tests.tiny import thorough

__all__ = ["calm", "port"]  # fixtures
TURNS = {"a": ["one fish", "two fish"], "b": ["red fish"]}
METHOD = "medusa[nodes=4]"


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    file.write_text("".join(json.dumps({"question_id": name, "turns": of}) + "\n" for name, of in TURNS.items()))
    return file


@pytest.fixture(scope="module")
def answers(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The samples of the method by prompt."""
    out = tmp_path_factory.mktemp("first") / "r"
    run(METHOD, suite="jsonl", data=questions, max_new_tokens=8, warmup=0, out=out)
    names = ("text", "token_ids", "tokens", "prompt_tokens", "steps", "accepted_tokens", "draft_nodes")
    return {
        TURNS[row.question_id][row.turn]: {name: getattr(row, name) for name in names}
        for row in read_run(out).of(METHOD)
    }


def both(servers: Path, questions: Path, out: Path, *more: str) -> list[str]:
    words = ["run", "--methods", METHOD, "--servers", str(servers), "--suite", f"jsonl:{questions}"]
    return [*words, "--max-new-tokens", "8", "--warmup", "0", "--out", str(out), *more]


def pairing(file: Path, *labels: str) -> Path:
    """Name the method of these servers in a file."""
    text = file.read_text()
    for label in labels:
        text = text.replace(f"label: {label}\n", f"label: {label}\n  method: {METHOD}\n")
    file.write_text(text)
    return file


def test_a_pair_that_is_exact_and_one_that_differs(
    port: int, questions: Path, answers: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = {**answers, "red fish": {**answers["red fish"], "accepted_tokens": 1, "token_ids": [5, 6, 7]}}
    servers = {"plain": fake(), "right": fake(answers=answers), "wrong": fake(answers=changed)}
    file, out = pairing(file_of(tmp_path, port, servers, blocks=1), "right", "wrong"), tmp_path / "r"
    assert main(both(file, questions, out, "--json")) == 0
    record = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in record[METHODS]["rows"]] == ["ar", METHOD]
    assert [row["method"] for row in record[SERVERS]["rows"]] == ["plain", "right", "wrong"]
    right, wrong = record["parity"]
    assert (right["method"], right["server"], right["verdict"], right["prompts"]) == (METHOD, "right", "exact", 3)
    assert right["tau"][0] == right["tau"][1] > 1 and None not in right["speedup"]
    assert (wrong["server"], wrong["verdict"], wrong["same output"]) == ("wrong", "differs", 2)
    assert json.loads((out / PARITY).read_text())["pairs"] == record["parity"]
    for name in (METHODS, SERVERS):
        made = load_run(out / name)
        assert made.manifest["status"] == "complete" and (out / name / "report.html").exists()

    assert main(["parity", str(out)]) == 1
    printed = capsys.readouterr().out
    assert "exact" in printed and "differs" in printed and "wrong: b turn 1: outputs differ" in printed
    assert main(["parity", str(out), "--pair", f"{METHOD}=right"]) == 0
    assert main(["parity", str(out / METHODS), str(out / SERVERS), "--pair", f"{METHOD}=right"]) == 0
    assert main(["parity", str(out / METHODS)]) == 2 and PARITY in capsys.readouterr().err


@thorough
def test_each_run_is_resumed(
    port: int, questions: Path, answers: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mended, out = tmp_path / "mended", tmp_path / "r"
    servers = {"plain": fake(dies_after=3, unless=str(mended)), "right": fake(answers=answers)}
    words = both(pairing(file_of(tmp_path, port, servers, blocks=1), "right"), questions, out, "--quiet")
    assert main(words) == 4 and not (out / METHODS).exists()  # the servers are first, and their baseline died
    assert f"--out is {out} " in capsys.readouterr().err
    kept = {row.key: row.started for row in read_run(out / SERVERS).rows if row.ok}
    mended.touch()
    assert main(words) == 2  # not empty
    assert main([*words, "--resume"]) == 0
    made = {row.key: row.started for row in read_run(out / SERVERS).rows}
    assert len(kept) == 2 and kept.items() <= made.items() and len(made) == 6
    assert main([*words, "--resume"]) == 0
    assert made == {row.key: row.started for row in read_run(out / SERVERS).rows}
    assert main(["parity", str(out)]) == 0


@thorough
def test_sampled_outputs_have_speedups_and_no_verdict(
    port: int, questions: Path, answers: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = pairing(file_of(tmp_path, port, {"plain": fake(), "right": fake(answers=answers)}, blocks=1), "right")
    out = tmp_path / "r"
    assert main(both(file, questions, out, "--temperature", "0.7", "--quiet")) == 0
    printed = capsys.readouterr().out
    assert "not compared" in printed and "temperature 0" in printed
    (pair,) = json.loads((out / PARITY).read_text())["pairs"]
    assert pair["exact"] is False and pair["same output"] is None and pair["prompts"] == 3
    assert None not in pair["tau"] and pair["speedup"][1] is not None
    assert main(["parity", str(out)]) == 1


def test_a_dry_run_has_both_plans_and_the_pairs(
    questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "servers.yaml", tmp_path / "r"
    file.write_text("servers: [{label: plain, command: [sh]}, {label: ar, engine: vllm, model: M, executable: x-vllm}]")
    assert main(both(file, questions, out, "--dry-run")) == 2 and "not on the PATH" in capsys.readouterr().err
    file.write_text("servers: [{label: plain, command: [sh]}, {label: ar, command: [sh]}]")
    assert main(both(file, questions, out, "--dry-run", "--concurrency", "2,3")) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line]
    assert ["pair", "ar = ar"] in lines and ["server", "plain: sh"] in lines
    assert [rest.split()[0] for name, rest in lines if name == "starts"] == ["8"]  # 2 blocks, 2 levels
    assert [rest for name, rest in lines if name == "out"] == [str(out / METHODS), str(out / SERVERS)]
    assert not out.exists()
    out.mkdir()
    (out / "manifest.json").write_text("{}")
    assert main(both(file, questions, out)) == 2 and "one run" in capsys.readouterr().err


def test_python_has_one_call_for_each(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="parity"):
        run("pld", servers=tmp_path / "servers.yaml")


def test_a_server_has_its_chosen_method_or_that_with_its_label() -> None:
    assert pairs_of(["ar", "pld"], ["plain", "pld", "x"], {"x": "ar"}) == [("pld", "pld"), ("ar", "x")]
    assert pairs_of(["ar", "pld"], ["pld"], {"pld": "ar"}) == [("ar", "pld")]
