"""`ssbench paper TABLE --published`: the papers' trees, where the user does not say otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specbench_ss import registry
from specbench_ss.bench import preflight
from specbench_ss.cli.main import main
from specbench_ss.reports.paper import missing_parts
from specbench_ss.reports.paper.missing_parts import config_for
from specbench_ss.reports.paper.tables import Table1, Table6
from specbench_ss.results.report import Bench, Request
from specbench_ss.runs.config import RunConfig
from specbench_ss.runs.records import Run
from specbench_ss.runs.run_dir import read_run
from tests.conftest import STEP_S


def test_every_method_takes_the_papers_tree() -> None:
    config = Table1().configs(Request(published=True))["run"]
    given = {spec.name: spec.options for spec in config.methods}
    assert given["ss"]["n_keep"] == "32" and given["ss-shared"]["stream_attention_top_p"] == "64"
    assert {name for name, options in given.items() if options.get("tree") == "published"} == {
        "medusa", "medusa2", "hydra", "eagle",
    }  # fmt: skip
    preflight.check_methods(config)
    assert not any(spec.options for spec in Table1().configs(Request())["run"].methods)


@pytest.mark.parametrize("name", sorted(registry.names(registry.EXPERIMENTS)))
def test_every_table_can_be_asked_for_it(name: str) -> None:
    kind = registry.load(registry.EXPERIMENTS, name)()
    if "published" not in kind.uses:
        pytest.skip("no table")
    for config in kind.configs(Request(published=True)).values():
        preflight.check_methods(config)


def test_what_the_user_sets_is_kept() -> None:
    config = Table1().configs(Request(published=True, settings=("ss.n_keep=7",)))["run"]
    assert next(spec.options["n_keep"] for spec in config.methods if spec.name == "ss") == "7"


def test_rows_are_found_whatever_their_options(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    def measure(config: RunConfig, name: str) -> Run:
        return read_run(make_run(labels=tuple(spec.label for spec in config.methods if spec.name in STEP_S)))

    bench = Bench(Request(published=True), tmp_path, measure, lambda: pytest.fail("no model is needed"))
    (grid,) = [grid for grid in Table6().run(bench).grids if grid.name == "tau"]
    ours = {row[1]: row[2] for row in grid.rows}
    assert all(ours[name] is not None for name in ("SS-Lossless", "Medusa"))


def test_figures_take_no_published_trees(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "figure-10", "--published", "--dry-run"]) == 2
    assert "takes no --published" in capsys.readouterr().err


def test_the_papers_tables_have_the_papers_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missing_parts, "comes_along", lambda model, name: True)

    def asked(**given: Any) -> list[dict[str, str]]:
        return [dict(spec.options) for spec in config_for(Request(**given), ["ss[k=2]", "medusa"]).methods[1:]]

    assert asked(model="org/other") == [{"parent": "off", "k": "2"}, {}]  # whose folder may advise others
    assert asked(model="org/other", settings=("ss.root=on",)) == [{"root": "on", "k": "2"}, {}]
    assert asked() == [{"k": "2"}, {}]  # the lab's advises none
