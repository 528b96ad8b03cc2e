"""Parity of a local method and a served drafter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from specbench_ss import run
from specbench_ss.cli.main import main
from specbench_ss.errors import UserError
from specbench_ss.results.parity import PARITY, differences, parity
from specbench_ss.runs.records import Run
from specbench_ss.runs.run_dir import read_run
from tests.tiny import thorough


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("local") / "r"
    run("pld", limit=1, tasks="translation,qa", max_new_tokens=12, warmup=0, out=out)
    return read_run(out)


@thorough
def test_a_run_is_exact_with_itself_and_every_difference_is_named(local: Run) -> None:
    found = parity(local, local)
    assert {one.method for one in found} == {"ar", "pld"} and all(one.exact for one in found)
    counts = found[0].counts()
    assert counts["prompts"] == counts["same output"] == counts["same steps"] == counts["same accepted"] > 0

    first = next(row for row in local.rows if row.method == "pld")
    for change, named in (
        ({"steps": (first.steps or 0) + 1}, f"steps {first.steps} and"),
        ({"accepted_tokens": None}, "accepted not known"),
        ({"token_ids": [*(first.token_ids or [])[:3], 7]}, "outputs differ at 3"),
        ({"prompt_tokens": 1, "steps": None}, "prompt lengths differ"),
    ):
        rows = [replace(row, **change) if row is first else row for row in local.rows]
        (changed,) = parity(local, replace(local, rows=rows), [("pld", "pld")])
        assert not changed.exact and named in " ".join(differences(changed))


def test_pairs_are_named_on_the_command_line(local: Run, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(local.path)
    assert main(["parity", path, path]) == 0 and "exact" in capsys.readouterr().out
    assert main(["parity", path, path, "--pair", "pld=ar", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[0]["exact"] is False
    for given, stated in (("pld", "METHOD=SERVER"), ("pld=nothing", "has no 'nothing'")):
        assert main(["parity", path, path, "--pair", given]) == 2 and stated in capsys.readouterr().err


def test_a_directory_without_pairs_is_one_line(local: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / PARITY).write_text('{"pairs": []}')
    for words, stated in (([str(tmp_path)], "no pairs"), ([str(local.path), "--pair", "pld=pld"], "two runs")):
        assert main(["parity", *words]) == 2
        error = capsys.readouterr().err
        assert stated in error and error.count("\n") == 1


def test_sampled_runs_are_refused(local: Run) -> None:
    manifest = {**local.manifest, "config": {**local.manifest["config"], "temperature": 0.7}}
    with pytest.raises(UserError, match="greedy"):
        parity(replace(local, manifest=manifest), local)


@thorough
def test_runs_without_a_common_prompt_are_refused(local: Run, tmp_path: Path) -> None:
    run("pld", limit=1, tasks="summarization", max_new_tokens=12, warmup=0, out=tmp_path / "r")
    with pytest.raises(UserError, match="no prompt in common"):
        parity(local, read_run(tmp_path / "r"))
