"""Scripts for a GPU: every stage is asked for rightly, and what can be tried without one does what it
states."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

from specbench_ss import __version__
from tests.tiny import thorough

ROOT = Path(__file__).parents[2]
GPU = ROOT / "benchmarks" / "gpu"
STUB = """#!/bin/sh
echo "$@" >> "$ASKED"
case "$*" in *"$FAILS"*) exit 3 ;; esac
"""


@pytest.fixture
def asked(tmp_path: Path) -> dict[str, str]:
    """An environment in which python3 writes down what it is asked for, and fails where FAILS is part of it."""
    stub = tmp_path / "bin" / "python3"
    stub.parent.mkdir()
    stub.write_text(STUB)
    stub.chmod(0o755)
    path = f"{stub.parent}:{os.environ['PATH']}"
    there = {**os.environ, "PATH": path, "ASKED": str(tmp_path / "asked"), "FAILS": "nothing at all"}
    for name in ("DEVICE", "TINY", "CALL", "LIMIT", "ENGINES", "DTYPE", "GPU_READY"):
        there.pop(name, None)
    (tmp_path / "asked").touch()
    return there | {"WORK": str(tmp_path / "work"), "WHEELS": "none", "FROM": "none"}


def run(script: str, asked: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(GPU / script), *words], cwd=ROOT, env=asked, capture_output=True, text=True, check=False
    )


def all_stages(asked: dict[str, str], out: Path, *stages: str) -> subprocess.CompletedProcess[str]:
    return run("all.sh", asked, str(out), *stages)


def calls(asked: dict[str, str]) -> list[str]:
    """Return the commands without those of the preamble."""
    return [line for line in Path(asked["ASKED"]).read_text().splitlines() if "gpu/ready.py" not in line]


def names_in(file: Path) -> list[str]:
    with tarfile.open(file) as archive:
        return archive.getnames()


@pytest.mark.parametrize("script", sorted(GPU.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_can_be_read(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    if script.name not in ("preamble.sh", "wheels.sh"):  # which is for a machine with a network
        assert re.search(r"^\. benchmarks/gpu/preamble\.sh$", script.read_text(), re.MULTILINE)


def test_every_stage_asks_for_what_the_page_states(asked: dict[str, str], tmp_path: Path) -> None:
    export = Path(asked["WORK"], "lab-m", "export")
    export.mkdir(parents=True)
    (export / "lab.json").write_text("{}")
    done = all_stages(asked, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    made = calls(asked)
    engines = [line for line in made if re.search("--engine (eager|graph)", line)]
    assert len([line for line in engines if "--engine graph" in line]) == 5
    output_match = [line for line in made if "output_match.py" in line]
    assert len(output_match) == 1 and "--device cuda --engines graph eager --out" in output_match[0]
    assert [line.split(" --out")[0] for line in made if " paper " in line] == [
        f"-m specbench_ss paper figure-{n} --device cuda --dtype bfloat16" for n in (17, 19)
    ]
    contexts = [line for line in made if "16384" in line]
    assert len(contexts) == 2 and all("contexts.jsonl" in line and "--widths 1 8 32" in line for line in contexts)
    assert [line for line in made if "vs_transformers.py" in line and "--compiled" in line]
    assert {line.split()[3] for line in made if "specbench_ss train " in line} == {"ss", "medusa", "draft"}
    larger = [line for line in made if f"--model {export}/base --methods all" in line]
    assert len(larger) == 2 and made.index(larger[0]) > [i for i, line in enumerate(made) if "lab train" in line][0]
    resumable = [line for line in made if " run " in line or " paper " in line]
    assert len(resumable) == 7 and all(line.endswith("--resume") for line in resumable)
    assert sum("doctor --calibrate" in line for line in made) == 1


def test_a_stage_that_fails_is_named_and_the_others_are_made(asked: dict[str, str], tmp_path: Path) -> None:
    done = all_stages(asked | {"FAILS": "output_match.py"}, tmp_path / "out", "output_match", "batches", "larger")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "failed, or out of time (run again to go on): output_match larger"
    assert "the larger lab is not trained to its end" in done.stdout
    assert [line.split()[0:2] for line in calls(asked)] == [
        ["benchmarks/gpu/output_match.py", "--device"], ["-m", "specbench_ss"],
    ]  # fmt: skip
    assert all_stages(asked, tmp_path / "out", "sameless").returncode == 2


def test_results_come_back_after_every_stage_and_can_be_begun_from(asked: dict[str, str], tmp_path: Path) -> None:
    out, results = tmp_path / "out", Path(asked["WORK"], "results")
    (results / "telemetry" / "lab-graph" / "traces").mkdir(parents=True)
    (results / "telemetry" / "lab-graph" / "samples.jsonl").write_text("{}\n")
    (results / "telemetry" / "lab-graph" / "traces" / "ss.json.gz").write_text("trace")
    all_stages(asked | {"FAILS": "output_match.py"}, out, "output_match", "generate")
    assert "output_match/log.txt" in names_in(out / "output_match.tar.gz")
    assert "generate/generate-graph.txt" in names_in(out / "generate.tar.gz")
    all_stages(asked, out, "telemetry")
    names = names_in(out / "telemetry.tar.gz")
    assert "telemetry/lab-graph/samples.jsonl" in names and not [name for name in names if "traces" in name]
    assert names_in(out / "traces.tar") == ["telemetry/lab-graph/traces/ss.json.gz"]
    fresh = asked | {"WORK": str(tmp_path / "fresh"), "FROM": str(out)}
    Path(asked["ASKED"]).write_text("")
    all_stages(fresh, tmp_path / "again", "generate")
    assert not calls(asked) and (tmp_path / "fresh" / "results" / "generate" / "generate-graph.txt").exists()


# -- what travels ----------------------------------------------------------------------------------------------------


def test_the_checkout_is_known_to_python_without_an_installation(tmp_path: Path) -> None:
    """With the names, classes and version that pip would note."""
    ready = runpy.run_path(str(GPU / "ready.py"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ready["note"](tmp_path, project)
    (noted,) = distributions(path=[str(tmp_path)])
    assert (noted.metadata["Name"], noted.version) == ("specbench-ss", __version__)
    groups = {**project["entry-points"], "console_scripts": project["scripts"]}
    assert {(p.group, p.name, p.value) for p in noted.entry_points} == {
        (group, name, value) for group, points in groups.items() for name, value in points.items()
    }


def test_packages_that_are_missing_are_reported_by_what_they_cost() -> None:
    ready = runpy.run_path(str(GPU / "ready.py"))
    missing, optional, old = ready["packages"]({"dependencies": ["torch>=99", "no-such>=1", "plotly>=7", "pytest>=1"]})
    assert missing == ["no-such"] and optional in ([], ["plotly"]) and old[0].startswith("torch ")
    assert "no-such; benchmarks/gpu/wheels.sh" in ready["problem"]("cpu", missing)
    assert ready["problem"]("cpu", []) == ""


# -- output_match.py -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def output_match() -> dict[str, Any]:
    """The script, whose dataclass is looked up by the name of its module."""
    spec = importlib.util.spec_from_file_location("gpu_output_match", GPU / "output_match.py")
    assert spec and spec.loader
    module = sys.modules["gpu_output_match"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)


SMALL = ["--device", "cpu", "--dtypes", "float32", "--prompts", "1", "--tasks", "1", "--new", "8"]


@thorough
def test_replayed_and_not_replayed_answers_are_kept_against_each_other(
    output_match: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "output_match.jsonl"
    words = [*SMALL, "--methods", "ar;sd;peagle", "--out", str(out), "--engines", "called"]
    assert output_match["main"](words) == 0
    reported = capsys.readouterr().out
    assert re.search(
        r"^ok +float32 called sd +1 identical; \d+ replays in \d+ steps, \d+ recorded", reported, re.MULTILINE
    )
    assert "declined: none" in reported and "left out: float32 called peagle" in reported
    ar, sd = output_match["read"](out)
    assert set(sd.kept) == {"model", "draft"} and sd.kept["draft"] and sd.recorded and sd.replays > sd.steps
    assert output_match["main"]([*words, "eager"]) == 0
    lines = output_match["read"](out)
    assert [line.engine for line in lines] == ["called"] * 2 + ["eager"] * 2
    assert [line.other for line in lines[2:]] == [{"identical": 1}] * 2 and ar.answers == lines[2].answers
    out.write_text(out.read_text()[:-10])  # cut off: that one is measured again, and no other one
    began = out.stat().st_size
    assert output_match["main"]([*words, "eager"]) == 0
    again = output_match["read"](out)
    assert [line.method for line in again] == ["ar", "sd", "ar", "sd"] and out.stat().st_size > began
    assert again[:3] == lines[:3]


def test_a_method_that_fails_or_differs_is_bad_and_the_others_are_measured(
    output_match: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = output_match["Bench"].answers

    def answers(self: Any, decoder: Any) -> Any:
        if decoder.name == "pld":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        rows = real(self, decoder)
        if decoder.name == "recycling":
            rows[0].token_ids[1] += 1
        return rows

    monkeypatch.setattr(output_match["Bench"], "answers", answers)
    assert output_match["main"]([*SMALL, "--methods", "pld;recycling;ar", "--engines", "eager"]) == 1
    reported = capsys.readouterr().out
    assert "FAILED float32 eager pld: RuntimeError: CUDA error" in reported and "1 bad, 1 failed" in reported
    assert re.search(r"^BAD .*recycling +1 mismatch", reported, re.MULTILINE) and re.search(
        r"^ok .*ar ", reported, re.MULTILINE
    )


@thorough
def test_the_roofline_measures_every_method(tmp_path: Path) -> None:
    """The smallest of each, without a GPU."""
    file = tmp_path / "lines.jsonl"
    sizes = "--widths 4 --contexts 16 --steps 1 --device cpu --models lab"
    methods = ["verify", "medusa", "ss", "ss-pruned", "eagle"]
    command = [sys.executable, str(ROOT / "benchmarks" / "roofline.py"), *sizes.split(), "--out", str(file)]
    done = subprocess.run(
        [*command, "--methods", *methods], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["method"] for line in lines] == methods and all(line["step_ms"] > 0 for line in lines)
