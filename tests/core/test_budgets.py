"""Settings and training budget of each method of a run."""

from __future__ import annotations

from typing import Any

import pytest

from specbench_ss.results.analysis import Budget, budgets, trained
from specbench_ss.runs.run_dir import read_run
from tests.conftest import MakeRun


def test_nodes_are_means_over_steps_and_settings_are_those_of_the_command(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss[k=2]", "medusa"), categories=("qa",), questions=4))
    run.manifest["config"] |= {
        "methods": [{"name": "ss", "options": {"k": "2"}}, {"name": "medusa", "options": {"nodes": "8"}}],
        "presets": [{"file": "m.json", "sha256": "0", "method": "medusa"}],
    }
    run.manifest["methods"][1] |= {"training_info": {"tokens": 5}, "advised": {"n_draft": 2}}
    plain, ss, medusa = budgets(run, ["ar", "ss[k=2]", "medusa"])
    rows = [row for row in run.rows if row.method == "ss[k=2]"]
    assert ss.drafted == pytest.approx(sum(r.draft_nodes or 0 for r in rows) / sum(r.steps or 0 for r in rows))
    assert (ss.given, ss.preset, ss.training_info) == ("k=2", False, {"tokens": 5})
    assert (ss.advised, plain.advised) == ("n_draft=2", "")
    assert (medusa.preset, medusa.training_info) == (True, None)
    assert plain.drafted == 0


def test_it_is_stated_how_long_the_weights_were_trained() -> None:
    def stated(*training_info: dict[str, Any] | None) -> str:
        return trained(
            [Budget(name, 1, 1, "", False, facts) for name, facts in zip("abc", training_info, strict=False)]
        )

    short, long = {"steps": 420, "tokens": 430080}, {"steps": 2000, "tokens": 9000000}
    how = "with weights that were trained for 420 steps on 430,080 tokens of text, repeats counted."
    assert stated(short, short, {"searched": {}}) == f"2 methods (a, b) draft {how}"
    assert stated(short) == f"1 method (a) drafts {how}"
    both = stated(short, long, short)
    assert both.startswith(f"2 methods (a, c) draft {how} 1 method (b) drafts with weights that were trained for 2,000")
    assert stated({"steps": 3}) == "1 method (a) drafts with weights that were trained for 3 steps."
    assert "on at most 921,600 tokens of text" in stated({"steps": 900, "token_positions": 921600})
    assert stated({"parameters": 9}) == "Of a it was not recorded how long the weights were trained."
    assert stated(None, {}) == ""
