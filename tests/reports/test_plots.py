"""Figures: they show the run's own numbers, and a mistake is one line."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from specbench_ss import UserError
from specbench_ss.cli.main import main
from specbench_ss.reports import charts
from specbench_ss.reports.palette import styles
from specbench_ss.reports.plot_command import Kind
from specbench_ss.reports.run_figures import RunFigures
from specbench_ss.results.analysis import analyse, load_run
from specbench_ss.results.cost_model import Roof, pairs, points, waterfalls
from specbench_ss.runs.records import Run
from specbench_ss.runs.run_dir import read_run
from tests.cli import failing
from tests.conftest import MakeRun
from tests.reports.chromium import needs_chromium
from tests.tiny import THOROUGH

LIMITS = {"read_bytes_per_s": 3e10, "flops_per_s": {"float32": 2e11}}
SHAPE = {"weight_bytes": 1e7, "matrix_parameters": 2e6, "attention_flops": 100.0, "kv_bytes": 64, "windows": [None]}
DRAFTER = {"weight_bytes": 1e6, "matrix_parameters": 2e5}
PICTURES = (("svg", b"<svg"), ("png", b"\x89PNG"), ("pdf", b"%PDF"))


def shaped(make_run: MakeRun) -> Run:
    """A run with the machine's limits and the methods' shapes."""
    run = read_run(make_run())
    shapes = {label: {**SHAPE, "drafter": None if label == "ar" else DRAFTER} for label in run.labels}
    run.manifest["machine"] = {"limits": LIMITS, "shapes": shapes}
    return run


@needs_chromium
@pytest.mark.parametrize(("suffix", "start"), PICTURES if THOROUGH else PICTURES[:1])
def test_the_same_run_gives_the_same_picture(suffix: str, start: bytes, make_run: MakeRun, tmp_path: Path) -> None:
    pytest.importorskip("kaleido", reason="figures as files need the extra `plot`")
    run = str(make_run())
    for name in (f"a.{suffix}", f"b.{suffix}"):
        assert main(["plot", run, "--kind", "waterfall", "--out", str(tmp_path / name)]) == 0
    first = (tmp_path / f"a.{suffix}").read_bytes()
    assert first.startswith(start) and first == (tmp_path / f"b.{suffix}").read_bytes()


def test_html_needs_no_extra(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kaleido", None)
    path = tmp_path / "a.html"
    assert main(["plot", str(make_run(labels=("ar", "ss[w=<b>$a$]"))), "--out", str(path)]) == 0
    assert "Plotly.newPlot" in path.read_text(encoding="utf-8") and "[w=<b>" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("command", ["plot {run}", "report {run} --format png"])
def test_kaleido_is_asked_for_where_it_is_missing(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setitem(sys.modules, "kaleido", None)
    assert "pip install -e '.[plot]'" in failing(command.format(run=make_run()).split(), capsys)


def test_without_a_browser_pictures_are_one_line_and_other_files_are_written(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("kaleido", reason="figures as files need the extra `plot`")
    run = make_run()
    before = set(run.iterdir())
    for browser in ("/nonexistent", "/bin/true"):
        monkeypatch.setenv("BROWSER_PATH", browser)
        for command in (f"plot {run}", f"plot {run} --out {run}/a.svg", f"report {run} --format png"):
            assert "Chromium" in failing(command.split(), capsys)
    assert set(run.iterdir()) == before
    assert all(main(["report", str(run), "--format", name]) == 0 for name in ("html", "csv", "md", "json", "parquet"))
    assert main(["plot", str(run), "--out", f"{run}/a.html"]) == 0


def test_the_command_offers_the_figures_that_there_are() -> None:
    assert {name for name in vars(RunFigures) if not name.startswith("_")} == {*get_args(Kind), "title", "contestants"}


def test_the_ranking_shows_the_summary(make_run: MakeRun) -> None:
    numbers = RunFigures(load_run(make_run(labels=("ar", "ss[k=1]", "ss", "medusa"))))
    made = numbers.ranking()
    assert list(made.layout.yaxis.ticktext) == [row.method for row in numbers.contestants]
    speeds = [trace.x[0] for trace in made.data]
    assert speeds == [row.speedup for row in numbers.contestants] == sorted(speeds, reverse=True)
    for trace, row in zip(made.data, numbers.contestants, strict=True):
        assert row.speedup_interval is not None
        error = trace.error_x
        ends = (trace.x[0] - error.arrayminus[0], trace.x[0] + error.array[0])
        assert ends == pytest.approx(row.speedup_interval)


def test_bars_of_a_waterfall_end_where_the_next_begins(make_run: MakeRun) -> None:
    one = waterfalls(pairs(read_run(make_run(labels=("ar", "ss")))))["ss"]
    steps = charts.steps_of(one)
    for (_, start, size), (_, then, _) in zip(steps[:-2], steps[1:-1], strict=True):
        assert start + size == pytest.approx(then)
    assert sum(steps[-2][1:]) == pytest.approx(steps[-1][2]) == pytest.approx(one.method_ms)
    drawn = sorted((y, x) for trace in charts.waterfall([one]).data for x, y in zip(trace.x, trace.y, strict=True))
    assert [x for _, x in drawn] == [size for _, _, size in steps]


def test_points_of_the_pareto_figure_are_tau_and_relative_step_time(make_run: MakeRun) -> None:
    numbers = RunFigures(load_run(make_run()))
    found = {trace.name: (trace.x[0], trace.y[0]) for trace in numbers.pareto().data}
    for row in numbers.contestants:
        assert row.relative_step_time
        assert found[row.method] == (pytest.approx(row.relative_step_time), row.mean_acceptance_length)


def test_the_roofline_has_the_machines_limits(make_run: MakeRun) -> None:
    run = shaped(make_run)
    limit, *drawn = analyse(run).plot.roofline().data
    assert max(limit.y) == pytest.approx(200)
    assert len(drawn) == 1 + 2 * 2, "autoregressive decoding drafts nothing"
    run.manifest["machine"] = None
    with pytest.raises(UserError, match="limits"):
        analyse(run).plot.roofline()
    assert Roof(3e10, 2e11).at(1.0) == 3e10


def test_parts_of_the_roofline_add_up_to_the_counted_step(make_run: MakeRun) -> None:
    run = shaped(make_run)
    parts = {(point.method, point.part): point for point in points(pairs(run))}
    for row in analyse(run).machine_rows:
        own = [parts[row.method, part] for part in ("verification", "drafting") if (row.method, part) in parts]
        seconds = [row.step_s * row.verify_share, row.step_s * row.draft_share][: len(own)]
        assert sum(p.rate * s for p, s in zip(own, seconds, strict=True)) == pytest.approx(row.flops_per_step)
        moved = [p.rate * s / p.intensity for p, s in zip(own, seconds, strict=True)]
        assert sum(moved) == pytest.approx(row.bytes_per_step)


def test_methods_are_chosen_by_name_and_baselines_of_changed_models_left_out(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss", "ar[x=1]"), references={"ss": "ar[x=1]"}))
    assert [row.method for row in RunFigures(analyse(run)).contestants] == ["ss"]
    assert [row.method for row in RunFigures(analyse(run), ["ar[x=1]"]).rows] == ["ar[x=1]"]


def test_there_is_no_figure_of_memory_without_a_gpu(make_run: MakeRun) -> None:
    with pytest.raises(UserError, match="CUDA"):
        RunFigures(analyse(read_run(make_run()))).memory()


@pytest.mark.parametrize("ends", [(0.5, 2.0), (0.02, 40.0), (0.99, 1.01), (0.8, 1.25)])
def test_an_axis_of_ratios_holds_its_values_and_has_a_tick_at_1(ends: tuple[float, float]) -> None:
    low, high, ticks = charts.ratio_axis(ends)
    assert low < min(ends) and max(ends) < high
    assert 1.0 in ticks and 2 < len(ticks) <= 12 and ticks == sorted(ticks)


def test_positions_behind_few_steps_are_not_drawn(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss"), questions=2))
    row: Any = RunFigures(analyse(run)).contestants[0]
    row = replace(
        row,
        conditional_acceptance_rate=(0.8, 0.6, 0.2),
        conditional_acceptance_rate_n=(200, charts.FEW, charts.FEW - 1),
    )
    (trace,) = charts.acceptance([row], styles(run.labels)).data
    assert list(trace.y) == [0.8, 0.6]


def test_bands_and_heat_maps_for_papers() -> None:
    made = charts.lines({"a": [(1, 2.0), (2, None)]}, "x", "y", {"a": [(1.0, 3.0), (2.0, 4.0)]})
    assert list(made.data[0].y) == [1.0, 2.0, 4.0, 3.0] and made.layout.xaxis.title.text == "x"
    assert charts.heat_map([[1.0]], ["c"], ["<r>"]).data[0].y == ("&lt;r>",)
