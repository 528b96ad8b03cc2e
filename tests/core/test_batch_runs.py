"""`ssbench run --batch-size`: levels next to the samples, answers that do not change, resuming, and mistakes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from specbench_ss import run
from specbench_ss.bench import runner as levels_together
from specbench_ss.reports.html.report import HtmlReport
from specbench_ss.reports.summary_files import JsonReport, MarkdownReport
from specbench_ss.results.analysis import Results, analyse
from specbench_ss.results.checks import served_checks
from specbench_ss.runs.run_dir import read_concurrency, read_run
from tests.tiny import few, thorough

QUESTIONS = [
    {"question_id": 1, "category": "a", "turns": ["What is 3 plus 4?", "And plus 5?"]},
    {"question_id": 2, "category": "a", "turns": ["Name a colour."]},
    {"question_id": 3, "category": "b", "turns": ["Say one two three one two three."]},
]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("asked") / "questions.jsonl"
    file.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    return file


def measured(asked: Path, out: Path, resume: bool = False) -> Results:
    return run(
        "ss,pld", suite="mtbench", data=asked, batch_size=[3, 2, 1], max_new_tokens=12, warmup=0, telemetry=0,
        record_drafts=0, dtype="float32", out=out, resume=resume,
    )  # fmt: skip


@pytest.fixture(scope="module")
def finished(asked: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    """A run with one, two and three requests at a time, and what it returned."""
    out = tmp_path_factory.mktemp("finished") / "r"
    return out, measured(asked, out)


def test_requests_at_a_time_are_measured_next_to_the_samples(finished: tuple[Path, Results]) -> None:
    out, made = finished
    table = made.concurrency()
    assert list(zip(table["concurrency"], table["method"], strict=True)) == [
        (n, method) for n in (1, 2, 3) for method in ("ar", "ss", "pld")
    ]
    assert set(table["requests"]) == {4} and set(table["failed"]) == {0}
    assert (table["tokens_per_s"] > 0).all() and (table.query("method == 'ar'")["throughput_ratio"] == 1).all()
    tau = table.pivot_table("mean_acceptance_length", "method", "concurrency")
    assert (tau.sub(tau[1], axis=0).abs() < 1e-9).all(axis=None)  # the same steps with one, two and three at a time
    alone = {row.key: row.token_ids for row in read_run(out).rows}
    lines = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    assert len(lines) == 24
    for line in lines:
        assert line["token_ids"] == alone[line["question_id"], line["turn"], line["method"], line["repeat"]]
        assert line["wall_s"] == pytest.approx(line["prefill_s"] + line["decode_s"])
    assert not [warning for warning in made.manifest.get("warnings") or () if "at a time differ" in warning]


@few(1)
@pytest.mark.parametrize("biased", [False, True])
def test_sampled_answers_at_a_time_are_tested(
    asked: Path, tmp_path: Path, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if biased:
        monkeypatch.setattr(levels_together, "bound", lambda pooled: 0.0 if pooled.offered else 1.0)
    made = run(
        "pld", suite="mtbench", data=asked, batch_size=3, max_new_tokens=12, warmup=0, telemetry=0, record_drafts=0,
        dtype="float32", temperature=1.0, out=tmp_path / "r",
    )  # fmt: skip
    stated = [text for text in made.manifest.get("warnings") or () if "biased" in text]
    assert [text.partition(":")[0] for text in stated] == ["pld"] * biased


@thorough
def test_a_level_that_was_not_finished_is_made_again(
    asked: Path, finished: tuple[Path, Results], tmp_path: Path
) -> None:
    out = tmp_path / "r"
    shutil.copytree(finished[0], out)
    levels = out / "concurrency.jsonl"
    kept = levels.read_text().splitlines(keepends=True)
    levels.write_text("".join(kept[:-2]) + kept[-2][:20])  # killed while it wrote the level
    assert [check for check in served_checks(read_run(out)) if check.name == "concurrency"]
    measured(asked, out, resume=True)
    assert len(levels.read_text().splitlines()) == len(kept) and len(read_concurrency(out)[1]) == 24
    assert not [check for check in served_checks(read_run(out)) if check.name == "concurrency"]


def test_every_form_of_the_report_has_the_levels(finished: tuple[Path, Results], tmp_path: Path) -> None:
    run = read_run(finished[0])
    expected = [(n, method) for n in (1, 2, 3) for method in run.labels]
    HtmlReport().write(analyse(run), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert 'id="concurrency"' in page and "1, 2, 3 concurrent requests" in page
    MarkdownReport().write(analyse(run), tmp_path / "r.md")
    text = (tmp_path / "r.md").read_text()
    lines = text[text.index("## By load") :].splitlines()
    counts = [line.split("|")[1].strip() for line in lines if line.startswith("| ")][2:]
    assert counts == [str(n) for n, _ in expected]
    JsonReport().write(analyse(run), tmp_path / "r.json")
    levels = json.loads((tmp_path / "r.json").read_text())["concurrency"]
    assert [(level["concurrency"], level["method"]) for level in levels] == expected
    assert all(level["tokens_per_s"] > 0 and not level["failed"] for level in levels)
