"""Figures for papers: they show the run's own numbers, and a mistake is one line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

import pytest

from specbench_ss import UserError
from specbench_ss.cli.main import main
from specbench_ss.runs.run_dir import read_run
from tests.cli import failing
from tests.conftest import MakeRun

pytest.importorskip("matplotlib", reason="figures need the extra `plot`")

from matplotlib.figure import Figure

from specbench_ss.reports.plots.command import Kind
from specbench_ss.reports.plots.kinds import KINDS, write_plot
from specbench_ss.reports.plots.numbers import numbers_of
from specbench_ss.results.cost_model import machine_rows, pairs, points, waterfalls

LIMITS = {"read_bytes_per_s": 3e10, "flops_per_s": {"float32": 2e11}}
SHAPE = {"weight_bytes": 1e7, "matrix_parameters": 2e6, "attention_flops": 100.0, "kv_bytes": 64, "windows": [None]}
DRAFTER = {"weight_bytes": 1e6, "matrix_parameters": 2e5}


@pytest.mark.parametrize("kind", [name for name in KINDS if name != "roofline"])
def test_every_kind_is_drawn_and_the_same_run_gives_the_same_bytes(
    kind: str, make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    for name in ("a.pdf", "b.pdf"):
        assert main(["plot", str(run), "--kind", kind, "--out", str(tmp_path / name)]) == 0
    assert str(tmp_path / "a.pdf") in capsys.readouterr().out
    first = (tmp_path / "a.pdf").read_bytes()
    assert first.startswith(b"%PDF") and first == (tmp_path / "b.pdf").read_bytes()


def test_the_command_offers_the_kinds_that_there_are() -> None:
    assert get_args(Kind) == tuple(KINDS)


@pytest.mark.parametrize(("suffix", "start"), [(".svg", b"<?xml"), (".png", b"\x89PNG")])
def test_other_formats(suffix: str, start: bytes, make_run: MakeRun, tmp_path: Path) -> None:
    write_plot(read_run(make_run()), "ranking", tmp_path / f"figure{suffix}")
    assert (tmp_path / f"figure{suffix}").read_bytes().startswith(start)


def test_without_a_name_it_lies_in_the_run(make_run: MakeRun) -> None:
    run = make_run()
    assert main(["plot", str(run)]) == 0
    assert (run / "ranking.pdf").is_file()


def test_the_ranking_shows_the_summary(make_run: MakeRun) -> None:
    numbers, figure = numbers_of(read_run(make_run(labels=("ar", "ss[k=1]", "ss", "medusa")))), Figure()
    KINDS["ranking"].draw(figure, numbers)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [row.method for row in numbers.contestants]
    points = [line.get_xdata()[0] for line in axes.lines if len(line.get_xdata()) == 1]
    assert points == [row.speedup for row in numbers.contestants] == sorted(points, reverse=True)


def test_bars_of_a_waterfall_end_where_the_next_begins(make_run: MakeRun) -> None:
    run, figure = read_run(make_run(labels=("ar", "ss"))), Figure()
    KINDS["waterfall"].draw(figure, numbers_of(run))
    axes = figure.axes[0]
    bars = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches]
    assert len(bars) == 7
    for (_, end), (start, _) in zip(bars[:4], bars[1:5], strict=True):
        assert start == pytest.approx(end)
    assert bars[-1][1] == pytest.approx(bars[-2][1]) == pytest.approx(waterfalls(run)["ss"].method_ms)


def test_points_of_the_pareto_figure_are_tau_and_cost(make_run: MakeRun) -> None:
    numbers, figure = numbers_of(read_run(make_run())), Figure()
    KINDS["pareto"].draw(figure, numbers)
    points = {line.get_label(): (line.get_xdata()[0], line.get_ydata()[0]) for line in figure.axes[0].lines}
    for row in numbers.contestants:
        assert row.step_ratio
        assert points[row.method] == (pytest.approx(1 / row.step_ratio), row.tau)


def test_the_roofline_has_the_machines_limits(make_run: MakeRun) -> None:
    run, figure = read_run(make_run()), Figure()
    shapes = {label: {**SHAPE, "drafter": None if label == "ar" else DRAFTER} for label in run.labels}
    run.manifest["machine"] = {"limits": LIMITS, "shapes": shapes}
    KINDS["roofline"].draw(figure, numbers_of(run))
    roof, *drawn = figure.axes[0].lines
    assert max(roof.get_ydata()) == pytest.approx(200)
    assert len(drawn) == 1 + 2 * 2, "plain decoding drafts nothing"
    for point in points(pairs(run)):
        assert point.rate <= 2e11
    run.manifest["machine"] = None
    with pytest.raises(UserError, match="limits"):
        KINDS["roofline"].draw(Figure(), numbers_of(run))


def test_parts_of_the_roofline_add_up_to_the_counted_step(make_run: MakeRun) -> None:
    run = read_run(make_run())
    shapes = {label: {**SHAPE, "drafter": None if label == "ar" else DRAFTER} for label in run.labels}
    run.manifest["machine"] = {"limits": LIMITS, "shapes": shapes}
    parts = {(point.method, point.part): point for point in points(pairs(run))}
    for row in machine_rows(run):
        own = [parts[row.method, part] for part in ("verifying", "drafting") if (row.method, part) in parts]
        seconds = [row.step_s * row.verify_share, row.step_s * row.draft_share][: len(own)]
        assert sum(p.rate * s for p, s in zip(own, seconds, strict=True)) == pytest.approx(row.flops_per_step)
        moved = [p.rate * s / p.intensity for p, s in zip(own, seconds, strict=True)]
        assert sum(moved) == pytest.approx(row.bytes_per_step)


def test_methods_are_chosen_by_name(make_run: MakeRun) -> None:
    run = read_run(make_run())
    assert [row.method for row in numbers_of(run, ["medusa"]).rows] == ["medusa"]
    with pytest.raises(UserError, match="no method 'medus'.*medusa"):
        numbers_of(run, ["medus"])


def test_plain_decodings_of_changed_models_are_left_out(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss", "ar[x=1]"), references={"ss": "ar[x=1]"}))
    assert [row.method for row in numbers_of(run).contestants] == ["ss"]


def test_a_label_with_dollar_signs_is_no_formula(make_run: MakeRun, tmp_path: Path) -> None:
    write_plot(read_run(make_run(labels=("ar", "ss[weights=$a$_{]"))), "ranking", tmp_path / "a.pdf")


def test_mistakes_are_one_line(make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(make_run())
    assert "must end in .pdf, .svg, .png" in failing(["plot", run, "--out", "figure.gif"], capsys)
    (tmp_path / "folder.pdf").mkdir()
    assert "it is a folder" in failing(["plot", run, "--out", str(tmp_path / "folder.pdf")], capsys)
    assert "limits" in failing(["plot", run, "--kind", "roofline"], capsys)
    assert "is not a run directory" in failing(["plot", str(tmp_path)], capsys)


def test_matplotlib_is_asked_for_where_it_is_missing(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install -e '.[plot]'" in failing(["plot", str(make_run())], capsys)
