"""What is to be run on a GPU: every stage is asked for rightly, and what can be tried without one does what it says."""

from __future__ import annotations

import argparse
import os
import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from specbench_ss.decoding.target import Target
from specbench_ss.models.loading import load_target
from specbench_ss.testing.tiny import tiny_target

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
    return {**os.environ, "PATH": path, "ASKED": str(tmp_path / "asked"), "FAILS": "nothing at all"}


def all_stages(asked: dict[str, str], out: Path, *stages: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(GPU / "all.sh"), str(out), *stages],
        cwd=ROOT,
        env=asked,
        capture_output=True,
        text=True,
        check=False,
    )


def calls(asked: dict[str, str]) -> list[str]:
    """What was asked for, without the lines that print the device."""
    return [line for line in Path(asked["ASKED"]).read_text().splitlines() if not line.startswith("-c ")]


def stages_of(text: str) -> list[str]:
    known = re.search(r"^known=\((.*)\)$", text, re.MULTILINE)
    assert known
    return known[1].split()


@pytest.mark.parametrize("script", sorted(GPU.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_can_be_read(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_page_names_every_stage_in_order() -> None:
    stages = stages_of((GPU / "all.sh").read_text())
    page = (GPU / "README.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|.*\|.*\|$", page, re.MULTILINE) == stages
    assert "SmolLM2 is not among the stages" in page and "93 MB" in page and "64 MiB" in page


def test_every_stage_asks_for_what_the_page_says(asked: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "lab-m" / "export").mkdir(parents=True)
    (out / "lab-m" / "export" / "lab.json").write_text("{}")
    done = all_stages(asked, out)
    assert done.returncode == 0, done.stderr
    made = calls(asked)
    engines = [line for line in made if re.search("--engine (eager|graph)", line)]
    assert len([line for line in engines if "--engine graph" in line]) == 6
    assert [line.split(" --out")[0] for line in made if " paper " in line] == [
        f"-m specbench_ss paper figure-{n} --device cuda --dtype bfloat16" for n in (17, 19)
    ]
    contexts = [line for line in made if "16384" in line]
    assert len(contexts) == 2 and all("contexts.jsonl" in line and "--widths 1 8 32" in line for line in contexts)
    attention = [line.partition("--heads ")[2] for line in made if "attention_ways.py --device cuda --flex" in line]
    assert attention == ["32 8 128", "9 3 64"]
    assert [line for line in made if "vs_transformers.py" in line and "--compiled" in line]
    larger = [line for line in made if f"--model {out}/lab-m/export/base --methods all" in line]
    assert len(larger) == 2 and made.index(larger[0]) > [i for i, line in enumerate(made) if "lab train" in line][0]
    resumable = [line for line in made if " run " in line or " paper " in line]
    assert len(resumable) == 7 and all(line.endswith("--resume") for line in resumable)


def test_every_command_of_the_stages_ends_in_time() -> None:
    """Nothing that computes is started without a limit, and the limits of a stage are below ten minutes together."""
    text = (GPU / "all.sh").read_text()
    assert re.search(r"^limit=540\b", text, re.MULTILINE)
    stages = text[text.index("sameness()") :]
    for line in (line.strip() for line in stages.splitlines()):
        if "python3" in line:
            assert line.startswith("timeout $((limit / 2"), line
        if line.startswith("ssbench "):
            assert re.match(r"ssbench (120|\$limit|\$\(\(limit / 2\)\)) ", line), line
        if "lab.sh" in line:
            assert '"$out/lab-m" m $limit' in line


def test_a_stage_that_fails_is_named_and_the_others_are_made(asked: dict[str, str], tmp_path: Path) -> None:
    done = all_stages(
        asked | {"FAILS": "sameness.py --engine eager"}, tmp_path / "out", "sameness", "batches", "larger"
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "failed, or out of time (run again to go on): sameness larger"
    assert "the larger lab is not trained to its end" in done.stderr
    assert [line.split()[0:2] for line in calls(asked)] == [["benchmarks/gpu/sameness.py", "--engine"]] * 2 + [
        ["-m", "specbench_ss"]
    ]
    assert all_stages(asked, tmp_path / "out", "sameless").returncode == 2


def test_what_was_measured_beside_generate_is_not_measured_again(asked: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    all_stages(asked | {"FAILS": "vs_transformers.py --device cuda --dtype bfloat16 --engine graph"}, out, "generate")
    assert (out / "generate-eager.txt").exists() and not (out / "generate-graph.txt").exists()
    all_stages(asked, out, "generate")
    assert [re.search(r"--engine (\w+)", line)[1] for line in calls(asked)] == ["eager", "graph", "graph"]  # type: ignore[index]
    assert (out / "generate-graph.txt").exists()


# -- roofline.py and vs_transformers.py ------------------------------------------------------------------------------


def test_a_step_without_memory_is_told_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = runpy.run_path(str(ROOT / "benchmarks" / "roofline.py"))
    measured, told = bench["measured"], list[str]()

    def scarce(decoder: Any, context: int, width: int, steps: int) -> Any:
        if width == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. And more")
        return measured(decoder, context, width, steps)

    monkeypatch.setitem(bench["lines_of"].__globals__, "measured", scarce)
    arguments = argparse.Namespace(contexts=[16], methods=["verify"], widths=[1, 2, 4], engine="eager", steps=1)
    lines = list(bench["lines_of"](tiny_target("llama", words=61), "tiny", arguments, set(), told.append))
    assert [line.width for line in lines] == [1, 4]
    assert told == ["verify      2 rows     16 tokens: left out, out of memory on cpu (2.00 GiB more were wanted)"]


def test_a_pruned_step_drafts_as_the_papers_do_and_verifies_what_is_kept() -> None:
    bench = runpy.run_path(str(ROOT / "benchmarks" / "roofline.py"))
    target = load_target("lab", dtype="float32", device="cpu")
    decoder = bench["decoder_of"]("ss-pruned", target, 32)
    begun, state = bench["session"](bench["Forced"](decoder), [5 + i % 40 for i in range(16)], 400)
    with torch.inference_mode():
        step = [begun.step(state) for _ in range(2)][-1]
    assert (step.nodes, step.verified) == (120, 31)


@pytest.fixture(scope="module")
def beside() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "vs_transformers.py"))


def test_generate_over_a_static_cache_is_compiled_where_it_is_asked_for(
    beside: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens, by steps that went through what transformers compiles; here that is left as it is."""
    target: Target = load_target("lab", dtype="float32", device="cpu")
    case, steps = beside["compiled"](target), list[tuple[int, ...]]()

    def call(config: Any) -> Any:
        def counted(**inputs: Any) -> Any:
            steps.append(tuple(inputs["input_ids"].shape))
            return target.model(**inputs)

        return counted

    monkeypatch.setattr(target.model, "get_compiled_call", call)
    prompt = target.encode_chat([{"role": "user", "content": "What is 3 + 4?"}])
    for ours in (True, False):
        tokens = beside["answer"](target, case if ours else beside["Case"]("ar", case.ours, {}), prompt, 8)[1]
        assert tokens
        assert steps == [(1, 1)] * (len(steps))
        assert bool(steps) == ours
        steps.clear()
    assert not case.drafts and beside["same_steps"](target, case, prompt, 8) is None


def test_only_a_case_that_drafts_has_steps_to_compare(beside: dict[str, Any]) -> None:
    cases = beside["cases"](load_target("lab", dtype="float32", device="cpu"), "", [2])
    assert [case.drafts for case in cases] == [False] + [True] * (len(cases) - 1)
    assert {case.name.partition("[")[0] for case in cases} == {"ar", "sd", "pld"}
