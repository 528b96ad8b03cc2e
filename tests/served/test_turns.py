"""The order in which started servers take turns, and how a run that is resumed keeps it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from specbench_ss import run
from specbench_ss.bench import server_launch, server_run
from specbench_ss.bench.judge import Conversation, Judge, Message, Prompts, plan
from specbench_ss.bench.server_client import Answer, AnswerError, Server
from specbench_ss.errors import RunStopped, UserError
from specbench_ss.results.analysis import analyse
from specbench_ss.runs.config import Endpoint
from specbench_ss.runs.run_dir import BASELINE_ANSWERS, read_baseline_answers, read_run
from tests.served.fake_server import Behaviour, Fake, serving, ticking
from tests.tiny import few

SERVERS = ("plain", "x", "y")


class Started:
    """A server that seems to be started."""

    child = SimpleNamespace(wait=lambda seconds: None)

    def __init__(self, starts: Starts) -> None:
        self.starts = starts

    def fault(self) -> str:
        return self.starts.fault

    def output(self) -> str:
        return ""

    def stop(self) -> None:
        return


class Starts(list[str]):
    """Labels of started servers, in their order.

    server: that answers for all of them, with words by start. fault: reason why the running one seems to have ended.
    """

    def __init__(self, server: Fake) -> None:
        super().__init__()
        self.server, self.fault = server, ""

    def sent(self, text: str) -> list[list[str]]:
        """Return the conversations before this message, of all requests with it."""
        asked = [[message["content"] for message in body["messages"]] for body in self.server.behaviour.asked]
        return [before for *before, last in asked if last == text]

    def start(self, endpoint: Endpoint, *_: Any) -> Any:
        self.append(endpoint.label)
        self.server.behaviour.word = f"{endpoint.label}-{len(self)}-"
        return Started(self)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Starts]:
    with serving(Behaviour(tokens=4)) as server:
        made = Starts(server)
        monkeypatch.setattr(server_launch, "start", made.start)
        monkeypatch.setattr(server_run, "busy", lambda: "")
        monkeypatch.setattr(server_run, "Server", partial(Server, clock=ticking()))
        yield made


TURNS = {"a": 1, "b": 3, "c": 2, "d": 2, "e": 1}  # of each question; b and d are in block 1 of 2


def measured(
    starts: Starts,
    tmp_path: Path,
    blocks: int = 2,
    turns: Mapping[str, int] = TURNS,
    labels: Sequence[str] = SERVERS,
    **more: Any,
) -> Any:
    """Run servers on questions with these numbers of turns."""
    questions, file = tmp_path / "questions.jsonl", tmp_path / "servers.yaml"
    asked = ({"question_id": name, "turns": [f"{name} {i}" for i in range(n)]} for name, n in turns.items())
    questions.write_text("".join(json.dumps(one) + "\n" for one in asked))
    entries = [{"label": label, "command": [label, "{port}"]} for label in labels]
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


def test_later_turns_continue_stored_answers_of_the_baseline(starts: Starts, tmp_path: Path) -> None:
    """The word of an answer names the start that gave it: the baseline's first one, for everybody."""
    made = measured(starts, tmp_path)
    answers = read_baseline_answers(tmp_path / "r")
    assert set(answers) == {("b", 0), ("b", 1), ("d", 0)}
    assert all(text.startswith("plain-1-") for text in answers.values())
    for name, turn in (("b", 1), ("b", 2), ("d", 1)):
        sent = starts.sent(f"{name} {turn}")
        expected = [text for i in range(turn) for text in (f"{name} {i}", answers[name, i])]
        assert all(before == expected for before in sent) and len(sent) == 3 + ((name, turn) == ("b", 1))
    (own,) = (row.text for row in made.run.rows if (row.method, row.question_id, row.turn) == ("plain", "d", 0))
    assert own and own.startswith(f"plain-{len(starts)}-")  # measured at its own place


def test_each_server_continues_its_own_output_without_stored_answers(starts: Starts, tmp_path: Path) -> None:
    made = measured(starts, tmp_path, history="own")
    assert not read_baseline_answers(tmp_path / "r") and {row.status for row in made.run.rows} == {"ok"}


class WholeConversation(Prompts):
    """Prompts that are the conversation itself."""

    def messages(self, conversation: Conversation) -> list[Message]:
        pairs = zip(conversation.turns, conversation.answers, strict=True)
        return [{"role": role, "content": text} for pair in pairs for role, text in zip(ROLES, pair, strict=True)]


ROLES = ("user", "assistant")


@pytest.mark.parametrize("history", ["reference", "own"])
def test_the_judge_rates_the_conversations_that_took_place(history: str, starts: Starts, tmp_path: Path) -> None:
    """Every start answers with other words."""
    measured(starts, tmp_path, history=history)
    found = plan(read_run(tmp_path / "r"), Judge("j"), WholeConversation())
    rated = {json.dumps(messages[:-1]) for messages in found.messages.values()}
    sent = [body["messages"] for body in starts.server.behaviour.asked]
    assert rated == {json.dumps(messages) for messages in sent if messages[0]["content"] != "Hello"}
    assert (found.answers, found.damaged, found.left_out) == (27, 0, 0)


def test_an_answer_that_was_lost_is_not_judged_with_another_one(starts: Starts, tmp_path: Path) -> None:
    measured(starts, tmp_path)
    (tmp_path / "r" / BASELINE_ANSWERS).unlink()
    found = plan(read_run(tmp_path / "r"), Judge("j"), Prompts())
    assert (found.answers, found.damaged) == (18, 9)


