"""Tables of the applications: whose quality the papers' Baseline has, and that the claim states what was compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specbench_ss import registry
from specbench_ss.bench import preflight
from specbench_ss.cli.main import main
from specbench_ss.models import quantize, resolve
from specbench_ss.reports.paper import experiment
from specbench_ss.reports.paper.experiment import config_for
from specbench_ss.reports.paper.tables import (
    OldTable1,
    OldTable2,
    RunTable,
    Table1,
    Table3,
    Table4,
    Table5,
    Table6,
    draft_model_claims,
    kept_claims,
    quality_kept,
)
from specbench_ss.results.analysis import Results, load_run
from specbench_ss.results.report import Grid, Request, Result
from specbench_ss.runs.config import RunConfig
from specbench_ss.runs.records import Run
from tests.fabricated import STEP_S
from tests.methods.paper.shared import DEFAULT, bench, measuring
from tests.tiny import few, thorough

TASKS = ("sql", "dialogue_summary", "meaning_representation")
TUNED = "ss-shared-ar[weights=next-token]"
MakeRun = Callable[..., Path]


@pytest.fixture
def lora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lab with weights of some methods, and the LoRA on next tokens."""
    folder = tmp_path / "lab"
    for name in ("base", "medusa", "ss", "ss-shared", "next-token"):
        (folder / name).mkdir(parents=True)
    (folder / "lab.json").write_text("{}")
    monkeypatch.setattr(resolve, "LAB", folder)
    return folder / "next-token"


def asked(table: RunTable, *settings: str) -> list[str]:
    return [spec.label for spec in table.configs(Request(settings=settings))["run"].methods]


def made(table: RunTable, folder: Path, make_run: MakeRun, request: Request = DEFAULT) -> tuple[Result, Results]:
    """The table of a made-up run of whatever it asks for."""
    runs: list[Results] = []
    return table.run(bench(folder, request, measure=measuring(make_run, [], runs, categories=TASKS))), runs[0]


def quality(result: Result) -> Grid:
    return next(grid for grid in result.grids if grid.name == "metric")


@pytest.mark.parametrize("table", [Table3, OldTable1])
def test_the_lora_on_next_tokens_is_taken_where_it_came_with_the_model(table: type[RunTable], lora: Path) -> None:
    assert TUNED in asked(table())
    lora.rmdir()
    assert not any("ss-shared-ar" in label for label in asked(table()))
    (part,) = [part for part in table().parts(Request()) if "fine-tune" in part.name]
    assert "--set ss-shared-ar.weights=PATH" in part.missing
    assert "ss-shared-ar[weights=mine]" in asked(table(), "ss-shared-ar.weights=mine")


@pytest.mark.parametrize("table", [Table1, Table5])
def test_tables_without_a_fine_tuned_baseline_ask_for_none(table: type[RunTable], lora: Path) -> None:
    assert TUNED not in asked(table()) and not any("fine-tune" in part.name for part in table().parts(Request()))


@few(1)
@pytest.mark.parametrize(
    ("table", "method", "folder", "absent"),
    [
        (OldTable1, "ss-shared", "ss-shared-eq1", "trained by eq. 3 of the EMNLP paper"),
        (OldTable2, "ss-shared", "ss-shared-eq1", "trained by eq. 3 of the EMNLP paper"),
        (OldTable2, "sd", "draft-apps", "is not tuned for the applications"),
        (Table5, "sd", "draft-apps", "is not tuned for the applications"),
    ],
)
def test_weights_as_the_paper_trains_them_are_taken_where_they_come_with_the_model(
    table: type[RunTable], method: str, folder: str, absent: str, lora: Path, tmp_path: Path, make_run: MakeRun
) -> None:
    (lora.parent / "draft").mkdir()
    assert method in asked(table())
    result, _ = made(table(), tmp_path, make_run)
    (note,) = [note for note in result.notes if absent in note]
    assert f"--set {method}.weights=PATH" in note
    (lora.parent / folder).mkdir()
    labels = asked(table())
    assert f"{method}[weights={folder}]" in labels and method not in labels
    result, run = made(table(), tmp_path, make_run)
    assert not any(absent in note for note in result.notes)
    true = {row.task: row for row in run.rows if row.method == f"{method}[weights={folder}]"}
    row_name = {"ss-shared": "SS-Shared", "sd": "2-Model SD"}[method]
    grid = quality(result)
    shown = {row[0]: row[2] for row in grid.rows if row[1] == row_name}
    assert shown == {task: pytest.approx(100 * (true[task].quality or 0)) for task in TASKS}
    mine = Request(settings=(f"{method}.weights=mine",))
    labels = asked(table(), *mine.settings)
    assert f"{method}[weights=mine]" in labels and f"{method}[weights={folder}]" not in labels
    result, _ = made(table(), tmp_path, make_run, mine)
    assert f"{row_name} has the weights mine of --set" in result.notes


