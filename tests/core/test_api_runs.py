"""`run` of the public API: the numbers of the command without its printing, mistakes in one line."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from specbench_ss import Target, UserError, load_method, load_model, load_run, run
from specbench_ss.cli.main import main
from specbench_ss.results import summary
from tests.tiny import thorough, tiny_model

SMALL: dict[str, Any] = {"tasks": "qa", "limit": 1, "max_new_tokens": 6, "warmup": 0}
TIMES = (
    "_s", "started", "ended", "speedup", "tokens_per_s", "other_factor", "health", "unstable", "compar",
    "noise_reason", "host_", "ttft_s", "tpot_s", "latency_s", "speedup_within_bound", "relative_step_time",
)  # fmt: skip


@pytest.fixture(scope="module")
def lab() -> Target:
    return load_model("lab", device="cpu")


@pytest.fixture(scope="module")
def tiny() -> Target:
    return Target(tiny_model("llama"))


def compared(frame: pd.DataFrame) -> pd.DataFrame:
    """Without what depends on time, or on what else the machine does."""
    return frame[[name for name in frame.columns if not (name.endswith(TIMES) or name.startswith(TIMES[1:]))]]


@thorough
def test_a_run_is_summarised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal's tables, the report and the Parquet file of the summary have one summary."""
    made: list[Any] = []
    counted = summary._verdicts  # once in each summary
    monkeypatch.setattr(summary, "_verdicts", lambda run: made.append(run) or counted(run))
    options = ["--methods", "pld", "--tasks", "qa", "--limit", "1", "--max-new-tokens", "6", "--device", "cpu"]
    assert main(["run", *options, "--out", str(tmp_path / "run")]) == 0
    assert len(made) == 1 and (tmp_path / "run" / "summary.parquet").exists()


