"""`ssbench judge`, against a real HTTP server on loopback: nothing unasked, nothing twice, nothing lost."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from specbench_ss.bench.judge import Conversation, FilePrompts, Prompts, plan, rating
from specbench_ss.bench.judge import Judge as JudgingModel
from specbench_ss.cli.main import main
from specbench_ss.errors import UserError
from specbench_ss.results.analysis import load_run
from specbench_ss.results.summary import summarise
from specbench_ss.runs.run_dir import JUDGE, read_run
from tests.conftest import MakeRun
from tests.loopback import Quiet, listening

SHARED = Path(os.environ.get("SSBENCH_SHARED", Path(__file__).resolve().parents[3] / "shared")) / "data"
OFFICIAL = SHARED / "mt_bench" / "judge_prompts.jsonl"


JUDGE_J = JudgingModel("j")


def host(judge: Judge) -> str:
    return judge.url.removeprefix("http://").removesuffix("/v1")


@dataclass
class Judge:
    """Rates by the number of the sample that an answer ends on. statuses: answered in turn before it does."""

    url: str = ""
    statuses: list[int] = field(default_factory=list)
    silent: bool = False
    page: str = ""  # how it misbehaves
    stolen: list[str] = field(default_factory=list)  # pages that a redirect led to
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    judge = Judge()

    class Handler(Quiet, BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if judge.page:
                misbehave(self, judge)
                return
            status = judge.statuses.pop(0) if judge.statuses else 200
            if status == 200:
                judge.requests.append(body)
                judge.keys.add(str(self.headers["Authorization"]))
            stated = "No idea." if judge.silent else "As in [[3]]? No: [[8]]"
            message = {"role": "assistant", "content": stated}
            reply = {
                "id": "1",
                "object": "chat.completion",
                "created": 0,
                "model": body["model"],
                "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
                "usage": {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18},
            }
            content = json.dumps(reply if status == 200 else {"error": {"message": "out of luck"}}).encode()
            self.send_response(status)
            self.send_header("retry-after-ms", "1")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            judge.stolen.append(self.path)

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OPENAI_API_KEY", "secret-of-the-test")
    with listening(Handler) as url:
        judge.url = f"{url}/v1"
        yield judge


@pytest.fixture
def run(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """12 questions of two turns by two methods: the first turns have the same answer to every question's number."""
    monkeypatch.setenv("SSBENCH_CACHE", str(tmp_path / "cache"))
    return make_run(labels=("ar", "ss"), categories=("writing", "math"), questions=2, turns=2)


def misbehave(handler: BaseHTTPRequestHandler, judge: Judge) -> None:
    """Answer with a redirect, a key, a compressed or an endless body."""
    if judge.page == "redirect":
        handler.send_response(302)
        handler.send_header("Location", f"{judge.url}/elsewhere")
    else:
        handler.send_response(200 if judge.page in ("endless", "gzip") else 500)
    handler.send_header("Content-Type", "application/json")
    if judge.page == "gzip":
        handler.send_header("Content-Encoding", "gzip, gzip")
    handler.send_header("Connection", "close")
    handler.end_headers()
    body = {"gzip": gzip.compress(gzip.compress(b" " * (1 << 20))), "redirect": b""}
    with suppress(OSError):
        for _ in range(1 << 12 if judge.page == "endless" else 1):
            handler.wfile.write(body.get(judge.page, b" " * (1 << 16) if judge.page == "endless" else ECHO))


ECHO = json.dumps({"error": {"message": "x" * 110 + "secret-of-the-test"}}).encode()


@pytest.mark.parametrize(
    ("page", "stated"),
    [("redirect", "redirects"), ("echo", r"\*\*\*"), ("gzip", "encoding"), ("endless", "over 4 MiB")],
)
def test_a_hostile_judge_is_one_line_without_the_key(
    page: str, stated: str, run: Path, judge: Judge, capsys: pytest.CaptureFixture[str]
) -> None:
    judge.page = page
    assert ask(run, judge, "--yes", "--retries", "0") == 2
    printed = capsys.readouterr()
    (error,) = printed.err.strip().splitlines()
    assert re.search(stated, error) and "secret-" not in printed.out + error and not judge.stolen


def ask(run: Path, judge: Judge, *more: str, model: str = "strict") -> int:
    return main(["judge", str(run), "--model", model, "--base-url", judge.url, "--workers", "2", *more])


def test_nothing_is_sent_before_the_user_states_so(run: Path, judge: Judge, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path.name for path in run.iterdir())
    assert ask(run, judge, "--price", "1000,0") == 0
    stated = capsys.readouterr().out
    assert not judge.requests and sorted(path.name for path in run.iterdir()) == before
    assert "calls      16: about " in stated and "at most 16,384 received" in stated and "Nothing was sent" in stated
    assert "cost       at most about 0." in stated or "cost       at most about " in stated


