"""The order in which started servers take turns, and how a run that is resumed keeps it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from specbench_ss import run
from specbench_ss.bench import server_launch, server_run
from specbench_ss.errors import UserError
from specbench_ss.results.analysis import analyse
from specbench_ss.runs.config import Endpoint
from specbench_ss.runs.run_dir import read_run
from tests.served.fake_server import Behaviour, Fake, serving

SERVERS = ("plain", "x", "y")


class Started:
    """A server that seems to be started."""

    child = SimpleNamespace(wait=lambda seconds: None)

    def fault(self) -> str:
        return ""

    def stop(self) -> None:
        return


class Starts(list[str]):
    """Labels of started servers, in their order. server: that answers for all of them, with words by start."""

    def __init__(self, server: Fake) -> None:
        super().__init__()
        self.server = server

    def start(self, endpoint: Endpoint, *_: Any) -> Any:
        self.append(endpoint.label)
        self.server.behaviour.word = f"{endpoint.label}-{len(self)}-"
        return Started()


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Starts]:
    with serving(Behaviour(tokens=4)) as server:
        made = Starts(server)
        monkeypatch.setattr(server_launch, "start", made.start)
        monkeypatch.setattr(server_run, "busy", lambda: "")
        yield made


def measured(starts: Starts, tmp_path: Path, blocks: int = 2, **more: Any) -> Any:
    """Run servers on five questions; the second and the fourth, which are in block 1 of 2, have three and two turns."""
    questions, file = tmp_path / "questions.jsonl", tmp_path / "servers.yaml"
    turns = {"a": 1, "b": 3, "c": 2, "d": 2, "e": 1}
    asked = ({"question_id": name, "turns": [f"{name} {i}" for i in range(n)]} for name, n in turns.items())
    questions.write_text("".join(json.dumps(one) + "\n" for one in asked))
    entries = [{"label": label, "command": [label, "{port}"]} for label in SERVERS]
    file.write_text(yaml.safe_dump({"port": starts.server.server_port, "blocks": blocks, "servers": entries}))
    given = {"suite": "jsonl", "data": questions, "max_new_tokens": 4, "warmup": 0, "out": tmp_path / "r"}
    return run(servers=file, **given, **more)


def test_the_baseline_begins_one_block_and_ends_the_next(starts: Starts, tmp_path: Path) -> None:
    made = measured(starts, tmp_path)
    first, second = starts[:3], starts[3:]
    assert first[0] == "plain" and second == first[::-1], "no further start at the end"
    rows = made.run.rows
    assert {row.status for row in rows} == {"ok"} and len(rows) == 9 * 3
    assert {row.question_id for row in rows if row.block == 1} == {"b", "d"}
    assert Counter(row.block for row in rows) == {0: 4 * 3, 1: 5 * 3}
    assert made.manifest["drift"]["prompts"] == 3  # first turns of block 0


def test_later_turns_continue_what_the_baseline_answered_ahead(starts: Starts, tmp_path: Path) -> None:
    """The word of an answer names the start that gave it: the baseline's first one, for everybody."""
    made = measured(starts, tmp_path)
    ahead = made.manifest["histories"]
    assert {name: len(texts) for name, texts in ahead.items()} == {"b": 2, "d": 1}
    assert all(text.startswith("plain-1-") for texts in ahead.values() for text in texts)
    bodies = [body["messages"] for body in starts.server.behaviour.asked]
    for name, turn in (("b", 1), ("b", 2), ("d", 1)):
        sent = [messages for messages in bodies if messages[-1]["content"] == f"{name} {turn}"]
        histories = {tuple(m["content"] for m in messages if m["role"] == "assistant") for messages in sent}
        assert histories == {tuple(ahead[name][:turn])} and len(sent) == 3 + (turn < 2 and name == "b")
    (own,) = (row.text for row in made.run.rows if (row.method, row.question_id, row.turn) == ("plain", "d", 0))
    assert own and own.startswith(f"plain-{len(starts)}-")  # measured at its own place


def test_each_server_continues_its_own_output_without_answers_ahead(starts: Starts, tmp_path: Path) -> None:
    made = measured(starts, tmp_path, history="own")
    assert "histories" not in made.manifest and {row.status for row in made.run.rows} == {"ok"}


def cut(out: Path, kept: int) -> None:
    """Leave a run as if it had been interrupted after so many samples."""
    samples = (out / "samples.jsonl").read_text().splitlines(keepends=True)
    (out / "samples.jsonl").write_text("".join(samples[:kept]))
    (out / "output_match.jsonl").write_text("")


@pytest.mark.parametrize("kept", [0, 2, 4 * 2 + 1, 4 * 3, 4 * 3 + 5, 4 * 3 + 5 * 2 + 1])
def test_a_resumed_run_goes_on_in_its_order_with_the_same_histories(starts: Starts, tmp_path: Path, kept: int) -> None:
    before, order = measured(starts, tmp_path).run, [*starts]
    cut(tmp_path / "r", kept)
    starts.clear()
    after = measured(starts, tmp_path, resume=True).run
    assert [row.key for row in after.rows] == [row.key for row in before.rows]
    assert [row.block for row in after.rows] == [row.block for row in before.rows]
    assert after.manifest["histories"] == before.manifest["histories"]
    ends = (4, 8, 12, 17, 22, 27)  # samples after each visit
    assert [*starts] == [label for label, end in zip(order, ends, strict=True) if end > kept]


def test_answers_ahead_that_were_lost_are_asked_for_again(starts: Starts, tmp_path: Path) -> None:
    measured(starts, tmp_path)
    cut(tmp_path / "r", 4 * 3)
    manifest = json.loads((tmp_path / "r" / "manifest.json").read_text())
    del manifest["histories"]
    (tmp_path / "r" / "manifest.json").write_text(json.dumps(manifest))
    starts.clear()
    made = measured(starts, tmp_path, resume=True)
    assert starts[0] == starts[-1] == "plain" and set(made.manifest["histories"]) == {"b", "d"}
    assert {row.status for row in made.run.rows} == {"ok"}


def test_another_order_is_refused(starts: Starts, tmp_path: Path) -> None:
    measured(starts, tmp_path)
    cut(tmp_path / "r", 5)
    with pytest.raises(UserError, match="has 2 blocks, not 4; set blocks: 2"):
        measured(starts, tmp_path, blocks=4, resume=True)
    manifest = json.loads((tmp_path / "r" / "manifest.json").read_text())
    del manifest["blocks"]
    (tmp_path / "r" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="took turns in an earlier order; use another --out"):
        measured(starts, tmp_path, resume=True)
    assert len(read_run(tmp_path / "r").rows) == 5


def test_blocks_that_differ_widen_the_interval_of_a_served_run(starts: Starts, tmp_path: Path) -> None:
    """x is slower in block 1; the same times in one block have the interval over questions alone."""
    run_ = measured(starts, tmp_path).run
    for row in run_.rows:
        row.wall_s = 1.0 + 0.01 * len(row.question_id + str(row.turn)) + 0.5 * (row.method == "x" and row.block == 1)
    halves = {}
    for blocks in (2, 1):
        for row in run_.rows:
            row.block = (row.block or 0) % blocks
        (found,) = [row for row in analyse(run_).overall if row.method == "x"]
        low, high = found.speedup_interval or (0.0, 0.0)
        halves[blocks] = high / low
        (drift,) = [check.sentence for check in analyse(run_).checks if check.name == "drift"]
        assert ("intervals do not cover it" in drift) == (blocks == 1)
    assert halves[2] > 2 * halves[1]