def test_the_acl_papers_tables_keep_the_weights_of_eq_3(lora: Path) -> None:
    (lora.parent / "ss-shared-eq1").mkdir()
    for table in (Table1, Table3, Table5):
        assert "ss-shared" in asked(table())
        assert not any("eq1" in label for label in asked(table()))


def test_weights_of_another_name_draft_the_papers_trees_too(lora: Path) -> None:
    (lora.parent / "ss-shared-eq1").mkdir()
    specs = OldTable1().configs(Request(published=True))["run"].methods
    (eq1,) = [spec for spec in specs if spec.name == "ss-shared"]
    assert eq1.options["weights"] == "ss-shared-eq1" and eq1.options["n_keep"] == "32"


def test_baselines_quality_is_the_fine_tunes_and_its_speed_the_frozen_bases(
    lora: Path, tmp_path: Path, make_run: MakeRun
) -> None:
    result, run = made(Table3(), tmp_path, make_run)
    true = {(row.task, row.method): 100 * (row.quality or 0) for row in run.rows}
    shown = {(row[0], row[1]): row[2] for row in quality(result).rows}
    for task in TASKS:
        assert shown[task, "Baseline"] == pytest.approx(true[task, TUNED]) != pytest.approx(true[task, "ar"])
        assert shown[task, "Frozen base"] == pytest.approx(true[task, "ar"])
        assert shown[task, "SS-Shared"] == pytest.approx(true[task, "ss-shared"])
    speed = next(grid for grid in result.grids if grid.name == "speedup")
    assert [row[2] for row in speed.rows if row[1] == "Baseline"] == [1.0] * 3
    assert not any(row[1] == "Frozen base" for row in speed.rows)
    assert any(TUNED in note and "speedups are over `ar` of the frozen base" in note for note in result.notes)


@pytest.mark.parametrize(
    ("around", "holds"), [("−1.9 to 3.0", True), ("−9.0 to −2.5", False), ("−5.0 to 1.0", None), (None, None)]
)
def test_quality_is_kept_where_the_whole_interval_lies_within_the_margin(
    around: str | None, holds: bool | None
) -> None:
    columns = quality_kept(Run({}, [], [], []), ("a", "b"), "x", "").columns
    (claim,) = kept_claims(Grid("g", columns, (("sql", 90.0, 91.0, -1.0, around, 40),)))
    assert claim.holds is holds and claim.sure


@pytest.mark.parametrize("table", [Table5, OldTable2])
def test_a_draft_model_is_kept_against_streams_in_time_and_calls(
    table: type[RunTable], lora: Path, tmp_path: Path, make_run: MakeRun
) -> None:
    (lora.parent / "draft").mkdir()
    result, run = made(table(), tmp_path, make_run)
    grid = next(grid for grid in result.grids if grid.name == "against-a-draft-model")
    true = {(row.task, row.method): row for row in run.rows}
    claims = table().claims(result)
    assert len(claims) == 2 * len(TASKS)
    for row, time, calls in zip(grid.rows, claims[::2], claims[1::2], strict=True):
        own, other = true[row[0], "ss-shared"], true[row[0], "sd"]
        assert row[1] == pytest.approx(own.tokens / own.tokens_per_s / (other.tokens / other.tokens_per_s))
        assert row[3] == pytest.approx(own.num_target_forwards / other.num_target_forwards) and row[5] == 6
        assert time.statement.startswith(f"{row[0]}: SS-Shared answers sooner") and time.found.endswith(", 6 questions")
        assert f"{row[1]:.2f}× (" in time.found and f"{row[3]:.2f}× (" in calls.found
    first = tuple(dataclasses.replace(grid, rows=(("sql", ratio, text, ratio, text, 6),)) for ratio, text in ENDS)
    kept = [[claim.holds for claim in draft_model_claims(one)] for one in first]
    assert kept == [[True, False], [False, True], [None, None]]


ENDS = ((0.5, "0.40–0.60"), (2.0, "1.50–2.50"), (1.1, "0.90–1.30"))


