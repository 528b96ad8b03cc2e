"""Several sessions (`SampleRecord.session`): how much processes differ is part of the intervals."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.interval_coverage import NOISES, covered_sessions
from specbench_ss.bench import sessions
from specbench_ss.cli.main import main
from specbench_ss.results.ranking import rank_ranges
from specbench_ss.results.sample_checks import comparable
from specbench_ss.results.summary import summarise
from specbench_ss.runs.records import SampleRecord
from specbench_ss.runs.run_dir import read_run, without_verdict
from specbench_ss.stats.pairs import Pairs, together
from tests.conftest import MakeRun
from tests.forked import Forked, module
from tests.tiny import THOROUGH


def sides(effects: list[float], noise: float = 0.0) -> tuple[list[SampleRecord], list[SampleRecord]]:
    """A method and a baseline on twelve questions; the logarithm of the speedup is 0.3 and an effect a session."""
    rng, made = np.random.default_rng(0), ([], [])  # type: ignore[var-annotated]
    work = rng.lognormal(0, 0.5, 12)
    for session, effect in enumerate(effects):
        for question, seconds in enumerate(work):
            for side, own in zip(made, (0.3 + effect, 0.0), strict=True):
                row = SampleRecord(f"q{question}", 0, "m" if own else "ar", session, "qa", 0, 0, 0, "", "", "ok")
                row.session, row.tokens, row.prefill_tokens = session, 20, 1
                row.wall_s = float(seconds * np.exp(noise * rng.normal() - own))
                side.append(row)
    return made


def test_the_variance_between_sessions_is_that_of_their_mean() -> None:
    effects = [0.02, -0.01, 0.005, -0.015]
    pairs = Pairs(*sides(effects))
    found = pairs.log_speedup()
    assert found.error == pytest.approx(np.std(effects, ddof=1) / 2, rel=0.02)  # of a mean of four
    assert found.freedom == pytest.approx(3, rel=0.01)
    assert pairs.processes == 0 and pairs.sessions()[0].sum() == pytest.approx(0, abs=1e-12)
    assert pairs.session_speedups() == pytest.approx(np.exp([0.3 + one for one in effects]))


def test_a_single_session_keeps_its_interval_and_the_floor() -> None:
    own, other = sides([0.0], noise=0.05)
    pairs = Pairs(own, other)
    assert pairs.sessions() == () and pairs.processes == 1
    numbered = [[replace(row, session=2) for row in side] for side in (own, other)]
    assert Pairs(*numbered).interval() == pairs.interval()


def test_a_session_that_lacks_questions_counts_by_those_that_it_has() -> None:
    own, other = sides([0.0, 0.0, 0.0])
    pairs = Pairs([row for row in own if not (row.session == 2 and row.question_id != "q3")], other)
    assert pairs.log_speedup().error == pytest.approx(0, abs=1e-9) and pairs.n_sessions == 3


def test_pairs_of_methods_have_the_variance_between_sessions_too() -> None:
    own, other = sides([0.03, -0.03, 0.0], noise=0.01)
    of_both = together([own, other])
    assert of_both.sessions.shape == (2, 3)
    assert of_both.sessions[1] - of_both.sessions[0] == pytest.approx(Pairs(own, other).sessions()[0], abs=1e-12)


def test_a_lead_within_the_differences_of_sessions_is_not_significant(make_run: MakeRun) -> None:
    """Sessions of ss differ by 40 %: its rank and its verdict are open, and were not if they were repeats."""
    placed = []
    for several in (False, True):
        run = read_run(make_run(labels=("ar", "ss", "medusa"), repeats=3, seed=several))
        rows = summarise(run)
        for row in run.rows:
            pace = {"ar": 1.0, "ss": (0.6, 0.8, 1.1)[row.repeat], "medusa": 0.95}[row.method]
            row.wall_s, row.tokens = pace * (1 + 0.01 * (row.index % 3)), 40
            row.session = row.repeat if several else 0
        placed.append(rank_ranges(run, rows)["ss"])
    assert (placed[0].best, placed[0].worst, placed[0].faster) == (1, 1, True)
    assert placed[1].tied_with == ("medusa",) and not placed[1].faster


def test_repeats_in_other_processes_do_not_show_memory(make_run: MakeRun) -> None:
    run = read_run(make_run(repeats=2))
    for row in run.rows:
        row.token_ids = [1]
    run.entry("ss")["stateful"] = False
    assert comparable(run, "ss")
    for row in run.rows:
        row.session = row.repeat
    assert not comparable(run, "ss")


@pytest.mark.parametrize(("sessions", "effect", "least"), [(3, 0.0, 0.945), (3, 0.02, 0.94), (5, 0.05, 0.935)])
def test_intervals_over_sessions_cover_the_truth(sessions: int, effect: float, least: float) -> None:
    """95 to 97 % by the table in docs/metrics.md; 500 runs determine it to 2 %."""
    share, _ = covered_sessions((4,) * 13, NOISES[4], sessions, effect, 500, np.random.default_rng(1))
    assert least - 0.01 <= share <= 0.995


def test_records_from_before_are_of_the_first_session(make_run: MakeRun) -> None:
    path = make_run(repeats=1)
    file = path / "samples.jsonl"
    file.write_text(file.read_text().replace(', "session": 0', ""))
    assert "session" not in file.read_text().partition("\n")[0]
    assert {row.session for row in read_run(path).rows} == {0}


RUN = ["--methods", "pld", "--tasks", "qa", "--limit", "1", "--max-new-tokens", "6", "--warmup", "0", "--sessions", "2"]


def test_a_run_stopped_in_its_second_session_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches the process of the session; no sample of the first session is repeated.

    Sessions are fresh processes if thorough, else copies of this one, which need not import all packages.
    """
    if not THOROUGH:
        monkeypatch.setattr(sessions, "subprocess", SimpleNamespace(Popen=module, DEVNULL=None))
    out = tmp_path / "run"
    parent = Forked(lambda: main(["run", *RUN, "--out", str(out)]))
    samples, until = out / "samples.jsonl", time.monotonic() + 120
    while time.monotonic() < until and not (samples.exists() and samples.read_text().count("\n") >= 2):
        time.sleep(0.01)
    first = samples.read_text()
    while time.monotonic() < until and len(read_run(out).manifest["sessions"]) < 2:
        time.sleep(0.01)
    parent.send_signal(signal.SIGINT)
    assert parent.wait(60) == 130
    assert read_run(out).manifest["status"] != "complete", "the session was stopped"
    assert main(["run", *RUN, "--out", str(out), "--resume"]) == 0
    made = read_run(out)
    assert made.manifest["status"] == "complete" and made.manifest["n_sessions"] == made.sessions == 2
    assert samples.read_text().startswith(first) and samples.read_text().count("\n") == made.samples == len(made.rows)
    assert sorted((row.session, row.repeat, row.method) for row in made.rows) == [
        (n, n, label) for n in (0, 1) for label in ("ar", "pld")
    ]
    assert len({tuple(row.token_ids or ()) for row in made.rows}) == 1 and not without_verdict(made)
    assert main(["run", *RUN[:-1], "1", "--out", str(out), "--resume"]) == 2


@pytest.mark.parametrize(
    "more", [["--target-ci", "3%"], ["--batch-size", "2"], ["--endpoint", "http://h/v1"], ["--executor", "ray"]]
)
def test_what_does_not_go_with_sessions_is_refused(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    methods = [] if "--endpoint" in more else ["--methods", "pld"]
    assert main(["run", *methods, "--sessions", "2", *more]) == 2
    assert "--sessions" in capsys.readouterr().err