def test_a_run_is_silent_and_equals_that_of_the_command(
    lab: Target, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By name and by a loaded model; every count, text and verdict is that of the command's run directory."""
    settings = {"pld": {"length": 4, "complete": True}}
    capfd.readouterr()
    named = run(["pld", "ss[k=2]"], set=settings, device="cpu", out=tmp_path / "named", **SMALL)
    given = run("pld,ss[k=2]", set=["pld.length=4", "pld.complete=on"], model=lab, out=tmp_path / "given", **SMALL)
    assert capfd.readouterr() == ("", "")
    options = ["--methods", "pld,ss[k=2]", "--set", "pld.length=4", "--set", "pld.complete=on", "--device", "cpu"]
    options += [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["run", *options, "--out", str(tmp_path / "reported")]) == 0
    reported = load_run(tmp_path / "reported")
    assert {p.name for p in (tmp_path / "reported").iterdir()} - {p.name for p in named.path.iterdir()} == {
        "report.html"
    }
    for made in (named, given):
        for name in ("samples", "steps", "output_match"):
            pd.testing.assert_frame_equal(compared(getattr(made, name)), compared(getattr(reported, name)))
        pd.testing.assert_frame_equal(compared(made.summary(all=True)), compared(reported.summary(all=True)))
        assert not made.unfinished and made.manifest["status"] == "complete"
    assert named.manifest["config"] == reported.manifest["config"]
    assert given.manifest["model"] == reported.manifest["model"]
    assert reported.manifest["command"][0] == "ssbench"
    (called,) = named.manifest["command"]
    assert called.startswith("specbench_ss.run(['pld', 'ss[k=2]'], set={'pld': {'length': 4, ")
    assert "model='<lab>'" in given.manifest["command"][0] and sys.argv[0] not in str(given.manifest)


@thorough
def test_a_run_goes_on_where_it_was_left(tmp_path: Path) -> None:
    first = run("pld", out=tmp_path / "run", device="cpu", **SMALL)
    rows = tmp_path / "run" / "samples.jsonl"
    rows.write_text(rows.read_text().splitlines(keepends=True)[0])
    assert "samples are missing" in load_run(tmp_path / "run").unfinished
    again = run("pld", out=tmp_path / "run", device="cpu", resume=True, **SMALL)
    pd.testing.assert_frame_equal(compared(again.samples), compared(first.samples))
    with pytest.raises(UserError, match="is not empty"):
        run("pld", out=tmp_path / "run", device="cpu", **SMALL)
    with pytest.raises(UserError, match="has limit 1, not 2"):
        run("pld", out=tmp_path / "run", device="cpu", resume=True, **{**SMALL, "limit": 2})


def test_what_the_command_warns_of_is_in_the_manifest(lab: Target, tmp_path: Path) -> None:
    """As of a preset that was made for other conditions."""
    file = tmp_path / "pld.yaml"
    file.write_text("method: pld\noptions: {length: 3}\nmade_for: {device: cuda}\n")
    made = run("pld", model=lab, preset=file, out=tmp_path / "a", **SMALL)
    assert f"preset {file} was made for other conditions: device cuda, here cpu" in made.manifest["warnings"]
    assert made.manifest["methods"][1]["options"]["length"] == 3


PLUGIN = """
from specbench_ss import Decoder, DecodeState, DraftTree


class Nothing(Decoder):
    name, summary = "nothing", "drafts nothing"

    def propose(self, state: DecodeState) -> DraftTree:
        return DraftTree.root_only(state.root)
"""


@thorough
def test_a_plugin_may_change_from_run_to_run(tiny: Target, tmp_path: Path) -> None:
    file = tmp_path / "nothing.py"
    for text in (PLUGIN, PLUGIN.replace("drafts nothing", "still drafts nothing")):
        file.write_text(text)
        made = run("nothing", plugin=file, out=tmp_path / str(len(text)), device="cpu", **SMALL)
        assert made.manifest["methods"][1]["summary"] in text
    assert load_method("nothing", tiny).name == "nothing"
    with pytest.raises(UserError, match="no method 'nothing'"):
        run("nothing", out=tmp_path / "none", **SMALL)


@pytest.mark.parametrize(
    ("methods", "options", "stated"),
    [
        ("pld", {"limit": "few"}, "--limit must be a whole number, at least 0, not 'few'"),
        ("pld", {"limit": -1}, "--limit must be at least 0, not -1"),
        ("pld", {"repeats": True}, "--repeats"),
        ("pld", {"temperature": "0"}, "--temperature must be a number"),
        ("pld", {"temperature": float("nan")}, "--temperature"),
        ("pld", {"trace": "yes"}, "--trace must be true or false"),
        ("pld", {"out": 3}, "--out must be a path"),
        ("pld", {"dtype": "float8"}, "--dtype: there is no 'float8'"),
        ("pld", {"device": "cuda:99"}, "device 'cuda:99' is not available"),
        ("pld", {"tasks": ["qaa"]}, "did you mean qa?"),
        ("pld", {"limmit": 3}, "run(): no option 'limmit' (did you mean limit?)"),
        ("pld", {"dry_run": True}, "run(): no option 'dry_run'"),
        ("pld", {"set": {"pld.lenght": 2}}, "has no option 'lenght'"),
        ("pld", {"set": {"pld": 2}}, "run(): 'set' has 'pld'"),
        ("pld", {"stop": ""}, "--stop"),
        ("pld", {"plugin": "nowhere.py"}, "nowhere.py"),
        ("pld", {"preset": "nowhere.yaml"}, "cannot read nowhere.yaml"),
        ("pld", {"resume": True}, "--resume requires --out"),
        ("pld", {"label": "a"}, "--label needs --endpoint"),
        ("pld", {"model": "labb"}, "did you mean lab?"),
        ("pld", {"model": 3}, "model= is a name, a folder or a target"),
        ("", {}, "no method given"),
        (["pld", "pld"], {}, "given twice"),
        ({"pld": 3}, {}, "--methods must be text"),
        (None, {}, "--methods NAME"),
    ],
)
def test_what_cannot_be_run_is_one_line_and_leaves_nothing(
    methods: Any, options: Mapping[str, Any], stated: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=re.escape(stated)):
        run(methods, **options)
    assert not list(tmp_path.iterdir())


def test_a_loaded_model_keeps_its_place(lab: Target) -> None:
    with pytest.raises(UserError, match="dtype= has no effect on a model that is loaded"):
        run("pld", model=lab, dtype="float32")
