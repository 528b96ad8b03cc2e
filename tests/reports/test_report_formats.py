"""`ssbench report`: other formats than the page, and several runs side by side."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path

import pandas as pd
import pytest

from specbench_ss import load_run, registry
from specbench_ss.cli import report
from specbench_ss.cli.main import main
from specbench_ss.reports.html import comparison_page
from specbench_ss.reports.html.assets import plotly_js
from specbench_ss.results.analysis import analyse
from specbench_ss.runs.run_dir import read_run
from tests.cli import failing
from tests.conftest import MakeRun
from tests.fabricated import EVIL


def written(run: Path, name: str, file: str) -> bytes:
    assert main(["report", str(run), "--format", name]) == 0
    return (run / file).read_bytes()


def test_csv_and_parquet_are_the_summary(make_run: MakeRun) -> None:
    run = make_run()
    expected = load_run(run).summary(all=True)
    read = pd.read_csv(io.BytesIO(written(run, "csv", "summary.csv")))
    stored = pd.read_parquet(io.BytesIO(written(run, "parquet", "summary.parquet")))
    for found in (read, stored):
        assert list(found.columns) == list(expected.columns)
        assert found.speedup.dropna().tolist() == pytest.approx(expected.speedup.dropna().tolist())


def test_json_holds_finding_checks_summary_and_manifest(make_run: MakeRun) -> None:
    whole = json.loads(written(make_run(failing=("ss",)), "json", "report.json"))
    assert whole["headline"].startswith("medusa is faster") and whole["headline"].endswith(" ss failed.")
    assert {"name", "state", "sentence", "lines"} == set(whole["checks"][0])
    assert {row["method"] for row in whole["summary"]} == {"ar", "ss", "medusa"}
    assert whole["manifest"]["suite"]["prompts"] > 0


def test_markdown_has_the_finding_and_the_faults(make_run: MakeRun) -> None:
    text = written(make_run(failing=("ss",)), "md", "report.md").decode()
    head, _, table = text.partition("| task |")
    assert head.startswith("# lab-s on ") and "failed" in head and table.count("\n") > 4


def test_the_help_names_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--help"]) == 0
    output = capsys.readouterr().out
    assert registry.names(registry.REPORTS) == report.KINDS.split(", ") and "parquet" in output and "html" in output


def test_several_runs_are_shown_side_by_side(make_run: MakeRun) -> None:
    runs = [make_run(seed=seed) for seed in range(3)]
    assert main(["report", *map(str, runs)]) == 0
    text = (runs[0] / "comparison.html").read_text(encoding="utf-8")
    made = comparison_page.page([analyse(read_run(run)) for run in runs])
    assert made["title"] in text
    assert [line[:7] for line in made["headlines"]] == ["A to B:", "A to C:"]
    assert len(made["speedups"].figure["data"]) == 2 * 3  # two methods and ar, three runs
    trend = {line["name"]: line for line in made["trend"].figure["data"]}
    assert trend.keys() == {"ss", "medusa"} and all(list(line["x"]) == ["A", "B", "C"] for line in trend.values())
    assert list(trend["ss"]["y"]) == [load_run(run).overall[1].speedup for run in runs]
    assert comparison_page.page([analyse(read_run(run)) for run in runs[:2]])["trend"] is None
    tables = {table.name: table for table in made["changes"]}
    rows = {row[0].text: row for row in tables["change-speedup-c"].rows}
    for at, run in ((1, runs[0]), (2, runs[2])):
        summary = load_run(run).summary(all=True).set_index(["task", "method"])
        assert rows["ss"][at].sort == pytest.approx(summary.loc[("overall", "ss"), "speedup"])
    assert "src=" not in text.replace(plotly_js(), "").replace("data-src", "")


def test_runs_that_do_not_compare_are_shown_without_changes(make_run: MakeRun) -> None:
    runs = [read_run(make_run()) for _ in range(2)]
    runs[1].manifest["model"]["hash"] = "another"
    made = comparison_page.page([analyse(run) for run in runs])
    assert made["changes"] == [] and made["tasks"] == []
    assert made["differences"].rows[0][0].text.startswith("✕ model hash")
    assert any("differ in model hash" in line for line in made["headlines"])
    assert not any("--force" in line for line in made["headlines"]), "an option of another command"
    assert made["speedups"].figure["data"]


def test_what_differs_has_a_column_for_every_run(make_run: MakeRun) -> None:
    runs = [read_run(make_run()) for _ in range(3)]
    runs[2].manifest["model"]["device"] = "cuda"
    (row,) = [
        r for r in comparison_page.page([analyse(run) for run in runs])["differences"].rows if r[0].text == "device"
    ]
    assert [cell.text for cell in row[1:]] == ["cpu", "cpu", "cuda"]


def test_a_pipe_is_not_taken_for_a_file_that_may_be_replaced(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    message = failing(["report", str(make_run()), "--format", "csv", "--out", str(pipe)], capsys)
    assert "is a device, a pipe or a socket" in message and pipe.is_fifo()


def test_hostile_names_are_text(make_run: MakeRun) -> None:
    runs = [make_run(categories=(EVIL, "qa"), questions=2) for _ in range(2)]
    assert main(["report", *map(str, runs)]) == 0
    text = (runs[0] / "comparison.html").read_text(encoding="utf-8")
    assert "<script>alert" not in text and "&lt;script&gt;alert" in text


def test_mistakes_are_one_line(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(make_run()) for _ in range(2)]
    assert "--fail-on takes one run" in failing(["report", *runs, "--fail-on", "failed"], capsys)
    assert "at most 26" in failing(["report", *(runs[:1] * 27)], capsys)


def test_without_a_path_the_run_that_was_started_last_is_reported(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no run in ./runs" in failing(["report"], capsys)
    for name, created in (("b", "2026-01-01T10:00:00+00:00"), ("a", "2026-01-02T09:00:00+00:00")):
        run = shutil.move(make_run(), tmp_path / "runs" / name)
        manifest = json.loads((run / "manifest.json").read_text())
        (run / "manifest.json").write_text(json.dumps({**manifest, "created": created}))
    (tmp_path / "runs" / "c").mkdir()
    (tmp_path / "runs" / "c" / "manifest.json").write_text("{}")
    assert main(["report"]) == 0
    assert "latest run: runs/a\n" in capsys.readouterr().out and (tmp_path / "runs/a/report.html").exists()
    shutil.copytree(tmp_path / "runs/a", tmp_path / "runs/both/methods")  # as of a run with --methods and --servers
    shutil.rmtree(tmp_path / "runs/a")
    assert main(["report"]) == 0
    assert "latest run: runs/both/methods\n" in capsys.readouterr().out