def failing(
    monkeypatch: pytest.MonkeyPatch,
    starts: Starts,
    error: Callable[[], BaseException],
    *texts: str,
    always: bool = False,
) -> None:
    """Let the first server that is started fail at these messages, or every one."""
    ask = Server.ask

    def asked(server: Server, messages: Any, *parameters: Any) -> Answer:
        if (always or len(starts) == 1) and messages[-1]["content"] in texts:
            starts.server.behaviour.asked.append({"messages": messages})
            raise error()
        return ask(server, messages, *parameters)

    monkeypatch.setattr(Server, "ask", asked)


def test_an_interrupted_run_continues_with_the_answers_that_were_stored(
    starts: Starts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, starts, KeyboardInterrupt, "d 0")
    with pytest.raises(KeyboardInterrupt):
        measured(starts, tmp_path)
    before = read_baseline_answers(tmp_path / "r")
    assert set(before) == {("b", 0), ("b", 1)}
    with (tmp_path / "r" / BASELINE_ANSWERS).open("ab") as file:
        file.write(b'{"question_id": "d", "tu')  # as of a killed process
    made = measured(starts, tmp_path, resume=True)
    after = read_baseline_answers(tmp_path / "r")
    assert after.items() >= before.items() and set(after) == {*before, ("d", 0)}
    assert {row.status for row in made.run.rows} == {"ok"}
    assert len(starts.sent("b 0")) == len(starts.sent("b 1")) == 1 + 3, "asked once before the samples"


def test_a_baseline_that_dies_ends_the_run_and_keeps_its_answers(
    starts: Starts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def died() -> AnswerError:
        starts.fault = "the server exited with code 7"
        return AnswerError("the stream ended")

    failing(monkeypatch, starts, died, "b 1")
    with pytest.raises(RunStopped, match="exited with code 7.*--resume"):
        measured(starts, tmp_path)
    assert set(read_baseline_answers(tmp_path / "r")) == {("b", 0)} and not starts.sent("d 0")
    starts.fault = ""
    made = measured(starts, tmp_path, resume=True)
    assert {row.status for row in made.run.rows} == {"ok"} and len(made.run.rows) == 9 * 3
    assert len(starts.sent("b 0")) == 1 + 3


def test_a_baseline_that_hangs_is_not_waited_for_at_every_question(
    starts: Starts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = "bdfh"
    failing(monkeypatch, starts, lambda: AnswerError("no text within 120 s"), *(f"{name} 0" for name in odd))
    monkeypatch.setattr(Server, "alive", lambda _: False)
    with pytest.raises(RunStopped, match="failed 3 times in a row and does not answer any more"):
        measured(starts, tmp_path, turns={name: 1 + (name in odd) for name in "abcdefgh"})
    assert [len(starts.sent(f"{name} 0")) for name in odd] == [1, 1, 1, 0]


def test_an_answer_that_failed_is_made_by_the_next_start(
    starts: Starts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, starts, lambda: AnswerError("too long"), "b 1")
    made = measured(starts, tmp_path)
    assert {row.status for row in made.run.rows} == {"ok"} and len(made.run.rows) == 9 * 3
    assert any("plain failed on b turn 2" in warning for warning in made.manifest["warnings"])


def test_one_answer_that_fails_costs_the_turns_after_it_alone(
    starts: Starts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, starts, lambda: AnswerError("too long"), "b 1", always=True)
    failed = {
        (row.question_id, row.turn, row.method): row.error for row in measured(starts, tmp_path).run.rows if not row.ok
    }
    assert {key[:2] for key in failed} == {("b", 1), ("b", 2)} and len(failed) == 2 * 3
    assert all("no answer to turn 2 of plain" in (error or "") for (_, turn, _), error in failed.items() if turn == 2)


def cut(out: Path, kept: int) -> None:
    """Leave a run as if it had been interrupted after so many samples."""
    samples = (out / "samples.jsonl").read_text().splitlines(keepends=True)
    (out / "samples.jsonl").write_text("".join(samples[:kept]))
    (out / "output_match.jsonl").write_text("")


@few(2)
@pytest.mark.parametrize("kept", [0, 2, 4 * 2 + 1, 4 * 3, 4 * 3 + 5, 4 * 3 + 5 * 2 + 1])
def test_a_resumed_run_goes_on_in_its_order_with_the_same_answers(starts: Starts, tmp_path: Path, kept: int) -> None:
    before, order = measured(starts, tmp_path).run, [*starts]
    answers = read_baseline_answers(tmp_path / "r")
    cut(tmp_path / "r", kept)
    starts.clear()
    after = measured(starts, tmp_path, resume=True).run
    assert [row.key for row in after.rows] == [row.key for row in before.rows]
    assert [row.block for row in after.rows] == [row.block for row in before.rows]
    assert read_baseline_answers(tmp_path / "r") == answers
    ends = (4, 8, 12, 17, 22, 27)  # samples after each visit
    assert [*starts] == [label for label, end in zip(order, ends, strict=True) if end > kept]


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
    assert halves[2] > 2 * halves[1]


@pytest.mark.parametrize(
    ("labels", "blocks", "uncovered"), [(SERVERS, 2, False), (SERVERS, 1, True), (SERVERS[:1], 2, False)]
)
def test_a_drift_that_no_interval_covers_has_a_lower_limit(
    labels: Sequence[str], blocks: int, uncovered: bool, starts: Starts, tmp_path: Path
) -> None:
    """A server alone is compared with no other, so that its drift is in no speedup."""
    run_ = measured(starts, tmp_path, blocks, labels=labels).run
    run_.manifest["drift"]["ratio"] = 1.07
    (drift,) = [check for check in analyse(run_).checks if check.name == "drift"]
    assert drift.state == ("warning" if uncovered else "ok") and "+7%" in drift.sentence
    assert ("intervals do not cover it" in drift.sentence) == ("blocks" in drift.sentence) == uncovered
