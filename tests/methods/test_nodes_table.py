"""The table of tau by nodes: every row drafts as many nodes as it states, and its lines are summed as tau is
defined."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from specbench_ss.engine.target import Target
from specbench_ss.options import MethodSpec
from specbench_ss.registry import method_class, method_options
from specbench_ss.suite import Question
from tests.tiny import thorough

BENCH: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "nodes.py"))


@pytest.mark.parametrize("way", BENCH["WAYS"])
@pytest.mark.parametrize("nodes", BENCH["NODES"])
def test_every_row_is_asked_for_with_its_number_of_nodes(way: str, nodes: int) -> None:
    spec = MethodSpec.parse(BENCH["filled"](BENCH["WAYS"][way], nodes))
    options = method_options(spec)
    if way == "lookahead":
        assert options.guesses * (options.level - 1) == nodes
    elif way.startswith("eagle") and way != "eagle":
        assert options.total_tokens == nodes + 1
    elif way == "ss, pruned from 120":
        assert (options.n_keep, options.n_draft) == (nodes + 1, 0)
    elif way != "ar":
        limit = "nodes" if way.endswith("tree") else method_class(spec.name).node_options[0]
        assert getattr(options, limit) == nodes


def test_the_table_holds_the_newest_weights_and_states_what_cannot_be(tmp_path: Path) -> None:
    line = {
        "way": "ar",
        "nodes": 0,
        "settings": "a",
        "steps": 2,
        "tokens": 4,
        "drafted": 0,
        "verified": 0,
        "same": True,
    }
    newer = {**line, "settings": "b", "tokens": 6}
    BENCH["write_table"](tmp_path / "t.csv", [line, newer])
    rows = (tmp_path / "t.csv").read_text().splitlines()
    assert rows[1].startswith("ar,0,3.0,") and rows[-1].startswith("space,64,") and "four masks" in rows[-1]


@thorough
def test_a_cell_is_measured_against_plain_decoding_and_summed(lab: Target) -> None:
    (cell,) = (c for c in BENCH["cells"](lab, ["ss, pruned from 120"]) if c.nodes == 4)
    lines = [BENCH["measured"](lab, cell, Question(f"q{i}", "qa", (text,))) for i, text in enumerate("ab")]
    assert all(line["same"] for line in lines)
    summed = BENCH["summed"](lines)
    assert summed["drafted"] == 120 and summed["verified"] == 4
    assert summed["tau"] == round(sum(x["tokens"] for x in lines) / sum(x["steps"] for x in lines), 3)
    cell.plain[1].update({key: [0] for key in cell.plain[1]})
    assert not BENCH["measured"](lab, cell, Question("q0", "qa", ("a",)))["same"]