def test_verdicts_stand_next_to_speed_and_are_asked_for_once(
    run: Path, judge: Judge, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(run, judge, "--yes") == 0
    assert len(judge.requests) == 16 and judge.keys == {"Bearer secret-of-the-test"}
    assert {(r["model"], r["temperature"], r["max_tokens"]) for r in judge.requests} == {("strict", 0, 1024)}
    row = next(row for row in summarise(read_run(run)) if row.method == "ss")
    assert (row.judge_score, row.judge_score_n, row.judge_score_difference) == (pytest.approx(0.8), 4, 0)
    assert row.quality is not None and row.quality != row.judge_score  # one does not become the other
    results = load_run(run)
    assert set(results.samples["judge_score"]) == {0.8} and set(results.summary(all=True)["judge"]) == {
        f"strict at {host(judge)}, prompts own-2, 1024 tokens"
    }
    assert "secret-of-the-test" not in (run / JUDGE).read_text()
    assert ask(run, judge, "--yes") == 0
    assert len(judge.requests) == 16 and "Every output has a rating." in capsys.readouterr().out
    assert main(["report", str(run)]) == 0 and "s rating, divided by ten" in (run / "report.html").read_text()


def test_answers_are_not_judged_while_references_are_missing(
    run: Path, judge: Judge, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = json.loads((run / "questions.json").read_text())
    (run / "questions.json").write_text(json.dumps([question | {"references": []} for question in questions]))
    assert ask(run, judge, "--yes") == 2
    assert "--resume" in capsys.readouterr().err and not judge.requests


def test_equal_answers_share_one_verdict(run: Path, judge: Judge) -> None:
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    for line in lines:
        line["text"] = f"the same answer to {line['question_id']}"
    (run / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert ask(run, judge, "--yes", "--methods", "ar") == 0
    assert len(judge.requests) == 8
    assert ask(run, judge) == 0  # ss states what ar stated: its verdicts are known, and cost nothing
    assert len(judge.requests) == 8 and len(read_run(run).judged_scores) == 16


def test_an_error_that_passes_is_retried_and_one_that_stays_keeps_what_there_is(
    run: Path, judge: Judge, capsys: pytest.CaptureFixture[str]
) -> None:
    judge.statuses = [500, 429, 200]
    assert ask(run, judge, "--yes", "--methods", "ar") == 0
    assert len(judge.requests) == 8
    judge.statuses = [200, 200, 200, 401, 401]
    assert ask(run, judge, "--yes", "--workers", "1") == 2
    error = capsys.readouterr().err
    assert "out of luck" in error and "verdicts are stored; repeat the command" in error
    kept = len(read_run(run).judge_verdicts)
    assert 11 <= kept < 16
    judge.statuses = []
    assert ask(run, judge, "--yes") == 0
    assert len(read_run(run).judged_scores) == 16 and len(judge.requests) == 16


def test_a_reply_without_a_rating_is_no_score_and_is_asked_again(
    run: Path, judge: Judge, capsys: pytest.CaptureFixture[str]
) -> None:
    judge.silent = True
    assert ask(run, judge, "--yes") == 2
    assert "16 replies have no rating" in capsys.readouterr().err
    assert summarise(read_run(run))[0].judge_score is None
    judge.silent = False
    assert ask(run, judge, "--yes") == 0
    assert summarise(read_run(run))[0].judge_score == pytest.approx(0.8) and len(judge.requests) == 32


def test_the_judge_sees_what_the_method_saw(run: Path) -> None:
    done = read_run(run)
    reference = next(r.text for r in done.rows if r.method == "ar" and r.turn == 0)
    second = next(r for r in done.rows if r.method == "ss" and r.turn == 1)
    second.text = "the second answer"
    for history, first in (("reference", reference), ("own", "another first answer")):
        next(r for r in done.rows if r.method == "ss" and r.turn == 0).text = "another first answer"
        done.manifest["config"]["history"] = history
        sent = [m[1]["content"] for m in plan(done, JUDGE_J, Prompts()).messages.values()]
        assert any(f"{first}\n</assistant>" in text and "the second answer" in text for text in sent)
    texts = [m[1]["content"] for m in plan(done, JUDGE_J, Prompts()).messages.values()]
    assert sum("<reference>" in text for text in texts) == 8  # of mathematics alone
    with pytest.raises(UserError, match="has no method 'sss'"):
        plan(done, JUDGE_J, Prompts(), ["sss"])


@pytest.mark.skipif(not OFFICIAL.is_file(), reason="MT-Bench's prompts for a judge are not here")
def test_mt_benchs_own_prompts() -> None:
    prompts = FilePrompts(OFFICIAL)
    assert prompts.label == "judge_prompts-fd283293406d"
    braces = Conversation("math", ("One {x}?", "Two?"), ("a {y}", "b"), ("r1", "r2"))
    sent = prompts.messages(braces)
    assert sent is not None and all(text in sent[1]["content"] for text in ("One {x}?", "a {y}", "b", "r1", "r2"))
    single = prompts.messages(Conversation("writing", ("One?",), ("a",)))
    assert single is not None and single[0]["content"] == "You are a helpful assistant."
    assert prompts.messages(Conversation("writing", ("1", "2", "3"), ("a", "b", "c"))) is None


def test_ratings() -> None:
    stated = {
        "[[7]]": 0.7,
        "[[3]] no, [[ 9.5 ]]": 0.95,
        "[[0]]": None,
        "[[11]]": None,
        "7/10": None,
        "": None,
        "[[1]]": 0.1,
    }
    assert {text: rating(text) for text in stated} == stated