def table_4(folder: Path, make_run: MakeRun) -> tuple[Result, list[RunConfig], Results]:
    """Table 4 of a made-up run of whatever each level asks for."""
    configs: list[RunConfig] = []
    runs: list[Results] = []
    measure = measuring(make_run, configs, runs, categories=("sql",))
    return Table4().run(bench(folder, Request(device="cpu"), measure=measure)), configs, runs[0]


def test_table_4_has_the_fine_tune_at_every_level_that_can_run(
    lora: Path, tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "find_spec", lambda name: True if name == "torchao" else None)
    result, configs, run = table_4(tmp_path, make_run)
    assert [config.quantize for config in configs] == ["none", "int8"]
    assert all([spec.label for spec in c.methods] == ["ar", "ss-shared", "ss", TUNED] for c in configs)
    true = {row.method: row for row in run.rows if row.task == "overall"}
    rows = {(row[0], row[1]): row for row in result.grids[0].rows}
    for name, label in {"Baseline": TUNED, "Frozen base": "ar", "SS-Shared": "ss-shared", "SS-Lossless": "ss"}.items():
        whole = rows["FP16 (here: float32)", name]
        assert whole[5] == pytest.approx(100 * (true[label].quality or 0)) and whole[6] == 6
        assert rows["INT8", name][2] is not None and rows["INT4", name][2] is None
    assert rows["INT8", "SS-Shared"][7] == 2.84 and rows["NF4", "SS-Shared"][7] is None
    (claim,) = Table4().claims(result)
    assert "INT8: " in claim.found and "FP16 (here: float32): " in claim.found and claim.found.endswith("; 6 questions")
    assert any(TUNED in note for note in result.notes)
    out = [note for note in result.notes if note.startswith("left out: SS-Shared")]
    assert "INT4 on lab needs a CUDA device" in out[0] and "NF4 on lab needs bitsandbytes" in out[1]


# -- --published: the papers' trees, where the user does not state otherwise ---------------------


def test_every_method_takes_the_papers_tree() -> None:
    config = Table1().configs(Request(published=True))["run"]
    given = {spec.name: spec.options for spec in config.methods}
    assert given["ss"]["n_keep"] == "32" and given["ss-shared"]["stream_attention_top_p"] == "64"
    assert {name for name, options in given.items() if options.get("tree") == "published"} == {
        "medusa", "medusa2", "hydra", "eagle",
    }  # fmt: skip
    preflight.check_methods(config)
    assert not any(spec.options for spec in Table1().configs(Request())["run"].methods)


@pytest.mark.parametrize("table", [OldTable1, OldTable2, Table1, Table3, Table5, Table6])
def test_every_printed_number_has_a_grid(table: type[RunTable]) -> None:
    keys = {"task", "model", "method", "parameters", "quantization", "generation"}
    assert set(table().printed[0]) - keys == set(table().metrics)


@thorough
def test_every_table_can_be_asked_for_it() -> None:
    tables = [kind for kind in registry.load_all(registry.EXPERIMENTS).values() if "published" in kind.uses]
    assert len(tables) == 8
    for config in (config for kind in tables for config in kind().configs(Request(published=True)).values()):
        preflight.check_methods(config)


def test_what_the_user_sets_is_kept() -> None:
    config = Table1().configs(Request(published=True, settings=("ss.n_keep=7",)))["run"]
    assert next(spec.options["n_keep"] for spec in config.methods if spec.name == "ss") == "7"


def test_rows_are_found_whatever_their_options(tmp_path: Path, make_run: MakeRun) -> None:
    def measure(config: RunConfig, name: str) -> Results:
        return load_run(make_run(labels=tuple(spec.label for spec in config.methods if spec.name in STEP_S)))

    here = bench(tmp_path, Request(published=True), measure=measure)
    (grid,) = [grid for grid in Table6().run(here).grids if grid.name == "tau"]
    ours = {row[1]: row[2] for row in grid.rows}
    assert all(ours[name] is not None for name in ("SS-Lossless", "Medusa"))


def test_figures_take_no_published_trees(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "figure-10", "--published", "--dry-run"]) == 2
    assert "takes no --published" in capsys.readouterr().err


def test_the_papers_tables_have_the_papers_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "is_bundled", lambda model, name: True)

    def asked(**given: Any) -> list[dict[str, str]]:
        return [dict(spec.options) for spec in config_for(Request(**given), ["ss[k=2]", "medusa"]).methods[1:]]

    assert asked(model="org/other") == [{"parent": "off", "k": "2"}, {}]  # whose folder may advise others
    assert asked(model="org/other", settings=("ss.root=on",)) == [{"root": "on", "k": "2"}, {}]
    assert asked() == [{"k": "2"}, {}]  # the lab's advises none
